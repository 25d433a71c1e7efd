"""The server: uvicorn's, which accepts connections itself, with limits.

Needs uvicorn 0.54 or newer: `Server.startup` and `servers`.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn

from ..errors import format_message
from .connections import Connection, Connections
from .server_settings import ServerSettings

_BATCH = 8  # connections accepted before the event loop runs other tasks
_RETRY_SECONDS = 0.2  # until the next try, if accepting has failed
_LOG_SECONDS = 60.0  # between two log lines of one kind
_FULL = b'{"error":{"message":"too many connections are open: try again","type":"server_error"}}'
_REJECTED = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%s" % (len(_FULL), _FULL)
)


class Server(uvicorn.Server):
    """uvicorn's server, with limits on connections, and without tracebacks in the log. It accepts connections
    itself: uvicorn's `asyncio.Server` counts none, and logs a traceback for each connection of its backlog
    when `accept` fails.
    """

    def __init__(self, config: uvicorn.Config, settings: ServerSettings, log: Callable[[str], None]):
        super().__init__(config)
        self._settings = settings
        self._log = log
        self._next_log = dict[str, float]()  # when a line of each kind may be logged again
        self._connections = Connections(settings)
        self._opening = set[asyncio.Task[None]]()
        self._retry: asyncio.TimerHandle | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._log_loop_error)
        await super().startup(sockets=[])
        self.servers = [self]  # type: ignore[list-item]
        assert sockets
        (self._socket,) = sockets
        self._socket.setblocking(False)
        self._start()

    def close(self) -> None:
        """Stops accepting connections."""
        self._loop.remove_reader(self._socket)
        if self._retry is not None:
            self._retry.cancel()

    async def wait_closed(self) -> None:
        """Does nothing: uvicorn calls this after it has waited for all connections itself."""

    def _log_rarely(self, kind: str, line: str) -> None:
        """Logs a line, at most one of each kind a minute."""
        now = time.monotonic()
        if now >= self._next_log.get(kind, now):
            self._next_log[kind] = now + _LOG_SECONDS
            self._log(format_message(line))

    def _log_loop_error(self, _: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._log_rarely(type(error).__name__, f"{context['message']}: {type(error).__name__}: {error}")

    def _start(self) -> None:
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                accepted, peer = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # mostly: too many open files. The socket would be ready again at once.
                self._connections.abort_waiting()
                self._loop.remove_reader(self._socket)
                self._retry = self._loop.call_later(_RETRY_SECONDS, self._start)
                why = f"no connection can be accepted: {error.strerror}"
                self._log_rarely("accept", f"{why}; raise ulimit -n, or lower --max_connections")
                return
            address = self._connections.add(peer[0])
            if address is None:
                self._reject(accepted, peer[0])
                continue
            own = dict(config=self.config, server_state=self.server_state, app_state={})
            connection = Connection(self._connections, address, self._settings.stall_seconds, **own)
            task = self._loop.create_task(self._open(accepted, connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _reject(self, accepted: socket.socket, host: str) -> None:
        with accepted, suppress(OSError):
            accepted.setblocking(False)
            accepted.send(_REJECTED)
        self._log_rarely(
            "full", f"a connection of {host} is rejected: too many are open, and all have requests in flight"
        )

    async def _open(self, accepted: socket.socket, connection: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted)
        except BaseException:
            if connection.transport is None:
                accepted.close()
                self._connections.set_waiting(connection, False)
                self._connections.remove(connection.address)
            raise
