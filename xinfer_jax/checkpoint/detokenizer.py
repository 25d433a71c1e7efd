"""Ids in, pieces of text out, as the ids come."""

from .tokenizer import Tokenizer


class IncrementalDecoder:
    """Never gives half a UTF-8 character; joined, its pieces are `decode` of all ids.

    A step decodes few ids again: those since the text was last whole, and the ones before for context.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._decode = tokenizer.decode
        self._before: list[int] = []  # the last ids whose text is out
        self._pending: list[int] = []  # ids whose text is not

    def push(self, token: int) -> str:
        """The text that this id completes, empty while a character is only half there."""
        self._pending.append(token)
        piece = self.finish()
        if not piece or piece.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._before, self._pending = self._pending, []
        return piece

    def finish(self) -> str:
        """What is left when no more ids come."""
        # Decoded behind what comes before: the start of a text is treated apart (a leading space, say).
        return self._decode(self._before + self._pending)[len(self._decode(self._before)) :]
