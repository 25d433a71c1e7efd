"""Limits on open connections and their requests, and the closing of idle and stalled ones.

Needs uvicorn 0.54 or newer: the methods of `H11Protocol`.
"""

import asyncio
import time
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import format_message
from .framing import Backlog, HeldFlow, LimitedParser
from .http_responses import APIError
from .ip_addresses import address_group, is_within, parse_networks
from .server_settings import ServerSettings

_READ_BYTES = 2**17  # that one read takes from the socket at most
_LARGE_READ = 2**14  # bytes, after which other connections come first
_BURST = 256.0  # requests of an address that begin at once, and
_REQUESTS_PER_SECOND = 200.0  # further ones; others wait for their turn
_MIN_READ = 2**16  # bytes of a response that a client must read within the stall time


class Connections:
    """The open connections of a server, by address.

    A connection *waits* while its client has to act: to send a request, or to read a response. At a limit, a
    new connection aborts the connection that has waited longest. At the limit per address it is one of the
    same address. At the total limit it is one of the address with the most connections. The new connection is
    rejected only if none waits.
    """

    def __init__(self, settings: ServerSettings):
        self._most = settings.max_connections
        self._most_per_address = settings.max_connections_per_address
        self._proxies = parse_networks(settings.trusted_proxies)
        self._total = 0
        self._open = Counter[str]()
        self._left: dict[str, tuple[float, float]] = {}  # requests that need not wait, at this time
        self._waiting: dict[Connection, None] = {}  # in the order in which they began to wait
        self.backlog = Backlog()
        self.most_discarded = settings.max_body_bytes

    def add(self, host: str) -> str | None:
        """Counts a new connection. Returns the address under which it counts. None: it must be rejected."""
        is_proxy = self.is_proxy(host)
        address = host if is_proxy else address_group(host)
        if not is_proxy and self._open[address] >= self._most_per_address:
            if not self.abort_waiting(address):
                return None
        elif self._total >= self._most and not self.abort_waiting():
            return None
        self._open[address] += 1
        self._total += 1
        return address

    def is_proxy(self, address: str) -> bool:
        return is_within(address, self._proxies)

    def abort_waiting(self, address: str | None = None) -> bool:
        """Aborts a waiting connection of this address, or of the address with the most connections. A
        connection of a proxy is aborted only if no other waits. Returns True if there was one.
        """
        waiting = [one for one in self._waiting if address in (None, one.address)]
        if waiting:
            max(waiting, key=lambda one: (not one.is_proxy, self._open[one.address])).abort()
        return bool(waiting)

    def set_waiting(self, connection: "Connection", waits: bool) -> None:
        """Sets whether a connection waits."""
        if not waits:
            self._waiting.pop(connection, None)
        elif not connection.aborted:
            self._waiting.setdefault(connection)

    def count_request(self, address: str) -> bool:
        """Counts a request. Returns True if the address sends requests so fast that its next ones have to
        wait.
        """
        now = time.monotonic()
        left, last = self._left.get(address, (_BURST, now))
        left = min(_BURST, left + _REQUESTS_PER_SECOND * (now - last)) - 1
        self._left[address] = max(0.0, left), now
        return left < 0

    def remove(self, address: str) -> None:
        """Removes a connection from the counts."""
        self._total -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]
            self._left.pop(address, None)


class Connection(H11Protocol):
    """One connection. It is closed if the head of a request, the first or a later one, does not arrive in
    time, and aborted if the client stops reading: uvicorn would keep the response in memory forever. It is
    also closed if the client sends data that `LimitedParser` rejects, or too much of a body after its
    response.
    """

    conn: LimitedParser
    flow: HeldFlow

    def __init__(self, connections: Connections, address: str, stall_seconds: float, **more: Any):
        super().__init__(**more)
        self.conn = LimitedParser()
        self.address = address
        self.is_proxy = connections.is_proxy(address)
        self.aborted = False
        self._connections = connections
        self._stall_seconds = stall_seconds
        self._unread = 0  # bytes, at the last check of the client's progress
        self._discarded = 0  # bytes of a body, since its response is complete
        self._stall_task: asyncio.TimerHandle | None = None
        connections.set_waiting(self, True)

    def abort(self) -> None:
        """Closes the connection at once. Unread data is lost."""
        self.aborted = True
        self._connections.set_waiting(self, False)
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = HeldFlow(transport)
        transport.max_size = _READ_BYTES
        transport.set_write_buffer_limits(0)  # `pause_writing` is called while any byte is unread
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        if self.aborted:  # in favor of a newer connection, before this one was made
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # which would keep the buffers until its time
        self._stop_watching()
        self.aborted = True
        self._connections.set_waiting(self, False)
        self._connections.backlog.remove(self)
        self._connections.remove(self.address)

    def data_received(self, data: bytes) -> None:
        # Unlike uvicorn's, does not stop the timeout at the first byte: only a complete head does.
        self.conn.receive_data(data)
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self._discarded += len(data)
            if self._discarded > self._connections.most_discarded:
                self.abort()
                return
        cycle = self.cycle
        self.handle_events()
        is_part = self.cycle is cycle and self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if len(data) >= _LARGE_READ or is_part:  # neither begins nor completes a request
            self._hold()

    def handle_events(self) -> None:
        if self.flow.held:
            return
        cycle = self.cycle
        self.conn.begin()
        super().handle_events()
        many = self.cycle is not cycle and self._connections.count_request(self.address)
        if self.conn.behind or many:
            self._hold()
        self._update_waiting()

    def _hold(self) -> None:
        """Reads and parses no more until it is this connection's turn."""
        if not self.transport.is_closing():
            self.flow.hold()
            self._connections.backlog.add(self)

    def go_on(self) -> None:
        """Parses a few more events, and reads again."""
        if not self.transport.is_closing():
            self.flow.release()
            self.handle_events()

    def send_400_response(self, msg: str) -> None:
        """Rejects data that is no request, and closes the connection."""
        error = self.conn.error
        assert error is not None
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = APIError(error.error_status_hint, format_message(error)).response()
            headers = [*response.raw_headers, (b"connection", b"close")]
            parts = (
                h11.Response(status_code=response.status_code, headers=headers),
                h11.Data(data=bytes(response.body)),
            )
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self.transport.close()

    def on_response_complete(self) -> None:
        self.cycle.body = bytearray()  # of a request that was rejected before it was read
        self._discarded = 0
        super().on_response_complete()
        self._update_waiting()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_progress()
        self._update_waiting()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()
        self._update_waiting()

    def _update_waiting(self) -> None:
        in_flight = self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)
        self._connections.set_waiting(self, self.flow.write_paused or not in_flight)

    def _watch_progress(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._stall_task = self.loop.call_later(self._stall_seconds, self._check_progress)

    def _check_progress(self) -> None:
        if self.transport.get_write_buffer_size() > self._unread - _MIN_READ:
            self.abort()
        else:
            self._watch_progress()

    def _stop_watching(self) -> None:
        if self._stall_task is not None:
            self._stall_task.cancel()
            self._stall_task = None
