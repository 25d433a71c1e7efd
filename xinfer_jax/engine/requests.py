"""`Request`: a prompt that an engine answers, and its `Answer`s. Callers may use it from any thread or event
loop.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from ..errors import InputError
from ..generation.options import GenerateOutput
from ..generation.validation import ValidatedCall
from ..sampling.logprobs import TokenLogprobs
from ..sampling.sampling_config import min_tokens_of_row
from ..stats import GenerateStats, peak_bytes
from ..tokenization.answer_detokenizer import AnswerDetokenizer
from .answers import Answer, sums_by_place
from .request_options import RequestOptions
from .row import HeldAdapter, Row


class Request:
    """A request to an engine, from `Engine.submit`. Call `result` to wait for its answers.

    If a request has one answer, you can iterate over the request to get its ids, or over `text()` to get its
    text, while it is generated.

    Attributes:
        ids: the token ids of the prompt.
        answers: a list of `Answer`: `n` of them, or `best_of`.
        call: the prompt and the `GenerateOptions` of the request, after all checks.
        request_options: the `RequestOptions` of the request, after all checks.
        adapter: the LoRA adapter of the request. None: the request names no adapter.
        factors: the factors of the engine's vectors (`GenerateOptions.taps`).
        deadline: the time of the deadline, by time.monotonic().
        prompt_logprobs: the log-probability of each token of the prompt except the first, or from
            `prompt_logprobs_from` on, if the request asks for them.
        error: the error with which the request failed. None: it has not failed.
    """

    def __init__(
        self,
        engine: Any,
        call: ValidatedCall,
        request_options: RequestOptions,
        adapter: HeldAdapter | None = None,
        factors: Sequence[float] = (),
        numbers: Sequence[int] | None = None,
        first: Answer | None = None,
    ):
        """Creates a request. `Engine.submit` does it for you.

        Args:
            engine: the engine that gets the request.
            call: the prompt and the checked `GenerateOptions`.
            request_options: the checked `RequestOptions`.
            adapter: the adapter that the request names. None: the request names no adapter.
            factors: the factors of the engine's vectors.
            numbers: the indices of the answers that this engine computes. None: all.
            first: an answer of another engine, which has its first token. None: there is none.
        """
        self.engine = engine
        self.call = call
        self.request_options = request_options
        self.ids = call.prompts[0]
        self.adapter = adapter
        self.factors = factors
        self.submitted: float = request_options.received or time.monotonic()
        deadline = request_options.deadline
        self.deadline = float("inf") if deadline is None else self.submitted + deadline
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.error: BaseException | None = None
        self.times: dict[str, float] = {}  # "prefill": begin, "first": first token, "ended": end
        self.listeners: list[Callable[[], None]] = []  # called when it has new tokens, or has ended
        numbers = range(call.answers) if numbers is None else numbers
        self.answers = [Answer(self, self._new_row(j, first is None), j) for j in numbers]
        if first is not None:
            self.answers[0].continue_from(first)
            self.times["first"] = time.monotonic()

    def _new_row(self, number: int, prefills: bool) -> Row:
        """Returns the row of an answer. prefills: this engine prefills the prompt."""
        asked = self.request_options
        max_tokens = self.call.options.max_tokens
        scores = asked.prompt_logprobs is not None and number == 0 and prefills
        row = Row(
            self.ids,
            max_tokens,
            priority=asked.priority,
            answer_group=number // self.engine.rows,
            salt=asked.salt.encode("utf-8", "surrogatepass"),
            adapter=self.adapter,
            factors=self.factors,
            client=asked.client,
            logprobs_from=asked.prompt_logprobs_from if scores else None,
            share_answers=asked.share_answers,
        )
        # Long factors of longrope have pages of their own. No text encodes to b"\xff".
        is_long = row.longest > (self.engine.model.config.rope.switches_at or row.longest)
        return dataclasses.replace(row, salt=b"\xff" + row.salt) if is_long else row

    def __iter__(self) -> Iterator[int]:
        return iter(self.single_answer)

    def text(self) -> Iterator[str]:
        """Yields the text of the single answer in pieces, while it is generated."""
        return self.single_answer.text()

    def text_async(self) -> AsyncIterator[str]:
        """Yields the text of the single answer in pieces, in an event loop."""
        return self.single_answer.text_async()

    def result(self, timeout: float | None = None) -> GenerateOutput:
        """Waits for the end of the request, and returns the answers as `generate` does.

        Args:
            timeout: the longest time to wait, in seconds. None: no limit.

        Raises:
            InputError: numbers are not finite, the settings leave no token, or the engine was closed.
            TimeoutError: the request has not ended after `timeout` seconds. It continues.
        """
        self.engine.wait(lambda: self.ended, timeout)
        self.raise_error()
        options = self.call.options
        asked = self.request_options
        answers: Any = self.answers
        out = GenerateOutput(
            tokens=[list(answer.tokens) for answer in answers],
            logprobs=[list(answer.logprobs) for answer in answers],
            finish_reason=[answer.finish_reason or "" for answer in answers],
            stop_reason=[answer.stop_reason for answer in answers],
            stats=self._stats(),
            alternatives=[list(answer.alternatives) for answer in answers] if options.logprobs else None,
            token_versions=[answer.token_versions for answer in answers],
            adapter=self.adapter.name if self.adapter else None,
            adapter_versions=[answer.adapter_versions for answer in answers] if self.adapter else None,
            routed_experts=[answer.routed_experts for answer in answers if answer.routed_experts is not None]
            if asked.return_routed_experts
            else None,
            support=[answer.support for answer in answers] if asked.return_support else None,
        )
        return out if options.best_of in (None, options.n) else out.best(options.n, options.best_of)

    def move_to(self, engine: Any) -> None:
        """Gives the request to another engine. It has not begun."""
        self.engine = engine

    def cancel(self) -> None:
        """Ends the request at the engine's next step, with the finish_reason "abort"."""
        self.engine.cancel(self)

    @property
    def recorded(self) -> int:
        """The level of the values that are recorded for each token, next to its log-probability.

        0 records nothing more, 1 adds `Answer.processed_logprobs`, 2 adds alternatives, and 3 adds sampling
        masks.
        """
        asked = self.request_options
        if asked.return_support:
            return 3
        return 2 if self.call.options.logprobs else int(asked.processed_logprobs)

    @property
    def answered(self) -> bool:
        """True if all answers have ended."""
        return all(answer.ended_by is not None for answer in self.answers)

    @property
    def ended(self) -> bool:
        """True if the request has ended. Its answers, error and times do not change any more."""
        return "ended" in self.times

    def new_detokenizer(self) -> AnswerDetokenizer:
        """Returns a detokenizer with the stop strings and the special tokens of this request."""
        tokenizer = self.engine.model.tokenizer
        if tokenizer is None:
            raise InputError("this checkpoint has no tokenizer.json: take the ids by `for id in request`")
        options = self.call.options
        return AnswerDetokenizer(
            tokenizer,
            options.stop_strings,
            skip_special_tokens=self.request_options.skip_special_tokens,
            min_tokens=min_tokens_of_row(options.sampling),
            content_after=self.request_options.content_after,
            end_ids=self.call.end_ids,
        )

    def raise_error(self) -> None:
        """Raises the error with which the request failed, if it has failed."""
        if self.error is not None:
            raise self.error

    def fail(self, error: BaseException | None) -> None:
        """Records the error with which the request failed. The engine then ends the request."""
        self.error = error

    def end(self, error: BaseException | None) -> None:
        """Marks the request as ended, or as failed with an error. The engine calls it, and then calls
        `notify`.
        """
        self.error = error
        for answer in self.answers:
            answer.end("error")
        self.times.setdefault("ended", time.monotonic())  # last, as waiting threads then read the others

    def updates(self) -> AsyncIterator[bool]:
        """Yields whenever the request may have new tokens, in an event loop.

        `Answer.tokens_after` returns the tokens.
        """
        return request_updates([self])

    def notify(self) -> None:
        """Wakes the listeners: the request has new tokens, or has ended."""
        for listener in list(self.listeners):
            with contextlib.suppress(RuntimeError):  # its event loop was closed
                listener()

    @property
    def single_answer(self) -> Answer:
        """The answer of a request with one answer. With several answers it raises `InputError`."""
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
            none = [0] * engine.num_draft_tokens
            stats.drafted = [sums_by_place(answer.drafted, none) for answer in answers]
            stats.accepted = [sums_by_place(answer.accepted, none) for answer in answers]
            pairs = zip(stats.accepted, stats.drafted, strict=True)
            stats.acceptance = [sum(accepted) / max(1, sum(drafted)) for accepted, drafted in pairs]
        return stats


def check_started(engine: Any) -> None:
    if not engine.started:
        raise InputError("an event loop needs an engine with a thread: with xj.Engine(model) as engine: …")


async def request_updates(requests: Sequence[Request], quiet: float | None = None) -> AsyncIterator[bool]:
    """Yields True at once, and whenever requests to one engine may have new tokens. Yields False after
    `quiet` seconds without them.
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
