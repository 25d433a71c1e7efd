"""`CallParser`: the common part of the parsers of one call. Also finds partial marks in a text."""

from collections.abc import Callable, Iterable
from typing import Any

_MOST_UNDECIDED = 8192  # characters, more than any step waits for


class CallParser:
    """Parses one call while it is generated.

    Attributes:
        name: the name of the function. None: not known yet.
        ended, failed: the call is complete, or the text is not a call.
        length: the number of characters of the text so far that belong to the call, or precede the error.
    """

    # Takes a text, and returns how many of its characters it has read, and their JSON.
    _step: Callable[[str], tuple[int, str]]
    _verbatim: tuple[Any, ...] = ()  # steps that read whitespace; the others come after it

    def __init__(self) -> None:
        self.name: str | None = None
        self.ended = False
        self.failed = False
        self.length = 0
        self._pending = ""

    def push(self, text: str) -> str:
        """Takes the next part of the text. Returns the next piece of the arguments' JSON."""
        text = self._pending + text
        pieces = []
        moved = True
        while moved and not self.ended and not self.failed:
            step = self._step
            spaces = 0 if step in self._verbatim else len(text) - len(text.lstrip())
            used, piece = step(text[spaces:])
            used += spaces
            text = text[used:]
            self.length += used
            pieces.append(piece)
            moved = used > 0 or step != self._step
        self._pending = text
        self.failed = self.failed or not self.ended and len(text) > _MOST_UNDECIDED
        return "".join(pieces)

    def finish(self) -> str:
        """Ends the text. Returns the last piece of the arguments' JSON, if the call ends with it."""
        return ""


def length_of_partial_mark(text: str, marks: Iterable[str]) -> int:
    """Returns the length of the longest end of the text with which one of the marks begins. A whole mark does
    not count.
    """
    return max((_partial(text, mark) for mark in marks), default=0)


def _partial(text: str, mark: str) -> int:
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)
