"""`EngineLoop`: takes requests from any thread, and lets a core answer them step by step on a thread of its
own, or on the caller's.

submit ─► `_submitted` ─ step: calls; new, cancelled and late requests; the core's step ─► answers
"""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Self

from ..errors import InputError, format_value
from ..ops.operation import without_mesh_context
from .answers import Answer
from .pausing import RUNNING
from .requests import Request
from .row import HeldAdapter
from .statistics import EngineCounters, EngineStats, collect_stats
from .submission import Engine

_LOGGER = logging.getLogger(__name__)

_WAIT_SECONDS = 0.1  # for events, in a step of a core that only waits


class EngineLoop(Engine):
    """An engine with a queue of requests.

    Attributes:
        error: the reason why it failed, or that it was closed. None while it can answer.
        name: the name in messages.
        counters: counts of its requests.
    """

    core: Any  # `EngineCore` or `Dispatcher`
    role: str | None = None

    def create_parts(self) -> None:
        super().create_parts()
        self._condition = threading.Condition()  # is notified of all changes, and of new tokens
        self._unfinished: dict[Request, None] = {}  # in the order in which they came
        self._next_deadline = math.inf  # of these, or earlier
        # Until the next step:
        self._submitted: list[Answer] = []
        self._cancelled: list[Request] = []
        self._calls: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._step_lock = threading.Lock()
        self._stopping = 0  # callers of `without_steps` that wait for the end of a step
        self.counters = EngineCounters()
        self._last_step_time = time.monotonic()

    @property
    def stats(self) -> EngineStats:
        return collect_stats(self.engines, [self.counters])

    @property
    def load(self) -> int:
        """Answers of unfinished requests."""
        with self._condition:
            return sum(len(request.answers) for request in self._unfinished)

    @property
    def started(self) -> bool:
        return self._thread is not None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="xinfer_jax engine", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        works = self.error is None
        self._fail(InputError("the engine was closed before the request ended"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._step_lock.acquire(blocking=False):  # else one of its steps closes it
            self.core.close(works)
            self._step_lock.release()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Calls a function before the next step, on the thread that takes the steps."""
        with self._condition:
            self._calls.append(function)
            self._condition.notify_all()

    @contextmanager
    def without_steps(self) -> Iterator[None]:
        """Within the `with` block, of any thread but the engine's, no step runs."""
        with self._condition:
            self._stopping += 1
            self._condition.notify_all()
        self._step_lock.acquire()
        with self._condition:
            self._stopping -= 1
        try:
            with _defer_interrupts():
                yield
        finally:
            self._step_lock.release()
            self.wake()

    @property
    def adapters_in_use(self) -> set[HeldAdapter]:
        """The adapters of unfinished requests."""
        with self._condition:
            return {request.adapter for request in self._unfinished if request.adapter}

    def abort_unfinished(self, reason: str, adapter: HeldAdapter | None = None) -> None:
        """Ends all requests, or the requests with an adapter, between two steps. reason: their `ended_by`."""
        with self._condition:
            submitted, self._submitted = self._submitted, []
            requests = [r for r in self._unfinished if adapter is None or r.adapter is adapter]
        self.core.add(submitted)
        self.core.abort(requests, reason)

    def wake(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def cancel(self, request: Request) -> None:
        """Ends a request at the next step."""
        with self._condition:
            if request in self._unfinished:
                self._cancelled.append(request)
                self._condition.notify_all()

    def wait(self, until: Callable[[], bool], timeout: float | None = None) -> None:
        """Waits until a condition holds or the engine has failed. Without a thread it takes steps meanwhile.

        Raises:
            TimeoutError: the condition does not hold after `timeout` seconds.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout

        def is_over() -> bool:
            return until() or self.error is not None

        if self.started:
            with self._condition:
                self._condition.wait_for(is_over, timeout)
        while not is_over():
            if time.monotonic() > end:
                raise TimeoutError(f"no end after {timeout} seconds")
            self.step()
            if self.pausing.phase != RUNNING:
                self._wait_for_work()

    @without_mesh_context
    def step(self) -> bool:
        """Takes one step on the caller's thread: ends requests and, unless the engine is paused, prefills a
        chunk and decodes. Returns True if there was anything to do. Ctrl-C is raised after the step, which is
        complete then.
        """
        with self._step_lock, _defer_interrupts():
            try:
                return self.error is None and self._step()
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self._last_step_time = time.monotonic()

    def _run(self) -> None:
        try:
            while self.error is None:
                busy = self.step()
                with self._condition:
                    self._condition.wait_for(lambda: not self._stopping)
                    if not busy:
                        self._condition.wait_for(self._has_work, 1.0)
        except BaseException as error:  # all requests have it, and later `submit`s raise it
            _LOGGER.error("%s has failed: %s: %s", self.name, type(error).__name__, error)

    def _fail(self, error: BaseException) -> None:
        with self._condition:
            self.error = self.error or error
            self._submitted = []
            self._notify(list(self._unfinished))

    def _step(self) -> bool:
        with self._condition:  # all at once: a request that ends in a step was submitted before that
            late: list[Request] = []
            if (now := time.monotonic()) > self._next_deadline:
                late = [request for request in self._unfinished if request.deadline < now]
                others = (request.deadline for request in self._unfinished if request.deadline >= now)
                self._next_deadline = min(others, default=math.inf)
            calls, self._calls = self._calls, []
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, []
        for call in calls:
            call()
        if calls:
            self.wake()
        self.core.add(submitted)
        self.core.abort(cancelled, "cancelled")
        self.core.abort(late, "deadline")
        if self.pausing.phase != RUNNING:
            return False
        return self.core.step(lambda: bool(self._submitted))

    def _notify(self, requests: Collection[Request]) -> None:
        """Marks answered and failed requests as ended, and wakes all that wait for these."""
        with self._condition:
            for request in requests:
                error = request.error or self.error
                if request in self._unfinished and (error or request.answered):
                    del self._unfinished[request]
                    request.end(error)
                    self.counters.add(request)
            self._condition.notify_all()
        for request in requests:
            request.notify()

    def enqueue(self, requests: list[Request]) -> None:
        with self._condition:
            self.check_open()
            removed = [r.adapter.name for r in requests if r.adapter and r.adapter.removed]
            if removed and self.role is None:
                raise InputError(f"the adapter {format_value(removed[0])} was removed: add it again")
            self._unfinished |= dict.fromkeys(requests)
            self._next_deadline = min([self._next_deadline, *(request.deadline for request in requests)])
            self._submitted += [answer for request in requests for answer in request.answers]
            self._condition.notify_all()

    def _wait_for_work(self) -> None:
        """Waits a moment for calls and requests, or for a caller of `without_steps`."""
        with self._condition:
            self._condition.wait_for(lambda: self._stopping or self._has_work(), _WAIT_SECONDS)

    def _has_work(self) -> bool:
        """Returns True if a step has something to do. Deadlines do not count."""
        return bool(self._submitted or self._cancelled or self._calls or self.error)


@contextmanager
def _defer_interrupts() -> Iterator[None]:
    """Defers Ctrl-C: in the main thread, its handler is called only at the end of the `with` block."""
    handler = signal.getsignal(signal.SIGINT)
    deferred = list[Any]()
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    signal.signal(signal.SIGINT, lambda *args: deferred.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for args in deferred[:1]:
            handler(*args)
