"""Parses the sampling fields of a body."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..checkpoint.tokenizer import Tokenizer
from ..errors import InputError, format_value
from ..grammar.compiler import vocabulary_of
from ..grammar.vocabulary import TokenSearch
from ..sampling.biases import LONGEST_BAD_WORD, MOST_BAD_WORDS
from ..sampling.sampling_config import SamplingConfig
from ..sampling.settings import SETTINGS, Setting
from ..text import MAX_STOP_STRING_CHARS
from .fields import BodyError, Fields

_MOST_TEXTS = 16


def parse_sampling(
    tokenizer: Tokenizer | None, vocab_size: int, fields: Fields, defaults: Any
) -> SamplingConfig:
    """Returns the defaults with the settings of the body."""
    read = _Reader(fields, tokenizer, vocab_size)
    given = (setting for setting in SETTINGS.values() if setting.in_bodies and setting.field in fields.values)
    values = {setting.name: getattr(read, setting.kind)(setting) for setting in given}
    values = {name: value for name, value in values.items() if value is not None}
    for name, value in values.items():
        try:
            SamplingConfig(**{name: value}).validate()
        except InputError as error:
            raise BodyError(SETTINGS[name].field, error) from error
    values |= ids_of_texts(values, defaults, tokenizer, vocab_size)
    settings: SamplingConfig = dataclasses.replace(defaults, **values)
    return settings


def ids_of_texts(
    given: Mapping[str, Any], defaults: SamplingConfig, tokenizer: Tokenizer | None, vocab_size: int
) -> dict[str, np.ndarray]:
    """The token ids of settings that are texts, which are given, or which another given setting needs.

    Args:
        given: values of settings by name.
        defaults: of the others.
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
    """int32, read-only: the ids of all tokens whose text contains one of these. BodyError: no token contains
    one, which is no default.
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


class _Reader:
    """Reads the settings of a body by their kind; None: nothing is asked for."""

    def __init__(self, fields: Fields, tokenizer: Tokenizer | None, vocab_size: int):
        self._fields = fields
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def number(self, setting: Setting) -> Any:
        if setting.most is not None:
            self._fields.integer(setting.field, 0, setting.most)
        number = self._fields.number(setting.field)
        return setting.default if number == setting.also_default else number

    def switch(self, setting: Setting) -> bool:
        return self._fields.boolean(setting.field)

    def texts(self, setting: Setting) -> tuple[str, ...]:
        return self._fields.strings(setting.field, (), _MOST_TEXTS, MAX_STOP_STRING_CHARS)

    def ids(self, setting: Setting) -> list[int]:
        return self._fields.token_ids(setting.field, self._vocab_size)

    def bias(self, setting: Setting) -> dict[int, float] | None:
        """The biases by token id; in JSON the ids are texts."""
        name = setting.field
        numbers: dict[int, float] = {}
        for i, bias in self._fields.mapping(name).items():
            is_id = i.isdecimal() and len(i) < 10
            if not is_id or type(bias) not in (int, float) or abs(bias) > 1e30:
                raise BodyError(name, f"{name} maps token ids to numbers, got {format_value(i)}")
            numbers[int(i)] = float(bias)
        ids = Fields({name: list(numbers)}).token_ids(name, self._vocab_size)
        return {i: numbers[i] for i in ids} or None

    def words(self, setting: Setting) -> list[list[int]] | None:
        """The ids of each word at the start of a text and, where they differ, after a space (as vLLM)."""
        name = setting.field
        words = self._fields.strings(name, (), MOST_BAD_WORDS, MAX_STOP_STRING_CHARS)
        found = list[list[int]]()
        if not words:
            return None
        if self._tokenizer is None:
            raise BodyError(name, f"{name} need a tokenizer, which this checkpoint lacks: leave them out")
        for word in words:
            at_start, after_space = (
                self._tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " ")
            )
            if not at_start or len(at_start) > LONGEST_BAD_WORD or max(at_start) >= self._vocab_size:
                said = f"each of {name} must have 1 to {LONGEST_BAD_WORD} tokens, got {len(at_start)}"
                raise BodyError(name, f"{said}: {format_value(word)}")
            found.append(at_start)
            if after_space and after_space[0] != at_start[0] and len(after_space) == len(at_start):
                found.append(after_space)
        if len(found) > MOST_BAD_WORDS:
            said = f"{name} are {len(found)} sequences of tokens, more than {MOST_BAD_WORDS}"
            raise BodyError(name, f"{said}: give fewer")
        return found
