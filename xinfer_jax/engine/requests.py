"""`Request` and its `Answer`s: callers read tokens and text from them, from any thread or event loop."""

import asyncio
import contextlib
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..errors import InputError
from ..generation.batch_arrays import answer_keys
from ..generation.options import GenerateOutput
from ..generation.output_checks import check_generated
from ..generation.state import SampledTokens
from ..generation.validation import ValidatedCall
from ..model.routes import routes_shape
from ..sampling.logprobs import TokenLogprobs
from ..sampling.sampling_config import min_tokens_of_row
from ..stats import GenerateStats, peak_bytes
from ..tokenization.answer_detokenizer import AnswerDetokenizer
from ..tokenization.tokenizer import Tokenizer
from .row import HeldAdapter, Row


class Switch(NamedTuple):
    """When an answer's next keys and tokens came from parameters of another version. An answer begins with
    one.
    """

    version: int
    computed: int = 0  # tokens that had keys then
    sampled: int = 0  # tokens that were sampled before
    recomputed: bool = False  # all keys were computed anew
    adapter_version: int = 0  # of its adapter, if it has one


class Answer:
    """One answer of a request. Iterating gives its ids as they are sampled; every iteration starts at the
    first.

    Attributes:
        tokens: ids so far, without an EOS or stop id at the end.
        logprobs: the model's log-probability of each, and of that id.
        processed: those after the logits processors, if its request asks for them.
        alternatives: with options.logprobs: of each of `logprobs`.
        number: its place among the answers of its request.
        switches: the versions of the engine's parameters, for `Engine.replay`.
        finish_reason: "eos", "stop", "length", "cancelled", "deadline", "aborted" (by `Engine.update`) or
            "error"; None before the end.
    """

    def __init__(self, request: "Request", row: Row, number: int):
        self.tokens: list[int] = []
        self.sampled: list[int] = []  # tokens, with the EOS or stop id
        self.logprobs: list[float] = []
        self.processed: list[float] = []
        self.alternatives: list[TokenLogprobs] = []
        self.switches: list[Switch] = []
        self.recorded_routes: Any = ()  # at the end: int16 [tokens with keys, L U]
        self.finish_reason: str | None = None
        self.request = request
        self.emit: Any = None  # where another engine prefilled it: reports an event of its row
        self.row = row
        self.number = number
        self.swapped: Any = None  # of a preempted row: its state (None: it has none yet), and its pages
        self.state: Any = None  # of a row that computes its keys anew, with its old recurrent states
        self.passes = 0
        self.accepted = 0
        self._detokenizer = request.new_detokenizer() if request.stop_strings else None
        self.matcher = request.call.new_matcher(0)  # of its grammar

    @property
    def key_1(self) -> jax.Array:
        call = self.request.call
        number_1 = np.array([self.number], np.int32) if self.number else None
        return answer_keys(call.key, np.array([self.request.number], np.int32), number_1)

    @property
    def has_begun(self) -> bool:
        """Whether it has keys, or had some."""
        return bool(self.switches or self.row.num_computed)

    @property
    def token_versions(self) -> list[int]:
        """Of each of `logprobs`, the version of the parameters that its token was sampled by."""
        return [switch.version for switch in self._switch_of_tokens]

    @property
    def adapter_versions(self) -> list[int]:
        """Of each of `logprobs`, the version of its adapter then, if its request has one."""
        return [switch.adapter_version for switch in self._switch_of_tokens]

    @property
    def _switch_of_tokens(self) -> list[Switch]:
        begins = [switch.sampled for switch in self.switches]
        return [self.switches[bisect_right(begins, i) - 1] for i in range(len(self.logprobs))]

    @property
    def routes(self) -> np.ndarray | None:
        """int32 [tokens of the prompt and of `sampled`, L, U] at the end, if its request asks for them: the
        experts that each token used when its keys were computed, as `score` takes them. -1: of the last
        token, which had no keys yet, and of all if the answer ended while it had no slot.
        """
        if not self.request.return_routes:
            return None
        tokens = len(self.request.ids) + len(self.sampled)
        routes = np.full((tokens, *routes_shape(self.request.call.config)), -1, np.int32)
        recorded = np.asarray(self.recorded_routes)[:tokens]
        routes[: len(recorded)] = recorded.reshape(-1, *routes.shape[1:])
        return routes

    def record_version(
        self, version: int, recomputes: bool = False, adapter_version: int | None = None
    ) -> None:
        """What follows comes from parameters of this version. recomputes: the keys of all tokens, too;
        adapter_version: None: that which its adapter has.
        """
        if adapter_version is None:
            adapter_version = self.row.adapter.version if self.row.adapter else 0
        if not self.switches:
            self.switches = [Switch(version, adapter_version=adapter_version)]
        last = self.switches[-1]
        if recomputes or (last.version, last.adapter_version) != (version, adapter_version):
            counts = self.row.num_computed, len(self.sampled)
            self.switches = [*self.switches, Switch(version, *counts, recomputes, adapter_version)]

    @property
    def ids_with_keys(self) -> list[int]:
        """The prompt and the sampled tokens but for the last one, whose keys are never written before the
        next.
        """
        return [*self.request.ids, *self.sampled[:-1]]

    def append(self, ids: list[int], logprobs: list[float], finished: bool) -> bool:
        """Appends sampled tokens; finished: the last is an EOS or stop id. Returns whether the answer has
        ended. Raises InputError for numbers that are not finite, or a token that the grammar forbids.
        """
        options = self.request.call.options
        ending = finished and ids[-1]
        if self.matcher is not None:
            self.matcher.append(ids)
        self.sampled += ids
        self.logprobs += logprobs
        for token in ids[:-1] if finished else ids:
            self.tokens.append(token)
            if self._detokenizer is not None:
                self._detokenizer.push(token)
                if self._detokenizer.ended:
                    for per_token in (self.sampled, self.logprobs, self.processed, self.alternatives):
                        del per_token[len(self.tokens) :]
                    return self._end("stop")
        if finished:
            return self._end("stop" if ending in options.stop_token_ids else "eos")
        if len(self.sampled) >= options.max_new_tokens:
            return self._end("length")
        return not np.isfinite(logprobs).all() and self._end("error")

    def _end(self, reason: str) -> bool:
        sampled = np.array([self.sampled]), np.array([self.logprobs]), np.array([len(self.sampled)])
        check_generated(self.request.call, SampledTokens(*sampled, np.array([True])))
        self.finish_reason = reason
        return True

    def tokens_after(self, count: int) -> tuple[list[int], bool]:
        """The ids after the first `count`, and whether no more will come."""
        ended = self.finish_reason is not None  # read before the ids, which another thread appends to
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
        """Pieces of text as they come; joined they are the answer, up to the first stop string."""
        detokenizer = self.request.new_detokenizer()
        for token in self:
            if piece := detokenizer.push(token):
                yield piece
        if rest := detokenizer.finish():
            yield rest

    async def text_async(self) -> AsyncIterator[str]:
        """`text` for an event loop."""
        detokenizer = self.request.new_detokenizer()
        count = 0
        async for _ in request_updates([self.request]):
            new, ended = self.tokens_after(count)
            count += len(new)
            if piece := "".join(map(detokenizer.push, new)):
                yield piece
            if ended:
                break
        self.request.raise_error()
        if rest := detokenizer.finish():
            yield rest


