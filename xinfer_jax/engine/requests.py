"""What a caller holds of a request: its answers as they come, from any thread, and the whole at the end."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ..checkpoint.tokenizer import Tokenizer
from ..errors import InputError
from ..generation.faults import check_chosen
from ..generation.options import Call, GenerateOutput
from ..generation.state import Chosen
from ..sampling.choice import answer_keys
from ..sampling.logprobs import TokenLogprobs
from ..stats import GenerateStats, peak_bytes
from ..text import Said
from .scheduler import Row


class Answer:
    """One answer of a request. Iterating gives its ids as they come; several may do so, each from its start.

    Attributes:
        tokens: ids so far, without the one that ended it.
        logprobs: the model's log-probability of each, and of the one that ended it.
        alternatives: with options.logprobs: of each of `logprobs`.
        finish_reason: "eos", "stop", "length", "cancelled" or "deadline"; "error"; None: it has not ended.
    """

    def __init__(self, request: "Request", row: Row, number: int):
        """request: what it answers, as its answer of this number; row: as the scheduler sees it."""
        self.tokens: list[int] = []
        self.chosen: list[int] = []  # with the id that ended it
        self.logprobs: list[float] = []
        self.alternatives: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.request = request
        self.row = row
        self._number = number
        self.state: Any = None  # of the device, while it made way
        self.pages: Any = None  # what they hold, while they are in host memory
        self.passes = 0
        self.accepted = 0
        self._said = request.said() if request.stop_strings else None

    @property
    def key_1(self) -> jax.Array:
        """What it draws with."""
        call = self.request.call
        number_1 = np.array([self._number], np.int32) if call.answers > 1 else None
        return answer_keys(call.key, np.array([self.request.number], np.int32), number_1)

    def push(self, ids: list[int], logprobs: list[float], finished: bool) -> bool:
        """Takes what the device chose, of which the last ended it or not; whether the answer has ended.
        Called by the engine.

        Raises:
            InputError: what an answer must not give, as `generate` says it.
        """
        options = self.request.call.options
        ending = finished and ids[-1]
        self.chosen += ids
        self.logprobs += logprobs
        for token in ids[:-1] if finished else ids:
            self.tokens.append(token)
            if self._said is not None:
                self._said.push(token)
                if self._said.ended:
                    for known in (self.chosen, self.logprobs, self.alternatives):
                        del known[len(self.tokens) :]
                    return self._end("stop")
        if finished:
            return self._end("stop" if ending in options.stop_token_ids else "eos")
        if len(self.chosen) >= options.max_new_tokens:
            return self._end("length")
        return not np.isfinite(logprobs).all() and self._end("error")

    def _end(self, reason: str) -> bool:
        chosen = np.array([self.chosen]), np.array([self.logprobs]), np.array([len(self.chosen)])
        check_chosen(self.request.call, Chosen(*chosen, np.array([True])))
        self.finish_reason = reason
        return True

    def since(self, given: int) -> tuple[list[int], bool]:
        """Ids behind so many, and whether these are the last."""
        ended = self.finish_reason is not None  # looked at first: what is true of it is true of the ids
        return self.tokens[given:], ended

    def __iter__(self) -> Iterator[int]:
        given = 0
        ended = False
        while not ended:
            self.request.engine.wait(lambda given=given: any(self.since(given)))
            new, ended = self.since(given)
            yield from new
            given += len(new)
        self.request.raise_error()

    def text(self) -> Iterator[str]:
        """Pieces of text as they come; joined they are the answer, up to the first stop string."""
        said = self.request.said()
        for token in self:
            if piece := said.push(token):
                yield piece
        if rest := said.finish():
            yield rest

    async def text_async(self) -> AsyncIterator[str]:
        """`text` for an event loop, which goes on with other things until a piece comes."""
        said = self.request.said()
        given = 0
        async for _ in news([self.request]):
            new, ended = self.since(given)
            given += len(new)
            if piece := "".join(map(said.push, new)):
                yield piece
            if ended:
                break
        self.request.raise_error()
        if rest := said.finish():
            yield rest


class Request:
    """What `Engine.submit` gives.

    Attributes:
        ids: the prompt.
        answers: as many as were asked for (`n`, or `best_of`).
        prompt_logprobs: where asked for: what the model says of each token of the prompt, or of those from
            one on; not of the first of all.
        error: what broke it off; None: nothing so far.
        number: that `generate` would fold into its key.
        skip_special_tokens: they have no text, so no stop string is found in it.
    """

    def __init__(
        self, engine: Any, call: Call, tokenizer: Tokenizer | None, stops: Sequence[str], number: int,
        skip_special_tokens: bool,
    ):  # fmt: skip
        """engine: that will answer; call: from `checked`, of one prompt."""
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
        self.deadline = float("inf")
        self.cancelled = False
        self.live = False  # others may come while it is answered, and somebody read along
        self.asks: Any = None  # alternatives of each token of the prompt
        self.submitted = time.monotonic()
        self.times: dict[str, float] = {}  # when: its first piece was read, it had a token, it ended
        self.wakers: list[Callable[[], None]] = []  # of event loops that wait for it

    def __iter__(self) -> Iterator[int]:
        return iter(self._only)

    def text(self) -> Iterator[str]:
        """`Answer.text` of a request for one answer."""
        return self._only.text()

    def text_async(self) -> AsyncIterator[str]:
        """`Answer.text_async` of a request for one answer."""
        return self._only.text_async()

    def result(self, timeout: float | None = None) -> GenerateOutput:
        """Waits for the end; the answers as `generate` gives them.

        Raises:
            InputError: its numbers were broken, or its settings left no token; the engine was closed.
            TimeoutError: it has not ended after so many seconds.
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
        )
        return out if options.best_of in (None, options.n) else out.best(options.n, options.best_of)

    def cancel(self) -> None:
        """Ends it, with the finish_reason "cancelled", at the engine's next turn."""
        self.cancelled = True
        self.engine.cancel(self)

    @property
    def answered(self) -> bool:
        """Whether every answer has ended."""
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def ended(self) -> bool:
        """Whether it has ended: its answers, its error and its times stay as they are."""
        return "ended" in self.times

    def said(self) -> Said:
        """What makes text of an answer's ids."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer.json: take the ids by `for id in request`")
        return Said(self.tokenizer, self.stop_strings, skip_special_tokens=self.skip_special_tokens)

    def raise_error(self) -> None:
        """What broke it off."""
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None) -> None:
        """It has ended, or is broken off. Called by the engine, which then tells of it."""
        self.error = error
        for answer in self.answers:
            answer.finish_reason = answer.finish_reason or "error"
        self.times.setdefault("ended", time.monotonic())  # last: who waits for it reads the others

    def tell(self) -> None:
        """Wakes who waits in an event loop."""
        for wake in list(self.wakers):
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                wake()

    @property
    def _only(self) -> Answer:
        if len(self.answers) != 1:
            raise InputError(f"this request has {len(self.answers)} answers: take each by request.answers[j]")
        return self.answers[0]

    def _stats(self) -> GenerateStats:
        answers = self.answers
        times = self.times
        engine = self.engine
        read, first, end = (times.get(name, self.submitted) for name in ("read", "first", "ended"))
        stats = GenerateStats(len(answers), len(self.ids), engine.weight_bytes, engine.cache_bytes)
        stats.reused_tokens = answers[0].row.hits
        stats.generated_tokens = sum(len(answer.logprobs) for answer in answers)
        stats.decode_steps = max(len(answer.logprobs) for answer in answers) - 1
        stats.ttft_seconds = first - self.submitted
        stats.prefill_seconds = first - read
        stats.decode_seconds = end - first
        stats.total_seconds = end - self.submitted
        stats.peak_bytes = peak_bytes()
        if engine.guesses:
            stats.passes = [answer.passes for answer in answers]
            guessed = [max(1, answer.passes) * engine.guesses for answer in answers]
            stats.acceptance = [a.accepted / n for a, n in zip(answers, guessed, strict=True)]
        return stats


async def news(requests: Sequence[Request], quiet: float | None = None) -> AsyncIterator[bool]:
    """True at the start, and whenever there may be something new of requests to one engine; False after so
    many seconds without.
    """
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    if not requests[0].engine.started:
        raise InputError("an event loop needs an engine with a thread: with xj.Engine(model) as engine: …")

    def wake() -> None:
        loop.call_soon_threadsafe(event.set)

    for request in requests:
        request.wakers.append(wake)
    try:
        yield True
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), quiet)
            yield event.is_set()
            event.clear()
    finally:
        for request in requests:
            request.wakers.remove(wake)
