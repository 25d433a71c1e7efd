"""Runs slow work in threads, so that it does not block the event loop.

Tokenizers and NumPy release Python's GIL. JSON, chat templates and response formatting hold it for a few
milliseconds at a time, because bodies are limited and responses are formatted in slices.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

_LARGE_BYTES = 2**14  # of a body
LARGE_TOKENS = 2**10  # of a response
_MAX_LARGE_JOBS = 2  # at a time, of all clients
_CREDIT = 0.01  # seconds that a client counts as behind the others, at most


def is_large(data: list[bytes]) -> bool:
    """Returns True if work on this body may take long."""
    return len(data[0]) > _LARGE_BYTES


class FairLock:
    """Lets one job run at a time. The next one is of the client that has used the least time. A client that
    has used less than the others counts as just behind them, so its first job is the next one, and nobody
    waits without end. Source: start-time fair queueing (Goyal et al., 1996).
    """

    def __init__(self) -> None:
        self._held = False
        self._now = 0.0  # the latest start of a job, in seconds used
        self._used: dict[str, float] = {}  # by client, where it is more than its credit leaves
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Holds the lock for one job of a client."""
        start = await self.acquire(client)
        acquired = time.monotonic()
        try:
            yield
        finally:
            self.release(client, start, time.monotonic() - acquired)

    async def acquire(self, client: str) -> float:
        """Waits for the client's turn, and returns when it started, in seconds used."""
        start = max(self._now - _CREDIT, self._used.get(client, -_CREDIT))
        if self._held:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (start, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it was granted meanwhile
                    self._grant_next()
                raise
        self._held = True
        self._now = max(self._now, start)
        return start

    def release(self, client: str, start: float, seconds: float) -> None:
        """Ends a turn that lasted so long."""
        self._used[client] = start + seconds
        self._used = {name: used for name, used in self._used.items() if used > self._now - _CREDIT}
        self._grant_next()

    def _grant_next(self) -> None:
        self._held = False
        while self._waiting and not self._held:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():  # else its client is gone
                turn.set_result(None)
                self._held = True


class WorkerPool:
    """Runs the jobs of one server. It runs one small and one large job of a client at a time, and few large
    jobs of all clients. So a small job does not wait for a large one.
    """

    def __init__(self) -> None:
        self._per_client: WeakValueDictionary[tuple[str, bool], asyncio.Semaphore] = WeakValueDictionary()
        self._large = asyncio.Semaphore(_MAX_LARGE_JOBS)
        self._exclusive = FairLock()

    async def run(self, client: str, large: bool, work: Callable[[], Any], exclusive: bool = False) -> Any:
        """Runs the work and returns its result. If this call is cancelled while it waits, the work never
        runs. A running job counts against the limits until it ends, even if nobody waits for it.

        exclusive: True: the job uses all cores. Only one such job runs at a time.
        """
        per_client = self._per_client.get((client, large)) or asyncio.Semaphore(1)
        self._per_client[client, large] = per_client
        async with AsyncExitStack() as stack:
            # The client's own comes first, so a client has one job at most in the queues that all share.
            await stack.enter_async_context(per_client)
            if exclusive:
                await stack.enter_async_context(self._exclusive.turn(client))
            if large:
                await stack.enter_async_context(self._large)
            running = asyncio.get_running_loop().run_in_executor(None, work)
            held = stack.pop_all()

        def release(_: Any) -> None:
            asyncio.ensure_future(held.aclose())  # it ends at once
            if not running.cancelled():
                running.exception()  # marks it as retrieved: asyncio logs exceptions that nobody retrieves

        running.add_done_callback(release)
        return await asyncio.shield(running)
