"""Connections: how many are open and of whom, and when one that waits for its client is closed.

Needs uvicorn 0.54 or newer: `Server.startup` and `servers`, and the methods of `H11Protocol`.
"""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import one_line
from .addresses import counted, is_within, networks
from .settings import Settings

_BATCH = 8  # connections accepted between two other tasks of the event loop
_RETRY_SECONDS = 0.2  # until the next try, where none could be accepted
_SILENT_SECONDS = 60.0  # between two lines of one kind
_LEAST_READ = 2**16  # bytes of a response that a client has to read within the stall time
_FULL = b'{"error":{"message":"too many connections are open: try again","type":"server_error"}}'
_REJECTED = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%s" % (len(_FULL), _FULL)
)


class Connections:
    """Those that are open, by address.

    A connection *waits* where its client has to do something: to send the head of a request, or to read what
    was written. At a limit the one that has waited longest is aborted for a new one; the new one is rejected
    only where requests are under way on all others.
    """

    def __init__(self, settings: Settings):
        self._most = settings.max_connections
        self._most_of_address = settings.max_connections_per_address
        self._proxies = networks(settings.trusted_proxies)
        self._total = 0
        self._open = Counter[str]()
        self._waiting: dict[str, dict[Connection, None]] = {}  # the one that has waited longest first

    def admit(self, host: str) -> str | None:
        """Counts one more connection, under the name that it returns; None: too many are open."""
        is_proxy = is_within(host, self._proxies)
        address = host if is_proxy else counted(host)
        if not is_proxy and self._open[address] >= self._most_of_address:
            if not self._abort_of(address):
                return None
        elif self._total >= self._most and not self.abort_one():
            return None
        self._open[address] += 1
        self._total += 1
        return address

    def abort_one(self) -> bool:
        """Aborts a waiting connection of the address that has most connections, of a proxy last."""
        if not self._waiting:
            return False
        most = max(
            self._waiting, key=lambda address: (not is_within(address, self._proxies), self._open[address])
        )
        return self._abort_of(most)

    def waits(self, connection: "Connection", waits: bool) -> None:
        """Notes whether a connection waits from now on."""
        waiting = self._waiting.get(connection.address, {})
        if not waits:
            waiting.pop(connection, None)
        elif not connection.aborted:
            waiting.setdefault(connection)
            self._waiting[connection.address] = waiting
        if not waiting:
            self._waiting.pop(connection.address, None)

    def closed(self, address: str) -> None:
        """Counts one less."""
        self._total -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def _abort_of(self, address: str) -> bool:
        if not (waiting := self._waiting.get(address)):
            return False
        connection = next(iter(waiting))
        connection.abort()
        return True


class Connection(H11Protocol):
    """One connection. It is closed where the head of a request, the first or the next, does not come in time,
    and aborted where the client does not read: uvicorn would hold the response for ever.
    """

    def __init__(self, connections: Connections, address: str, stall_seconds: float, **more: Any):
        super().__init__(**more)
        self.address = address
        self.aborted = False
        self._connections = connections
        self._stall_seconds = stall_seconds
        self._unread = 0  # bytes, when the client's progress was last looked at
        self._stall_task: asyncio.TimerHandle | None = None
        connections.waits(self, True)

    def abort(self) -> None:
        """Closes at once, whatever was not read yet."""
        self.aborted = True
        self._connections.waits(self, False)
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # writing is paused as long as anything waits to be read
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        if self.aborted:  # for a newer one, before it began
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()
        self.aborted = True
        self._connections.waits(self, False)
        self._connections.closed(self.address)

    def data_received(self, data: bytes) -> None:
        self.conn.receive_data(data)  # the clock stops at a whole head, not at its first byte
        self.handle_events()

    def handle_events(self) -> None:
        super().handle_events()
        self._note()

    def on_response_complete(self) -> None:
        self.cycle.body = bytearray()  # of a request that was rejected unread
        super().on_response_complete()
        self._note()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()
        self._note()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()
        self._note()

    def _note(self) -> None:
        under_way = self.cycle is not None and not self.cycle.response_complete
        self._connections.waits(self, self.flow.write_paused or not under_way)

    def _watch(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._stall_task = self.loop.call_later(self._stall_seconds, self._check_progress)

    def _check_progress(self) -> None:
        if self.transport.get_write_buffer_size() > self._unread - _LEAST_READ:
            self.abort()
        else:
            self._watch()

    def _stop_watching(self) -> None:
        if self._stall_task is not None:
            self._stall_task.cancel()
            self._stall_task = None


class Server(uvicorn.Server):
    """uvicorn's, with limits on connections and without tracebacks in the log."""

    def __init__(self, config: uvicorn.Config, settings: Settings, say: Callable[[str], None]):
        super().__init__(config)
        self._settings = settings
        self._say = say
        self._said = dict[str, float]()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._loop_failed)
        await super().startup(sockets=[])
        connections = Connections(self._settings)
        self.servers = [_Listener(listening, connections, self) for listening in sockets or ()]  # type: ignore

    def connection(self, connections: Connections, address: str) -> Connection:
        """The protocol of a new connection."""
        own = dict(config=self.config, server_state=self.server_state, app_state={})
        return Connection(connections, address, self._settings.stall_seconds, **own)

    def say_seldom(self, kind: str, line: str) -> None:
        """A line of the log, at most one of each kind a minute."""
        now = time.monotonic()
        if now >= self._said.get(kind, now):
            self._said[kind] = now + _SILENT_SECONDS
            self._say(one_line(line))

    def _loop_failed(self, _: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.say_seldom(type(error).__name__, f"{context['message']}: {type(error).__name__}: {error}")


class _Listener:
    """Accepts the connections of a socket; stands where uvicorn has an `asyncio.Server`, which counts
    nothing, and at an error of `accept` logs a traceback as often as its backlog is long.
    """

    def __init__(self, listening: socket.socket, connections: Connections, server: Server):
        self._socket = listening
        self._connections = connections
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._opening = set[asyncio.Task[None]]()
        self._retry: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._start()

    def close(self) -> None:
        """Accepts no more."""
        self._loop.remove_reader(self._socket)
        if self._retry is not None:
            self._retry.cancel()

    async def wait_closed(self) -> None:
        """As uvicorn asks: it has waited for all connections by then."""

    def _start(self) -> None:
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                accepted, peer = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file is left, mostly; the socket would be ready again at once
                self._connections.abort_one()
                self._loop.remove_reader(self._socket)
                self._retry = self._loop.call_later(_RETRY_SECONDS, self._start)
                why = f"no connection can be accepted: {error.strerror}"
                self._server.say_seldom("accept", f"{why}; raise ulimit -n, or lower --max_connections")
                return
            address = self._connections.admit(peer[0])
            if address is None:
                self._reject(accepted, peer[0])
                continue
            connection = self._server.connection(self._connections, address)
            task = self._loop.create_task(self._open(accepted, connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _reject(self, accepted: socket.socket, host: str) -> None:
        with accepted, suppress(OSError):
            accepted.setblocking(False)
            accepted.send(_REJECTED)
        self._server.say_seldom(
            "full", f"a connection of {host} is rejected: too many are open, and all busy"
        )

    async def _open(self, accepted: socket.socket, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted)
        except BaseException:
            if connection.transport is None:
                accepted.close()
                self._connections.waits(connection, False)
                self._connections.closed(connection.address)
            raise
