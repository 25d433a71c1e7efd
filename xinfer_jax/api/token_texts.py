"""Texts of single tokens, as log-probabilities show them."""

from collections.abc import Sequence

from ..checkpoint.detokenizer import IncrementalDecoder
from ..checkpoint.tokenizer import Tokenizer


class TokenTexts:
    """Texts of tokens as they stand in the text of one answer, and where each begins."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        """skip_special_tokens: in the text; they are shown all the same, and take no place in it."""
        self.tokenizer = tokenizer
        self._at = 0
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens)

    def text(self, token: int) -> str:
        """The text of a token that would come next; a part of a character is U+FFFD. A text begins without
        the blank that SentencePiece puts before its first word.
        """
        if self._at:
            return self.tokenizer.token_text(token)
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def push(self, token: int) -> int:
        """Takes the next token; where its text begins."""
        at = self._at
        self._at += len(self._decoder.push(token))
        return at


def prompt_text(
    tokenizer: Tokenizer | None,
    prompt: Sequence[int],
    tokens: Sequence[int] = (),
    skip_special_tokens: bool = True,
) -> str:
    """The text of a prompt that is echoed, with the blank between it and the answer's tokens: the answer's
    own text begins without.
    """
    if tokenizer is None:
        return ""
    text = tokenizer.decode(prompt, skip_special_tokens)
    if not text or not tokens:
        return text
    alone = tokenizer.decode(tokens[:1], skip_special_tokens)
    within = tokenizer.token_text(tokens[0])
    blank = within.removesuffix(alone) if within.endswith(alone) else ""
    return text + (blank if blank.isspace() else "")
