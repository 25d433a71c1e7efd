"""Parses the sampling fields of a body."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import format_value
from ..grammar.compiler import vocabulary_of
from ..grammar.vocabulary import TokenSearch
from ..sampling.biases import LONGEST_BAD_WORD, MOST_BAD_WORDS
from ..sampling.sampling_config import SamplingConfig
from ..sampling.settings import SETTINGS, Setting
from ..text import MAX_STOP_STRING_CHARS
from ..tokenization.tokenizer import Tokenizer
from .fields import BodyError, Fields, errors_of

_MOST_TEXTS = 16


def parse_sampling(
    tokenizer: Tokenizer | None, vocab_size: int, fields: Fields, defaults: Any
) -> SamplingConfig:
    """Returns the defaults with the settings of the body."""
    values: dict[str, Any] = {}
    for setting in SETTINGS.values():
        if setting.in_bodies and setting.field in fields.values:
            values[setting.name] = value = _value(setting, fields, tokenizer, vocab_size)
            with errors_of(setting.field):
                SamplingConfig(**{setting.name: value}).validate()
    values = {name: value for name, value in values.items() if value is not None}
    values |= ids_of_texts(values, defaults, tokenizer, vocab_size)
    settings: SamplingConfig = dataclasses.replace(defaults, **values)
    return settings


def _value(setting: Setting, fields: Fields, tokenizer: Tokenizer | None, vocab_size: int) -> Any:
    """Returns the value of a setting that a body has. None: it asks for nothing."""
    name = setting.field
    if setting.kind == "switch":
        return fields.boolean(name)
    if setting.kind == "texts":
        return fields.strings(name, (), _MOST_TEXTS, MAX_STOP_STRING_CHARS)
    if setting.kind == "ids":
        return fields.token_ids(name, vocab_size)
    if setting.kind == "bias":
        return _bias_of_ids(name, fields.mapping(name), vocab_size) or None
    if setting.kind == "words":
        words = fields.strings(name, (), MOST_BAD_WORDS, MAX_STOP_STRING_CHARS)
        return _ids_of_words(name, tokenizer, words, vocab_size) if words else None
    if setting.most is not None:
        fields.integer(name, 0, setting.most)
    number = fields.number(name)
    return setting.default if number == setting.also_default else number


def ids_of_texts(
    given: Mapping[str, Any], defaults: SamplingConfig, tokenizer: Tokenizer | None, vocab_size: int
) -> dict[str, np.ndarray]:
    """Returns the token ids of settings that are texts, if they are among the given ones, or if a given one
    needs them.
    """
    found = {}
    for setting in (setting for setting in SETTINGS.values() if setting.kind == "texts"):
        texts = given.get(setting.name)
        if texts is None and given.get(setting.texts_for) and getattr(defaults, setting.name) is None:
            texts = setting.default_texts
        if texts is not None:
            found[setting.name] = ids_with_texts(setting, tokenizer, vocab_size, tuple(texts))
    return found


@functools.lru_cache(maxsize=8)
def ids_with_texts(
    setting: Setting, tokenizer: Tokenizer | None, vocab_size: int, texts: Sequence[str]
) -> np.ndarray:
    """Returns int32, read-only: the ids of all tokens whose text contains one of these. BodyError: no token
    contains one, which is no default.
    """
    search = vocabulary_of(tokenizer, vocab_size).search if tokenizer else TokenSearch([])
    is_listed_V = np.zeros(vocab_size, bool)
    for text in texts:
        ids = search.containing(text)
        if not len(ids) and text not in setting.default_texts:
            said = f"no token contains {format_value(text)}: give texts that are parts of tokens"
            raise BodyError(setting.field, f"{setting.field}: {said}")
        is_listed_V[ids] = True
    found = np.flatnonzero(is_listed_V).astype(np.int32)
    found.flags.writeable = False
    return found


def _bias_of_ids(name: str, biases: dict[str, Any], vocab_size: int) -> dict[int, float]:
    """Returns the biases by token id. In JSON the ids are texts."""
    numbers: dict[int, float] = {}
    for i, bias in biases.items():
        is_id = i.isdecimal() and len(i) < 10
        if not is_id or type(bias) not in (int, float) or abs(bias) > 1e30:
            raise BodyError(name, f"{name} maps token ids to numbers, got {format_value(i)}")
        numbers[int(i)] = float(bias)
    ids = Fields({name: list(numbers)}).token_ids(name, vocab_size)
    return {i: numbers[i] for i in ids}


def _ids_of_words(
    name: str, tokenizer: Tokenizer | None, words: Sequence[str], vocab_size: int
) -> list[list[int]]:
    """Returns the ids of each word at the start of a text and, if they differ, after a space (as vLLM
    does).
    """
    found = list[list[int]]()
    if tokenizer is None:
        raise BodyError(name, f"{name} need a tokenizer, which this checkpoint lacks: leave them out")
    for word in words:
        at_start, after_space = (
            tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " ")
        )
        if not at_start or len(at_start) > LONGEST_BAD_WORD or max(at_start) >= vocab_size:
            said = f"each of {name} must have 1 to {LONGEST_BAD_WORD} tokens, got {len(at_start)}"
            raise BodyError(name, f"{said}: {format_value(word)}")
        found.append(at_start)
        if after_space and after_space[0] != at_start[0] and len(after_space) == len(at_start):
            found.append(after_space)
    if len(found) > MOST_BAD_WORDS:
        said = f"{name} are {len(found)} sequences of tokens, more than {MOST_BAD_WORDS}"
        raise BodyError(name, f"{said}: give fewer")
    return found
