"""`Arrivals`: the bodies that are arriving at a server, and their limits."""

import asyncio
import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import AsyncIterator

from .http_responses import APIError
from .server_settings import ServerSettings

_LEAST_BODIES = 16  # of one source, whatever the limit of its answers
_LARGEST_BODIES = 8  # of the largest size, that may arrive at a time in all

Source = tuple[str, str]  # a client, and the address from which it sends


@dataclasses.dataclass(eq=False)
class Arrival:
    """One body that is arriving.

    Attributes:
        timeout: ends the wait for it.
        size: bytes that have arrived.
        dropped: it was ended in favor of others.
    """

    _arrivals: "Arrivals"
    source: Source
    timeout: asyncio.Timeout
    size: int = 0
    dropped: bool = False

    def grow(self, size: int) -> None:
        """Counts a part of the body that has arrived."""
        self._arrivals.grow(self, size)


class Arrivals:
    """The bodies that are arriving. An incomplete body counts as no answer, so a client that sends slowly
    takes no place of others. These bodies have limits of their own: the number of one source, and the bytes
    of all. If all have more bytes, the oldest body of the source that has the most ends. Not thread-safe.
    """

    def __init__(self, settings: ServerSettings):
        self.most = max(_LEAST_BODIES, settings.max_waiting_per_client // 2)
        self.most_bytes = _LARGEST_BODIES * settings.max_body_bytes
        self._arriving = defaultdict[Source, dict[Arrival, None]](dict)  # the oldest first
        self._bytes = Counter[Source]()
        self._total = 0

    @contextlib.asynccontextmanager
    async def receive(self, source: Source, seconds: float) -> AsyncIterator[Arrival]:
        """Within, a body of this source arrives. Raises APIError: 429 at a limit, 408 after some seconds."""
        if len(self._arriving[source]) >= self.most:
            said = f"{self.most} bodies of this client are arriving, which is the limit"
            raise APIError(429, f"{said}: send a request when another one has been sent completely")
        arrival = Arrival(self, source, asyncio.timeout(seconds))
        self._arriving[source][arrival] = None
        try:
            async with arrival.timeout:
                yield arrival
        except TimeoutError as error:
            if not arrival.dropped:
                said = f"the body did not arrive within {seconds} seconds"
                raise APIError(408, f"{said}: send it faster") from error
            said = f"all bodies that arrive have more than {self.most_bytes} bytes, this client's the most"
            raise APIError(429, f"{said}: send fewer at a time", closes=True) from error
        finally:
            self._remove(arrival)

    def grow(self, arrival: Arrival, size: int) -> None:
        """Counts bytes of a body. At the limit ends another one, or this one."""
        if arrival.dropped:  # its task does not know it yet
            return
        arrival.size += size
        self._bytes[arrival.source] += size
        self._total += size
        while self._total > self.most_bytes:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            oldest = next(arrival for arrival in self._arriving[largest] if arrival.size)
            oldest.dropped = True
            if not oldest.timeout.expired():
                oldest.timeout.reschedule(asyncio.get_running_loop().time())
            self._remove(oldest)

    def _remove(self, arrival: Arrival) -> None:
        """Removes a body from the counts. Further calls do nothing."""
        arriving = self._arriving[arrival.source]
        if arrival in arriving:
            del arriving[arrival]
            self._total -= arrival.size
            self._bytes[arrival.source] -= arrival.size
        if not arriving:
            del self._arriving[arrival.source]
            del self._bytes[arrival.source]
