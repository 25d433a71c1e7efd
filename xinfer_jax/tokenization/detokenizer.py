"""Decodes token ids to text as the ids arrive."""

from functools import partial

from .tokenizer import Tokenizer

_MAX_PENDING = 16  # ids without a complete text; a character has at most four


class IncrementalDetokenizer:
    """Returns the text of each id once its characters are complete. The joined text is `decode` of all ids,
    or `decode_marked`. A push decodes few ids again: the pending ids, and the ids before them as context.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, marked: bool = False):
        decode = tokenizer.decode_marked if marked else tokenizer.decode
        self._decode = partial(decode, skip_special_tokens=skip_special_tokens)
        self._context: list[int] = []  # the last ids whose text has been returned
        self._pending: list[int] = []  # ids whose text has not

    def push(self, token: int) -> str:
        """Returns the text that this id completes. It is empty while a character is incomplete."""
        self._pending.append(token)
        text = self.finish()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return self._split_pending(text) if len(self._pending) >= _MAX_PENDING else ""
        self._context = self._pending
        self._pending = []
        return text

    def finish(self) -> str:
        """Returns the text of the pending ids, once no more ids come."""
        return self._decode_after(self._context, self._pending)

    def _decode_after(self, context: list[int], ids: list[int]) -> str:
        # Decoded with their context: tokenizers treat the start of a text differently (a leading space, say).
        return self._decode(context + ids)[len(self._decode(context)) :]

    def _split_pending(self, text: str) -> str:
        """Returns the text of the first pending ids, split at a point that no character spans. So a long run
        of ids without a complete text is not decoded again and again.
        """
        for at in range(len(self._pending) - 4, 0, -1):
            first = self._pending[:at]
            rest = self._pending[at:]
            first_text = self._decode_after(self._context, first)
            if first_text + self._decode_after(first, rest) == text:
                self._context = first
                self._pending = rest
                return first_text
        return ""
