"""`EngineLoop`: takes requests from any thread, and lets a core answer them step by step on a thread of its
own, or on the caller's.

submit ─► queue ─ step: calls; new, cancelled and late requests; the core's step ─► answers
"""

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Self

from ..errors import InputError
from .request_queue import RequestQueue
from .requests import Request
from .statistics import EngineCounters, EngineStats, collect_stats
from .submission import EngineBase

_WAIT_SECONDS = 0.1  # for events, in a step of a core that only waits


class EngineLoop(EngineBase):
    """An engine with a queue of requests.

    Attributes:
        error: why it failed, or that it was closed; None while it can answer.
        name: in messages.
        counters: of its requests.
    """

    _core: Any  # `EngineCore` or `Dispatcher`

    def __init__(self) -> None:
        self._queue = RequestQueue()
        self._thread: threading.Thread | None = None
        self._step_lock = threading.Lock()
        self.error = None
        self.name = "the engine"
        self.counters = EngineCounters()
        self._last_step_time = time.monotonic()

    @property
    def stats(self) -> EngineStats:
        """What the engine does now and did so far."""
        return collect_stats(self.engines, [self.counters])

    @property
    def load(self) -> int:
        """Answers of unfinished requests."""
        with self._queue.condition:
            return sum(len(request.answers) for request in self._queue.unfinished)

    @property
    def started(self) -> bool:
        """Whether it has a thread of its own."""
        return self._thread is not None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="xinfer_jax engine", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread; unfinished requests get an error."""
        works = self.error is None
        self._fail(InputError("the engine was closed before the request ended"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._step_lock.acquire(blocking=False):  # else one of its steps closes it
            self._core.close(works)
            self._step_lock.release()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Calls a function before the next step, on the thread that takes the steps."""
        with self._queue.condition:
            self._queue.calls.append(function)
            self._queue.condition.notify_all()

    def wake(self) -> None:
        """Wakes all threads that wait for this engine."""
        with self._queue.condition:
            self._queue.condition.notify_all()

    def cancel(self, request: Request) -> None:
        """Ends a request at the next step."""
        with self._queue.condition:
            if request in self._queue.unfinished:
                self._queue.cancelled.append(request)
                self._queue.condition.notify_all()

    def wait(self, until: Callable[[], bool], timeout: float | None = None) -> None:
        """Waits until a condition holds or the engine has failed; without a thread it takes steps meanwhile.

        Raises:
            TimeoutError: it does not hold after `timeout` seconds.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout

        def is_over() -> bool:
            return until() or self.error is not None

        if self.started:
            with self._queue.condition:
                self._queue.condition.wait_for(is_over, timeout)
        while not is_over():
            if time.monotonic() > end:
                raise TimeoutError(f"no end after {timeout} seconds")
            self.step()

    def step(self) -> bool:
        """Takes one step on the caller's thread: ends requests, prefills a chunk, decodes. Returns whether
        there was anything to do. Ctrl-C is raised after the step, which is complete then.
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
        """The engine's thread."""

        def has_work() -> bool:
            return self._queue.has_work or self.error is not None

        try:
            while self.error is None:
                if not self.step():
                    with self._queue.condition:
                        self._queue.condition.wait_for(has_work, 1.0)
        except BaseException as error:  # all requests have it, and later `submit`s raise it
            print(f"{self.name} has failed: {type(error).__name__}: {error}", file=sys.stderr)

    def _fail(self, error: BaseException) -> None:
        with self._queue.condition:
            self.error = self.error or error
            self._queue.clear()
            self._notify(list(self._queue.unfinished))

    def _step(self) -> bool:
        with self._queue.condition:
            work = self._queue.take()
        for call in work.calls:
            call()
        if work.calls:
            self.wake()
        self._core.add(work.submitted)
        self._core.abort(work.cancelled, "cancelled")
        self._core.abort(work.late, "deadline")
        return self._core.step(lambda: bool(self._queue.submitted))

    def _notify(self, requests: Collection[Request]) -> None:
        """Marks answered and failed requests as ended, and wakes all that wait for these."""
        with self._queue.condition:
            unfinished = self._queue.unfinished
            for request in requests:
                if request not in unfinished:
                    continue
                error = request.error or self.error
                if error or request.answered:
                    del unfinished[request]
                    request.end(error)
                    self.counters.add(request)
            self._queue.condition.notify_all()
        for request in requests:
            request.notify()

    def enqueue(self, requests: list[Request]) -> None:
        with self._queue.condition:
            self._check_open()
            self._queue.add(answer for request in requests for answer in request.answers)
            self._queue.condition.notify_all()

    def _wait_for_work(self) -> None:
        """Waits a moment for calls and requests."""
        with self._queue.condition:
            self._queue.condition.wait_for(lambda: self._queue.has_work, _WAIT_SECONDS)


@contextmanager
def _defer_interrupts() -> Iterator[None]:
    """In the main thread, calls the handler of Ctrl-C only at the end of the `with` block."""
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
