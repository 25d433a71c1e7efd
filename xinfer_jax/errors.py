"""The one exception for what a caller can mend: bad input, named with its value and the remedy."""

import re
import reprlib
from collections.abc import Iterable

_LONGEST = 300  # characters of an error; what is cut lies in the middle, since the remedy stands at the end
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


class InputError(ValueError):
    """Bad input (arguments, files, settings), raised on the host before any tracing.

    Its text is one line of at most 300 characters. The command line exits with 2 on it.
    """

    def __init__(self, message: object = ""):
        super().__init__(one_line(message))


class ContextLengthError(InputError):
    """A prompt, or a prompt and its answer, has more tokens than the model or a row of an engine holds."""

    code = "context_length_exceeded"  # the OpenAI API's word


class NoTokenLeftError(InputError):
    """The settings of a request forbade every token at some step of its answer."""


def one_line(message: object) -> str:
    """At most 300 characters on one line; control characters, and others that do not print, are escaped."""
    text = str(message)
    if len(text) > 20 * _LONGEST:  # what is cut anyway is not worth walking through
        text = text[: 10 * _LONGEST] + text[-10 * _LONGEST :]
    text = re.sub(r"\s*[\r\n]\s*", " ", text.strip())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 121]} … {text[-118:]}"


def shown(value: object, most: int = 80) -> str:
    """A value as Python writes it, shortened."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # a whole number of more digits than Python writes, or a repr that fails
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 2]} …"


def few(names: Iterable[object], most: int = 3) -> str:
    """The first of many names, and how many more there are."""
    texts = [str(name) for name in names]
    rest = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {rest} more" if rest > 0 else "")
