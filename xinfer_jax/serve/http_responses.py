"""Sends responses: errors, JSON bodies and server-sent events. A client that reads nothing is disconnected. A
disconnected client is noticed at once.

Waits are bounded by `asyncio.timeout`: `asyncio.wait_for` may swallow a cancellation on Python 3.11, and then
the answer of a client that has disconnected runs on.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from ..errors import format_message
from ..tool_calls.json_values import json_line

_SLICE_BYTES = 2**16  # of a body that are sent at a time; the client must read each within the stall time

_Result = TypeVar("_Result")


class APIError(Exception):
    """An HTTP error: its status, a message, and the field at fault. closes: the connection, because the rest
    of the body stays unread.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        closes: bool = False,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.closes = closes or status in (408, 413)

    def response(self) -> Response:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = dict(message=str(self), type=kind, param=self.param, code=self.code)
        headers = {"retry-after": "1"} if self.status in (429, 503) else {}
        if self.closes:
            headers["connection"] = "close"
        return JSONResponse(dict(error=error), self.status, headers)


class TimedResponse(Response):
    """A response in parts, each of which must be sent within `stall_seconds`, or the client is disconnected.
    `on_close` is called in any case.
    """

    def __init__(
        self, parts: AsyncIterator[bytes], media_type: str, on_close: Callable[[], None], stall_seconds: float
    ):
        super().__init__(None, media_type=media_type)
        del self.headers["content-length"]
        self._parts = parts
        self._on_close = on_close
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(OSError, ClientDisconnect):  # a stalled client raises TimeoutError
                await until_disconnect(self._write(send), receive)
        finally:
            self._on_close()

    async def _write(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._stall_seconds):
                await send(message)

        headers = self.raw_headers
        await send_in_time({"type": "http.response.start", "status": self.status_code, "headers": headers})
        async for part in self._parts:
            await send_in_time({"type": "http.response.body", "body": part, "more_body": True})
        await send_in_time({"type": "http.response.body", "body": b"", "more_body": False})


def json_response(body: bytes, on_close: Callable[[], None], stall_seconds: float) -> TimedResponse:
    """Sends a response with a complete JSON body, sent in slices."""

    async def slices() -> AsyncIterator[bytes]:
        for at in range(0, len(body), _SLICE_BYTES):
            yield body[at : at + _SLICE_BYTES]

    response = TimedResponse(slices(), "application/json", on_close, stall_seconds)
    response.headers["content-length"] = str(len(body))
    return response


def typed_event_stream(
    events: AsyncIterator[dict[str, Any] | None], on_close: Callable[[], None], stall_seconds: float
) -> TimedResponse:
    """Sends server-sent events whose names are the `type` of each object. events: see `event_stream`. They
    raise no errors.
    """

    async def parts() -> AsyncIterator[bytes]:
        async for event in events:
            name = b"" if event is None else b"event: %s\n" % event["type"].encode()
            yield name + _encode_event(event)

    return TimedResponse(parts(), "text/event-stream", on_close, stall_seconds)


def event_stream(
    events: AsyncIterator[dict[str, Any] | None], on_close: Callable[[], None], stall_seconds: float
) -> TimedResponse:
    """Sends server-sent events. events: objects to send. None: a comment."""

    async def parts() -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield _encode_event(event)
        except Exception as error:  # of the engine: the status has been sent, so it becomes an event
            message = format_message(error) or type(error).__name__
            fields = dict(message=message, type="server_error", param=None, code=None)
            yield _encode_event(dict(error=fields))
        yield b"data: [DONE]\n\n"

    return TimedResponse(parts(), "text/event-stream", on_close, stall_seconds)


async def until_disconnect(work: Coroutine[Any, Any, _Result], receive: Receive) -> _Result:
    """Runs the work and returns its result. If the client disconnects first, the work is cancelled and
    ClientDisconnect is raised.
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


def _encode_event(value: dict[str, Any] | None) -> bytes:
    if value is None:
        return b": waiting\n\n"
    return b"data: " + json_line(value).encode("utf-8", "replace") + b"\n\n"
