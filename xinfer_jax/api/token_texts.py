"""Decodes single tokens, as log-probabilities need them."""

from collections.abc import Sequence

from ..checkpoint.detokenizer import IncrementalDetokenizer
from ..checkpoint.tokenizer import Tokenizer


class TokenTextDecoder:
    """Decodes the tokens of one answer one by one, and finds where each begins in the answer's text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        """skip_special_tokens: the answer's text leaves them out; `text` returns theirs all the same."""
        self.tokenizer = tokenizer
        self._offset = 0
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)

    def text(self, token: int) -> str:
        """The text that a token has as the next one of the answer; part of a character is U+FFFD.

        At the start of the text it has no leading space, which SentencePiece puts before the first word.
        """
        if self._offset:
            return self.tokenizer.token_text(token)
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def push(self, token: int) -> int:
        """Appends the next token, and returns the offset at which its text begins."""
        offset = self._offset
        self._offset += len(self._detokenizer.push(token))
        return offset


def prompt_text(
    tokenizer: Tokenizer | None, prompt: Sequence[int], tokens: Sequence[int], skip_special_tokens: bool
) -> str:
    """The text of an echoed prompt, with the space before the answer's tokens, whose own text lacks it."""
    if tokenizer is None:
        return ""
    text = tokenizer.decode(prompt, skip_special_tokens)
    if not text or not tokens:
        return text
    first = tokenizer.decode(tokens[:1], skip_special_tokens)
    after_others = tokenizer.token_text(tokens[0])
    space = after_others.removesuffix(first) if after_others.endswith(first) else ""
    return text + (space if space.isspace() else "")
