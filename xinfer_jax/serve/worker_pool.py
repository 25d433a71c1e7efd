"""Runs slow work in threads, so that it does not block the event loop.

Tokenizers and NumPy release Python's GIL. JSON, chat templates and response formatting hold it for a few
milliseconds at a time, because bodies are limited and responses are formatted in slices.
"""

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

_LARGE_BYTES = 2**14  # of a body
LARGE_TOKENS = 2**10  # of a response
_MAX_LARGE_JOBS = 2  # at a time, of all clients


def is_large(data: list[bytes]) -> bool:
    """Whether work on this body may take long."""
    return len(data[0]) > _LARGE_BYTES


class WorkerPool:
    """Runs the jobs of one server: of a client one small and one large job at a time, of all clients few
    large ones. So a small job does not wait for a large one.
    """

    def __init__(self) -> None:
        self._per_client: WeakValueDictionary[tuple[str, bool], asyncio.Semaphore] = WeakValueDictionary()
        self._large = asyncio.Semaphore(_MAX_LARGE_JOBS)
        self._exclusive = asyncio.Semaphore(1)

    async def run(self, client: str, large: bool, work: Callable[[], Any], exclusive: bool = False) -> Any:
        """Returns what the work returns. If this call is cancelled while it waits, the work never runs; a
        running job counts against the limits until it ends, even if nobody waits for it.

        exclusive: the job uses all cores; only one such job runs at a time.
        """
        per_client = self._per_client.get((client, large)) or asyncio.Semaphore(1)
        self._per_client[client, large] = per_client
        needed = [per_client]
        if exclusive:
            needed.append(self._exclusive)
        if large:
            needed.append(self._large)
        acquired = list[asyncio.Semaphore]()
        try:
            # The client's own comes first, so a client has one job at most in the queues that all share.
            for semaphore in needed:
                await semaphore.acquire()
                acquired.append(semaphore)
            running = asyncio.get_running_loop().run_in_executor(None, work)
        except BaseException:
            for semaphore in acquired:
                semaphore.release()
            raise

        def release(_: Any) -> None:
            for semaphore in acquired:
                semaphore.release()
            if not running.cancelled():
                running.exception()  # marks it as retrieved: asyncio logs exceptions that nobody retrieves

        running.add_done_callback(release)
        return await asyncio.shield(running)
