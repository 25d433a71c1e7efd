"""Marks in a text that is still being generated: one may be there in part."""

from collections.abc import Iterable

# Gemma 4's control tokens that are the form of an answer.
GEMMA_START = "<|tool_call>"
GEMMA_END = "<tool_call|>"
GEMMA_QUOTE = '<|"|>'
GEMMA_CHANNEL = "<|channel>"  # followed by its name
GEMMA_CHANNEL_END = "<channel|>"
GEMMA_TOKENS = (GEMMA_START, GEMMA_END, GEMMA_QUOTE, GEMMA_CHANNEL, GEMMA_CHANNEL_END)


def length_of_partial_mark(text: str, marks: Iterable[str]) -> int:
    """The length of the longest end of the text with which one of the marks begins; a whole one is not it."""
    return max((_partial(text, mark) for mark in marks), default=0)


def _partial(text: str, mark: str) -> int:
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)
