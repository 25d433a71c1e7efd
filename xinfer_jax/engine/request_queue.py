"""`RequestQueue`: what callers' threads ask of an engine before its next step."""

import heapq
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .requests import Answer, Request


class QueuedWork(NamedTuple):
    """What a step handles before it prefills and decodes."""

    calls: list[Callable[[], None]]
    submitted: list[Answer]
    cancelled: list[Request]
    late: list[Request]  # their deadline has passed


class RequestQueue:
    """Unfinished requests, and what to do at the next step. Whoever uses it holds `condition`.

    Attributes:
        condition: is notified of all changes, and of new tokens.
        unfinished: requests in the order in which they came.
        submitted: answers that the scheduler does not have yet.
        calls: functions that the engine's thread calls before its next step.
        cancelled: since the last step.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.unfinished: dict[Request, None] = {}
        self.submitted: list[Answer] = []
        self.calls: list[Callable[[], None]] = []
        self.cancelled: list[Request] = []
        # A heap of (deadline, number, request). Requests that have ended may be freed before their deadline.
        self._deadlines: list[tuple[float, int, weakref.ref[Request]]] = []
        self._numbers = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether there is anything for a step but deadlines."""
        return bool(self.submitted or self.cancelled or self.calls)

    def add(self, answers: Iterable[Answer]) -> None:
        """Queues answers."""
        for answer in answers:
            request = answer.request
            self.submitted.append(answer)
            if request in self.unfinished:
                continue
            self.unfinished[request] = None
            if math.isfinite(request.deadline):
                entry = request.deadline, next(self._numbers), weakref.ref(request)
                heapq.heappush(self._deadlines, entry)

    def take(self) -> QueuedWork:
        """All of it. It is taken at once: a request that ends in a step was submitted before that."""
        now = time.monotonic()
        late = list[Request]()
        while self._deadlines and self._deadlines[0][0] < now:
            if request := heapq.heappop(self._deadlines)[-1]():
                late.append(request)
        work = QueuedWork(self.calls, self.submitted, self.cancelled, late)
        self.calls = []
        self.submitted = []
        self.cancelled = []
        return work

    def clear(self) -> None:
        """Forgets new requests and deadlines: the engine has failed."""
        self.submitted = []
        self._deadlines = []
