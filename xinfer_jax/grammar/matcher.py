"""`Matcher`: follows one answer through its grammar on the host, and says which tokens may come next."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..sampling.context import ALL_BITS
from .automaton import Dfa
from .compiler import ReasoningEnd, vocabulary_of
from .token_automaton import ENDS
from .token_masks import TokenMasks, check_allowed

if TYPE_CHECKING:
    from .grammars import Grammar


class CompiledGrammar:
    """A grammar that a model's vocabulary serves. Each answer gets a separate `matcher`.

    Args:
        grammar: a grammar with a tokenizer.
        vocab_size: V.
        dfa, new_masks: parts of a grammar that was compiled elsewhere: its automaton, or a function that
            makes the masks of an answer, with the methods of `LocalMasks`.

    Raises:
        InputError: the grammar is not served.
    """

    def __init__(
        self,
        grammar: "Grammar",
        vocab_size: int,
        dfa: Dfa | None = None,
        new_masks: Callable[[], Any] | None = None,
    ):
        self._grammar = grammar
        self._vocabulary = vocabulary_of(grammar.tokenizer, vocab_size)
        self._dfa = self._vocabulary.automaton(grammar) if new_masks is None else dfa
        self._new_masks = new_masks or self._local_masks
        if new_masks is None and self._dfa is None:
            self._vocabulary.matcher(grammar)

    def runs_on_device(self, prompt: Sequence[int]) -> bool:
        """Returns True if answers to this prompt follow an automaton on the device. Otherwise the host makes
        masks.
        """
        return self._dfa is not None and self._vocabulary.reasoning_end(self._grammar, list(prompt)) is None

    def matcher(self, prompt: Sequence[int], end_ids: Sequence[int]) -> "Matcher | DfaMatcher":
        """Returns a matcher for an answer to a prompt. end_ids: tokens that are allowed if the grammar may
        end, and only then.
        """
        waits_for = self._vocabulary.reasoning_end(self._grammar, list(prompt))
        if self._dfa is not None and waits_for is None:
            return DfaMatcher(self._dfa, end_ids)
        return Matcher(self._new_masks(), self._vocabulary.size, end_ids, waits_for)

    def _local_masks(self) -> "LocalMasks":
        return LocalMasks(self._vocabulary.matcher(self._grammar), self._vocabulary.size)


@dataclasses.dataclass
class DfaMatcher:
    """Checks on the host the tokens that an answer sampled by its automaton on the device."""

    dfa: Dfa
    _end_ids: Sequence[int]
    _state: int = 0

    def append(self, ids: Sequence[int]) -> None:
        """Follows the next tokens of the answer. Raises if one is not allowed."""
        for token in ids:
            token_class = ENDS if token in self._end_ids else self.dfa.class_V[token]
            self._state = int(self.dfa.next_SC[self._state, token_class])
            check_allowed(self._state >= 0)


class LocalMasks:
    """The masks of an answer, computed in this process when they are read."""

    seconds = 0.0  # that the last ones took, where the caller need not wait

    def __init__(self, matcher: Any, vocab_size: int):
        """Makes the masks of one answer. matcher: an `LLMatcher` that nothing else uses."""
        self._masks = TokenMasks(matcher, vocab_size)
        self._next: tuple[Sequence[int], Sequence[int]] = (), ()

    def start(self, ids: Sequence[int], draft_ids: Sequence[int]) -> None:
        """Begins to compute the masks of `TokenMasks.after`."""
        self._next = ids, draft_ids

    def wait(self, seconds: float) -> bool:
        """Returns True if `result` returns at once. Waits for it, but at most this number of seconds."""
        return True

    def result(self) -> np.ndarray:
        return self._masks.after(*self._next)


class Matcher:
    """One answer's way through its grammar. Token v has bit v % 32 of word v // 32 of a mask."""

    dfa = None

    def __init__(self, masks: Any, vocab_size: int, end_ids: Sequence[int], waits_for: ReasoningEnd | None):
        """Makes a matcher. masks: `LocalMasks`, or an object with its methods. waits_for: the end of the
        reasoning. Before it every token may come, but an EOS id only after a call.
        """
        self._masks = masks
        self._size = vocab_size
        self._ends = np.array(end_ids, np.int64)
        self._waits_for = waits_for
        self._recent: list[int] = []  # the last tokens of the reasoning
        self._in_call = False  # they are of a call
        self._ids: list[int] = []  # since the grammar began
        self._drafts: list[int] | None = None  # with which `start` was called; None: it was not called
        self._free: list[Any] = []  # which EOS ids may come, for each next mask before the grammar begins
        self._computes = False  # the others come from `_masks`
        self._bits: Sequence[np.ndarray] = ()  # these; tokens are checked by them

    @property
    def seconds(self) -> float:
        """The time that the last masks took while other work ran."""
        return self._masks.seconds

    def start(self, draft_ids: Sequence[int] = ()) -> None:
        """Begins to compute the masks of `fill`. Does nothing if it was called for these draft tokens, and no
        token was appended since.
        """
        drafts = list(draft_ids)
        if self._drafts == drafts:
            return
        self._drafts = list(drafts)
        self._free = []
        ahead = copy.copy(self)
        while ahead._waits_for is not None:
            self._free.append((self._ends == ahead._waits_for.call_end) & ahead._in_call)
            if not drafts or not ahead._try_append(drafts.pop(0)):
                break
        self._computes = ahead._waits_for is None
        if self._computes:
            self._masks.start(self._ids, drafts)

    def wait(self, seconds: float = 0.0) -> bool:
        """Returns True if the masks are computed. Waits for them, but at most this number of seconds."""
        return not self._computes or self._masks.wait(seconds)

    def fill(self, masks: np.ndarray, draft_ids: Sequence[int] = ()) -> None:
        """Writes the masks [Q, W] of the next token, and after each draft token. The masks after a token that
        the grammar forbids are not read: it is rejected. If `start` was called, `draft_ids` is not read.
        Raises as `TokenMasks.after`.
        """
        if self._drafts is None:
            self.start(draft_ids)
        self._bits = self._masks.result() if self._computes else ()
        at, bit = divmod(self._size, 32)
        for mask, may_end in zip(masks, self._free, strict=False):
            mask[:] = ALL_BITS
            self._allow_ends(mask, may_end)
        for mask, bits in zip(masks[len(self._free) :], self._bits, strict=False):
            mask[:] = bits[: len(mask)]
            self._allow_ends(mask, bool(bits[at] >> np.uint32(bit) & 1))

    def _allow_ends(self, mask: np.ndarray, may_end: Any) -> None:
        bit_of_ends = np.left_shift(np.uint32(1), (self._ends % 32).astype(np.uint32))
        allowed = np.broadcast_to(may_end, self._ends.shape)
        np.bitwise_or.at(mask, self._ends[allowed] // 32, bit_of_ends[allowed])
        np.bitwise_and.at(mask, self._ends[~allowed] // 32, ~bit_of_ends[~allowed])

    def append(self, ids: Sequence[int]) -> None:
        """Follows the tokens that were sampled under the last masks. Raises NoTokenLeftError if the grammar
        forbids one. Such a token is sampled if the settings forbid all tokens that the grammar allows.
        """
        for token in ids:
            self._drafts = None
            check_allowed(self._try_append(token))

    def _try_append(self, token: int) -> bool:
        """Appends a token, and returns True if it may come next. An EOS id ends the answer."""
        is_end = token in self._ends
        if (end := self._waits_for) is not None:
            is_allowed = not is_end or self._in_call and token == end.call_end
            self._recent = [*self._recent, token][-end.most_tokens :]
            self._in_call = end.in_call(self._recent, self._in_call)
            if end.ends(self._recent):
                self._waits_for = None
            return is_allowed
        if not is_end:
            self._ids.append(token)
        if not len(self._bits):  # sampled elsewhere: the next mask checks it
            return True
        bits, self._bits = self._bits[0], self._bits[1:]
        at, bit = divmod(self._size if is_end else token, 32)
        return bool(bits[at] >> np.uint32(bit) & 1)
