"""`Answer`: the tokens that an engine has sampled for a request. Callers read it from any thread or event
loop.
"""

import itertools
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..generation.output_checks import check_generated
from ..generation.state import SampledTokens
from ..model.routes import routes_shape
from ..old_names import OldAttribute
from ..sampling.logprobs import TokenLogprobs
from .row import Row

if TYPE_CHECKING:
    from .requests import Request
# `Answer.ended_by`, and the finish_reason that users see: OpenAI's, or vLLM's "abort" and "error".
FINISH_REASONS = {"eos": "stop", "stop string": "stop", "deadline": "length"} | dict.fromkeys(
    ("cancelled", "aborted"), "abort"
)


class Switch(NamedTuple):
    """A point in an answer after which keys and tokens come from another version of the parameters. An answer
    begins with a switch.
    """

    version: int
    computed: int = 0  # tokens that had keys then
    sampled: int = 0  # tokens that were sampled before
    recomputed: bool = False  # all keys were computed anew
    adapter_version: int = 0  # of its adapter, if it has one


def sums_by_place(*counts: Sequence[int]) -> list[int]:
    """Returns the sums of counts of draft tokens at each place of a pass. Missing places count 0."""
    return [sum(of_place) for of_place in itertools.zip_longest(*counts, fillvalue=0)]


class Progress(NamedTuple):
    """The new part of an answer that another engine computes."""

    start: int = 0  # tokens that were reported before; the next four are of those after them
    sampled: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    processed_logprobs: Sequence[float] = ()
    alternatives: Sequence[TokenLogprobs] = ()
    reason: str | None = None  # `Answer.ended_by`; None: it goes on
    hits: int = 0
    passes: int = 0
    accepted: Sequence[int] = ()
    prompt_start: int = 0  # log-probabilities of the prompt that were reported before
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # those after these
    prefill_seconds: float | None = None  # from the begin of prefill to the first token
    switches: Sequence[Any] = ()  # all of `Answer.switches`
    routed_experts: Any = ()  # `Answer.recorded_routes`
    error: BaseException | None = None  # why its request failed
    stop_string: str | None = None  # `Answer.stop_string`
    support: Sequence[Any] = ()  # as `sampled`: the sampling masks
    drafted: Sequence[int] = ()


