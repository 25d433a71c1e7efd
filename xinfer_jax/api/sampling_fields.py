"""Parses the sampling fields of a body."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InputError, format_value
from ..grammar.compiler import vocabulary_of
from ..grammar.vocabulary import TokenSearch
from ..sampling.biases import LONGEST_BAD_WORD, MOST_BAD_WORDS
from ..sampling.sampling_config import SamplingConfig
from ..text import MAX_STOP_STRING_CHARS
from ..tokenization.tokenizer import Tokenizer
from .fields import SAMPLING, BodyError, Fields

_BREAKERS = "dry_sequence_breakers"
DRY_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's
_MOST_NGRAM = 256  # bounds a decode step's work: it compares this many tokens at each position of a row


def parse_sampling(
    tokenizer: Tokenizer | None, vocab_size: int, fields: Fields, defaults: Any
) -> SamplingConfig:
    """Returns the defaults with the settings of the body."""
    values: dict[str, Any] = {}
    fields.integer("no_repeat_ngram_size", 0, _MOST_NGRAM)
    fields.integer("dry_allowed_length", 0, _MOST_NGRAM)
    for name, setting in SAMPLING.items():
        if (number := fields.number(name)) is not None:
            values[setting] = 0 if name == "top_k" and number == -1 else number
    if biases := fields.mapping("logit_bias"):
        values["logit_bias"] = _logit_bias(biases, vocab_size)
    if "allowed_token_ids" in fields.values:
        values["allowed_token_ids"] = fields.token_ids("allowed_token_ids", vocab_size)
    if words := fields.strings("bad_words", (), MOST_BAD_WORDS, MAX_STOP_STRING_CHARS):
        values["bad_words_ids"] = _bad_words_ids(tokenizer, words, vocab_size)
    texts = fields.strings(_BREAKERS, DRY_BREAKERS, 16, MAX_STOP_STRING_CHARS)
    if _BREAKERS in fields.values or values.get("dry_multiplier") and defaults.dry_sequence_breakers is None:
        values[_BREAKERS] = breaker_ids(tokenizer, vocab_size, texts)
    for setting, value in values.items():
        try:
            SamplingConfig(**{setting: value}).validate()
        except InputError as error:
            field_of_setting = {setting: field for field, setting in SAMPLING.items()}
            raise BodyError(field_of_setting.get(setting, setting), error) from error
    settings: SamplingConfig = dataclasses.replace(defaults, **values)
    return settings


@functools.lru_cache(maxsize=8)
def breaker_ids(
    tokenizer: Tokenizer | None, vocab_size: int, texts: Sequence[str] = DRY_BREAKERS
) -> np.ndarray:
    """int32, read-only: the ids of all tokens whose text contains one of these. BodyError: no token contains
    one, which is no default.
    """
    search = vocabulary_of(tokenizer, vocab_size).search if tokenizer else TokenSearch([])
    is_breaker_V = np.zeros(vocab_size, bool)
    for text in texts:
        ids = search.containing(text)
        if not len(ids) and text not in DRY_BREAKERS:
            said = f"no token contains {format_value(text)}: give texts that are parts of tokens"
            raise BodyError(_BREAKERS, f"{_BREAKERS}: {said}")
        is_breaker_V[ids] = True
    found = np.flatnonzero(is_breaker_V).astype(np.int32)
    found.flags.writeable = False
    return found


def _logit_bias(biases: dict[str, Any], vocab_size: int) -> dict[int, float]:
    """The biases by token id; in JSON the ids are texts."""
    numbers: dict[int, float] = {}
    for i, bias in biases.items():
        is_id = i.isdecimal() and len(i) < 10
        if not is_id or type(bias) not in (int, float) or abs(bias) > 1e30:
            raise BodyError("logit_bias", f"logit_bias maps token ids to numbers, got {format_value(i)}")
        numbers[int(i)] = float(bias)
    ids = Fields(dict(logit_bias=list(numbers))).token_ids("logit_bias", vocab_size)
    return {i: numbers[i] for i in ids}


def _bad_words_ids(tokenizer: Tokenizer | None, words: Sequence[str], vocab_size: int) -> list[list[int]]:
    """The ids of each word at the start of a text and, where they differ, after a space (as vLLM)."""
    name = "bad_words"
    found = list[list[int]]()
    if tokenizer is None:
        raise BodyError(name, "bad_words need a tokenizer, which this checkpoint lacks: leave them out")
    for word in words:
        at_start, after_space = (
            tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " ")
        )
        if not at_start or len(at_start) > LONGEST_BAD_WORD or max(at_start) >= vocab_size:
            said = f"each of bad_words must have 1 to {LONGEST_BAD_WORD} tokens, got {len(at_start)}"
            raise BodyError(name, f"{said}: {format_value(word)}")
        found.append(at_start)
        if after_space and after_space[0] != at_start[0] and len(after_space) == len(at_start):
            found.append(after_space)
    if len(found) > MOST_BAD_WORDS:
        said = f"bad_words are {len(found)} sequences of tokens, more than {MOST_BAD_WORDS}"
        raise BodyError(name, f"{said}: give fewer")
    return found
