"""`EngineEndpoint`: an engine that only prefills, or only decodes, as a `Dispatcher` uses it.

dispatcher ─ submit, send, receive, release, forget, drop ─► endpoint ─ events ─► dispatcher

Each answer at an endpoint has a ticket, a number that is used once. An event about a ticket that the
dispatcher does not know any more is ignored.
"""

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from ..errors import InputError
from ..sampling.logprobs import TokenLogprobs
from .requests import Answer

PREFILLED = "prefilled"  # the finish_reason of an answer that another engine continues
ELSEWHERE = object()  # in place of a preempted row's pages: those of a row that another engine prefilled


class Progress(NamedTuple):
    """What is new of an answer."""

    start: int = 0  # tokens that were reported before; the next three are of those after them
    sampled: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    alternatives: Sequence[TokenLogprobs] = ()
    tokens: int = 0  # number of its tokens, without an EOS or stop id
    reason: str | None = None  # its finish_reason; None: it goes on
    hits: int = 0
    passes: int = 0
    accepted: int = 0
    prompt_start: int = 0  # log-probabilities of the prompt that were reported before
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # those after these
    prefill_seconds: float | None = None  # from the begin of prefill to the first token
    error: BaseException | None = None  # why its request failed


@dataclasses.dataclass
class _Work:
    """An answer at an endpoint, and what the dispatcher has of it: its tokens, log-probabilities of its
    prompt, and its end.
    """

    answer: Answer
    tokens: int
    of_prompt: int = 0
    ended: bool = False
    resets: int = 0  # of the prefix cache, when the prompt was prefilled


class EngineEndpoint:
    """An engine of this process. Its methods return at once.

    Args:
        engine: an `Engine` with a role.
        core: its `RoleCore`.
        emit: takes the name of an event (a method of `Dispatcher`), a ticket and more, on any thread.
    """

    def __init__(self, engine: Any, core: Any, emit: Callable[..., None]):
        self.role = engine.role
        self.pages = engine.pages
        self._engine = engine
        self._core = core
        self._emit = emit
        self._answers: dict[int, _Work] = {}

    @property
    def error(self) -> BaseException | None:
        return self._engine.error

    def example_row(self) -> Any:
        """Arrays as `receive` takes them, of a row with one group of pages, before the engine has rows."""
        return self._core.example_row()

    def submit(self, ticket: int, answer: Answer) -> None:
        """Prefills the prompt of another engine's answer, or continues that after its first token."""
        if not self._engine.started:
            self._engine.__enter__()
        own = _copy(answer, self._engine, self.role == "decode")
        if self.role == "decode":
            own.emit = lambda name, *args: self._emit(name, ticket, *args)
            own.swapped_pages = ELSEWHERE
        self._answers[ticket] = _Work(own, len(own.logprobs))
        own.request.listeners.append(partial(self._report, ticket))
        with suppress(InputError):  # it has failed: the dispatcher sees its error
            self._engine.enqueue([own.request])

    def send(self, ticket: int, target: int, shardings: Any = None) -> None:
        """Sends a prefilled row to the endpoint where it has the ticket `target`. shardings: of `pull`; None:
        those of this engine.
        """
        deliver = partial(self._emit, "pages", target)
        self._call_soon(ticket, lambda answer: self._core.send(answer.row, shardings, deliver))

    def receive(self, ticket: int, contents: Any) -> None:
        """The state and pages of a row have arrived here."""
        self._call_soon(ticket, lambda answer: self._core.arrive(answer, contents))

    def fail(self, ticket: int, error: BaseException) -> None:
        """The state and pages of a row were lost: its request fails."""
        self._call_soon(ticket, lambda answer: self._core.lose(answer, error))

    def release(self, ticket: int) -> None:
        """A prefilled row has arrived elsewhere: its slot and pages are free."""
        self._call_soon(ticket, lambda answer: self._core.release(answer.row))

    def forget(self, ticket: int) -> None:
        """The numbers of a row were not finite: no other prompt finds its pages."""
        self._call_soon(ticket, lambda answer: self._core.scheduler.prefixes.uncache(answer.row))

    def cache_pages(self, ticket: int, ids: Sequence[int], first: int, contents: list[Any]) -> None:
        """Keeps pages that another engine decoded in the prefix cache: of `ids`, the prompt and more in full
        pages, those from `first` on, as `Device.copy_pages` gives them.
        """
        resets = self._answers[ticket].resets if ticket in self._answers else 0

        def cache(answer: Answer) -> None:
            row = answer.row
            if row.cacheable and self._core.scheduler.resets == resets:  # else they are of old weights
                self._core.cache_pages(row.salt, ids, first, contents)

        self._call_soon(ticket, cache)

    def drop(self, ticket: int) -> None:
        """Ends the work for a ticket, and frees what it has here."""
        if work := self._answers.get(ticket):
            self._engine.cancel(work.answer.request)  # first: the row may be prefilled meanwhile
            if self.role == "prefill":
                self.release(ticket)
            del self._answers[ticket]

    def _call_soon(self, ticket: int, call: Callable[[Answer], None]) -> None:
        """Calls a function with an answer that is here, on the engine's thread."""
        if work := self._answers.get(ticket):
            self._engine.call_soon(lambda: call(work.answer))

    def _report(self, ticket: int) -> None:
        """On the engine's thread: sends what is new of an answer."""
        work = self._answers.get(ticket)
        if work is None or work.ended or self.error is not None:
            return
        answer = work.answer
        request = answer.request
        start = work.tokens
        prompt_start = work.of_prompt
        work.tokens = len(answer.logprobs)
        work.of_prompt = len(request.prompt_logprobs)
        work.ended = answer.finish_reason is not None
        if (start, prompt_start) == (work.tokens, work.of_prompt) and not work.ended:
            return
        if answer.finish_reason == PREFILLED:
            work.resets = self._core.scheduler.resets
        times = request.times
        seconds = times["first"] - times["prefill"] if {"first", "prefill"} <= {*times} else None
        new = Progress(
            start, answer.sampled[start:], answer.logprobs[start:], answer.alternatives[start:],
            len(answer.tokens), answer.finish_reason, answer.row.hits, answer.passes, answer.accepted,
            prompt_start, request.prompt_logprobs[prompt_start:], seconds, request.error,
        )  # fmt: skip
        self._emit("progress", ticket, new)


def _copy(answer: Answer, engine: Any, is_prefilled: bool) -> Answer:
    """An answer for an engine, in a request of its own; is_prefilled: with its first token."""
    request = copy.copy(answer.request)
    request.engine = engine
    request.listeners = []
    request.times = {}
    request.prompt_logprobs = []
    row = dataclasses.replace(answer.row, pages=[], host_pages=[], num_computed=0)
    own = Answer(request, row, answer.number)
    request.answers = [own]
    if is_prefilled:
        row.num_computed = len(row.ids)
        row.logprobs_from = None
        own.append(list(answer.sampled), list(answer.logprobs), False)
        own.alternatives += answer.alternatives
        request.times["first"] = time.monotonic()
    return own
