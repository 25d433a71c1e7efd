"""Limits on the size of a tokenizer, and on the factor by which its steps may lengthen a text.

A few replacements in turn lengthen a text by any factor, and with it the memory that a short text takes.
"""

import base64
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import InputError

_MAX_BYTES = 2**26  # the largest published ones have half
_MAX_FACTOR = 256  # SentencePiece's table has 33, with replacements of spaces about 200
_MAX_STEPS = 64
_MAX_AROUND = 1024  # tokens around a text
_MAX_ADDED = 2**17  # control and user-defined tokens; Gemma has 6,400
_MAX_CHARACTERS = 2**21  # of all of them
_PREFIX = 64  # bytes of a prefix that count as much as the text
_FACTORS = dict(ByteLevel=2.0, BertNormalizer=2.0)  # each time; forms of Unicode change a text once


def check_tokenizer_size(file: Path) -> None:
    """Raises InputError if the file would take very long to read."""
    if (size := os.path.getsize(file)) > _MAX_BYTES:
        raise InputError(f"{file} has {size} bytes, the limit is {_MAX_BYTES}")


def check_text_growth(file: Path, backend: tokenizers.Tokenizer) -> None:
    """Raises InputError if a step of the tokenizer may make a text very long."""
    for what in ("normalizer", "pre_tokenizer", "decoder"):
        steps = step_settings(getattr(backend, what))
        factor = 1.0
        for step in steps:
            factor = min(1e30, factor * _factor(step))
        if factor > _MAX_FACTOR or len(steps) > _MAX_STEPS:
            raise InputError(
                f"{file}: the {what} of {len(steps)} steps may make a text {factor:.3g} times as long, the"
                f" limits are {_MAX_STEPS} steps and a factor of {_MAX_FACTOR}: fetch the file again"
            )
    if (added := backend.num_special_tokens_to_add(False)) > _MAX_AROUND:
        raise InputError(f"{file} adds {added} tokens to each text, the limit is {_MAX_AROUND}")


def check_added_tokens(texts: Collection[str]) -> None:
    """Raises InputError if these tokens, which are added to a vocabulary, would take very long to add."""
    check_token_count(len(texts))
    if (characters := sum(map(len, texts))) > _MAX_CHARACTERS:
        what = "control and user-defined tokens have"
        raise InputError(f"{what} {characters} characters, the limit is {_MAX_CHARACTERS}")


def check_token_count(count: int) -> None:
    """Raises InputError as `check_added_tokens`, before there are texts."""
    if count > _MAX_ADDED:
        raise InputError(f"there are {count} control and user-defined tokens, the limit is {_MAX_ADDED}")


def step_settings(*components: Any) -> list[dict[str, Any]]:
    """Returns the settings of each step of a tokenizer's components, also of sequences in sequences."""
    waiting = [json.loads(component.__getstate__()) for component in components if component is not None]
    found = []
    while waiting:
        settings = waiting.pop()
        if settings.get("type") == "Sequence":
            names = ("normalizers", "pretokenizers", "processors", "decoders")
            waiting += next(filter(None, map(settings.get, names)), [])
        else:
            found.append(settings)
    return found


def _factor(step: dict[str, Any]) -> float:
    """Returns the factor by which a step may lengthen a text, in bytes."""
    kind = step.get("type", "")
    if kind == "Replace":
        content = len(step["content"].encode())
        pattern = step["pattern"].get("String", "")
        return max(1.0, content / len(pattern.encode())) if pattern else 1.0 + content
    if kind == "Prepend":
        return 1 + len(step["prepend"].encode()) / _PREFIX
    if kind == "Precompiled":  # the length of a trie, the trie, and the texts that it names
        table = base64.b64decode(step["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :]
        return max(1.0, *map(len, texts.split(b"\0")))
    return _FACTORS.get(kind, 1.0)
