"""Ids in, pieces of text out, as the ids come."""

from functools import partial

from .tokenizer import Tokenizer

_MOST_PENDING = 16  # ids without whole text; a character has at most four


class IncrementalDecoder:
    """Never gives half a UTF-8 character; joined, its pieces are `decode` of all ids.

    A step decodes few ids again: those since the text was last whole, and the ones before for context.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._before: list[int] = []  # the last ids whose text is out
        self._pending: list[int] = []  # ids whose text is not

    def push(self, token: int) -> str:
        """The text that this id completes, empty while a character is only half there."""
        self._pending.append(token)
        piece = self.finish()
        if not piece or piece.endswith("\N{REPLACEMENT CHARACTER}"):
            return self._cut() if len(self._pending) >= _MOST_PENDING else ""
        self._before = self._pending
        self._pending = []
        return piece

    def finish(self) -> str:
        """What is left when no more ids come."""
        return self._behind(self._before, self._pending)

    def _behind(self, before: list[int], ids: list[int]) -> str:
        # Decoded behind what comes before: the start of a text is treated apart (a leading space, say).
        return self._decode(before + ids)[len(self._decode(before)) :]

    def _cut(self) -> str:
        """The text of the first pending ids, where no character lies on both sides of the cut: a long run of
        ids that make no whole text is not decoded again and again.
        """
        whole = self.finish()
        for at in range(len(self._pending) - 4, 0, -1):
            first = self._pending[:at]
            rest = self._pending[at:]
            piece = self._behind(self._before, first)
            if piece + self._behind(first, rest) == whole:
                self._before = first
                self._pending = rest
                return piece
        return ""
