"""Work that would hold up the event loop runs in threads: one job of a client at a time, and few large ones.

What tokenizers and numpy do releases the interpreter's lock; json, templates and formatting hold it for a
few milliseconds at a time, as bodies are bounded and responses are formatted in slices.
"""

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

_LARGE_BYTES = 2**14  # of a body
LARGE_TOKENS = 2**10  # of a response
_LARGE_AT_ONCE = 2  # of all clients


def is_large(data: list[bytes]) -> bool:
    """Whether work on this body may take long."""
    return len(data[0]) > _LARGE_BYTES


class Offload:
    """The jobs of one server, on one event loop. Small jobs of a client do not wait for its large ones."""

    def __init__(self) -> None:
        self._own: WeakValueDictionary[tuple[str, bool], asyncio.Semaphore] = WeakValueDictionary()
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)
        self._alone = asyncio.Semaphore(1)

    async def run(self, client: str, large: bool, work: Callable[[], Any], alone: bool = False) -> Any:
        """What the work returns. Cancelled before its turn it never runs; a job that runs keeps its place
        until it has ended, whoever waits for it. alone: it keeps all cores busy: one of these at a time.
        """
        own = self._own.get((client, large)) or asyncio.Semaphore(1)
        self._own[client, large] = own
        held = list[asyncio.Semaphore]()
        try:
            # Behind its own, first come, first served: a client waits there once.
            for semaphore in (own, *[self._alone] * alone, *[self._large] * large):
                await semaphore.acquire()
                held.append(semaphore)
            running = asyncio.get_running_loop().run_in_executor(None, work)
        except BaseException:
            for semaphore in held:
                semaphore.release()
            raise

        def ended(_: Any) -> None:
            for semaphore in held:
                semaphore.release()
            if not running.cancelled():
                running.exception()  # looked at, also where nobody waits any more

        running.add_done_callback(ended)
        return await asyncio.shield(running)