class Answer:
    """One answer of a request. Iterate over it to get its ids as they are sampled.

    Every iteration starts at the first id. `Request.answers` has the answers of a request.

    Attributes:
        tokens: all ids that were sampled so far, with the EOS or stop id that ended them.
        text_ids: the ids without that last id. `num_text_ids` is their number.
        logprobs: the natural log-probability of each token, before any logits processor.
        processed_logprobs: the log-probability of each token after the logits processors, if the request asks
            for it.
        alternatives: the alternatives of each token, if the request has `options.logprobs`.
        number: the index of the answer among the answers of its request.
        switches: the versions of the engine's parameters that computed the answer, for `Engine.replay`.
        ended_by: "eos", "stop" (an id), "stop string", "length", "cancelled", "deadline", "aborted" (by
            `Engine.update` or `Engine.pause`) or "error". None: the answer has not ended.
        finish_reason: "stop", "length", "abort" or "error" (see `GenerateOutput`). None: the answer has not
            ended.
        stop_reason: the id or the text that stopped the answer (see `GenerateOutput`).
    """

    routes = OldAttribute("routed_experts")
    processed = OldAttribute("processed_logprobs")

    def __init__(self, request: "Request", row: Row, number: int):
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.processed_logprobs: list[float] = []
        self.alternatives: list[TokenLogprobs] = []
        self.support_rows: list[np.ndarray] = []  # of each of `logprobs`: uint32 [ceil(V/32)]
        self.switches: list[Switch] = []
        self.recorded_routes: Any = ()  # at the end: int16 [tokens with keys, L U]
        self.ended_by: str | None = None
        self.stop_string: str | None = None  # that ended it
        self.request = request
        self.row = row
        self.number = number
        self.passes = 0
        self.drafted: Sequence[int] = ()  # draft tokens at each place of a pass
        self.accepted: Sequence[int] = ()  # the accepted ones
        self._detokenizer = request.new_detokenizer() if request.call.options.stop_strings else None
        self.matcher = request.call.new_matcher(0)  # of its grammar

    @property
    def has_begun(self) -> bool:
        """True if keys of the answer are in the cache, or were there."""
        return bool(self.switches or self.row.num_computed)

    @property
    def num_text_ids(self) -> int:
        """The number of tokens that have text, which are all tokens except an EOS or stop id at the end."""
        count = len(self.tokens)
        return count - (count > 0 and self.tokens[count - 1] in self.request.call.end_ids)

    @property
    def text_ids(self) -> list[int]:
        """The ids that have text, which are all of `tokens` except an EOS or stop id at the end."""
        return self.tokens[: self.num_text_ids]

    @property
    def token_versions(self) -> list[int]:
        """For each entry of `logprobs`, the version of the parameters that sampled the token."""
        return [switch.version for switch in self._switch_of_tokens]

    @property
    def adapter_versions(self) -> list[int]:
        """For each entry of `logprobs`, the version of the adapter that sampled the token.

        The version is 0 if the request has no adapter.
        """
        return [switch.adapter_version for switch in self._switch_of_tokens]

    @property
    def _switch_of_tokens(self) -> list[Switch]:
        begins = [switch.sampled for switch in self.switches]
        return [self.switches[bisect_right(begins, i) - 1] for i in range(len(self.logprobs))]

    @property
    def routed_experts(self) -> np.ndarray | None:
        """The experts that each token used, as `score` takes them, once the answer has ended.

        The array is int32 [tokens of the prompt and of the answer, L, U]. It has the experts at the time when
        the keys of a token were computed. It is None if the request did not ask for experts. Entries are -1
        for the last token, which had no keys yet. All entries are -1 if the answer ended while it had no
        slot.
        """
        if not self.request.request_options.return_routed_experts:
            return None
        tokens = len(self.request.ids) + len(self.tokens)
        routed_experts = np.full((tokens, *routes_shape(self.request.call.config)), -1, np.int32)
        recorded = np.asarray(self.recorded_routes)[:tokens]
        routed_experts[: len(recorded)] = recorded.reshape(-1, *routed_experts.shape[1:])
        return routed_experts

    @property
    def support(self) -> np.ndarray | None:
        """The sampling mask of each token, as `score` takes it.

        The array is uint32 [entries of `logprobs`, ceil(V/32)]. It is None if the request did not ask for
        masks. If the processors and filters allowed id v, bit `v % 32` of word `v // 32` is set.
        """
        if not self.request.request_options.return_support:
            return None
        words = -(-self.request.call.config.vocab_size // 32)
        return np.array(self.support_rows, np.uint32).reshape(-1, words)

    def record_version(
        self, version: int, recomputes: bool = False, adapter_version: int | None = None
    ) -> None:
        """Records that the next tokens come from parameters of this version.

        Args:
            version: the version of the parameters.
            recomputes: True if the keys of all tokens come from it too.
            adapter_version: the version of the adapter. None: the present version of its adapter.
        """
        if adapter_version is None:
            adapter_version = self.row.adapter.version if self.row.adapter else 0
        if not self.switches:
            self.switches = [Switch(version, adapter_version=adapter_version)]
        last = self.switches[-1]
        if recomputes or (last.version, last.adapter_version) != (version, adapter_version):
            counts = self.row.num_computed, len(self.tokens)
            self.switches = [*self.switches, Switch(version, *counts, recomputes, adapter_version)]

    @property
    def ids_with_keys(self) -> list[int]:
        """The prompt and the sampled tokens except the last one, whose keys are not written before the next
        token.
        """
        return [*self.request.ids, *self.tokens[:-1]]

    def append(
        self,
        ids: list[int],
        logprobs: list[float],
        finished: bool,
        processed_logprobs: Sequence[float] = (),
        alternatives: Sequence[TokenLogprobs] = (),
        support: Sequence[np.ndarray] = (),
    ) -> bool:
        """Appends sampled tokens with the values that are recorded for each of them.

        Args:
            ids: the tokens.
            logprobs: the log-probability of each token.
            finished: True if the last token is an EOS or stop id.
            processed_logprobs: the log-probability of each token after the processors, if it is recorded.
            alternatives: the alternatives of each token, if they are recorded.
            support: the sampling mask of each token, if it is recorded.

        Returns:
            True if the answer has ended.

        Raises:
            InputError: numbers are not finite, or the grammar forbids a token.
        """
        options = self.request.call.options
        if self.matcher is not None:
            self.matcher.append(ids)
        count = len(ids)
        if self._detokenizer is not None:
            for n, token in enumerate(ids[:-1] if finished else ids, 1):
                self._detokenizer.push(token)
                if self._detokenizer.ended:  # what was sampled after the stop string does not count
                    count = n
                    self.stop_string = self._detokenizer.stop_string
                    break
        self.processed_logprobs += processed_logprobs[:count]
        self.alternatives += alternatives[:count]
        self.support_rows += support[:count]
        self.logprobs += logprobs[:count]
        self.tokens += ids[:count]
        if self.stop_string is not None:
            return self._check_end("stop string")
        if finished:
            return self._check_end("stop" if ids[-1] in options.stop_token_ids else "eos")
        if len(self.tokens) >= options.max_tokens:
            return self._check_end("length")
        return not np.isfinite(logprobs).all() and self._check_end("error")

    def _check_end(self, reason: str) -> bool:
        sampled = np.array([self.tokens]), np.array([self.logprobs]), np.array([len(self.tokens)])
        check_generated(self.request.call, SampledTokens(*sampled, np.array([True])))
        self.end(reason)
        return True

    def end(self, reason: str, routed_experts: Any = None) -> None:
        """Ends the answer, unless it has ended.

        Args:
            reason: the value of `ended_by`.
            routed_experts: the new `recorded_routes`. None keeps the present ones.
        """
        if routed_experts is not None:
            self.recorded_routes = routed_experts
        self.ended_by = self.ended_by or reason

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's value "stop" or "length", or "abort" or "error". It is None until the answer has ended."""
        return self.ended_by and FINISH_REASONS.get(self.ended_by, self.ended_by)

    @property
    def stop_reason(self) -> int | str | None:
        """The id or the text that stopped the answer (see `GenerateOutput`)."""
        if self.ended_by == "stop":
            return self.tokens[-1]
        from_outside = self.ended_by in ("cancelled", "aborted", "deadline")
        return self.ended_by if from_outside else self.stop_string

    def count_passes(self, passes: int, accepted: Sequence[int]) -> None:
        """Counts forward passes of the model, and the draft tokens that they accepted at each place. They
        had draft tokens at these places.
        """
        self.passes += passes
        self.drafted = sums_by_place(self.drafted, [passes] * len(accepted))
        self.accepted = sums_by_place(self.accepted, accepted)

    def progress(self, start: int = 0, prompt_start: int = 0) -> Progress:
        """Returns the tokens after the first `start`, and log-probabilities of the prompt after
        `prompt_start`.
        """
        request = self.request
        times = request.times
        seconds = times["first"] - times["prefill"] if {"first", "prefill"} <= {*times} else None
        return Progress(
            start, self.tokens[start:], self.logprobs[start:], self.processed_logprobs[start:],
            self.alternatives[start:], self.ended_by, self.row.hits, self.passes,
            self.accepted, prompt_start, request.prompt_logprobs[prompt_start:], seconds, self.switches,
            self.recorded_routes, request.error, self.stop_string, self.support_rows[start:], self.drafted,
        )  # fmt: skip

    def apply(self, new: Progress) -> None:
        """Adds the progress of another engine, except the end. It skips tokens that are known already."""
        request = self.request
        known = max(0, len(request.prompt_logprobs) - new.prompt_start)
        request.prompt_logprobs.extend(new.prompt_logprobs[known:])
        if new.logprobs:
            now = time.monotonic()
            request.times.setdefault("prefill", now - (new.prefill_seconds or 0.0))
            request.times.setdefault("first", now)
        self.switches = [Switch(*switch) for switch in new.switches] or self.switches
        self.recorded_routes = new.routed_experts
        self.passes = new.passes
        self.accepted = new.accepted
        self.drafted = new.drafted
        known = max(0, len(self.logprobs) - new.start)
        self.alternatives += new.alternatives[known:]
        self.processed_logprobs += new.processed_logprobs[known:]
        self.support_rows += new.support[known:]
        self.logprobs += new.logprobs[known:]
        self.tokens += new.sampled[known:]
        self.stop_string = new.stop_string
        self.row.record_elsewhere(len(self.row.ids) + len(self.logprobs), new.hits)

    def continue_from(self, first: "Answer") -> None:
        """Continues after the first token of an answer that another engine prefilled."""
        of_first = first.processed_logprobs, first.alternatives, first.support_rows
        self.append(first.tokens, first.logprobs, False, *of_first)
        self.switches = list(first.switches)
        self.row.record_elsewhere(len(self.row.ids), first.row.hits)

    def tokens_after(self, count: int) -> tuple[list[int], bool]:
        """Returns the ids after the first `count`, and True if no more ids will come.

        In an event loop, call it for each item of `Request.updates`.

        Args:
            count: the number of ids that you have already.
        """
        ended = self.ended_by is not None  # read before the ids, which another thread appends to
        return self.tokens[count:], ended

    def __iter__(self) -> Iterator[int]:
        count = 0
        ended = False
        while not ended:
            self.request.engine.wait(lambda count=count: any(self.tokens_after(count)))
            new, ended = self.tokens_after(count)
            yield from new
            count += len(new)
        self.request.raise_error()

    def text(self) -> Iterator[str]:
        """Yields pieces of text as they come. Joined, they are the answer up to the first stop string."""
        detokenizer = self.request.new_detokenizer()
        for token in self:
            if piece := detokenizer.push(token):
                yield piece
        if rest := detokenizer.finish():
            yield rest

    async def text_async(self) -> AsyncIterator[str]:
        """Yields the pieces of `text` in an event loop."""
        detokenizer = self.request.new_detokenizer()
        count = 0
        async for _ in self.request.updates():
            new, ended = self.tokens_after(count)
            count += len(new)
            if piece := "".join(map(detokenizer.push, new)):
                yield piece
            if ended:
                break
        self.request.raise_error()
        if rest := detokenizer.finish():
            yield rest
