"""How a body wants its tokens to be chosen."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..checkpoint.tokenizer import Tokenizer
from ..errors import InputError, shown
from ..sampling.biases import LONGEST_BAD_WORD, MOST_BAD_WORDS
from ..sampling.settings import SamplingConfig
from ..text import LONGEST_STOP_STRING
from .fields import SAMPLING, BodyError, Fields

_MOST_NGRAM = 256  # a step compares so many tokens with each of the row at most


def sampling_of(tokenizer: Tokenizer | None, vocab_size: int, take: Fields, defaults: Any) -> SamplingConfig:
    """The settings that a body asks for.

    Raises:
        BodyError: with the field at fault.
    """
    values: dict[str, Any] = {}
    take.whole("no_repeat_ngram_size", 0, _MOST_NGRAM)
    for name, setting in SAMPLING.items():
        if (number := take.number(name)) is not None:
            values[setting] = 0 if name == "top_k" and number == -1 else number
    if biases := take.mapping("logit_bias"):
        good = lambda i, b: i.isdecimal() and len(i) < 10 and type(b) in (int, float) and abs(b) <= 1e30  # noqa: E731
        wrong = [i for i, b in biases.items() if not good(i, b)]
        if wrong:
            raise BodyError("logit_bias", f"logit_bias maps token ids to numbers, got {shown(wrong[0])}")
        numbers = {int(i): float(b) for i, b in biases.items()}
        ids = Fields(dict(logit_bias=list(numbers))).ids("logit_bias", vocab_size)
        values["logit_bias"] = {i: numbers[i] for i in ids}
    if "allowed_token_ids" in take.given:
        values["allowed_token_ids"] = take.ids("allowed_token_ids", vocab_size)
    if words := take.texts("bad_words", (), MOST_BAD_WORDS, LONGEST_STOP_STRING):
        values["bad_words_ids"] = _bad_words(tokenizer, words, vocab_size)
    for name, value in values.items():
        try:
            SamplingConfig(**{name: value}).validate()
        except InputError as error:
            back = {setting: field for field, setting in SAMPLING.items()}
            raise BodyError(back.get(name, name), error) from error
    settings: SamplingConfig = dataclasses.replace(defaults, **values)
    return settings


def _bad_words(tokenizer: Tokenizer | None, words: Sequence[str], vocab_size: int) -> list[list[int]]:
    """Each word as ids, at the beginning of a text and, where these are other ids, behind a blank (vLLM)."""
    name = "bad_words"
    found = list[list[int]]()
    if tokenizer is None:
        raise BodyError(name, "bad_words need a tokenizer, which this checkpoint lacks: leave them out")
    for word in words:
        alone, behind = (
            tokenizer.encode(blank + word.lstrip(), add_special_tokens=False) for blank in ("", " ")
        )
        if not alone or len(alone) > LONGEST_BAD_WORD or max(alone) >= vocab_size:
            raise BodyError(
                name,
                f"each of bad_words has from 1 to {LONGEST_BAD_WORD} tokens, got {len(alone)}: {shown(word)}",
            )
        found.append(alone)
        if behind and behind[0] != alone[0] and len(behind) == len(alone):
            found.append(behind)
    if len(found) > MOST_BAD_WORDS:
        raise BodyError(
            name, f"bad_words are {len(found)} sequences of tokens, more than {MOST_BAD_WORDS}: give fewer"
        )
    return found
