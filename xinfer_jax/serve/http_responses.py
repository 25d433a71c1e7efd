"""Sends responses: JSON bodies and server-sent events. A client that reads nothing is disconnected; a
disconnected client is noticed at once.

Waits are bounded by `asyncio.timeout`: `asyncio.wait_for` may swallow a cancellation on Python 3.11, and then
the answer of a client that has disconnected runs on.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..errors import format_message
from ..formatting import json_line

_SLICE_BYTES = 2**16  # of a body that are sent at a time; the client must read each within the stall time

_Result = TypeVar("_Result")


class _TimedResponse(Response):
    """A response of which each part must be sent within `stall_seconds`, or the client is disconnected.
    `on_close` is called in any case.
    """

    def __init__(self, on_close: Callable[[], None], stall_seconds: float, **more: Any):
        super().__init__(None, **more)
        self._on_close = on_close
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(OSError, ClientDisconnect):  # a stalled client raises TimeoutError
                await until_disconnect(self._write(send), receive)
        finally:
            self._on_close()

    async def _send_start(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await self._send(send, start)

    async def _send_part(self, send: Send, data: bytes, more: bool = True) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": more}
        await self._send(send, message)

    async def _send(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self._stall_seconds):
            await send(message)

    async def _write(self, send: Send) -> None:
        raise NotImplementedError


class JSONBodyResponse(_TimedResponse):
    """A response with a complete JSON body, sent in slices."""

    def __init__(self, body: bytes, on_close: Callable[[], None], stall_seconds: float):
        super().__init__(on_close, stall_seconds, media_type="application/json")
        self._body = body
        self.headers["content-length"] = str(len(self._body))

    async def _write(self, send: Send) -> None:
        await self._send_start(send)
        for at in range(0, len(self._body), _SLICE_BYTES):
            end = at + _SLICE_BYTES
            await self._send_part(send, self._body[at:end], end < len(self._body))


class EventStream(_TimedResponse):
    """Server-sent events, until the events end or the client disconnects or stalls."""

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any] | None],
        on_close: Callable[[], None],
        stall_seconds: float,
    ):
        """events: objects to send; None: a comment."""
        super().__init__(on_close, stall_seconds, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events

    async def _write(self, send: Send) -> None:
        await self._send_start(send)
        try:
            async for event in self._events:
                await self._send_part(send, b": waiting\n\n" if event is None else _encode_event(event))
        except OSError:
            raise
        except Exception as error:  # of the engine: the status has been sent, so it becomes an event
            message = format_message(error) or type(error).__name__
            fields = dict(message=message, type="server_error", param=None, code=None)
            await self._send_part(send, _encode_event(dict(error=fields)))
        await self._send_part(send, b"data: [DONE]\n\n", False)


async def until_disconnect(work: Coroutine[Any, Any, _Result], receive: Receive) -> _Result:
    """Returns what the work returns. If the client disconnects first, the work is cancelled.

    Raises:
        ClientDisconnect: the client disconnected first.
        Exception: what the work raises.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(wait_for_disconnect())
    tasks: list[asyncio.Future[Any]] = [working, disconnecting]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


def _encode_event(value: dict[str, Any]) -> bytes:
    return b"data: " + json_line(value).encode("utf-8", "replace") + b"\n\n"
