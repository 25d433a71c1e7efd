"""Limits on the data that clients make the event loop read and parse. `LimitedParser` bounds heads, trailers,
chunks, and the work of one read. `Backlog` shares further work among addresses, in a small part of the loop's
time.

Needs h11 0.16 or newer: `_receivebuffer`, and `Connection._receive_buffer`.
"""

import asyncio
from typing import Any, Protocol

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.flow_control import FlowControl

MAX_HEADERS = 100  # lines of a head, or of trailers; gunicorn's and Apache's limit
MAX_HEAD_BYTES = 2**16
MAX_TARGET_BYTES = 2**12  # about, of the path and the query; to unquote 64 kB takes 15 ms
FREE_CHUNKS = 1024  # of a body, that may have any size
CHUNK_BYTES = 256  # that each further chunk must have on average, its header not counted
_EVENTS = 8  # of a connection, parsed at once: a request has three, and one for each chunk
_TURNS = 2  # of connections that are held, each of about 0.3 ms
_PAUSE_SECONDS = 0.002  # for everything else, before their next turns


class _Buffer(ReceiveBuffer):
    """The bytes that have arrived and are not parsed yet. h11 takes all lines of a head or of trailers at
    once, and headers and data of chunks one by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spare = 0  # bytes that the chunks of this body are ahead of the average that is needed

    def maybe_extract_lines(self) -> list[bytearray] | None:
        lines = self._data[:MAX_HEAD_BYTES].split(b"\n", MAX_HEADERS + 2)
        if not any(line in (b"", b"\r") for line in lines[:-1]):  # no end, so far
            if len(lines) > MAX_HEADERS + 2:
                raise h11.RemoteProtocolError(f"more than {MAX_HEADERS} headers: send fewer", 431)
            if len(self._data) > MAX_HEAD_BYTES:
                raise h11.RemoteProtocolError(f"more than {MAX_HEAD_BYTES} bytes of headers: send fewer", 431)
        if len(lines[0]) > MAX_TARGET_BYTES:
            raise h11.RemoteProtocolError(f"a first line of {len(lines[0])} bytes: send a shorter path", 414)
        self._spare = FREE_CHUNKS * CHUNK_BYTES
        return super().maybe_extract_lines()

    def maybe_extract_next_line(self) -> bytearray | None:
        header = super().maybe_extract_next_line()
        if header is not None:
            self._spare -= CHUNK_BYTES + len(header)
            if self._spare < 0:
                said = f"the chunks of the body are too small: send at least {CHUNK_BYTES} bytes in each"
                raise h11.RemoteProtocolError(said)
        return header

    def maybe_extract_at_most(self, count: int) -> bytearray | None:
        data = super().maybe_extract_at_most(count)
        self._spare += len(data or b"")
        return data


class LimitedParser(h11.Connection):
    """h11's parser of requests, with limits.

    Attributes:
        behind: more has arrived than could be parsed since the last call of `begin`.
        error: why the client's bytes are no request, once they are none.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._receive_buffer = _Buffer()
        self._left = 0
        self.behind = False
        self.error: h11.RemoteProtocolError | None = None

    def begin(self) -> None:
        """Allows the next few events."""
        self._left = _EVENTS
        self.behind = False

    def next_event(self) -> Any:
        """Returns the next event, as h11's method does. After a few events it returns that it needs more
        data.
        """
        if not self._left:
            self.behind = True
            return h11.NEED_DATA
        self._left -= 1
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            self.error = error
            raise


class HeldFlow(FlowControl):
    """uvicorn's flow control, which reads nothing while the connection is held."""

    held = False  # besides `read_paused`, which is uvicorn's

    def hold(self) -> None:
        self.held = True
        self._transport.pause_reading()

    def release(self) -> None:
        self.held = False
        if not self.read_paused:
            self._transport.resume_reading()

    def resume_reading(self) -> None:
        if self.held:
            self.read_paused = False
        else:
            super().resume_reading()


class _Held(Protocol):
    address: str

    def go_on(self) -> None: ...


class Backlog:
    """The connections that are held, because much has arrived that is not read or not parsed yet. They go on
    in turn, one of each address after another.
    """

    def __init__(self) -> None:
        self._held: dict[str, dict[_Held, None]] = {}  # by address; the next ones first
        self._scheduled = False

    def add(self, connection: _Held) -> None:
        """Calls the connection's `go_on` later."""
        self._held.setdefault(connection.address, {})[connection] = None
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._work)

    def remove(self, connection: _Held) -> None:
        """Forgets a connection, if it is there."""
        if connection in (own := self._held.get(connection.address, {})):
            del own[connection]
            if not own:
                del self._held[connection.address]

    def _work(self) -> None:
        try:
            for _ in range(_TURNS):
                if self._held:
                    self._take_next().go_on()
        finally:
            self._scheduled = bool(self._held)
            if self._scheduled:
                asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._work)

    def _take_next(self) -> _Held:
        address = next(iter(self._held))
        connections = self._held.pop(address)
        self._held[address] = connections  # the last one now
        connection = next(iter(connections))
        self.remove(connection)
        return connection
