"""`Matcher`: follows one answer through its grammar on the host, and says which tokens may come next."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import NoTokenLeftError
from ..sampling.context import ALL_BITS
from .automaton import ENDS, Dfa
from .compiler import ReasoningEnd, error_words, next_tokens, vocabulary_of

if TYPE_CHECKING:
    from .grammars import Grammar


class CompiledGrammar:
    """A grammar that a model's vocabulary serves. Each answer gets a `matcher` of its own.

    Args:
        grammar: with a tokenizer.
        vocab_size: V.

    Raises:
        InputError: a grammar that is not served.
    """

    def __init__(self, grammar: "Grammar", vocab_size: int):
        self._grammar = grammar
        self._vocabulary = vocabulary_of(grammar.tokenizer, vocab_size)
        self._dfa = self._vocabulary.automaton(grammar)
        if self._dfa is None:
            self._vocabulary.matcher(grammar)

    def runs_on_device(self, prompt: Sequence[int]) -> bool:
        """Whether answers to this prompt follow an automaton on the device; else masks of the host."""
        return self._dfa is not None and self._vocabulary.reasoning_end(self._grammar, list(prompt)) is None

    def matcher(self, prompt: Sequence[int], end_ids: Sequence[int]) -> "Matcher | DfaMatcher":
        """For an answer to a prompt. end_ids: the EOS ids: allowed where the grammar may end, and only
        there.
        """
        waits_for = self._vocabulary.reasoning_end(self._grammar, list(prompt))
        if self._dfa is not None and waits_for is None:
            return DfaMatcher(self._dfa, end_ids)
        begun = self._vocabulary.matcher(self._grammar)
        return Matcher(begun, self._vocabulary.size, end_ids, waits_for)


class DfaMatcher:
    """Checks on the host what an answer sampled by its automaton on the device.

    Attributes:
        dfa: the automaton.
    """

    def __init__(self, dfa: Dfa, end_ids: Sequence[int]):
        self.dfa = dfa
        self._end_ids = end_ids
        self._state = 0

    def append(self, ids: Sequence[int]) -> None:
        """As of `Matcher`."""
        for token in ids:
            token_class = ENDS if token in self._end_ids else self.dfa.class_V[token]
            self._state = int(self.dfa.next_SC[self._state, token_class])
            check_allowed(self._state >= 0)


class Matcher:
    """One answer's way through its grammar.

    Masks are uint32 [ceil(V / 32)]: token v has bit v % 32 of word v // 32.
    """

    dfa = None

    def __init__(self, matcher: Any, vocab_size: int, end_ids: Sequence[int], waits_for: ReasoningEnd | None):
        """matcher: an `LLMatcher` of its own; waits_for: before it every token may come, but an EOS id only
        after a call.
        """
        self._matcher = matcher
        self._size = vocab_size
        self._ends = np.array(end_ids, np.int64)
        self._waits_for = waits_for
        self._recent: list[int] = []  # the last tokens of the reasoning
        self._in_call = False  # they are of a call

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
        may_end: Any
        if self._waits_for is not None:
            mask[:] = ALL_BITS
            may_end = (self._ends == self._waits_for.call_end) & self._in_call
        else:
            bits = next_tokens(self._matcher, self._size)
            self._check_served()
            mask[:] = bits[: len(mask)]
            at, bit = divmod(self._size, 32)
            may_end = bool(bits[at] >> np.uint32(bit) & 1)
        bit_of_ends = np.left_shift(np.uint32(1), (self._ends % 32).astype(np.uint32))
        allowed = np.broadcast_to(may_end, self._ends.shape)
        np.bitwise_or.at(mask, self._ends[allowed] // 32, bit_of_ends[allowed])
        np.bitwise_and.at(mask, self._ends[~allowed] // 32, ~bit_of_ends[~allowed])

    def append(self, ids: Sequence[int]) -> None:
        """Follows the tokens that were sampled.

        Raises:
            NoTokenLeftError: a token that the grammar forbids: it is sampled where the settings forbid all
                that it allows.
        """
        for token in ids:
            is_allowed = self._try_append(token)
            self._check_served()
            check_allowed(is_allowed)

    def _check_served(self) -> None:
        if self._matcher.is_error():
            why = error_words(self._matcher.get_error())
            raise NoTokenLeftError(f"the grammar exceeds what is served: {why}; simplify it")

    def _try_append(self, token: int) -> bool:
        """Whether the token may come next. An EOS id ends the answer."""
        if (end := self._waits_for) is not None:
            is_allowed = token not in self._ends or self._in_call and token == end.call_end
            self._recent = [*self._recent, token][-end.most_tokens :]
            self._in_call = end.in_call(self._recent, self._in_call)
            if end.ends(self._recent):
                self._waits_for = None
            return is_allowed
        if token in self._ends:
            return bool(self._matcher.is_accepting())
        return bool(self._matcher.consume_token(token))


def check_allowed(is_allowed: bool) -> None:
    """Raises NoTokenLeftError where a grammar does not allow what was sampled."""
    if not is_allowed:
        raise NoTokenLeftError(
            "the settings leave no token that the grammar allows: loosen logit_bias, allowed, forbidden or"
            " bad words, min_new_tokens, or the grammar"
        )
