"""`Matcher`: follows one answer through its grammar on the host, and says which tokens may come next."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import NoTokenLeftError
from ..sampling.context import ALL_BITS
from .compiler import next_tokens, vocabulary_of
from .grammars import Grammar


class CompiledGrammar:
    """A grammar that a model's vocabulary serves. Each answer gets a `matcher` of its own.

    Args:
        grammar: with a tokenizer.
        vocab_size: V.

    Raises:
        InputError: a grammar that is not served.
    """

    def __init__(self, grammar: Grammar, vocab_size: int):
        self._grammar = grammar
        self._vocabulary = vocabulary_of(grammar.tokenizer, vocab_size)
        self._start = self._vocabulary.matcher(grammar)

    def matcher(self, prompt: Sequence[int], end_ids: Sequence[int]) -> "Matcher":
        """For an answer to a prompt. end_ids: the EOS ids: allowed where the grammar may end, and only
        there.
        """
        waits_for = self._vocabulary.reasoning_end(self._grammar, list(prompt))
        begun = self._start.deep_copy()
        return Matcher(begun, self._vocabulary.size, end_ids, self._grammar.tokenizer, waits_for)


class Matcher:
    """One answer's way through its grammar.

    Masks are uint32 [ceil(V / 32)]: token v has bit v % 32 of word v // 32.
    """

    def __init__(
        self, matcher: Any, vocab_size: int, end_ids: Sequence[int], tokenizer: Any, waits_for: str | None
    ):
        """matcher: an `LLMatcher` of its own; waits_for: a text before which every token but an EOS id may
        come.
        """
        self._matcher = matcher
        self._size = vocab_size
        self._ends = np.array(end_ids, np.int64)
        self._tokenizer = tokenizer
        self._waits_for = waits_for
        self._recent: list[int] = []  # the last tokens of the reasoning

    def fill(self, masks: np.ndarray, draft_ids: Sequence[int] = ()) -> None:
        """Writes the masks [Q, W] of the next token, and after each draft token. Those after one that the
        grammar forbids are not read: it is rejected.

        Raises:
            NoTokenLeftError: the grammar exceeds llguidance's limits.
        """
        self._fill(masks[0])
        if draft_ids:
            ahead = copy.copy(self)
            ahead._matcher = self._matcher.deep_copy()
            for mask, token in zip(masks[1:], draft_ids, strict=True):
                if not ahead._try_append(token):
                    break
                ahead._fill(mask)

    def _fill(self, mask: np.ndarray) -> None:
        may_end = False
        if self._waits_for is not None:
            mask[:] = ALL_BITS
        else:
            bits = next_tokens(self._matcher, self._size)
            self._check(not self._matcher.is_error())
            mask[:] = bits[: len(mask)]
            at, bit = divmod(self._size, 32)
            may_end = bool(bits[at] >> np.uint32(bit) & 1)
        bit_of_ends = np.left_shift(np.uint32(1), (self._ends % 32).astype(np.uint32))
        if may_end:
            np.bitwise_or.at(mask, self._ends // 32, bit_of_ends)
        else:
            np.bitwise_and.at(mask, self._ends // 32, ~bit_of_ends)

    def append(self, ids: Sequence[int]) -> None:
        """Follows the tokens that were sampled.

        Raises:
            NoTokenLeftError: a token that the grammar forbids: it is sampled where the settings forbid all
                that it allows.
        """
        for token in ids:
            self._check(self._try_append(token))

    def _try_append(self, token: int) -> bool:
        """Whether the token may come next. An EOS id ends the answer."""
        if self._waits_for is not None:
            self._recent = [*self._recent, token][-len(self._waits_for) - 8 :]
            if self._waits_for in self._tokenizer.decode(self._recent, skip_special_tokens=False):
                self._waits_for = None
            return token not in self._ends
        if token in self._ends:
            return bool(self._matcher.is_accepting())
        return bool(self._matcher.consume_token(token))

    def _check(self, is_served: bool) -> None:
        if not is_served:
            raise NoTokenLeftError(
                "the settings leave no token that the grammar allows, or the grammar exceeds its limits:"
                " loosen logit_bias, allowed, forbidden or bad words, min_new_tokens, or the grammar"
            )
