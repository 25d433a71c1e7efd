"""`Dispatcher`: prompts are prefilled by some endpoints, and answers are decoded by others (DistServe, Zhong
et al., OSDI 2024; vLLM: disaggregated prefilling).

answer ─► the endpoint that has its prompt prefilled first ─ first token ─► the decoding endpoint with most
free pages ─ gives the row a slot, and pulls its pages ─► the prefilling endpoint frees them

A prompt's pages are not moved while its later chunks are computed: on the decoding side they would hold pages
that no row uses yet, and the copy is short beside the prefill. An answer that ends with its first token is
never moved.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ..errors import InputError
from .answers import Answer, Progress
from .endpoint import PREFILLED
from .pages import PAGE_SIZE
from .requests import Request
from .routing import PromptRouter
from .row import Row


@dataclasses.dataclass(eq=False)
class Job:
    """The work of an endpoint for an answer."""

    ticket: int
    endpoint: Any  # with the methods and attributes of `EngineEndpoint`: of this process, or of another
    answer: Answer
    source: "Job | None"  # of a decoding one: the job that prefilled the prompt
    arrived: bool = False  # the pages have left the source


class Dispatcher:
    """Gives answers to endpoints, in place of an `EngineCore` that would compute them. If an endpoint fails,
    its prompts go to another endpoint, and the requests whose pages were there fail. The thread of one engine
    calls the methods, also for events of endpoints: `progress` to `return_pages`.
    """

    def __init__(
        self,
        notify: Callable[[Collection[Request]], None],
        wait: Callable[[], None],
        prefix_cache: bool = True,
    ):
        """Makes a dispatcher. notify: a function that is called with requests that have new tokens, or have
        ended. wait: a function that waits a moment for events or requests. prefix_cache: True: endpoints have
        one.
        """
        self.endpoints: list[Any] = []  # that have not failed
        self._notify = notify
        self._wait = wait
        self._router = PromptRouter(prefix_cache)
        self._tickets = itertools.count(1)
        self._jobs: dict[int, Job] = {}  # by ticket
        self._current: dict[Answer, Job] = {}  # of answers that have not ended
        self._updated: dict[Request, None] = {}
        self._errors: dict[str, BaseException] = {}  # by role, of the last endpoint that failed

    def add(self, answers: Iterable[Answer]) -> None:
        """Gives prompts to endpoints that prefill."""
        queued = self._queued_tokens()
        for answer in answers:
            if answer.ended_by is None:  # else another answer of its request failed at once
                self._prefill(answer, queued)

    def abort(self, requests: Sequence[Request], reason: str) -> None:
        """Ends requests in any state. reason: their `ended_by`."""
        for request in requests:
            self._end(request, reason)

    def step(self, has_new_requests: Callable[[], bool]) -> bool:
        """Reports events, and waits a moment. Returns True if any request is unfinished."""
        for endpoint in list(self.endpoints):
            if endpoint.error is not None:
                self.lose(endpoint)
        updated = list(self._updated)
        self._updated.clear()
        self._notify(updated)
        if self._current and not has_new_requests():
            self._wait()
        return bool(self._current or updated)

    def close(self, works: bool) -> None:
        """Does nothing: who made the endpoints closes them."""

    def forget_prompts(self) -> None:
        """Notes that the endpoints have new weights, and no pages of earlier prompts."""
        self._router.given.clear()

    def of_role(self, role: str) -> list[Any]:
        return [endpoint for endpoint in self.endpoints if endpoint.role == role and endpoint.error is None]

    def lose(self, endpoint: Any) -> None:
        """Handles the failure of an endpoint: its prompts go to another, and so do rows whose pages have not
        left the endpoint that prefilled them. Other requests fail.
        """
        self.endpoints.remove(endpoint)
        self._router.remove(endpoint)
        self._errors[endpoint.role] = endpoint.error
        for job in [job for job in self._jobs.values() if job.endpoint is endpoint]:
            current = self._current.get(job.answer)
            if current is None or (current is not job and current.arrived):
                continue
            if job.source and not job.arrived:
                del self._jobs[job.ticket]
                self._decode(job.source)
            elif job.source:
                self._fail(job.answer.request, endpoint.error)
            else:
                self._drop(current)
                self._prefill(job.answer, self._queued_tokens())

    # --- events of endpoints ------------------------------------------------------------------------------

    def progress(self, ticket: int, new: Progress) -> None:
        """Handles new tokens. After a prompt was given to another endpoint, its first token comes again."""
        job = self._jobs.get(ticket)
        if job is None or self._current.get(job.answer) is not job:
            return
        answer = job.answer
        request = answer.request
        self._updated[request] = None
        if new.error is not None:
            self._fail(request, new.error)
            return
        answer.apply(new)
        if new.reason == PREFILLED:
            self._decode(job)
        elif new.reason is not None:
            answer.end(new.reason)
            self._drop(self._current.pop(answer))

    def pull(self, ticket: int, shardings: Any) -> None:
        """Handles the event that a row has room at the endpoint that decodes it."""
        if source := self._source(ticket):
            source.endpoint.send(source.ticket, ticket, shardings)

    def pages(self, ticket: int, contents: Any) -> None:
        """Handles the event that the state and pages of a row are on their way to the endpoint that decodes
        it.
        """
        if job := self._jobs.get(ticket):
            job.endpoint.receive(ticket, contents)

    def arrived(self, ticket: int) -> None:
        """Handles the event that the state and pages of a row have arrived at the endpoint that decodes
        it.
        """
        if source := self._source(ticket):
            self._jobs[ticket].arrived = True
            source.endpoint.release(source.ticket)

    def invalid(self, ticket: int) -> None:
        """Handles the event that the numbers of a row are not finite."""
        if source := self._source(ticket):
            source.endpoint.forget(source.ticket)

    def return_pages(self, ticket: int, ids: Sequence[int], first: int, contents: list[Any]) -> None:
        """Returns pages of an answer to the prefix cache of the endpoint that prefilled its prompt."""
        if source := self._source(ticket):
            source.endpoint.cache_pages(source.ticket, ids, first, contents)

    def _source(self, ticket: int) -> Job | None:
        job = self._jobs.get(ticket)
        return job.source if job else None

    # --- answers ------------------------------------------------------------------------------------------

    def _rows_at(self, endpoint: Any) -> list[Row]:
        return [answer.row for answer, job in self._current.items() if job.endpoint is endpoint]

    def _queued_tokens(self) -> dict[Any, int]:
        """Returns the tokens of prompts that each endpoint has not prefilled."""
        return {
            endpoint: sum(len(row.ids) - row.num_computed for row in self._rows_at(endpoint))
            for endpoint in self.of_role("prefill")
        }

    def _prefill(self, answer: Answer, queued: dict[Any, int]) -> None:
        """Gives an answer to the endpoint that will have prefilled the prompt first."""
        row = answer.row
        row.record_elsewhere(0, 0)
        if not queued:
            self._fail_without(answer.request, "prefill")
            return

        def tokens_until_prefilled(endpoint: Any, hits: int) -> int:
            return queued[endpoint] + len(row.ids) - hits * PAGE_SIZE

        endpoint = self._router.route(row, tokens_until_prefilled, queued)
        queued[endpoint] += len(row.ids)
        self._start(endpoint, answer, None)

    def _decode(self, source: Job) -> None:
        """Gives a prefilled row to the endpoint with the most free pages."""

        def free_pages(endpoint: Any) -> int:
            return endpoint.pages - sum(row.pages_to_continue for row in self._rows_at(endpoint))

        if endpoints := self.of_role("decode"):
            self._start(max(endpoints, key=free_pages), source.answer, source)
        else:
            self._fail_without(source.answer.request, "decode")

    def _start(self, endpoint: Any, answer: Answer, source: Job | None) -> None:
        job = Job(next(self._tickets), endpoint, answer, source)
        self._jobs[job.ticket] = job
        self._current[answer] = job
        endpoint.submit(job.ticket, answer)

    def _fail_without(self, request: Request, role: str) -> None:
        self._fail(request, self._errors.get(role) or InputError(f"no {role} process is connected"))

    def _fail(self, request: Request, error: BaseException | None) -> None:
        request.fail(error)
        self._end(request, "error")

    def _end(self, request: Request, reason: str) -> None:
        """Ends the answers of a request that have not ended."""
        self._updated[request] = None
        for answer in request.answers:
            answer.end(reason)
            self._drop(self._current.pop(answer, None))

    def _drop(self, job: Job | None) -> None:
        """Ends the work of endpoints for an answer."""
        while job:
            self._jobs.pop(job.ticket, None)
            job.endpoint.drop(job.ticket)
            job = job.source
