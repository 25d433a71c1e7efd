"""Exceptions for bad input, whose texts have the value and the remedy. Also formats values in errors and
reprs.
"""

import dataclasses
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

_MAX_LENGTH = 300  # characters of an error; the middle is cut, since the remedy is at the end
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


class InputError(ValueError):
    """Invalid input: an argument, a file or a setting. It is a `ValueError`.

    This library raises it on the host before any tracing, or after sampling if only the tokens show the
    error. The message is one line of at most 300 characters. Commands end with exit code 2 on it.
    """

    def __init__(self, message: object = ""):
        super().__init__(format_message(message))


class ContextLengthError(InputError):
    """A prompt, or a prompt and its answer, has too many tokens for the context, the engine or the cache.

    Shorten the prompt, or ask for fewer tokens.
    """

    code = "context_length_exceeded"  # as in the OpenAI API


class GrammarError(InputError):
    """A grammar is invalid or not supported. It is raised when you make the grammar, or at its first use."""


class NoTokenLeftError(InputError):
    """The settings or the grammar of a request forbid every token at some step of its answer."""


def format_message(message: object) -> str:
    """Returns at most 300 characters on one line. Characters that are not printable are escaped."""
    text = str(message)
    if len(text) > 20 * _MAX_LENGTH:  # the cut part needs no escaping
        text = text[: 10 * _MAX_LENGTH] + text[-10 * _MAX_LENGTH :]
    text = re.sub(r"\s*[\r\n]\s*", " ", text.strip())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) <= _MAX_LENGTH:
        return text
    return f"{text[: _MAX_LENGTH - 121]} … {text[-118:]}"


def format_value(value: object, most: int = 80) -> str:
    """Returns the repr of a value, shortened."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # an int with more digits than Python converts, or a repr that raises
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 2]} …"


def format_names(names: Iterable[object], most: int = 3) -> str:
    """Returns the first names, and the number of the others."""
    texts = [str(name) for name in names]
    rest = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {rest} more" if rest > 0 else "")


class ShortRepr:
    """A dataclass whose `repr` has types and shapes of arrays, and length and first entry of tuples."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = ", ".join(f"{f.name}={_short(getattr(self, f.name))}" for f in fields if f.repr)
        return f"{type(self).__name__}({given})"


def _short(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{getattr(value, 'name', value.dtype)}{list(value.shape)}"
    if isinstance(value, tuple) and value:
        first = value[0]
        return f"{len(value)} × {repr(first) if isinstance(first, ShortRepr) else _short(first)}"
    return type(value).__name__ if dataclasses.is_dataclass(value) else repr(value)


def format_token_counts(lists: Sequence[Sequence[Any]], noun: str) -> str:
    """Returns the number of lists and of their tokens, as "3 prompts of 2 to 5 tokens"."""
    sizes = sorted({len(entries) for entries in lists})
    between = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))) if sizes else "0"
    plural = "" if len(lists) == 1 else "s"
    tokens = "token" if sizes == [1] else "tokens"
    return f"{len(lists)} {noun}{plural} of {between} {tokens}"
