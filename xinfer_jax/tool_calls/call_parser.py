"""`CallParser`: what the parsers of one call have in common; marks, of which a text may have a part."""

import abc
from collections.abc import Iterable

# Gemma 4's control tokens that are the form of an answer.
GEMMA_START = "<|tool_call>"
GEMMA_END = "<tool_call|>"
GEMMA_QUOTE = '<|"|>'
GEMMA_CHANNEL = "<|channel>"  # followed by its name
GEMMA_CHANNEL_END = "<channel|>"
GEMMA_TOKENS = (GEMMA_START, GEMMA_END, GEMMA_QUOTE, GEMMA_CHANNEL, GEMMA_CHANNEL_END)


class CallParser(abc.ABC):
    """Parses one call while it is generated.

    Attributes:
        name: of the function; None: not known yet.
        ended: the call is complete.
        failed: the text is not a call.
        length: characters of the text so far that belong to the call, or precede what is wrong.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.ended = False
        self.failed = False
        self.length = 0

    @abc.abstractmethod
    def push(self, text: str) -> str:
        """Takes the next part of the text. Returns the next piece of the arguments' JSON."""


def length_of_partial_mark(text: str, marks: Iterable[str]) -> int:
    """The length of the longest end of the text with which one of the marks begins; a whole one is not it."""
    return max((_partial(text, mark) for mark in marks), default=0)


def _partial(text: str, mark: str) -> int:
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)