class Request:
    """What `Engine.submit` returns.

    Attributes:
        ids: the prompt.
        answers: `n` of them, or `best_of`.
        prompt_logprobs: with `prompt_logprobs` of `submit`: the model's log-probability of each token of the
            prompt, or of those from `prompt_logprobs_from` on; not of the first token.
        error: why the request failed; None otherwise.
        adapter: the LoRA adapter that it names; None: none.
        number: that `generate` would fold into its key.
        skip_special_tokens: they have no text, so no stop string is found in it.
        content_after: where stop strings count, as in `AnswerDetokenizer`.
    """

    def __init__(
        self, engine: Any, call: ValidatedCall, tokenizer: Tokenizer | None, stops: Sequence[str],
        number: int, skip_special_tokens: bool,
    ):  # fmt: skip
        self.engine = engine
        self.call = call
        self.tokenizer = tokenizer
        self.stop_strings = stops
        self.number = number
        self.skip_special_tokens = skip_special_tokens
        self.ids = call.prompts[0]
        self.answers = list[Answer]()
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.error: BaseException | None = None
        self.adapter: HeldAdapter | None = None
        self.deadline = float("inf")
        self.cancelled = False
        self.content_after: str | None = None
        self.live = False  # a caller may stream its answers, and more requests may come meanwhile
        self.processed_logprobs = False  # its answers have `processed`
        self.return_routes = False  # and `routes`
        self.num_prompt_logprobs: Any = None  # alternatives of each token of the prompt
        self.submitted = time.monotonic()
        self.times: dict[str, float] = {}  # "prefill": begin, "first": first token, "ended": end
        self.listeners: list[Callable[[], None]] = []  # called when it has new tokens, or has ended

    def __iter__(self) -> Iterator[int]:
        return iter(self.single_answer)

    def text(self) -> Iterator[str]:
        return self.single_answer.text()

    def text_async(self) -> AsyncIterator[str]:
        return self.single_answer.text_async()

    def result(self, timeout: float | None = None) -> GenerateOutput:
        """Waits for the end, and returns the answers as `generate` does.

        Raises:
            InputError: numbers that are not finite, or settings that leave no token; the engine was closed.
            TimeoutError: it has not ended after `timeout` seconds.
        """
        self.engine.wait(lambda: self.ended, timeout)
        self.raise_error()
        options = self.call.options
        answers = self.answers
        out = GenerateOutput(
            tokens=[list(answer.tokens) for answer in answers],
            logprobs=[list(answer.logprobs) for answer in answers],
            finish_reason=[answer.finish_reason or "" for answer in answers],
            stats=self._stats(),
            alternatives=[list(answer.alternatives) for answer in answers] if options.logprobs else None,
            token_versions=[answer.token_versions for answer in answers],
            adapter=self.adapter.name if self.adapter else None,
            adapter_versions=[answer.adapter_versions for answer in answers] if self.adapter else None,
            routes=[answer.routes for answer in answers] if self.return_routes else None,
        )
        return out if options.best_of in (None, options.n) else out.best(options.n, options.best_of)

    def cancel(self) -> None:
        """Ends it at the engine's next step, with the finish_reason "cancelled"."""
        self.cancelled = True
        self.engine.cancel(self)

    @property
    def recorded(self) -> int:
        """What is recorded of each token beside its log-probability: 0: nothing, 1: `Answer.processed`, 2:
        alternatives too.
        """
        return 2 if self.call.options.logprobs else int(self.processed_logprobs)

    @property
    def answered(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def ended(self) -> bool:
        """Whether it has ended: its answers, error and times do not change any more."""
        return "ended" in self.times

    def new_detokenizer(self) -> AnswerDetokenizer:
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer.json: take the ids by `for id in request`")
        return AnswerDetokenizer(
            self.tokenizer,
            self.stop_strings,
            skip_special_tokens=self.skip_special_tokens,
            min_tokens=min_tokens_of_row(self.call.options.sampling),
            content_after=self.content_after,
        )

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None) -> None:
        """Marks it as ended, or as failed with an error. Called by the engine, which then calls `notify`."""
        self.error = error
        for answer in self.answers:
            answer.finish_reason = answer.finish_reason or "error"
        self.times.setdefault("ended", time.monotonic())  # last, as waiting threads then read the others

    def notify(self) -> None:
        for listener in list(self.listeners):
            with contextlib.suppress(RuntimeError):  # its event loop was closed
                listener()

    @property
    def single_answer(self) -> Answer:
        if len(self.answers) != 1:
            raise InputError(f"this request has {len(self.answers)} answers: take each by request.answers[j]")
        return self.answers[0]

    def _stats(self) -> GenerateStats:
        answers = self.answers
        engine = self.engine
        prefill, first, end = (self.times.get(name, self.submitted) for name in ("prefill", "first", "ended"))
        stats = GenerateStats(len(answers), len(self.ids), engine.weight_bytes, engine.cache_bytes)
        stats.reused_tokens = answers[0].row.hits
        stats.generated_tokens = sum(len(answer.logprobs) for answer in answers)
        stats.decode_steps = max(len(answer.logprobs) for answer in answers) - 1
        stats.ttft_seconds = first - self.submitted
        stats.prefill_seconds = first - prefill
        stats.decode_seconds = end - first
        stats.total_seconds = end - self.submitted
        stats.peak_bytes = peak_bytes()
        if engine.num_draft_tokens:
            stats.passes = [answer.passes for answer in answers]
            draft_tokens = [max(1, answer.passes) * engine.num_draft_tokens for answer in answers]
            stats.acceptance = [a.accepted / n for a, n in zip(answers, draft_tokens, strict=True)]
        return stats


def check_started(engine: Any) -> None:
    if not engine.started:
        raise InputError("an event loop needs an engine with a thread: with xj.Engine(model) as engine: …")


async def request_updates(requests: Sequence[Request], quiet: float | None = None) -> AsyncIterator[bool]:
    """True at once, and whenever requests to one engine may have new tokens; False after `quiet` seconds
    without.
    """
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    check_started(requests[0].engine)

    def wake() -> None:
        loop.call_soon_threadsafe(event.set)

    for request in requests:
        request.listeners.append(wake)
    try:
        yield True
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(quiet):
                    await event.wait()
            yield event.is_set()
            event.clear()
    finally:
        for request in requests:
            request.listeners.remove(wake)
