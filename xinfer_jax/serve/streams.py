"""Answers on their way to a client: what is new of them, as server-sent events; who goes away is noticed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..api.bodies import Asked
from ..api.responses import REASONS, echoed, said_of, shown_logprobs
from ..api.token_texts import TokenTexts, prompt_text
from ..checkpoint.tokenizer import Tokenizer
from ..engine.requests import Answer, Request, news
from ..errors import one_line
from .admission import Refused
from .thoughts import Thoughts

_QUIET_SECONDS = 5.0  # after which a comment tells client and proxies that somebody is there
_SLICE = 64  # tokens of one chunk at most: what formatting a chunk takes is bounded
_SLICE_BYTES = 2**16  # of a whole response, between two looks at whether the client reads

_Result = TypeVar("_Result")


class Delta:
    """What is new of one answer since it was last looked at."""

    def __init__(self, index: int, answer: Answer, asked: Asked, tokenizer: Tokenizer, opened: bool):
        """opened: the prompt has begun a thought that the answer goes on with."""
        self._index = index
        self._answer = answer
        self._asked = asked
        self._tokenizer = tokenizer
        self._said = said_of(tokenizer, asked)
        self._thoughts = Thoughts(opened)
        self._texts = TokenTexts(tokenizer, asked.skip_special_tokens)
        self._given = self._noted = 0
        self._echo = asked.echo  # the prompt's text is still to be given
        self._echoes: list[Any] | None = None  # the prompt's tokens, once their numbers are known
        self.ended = False

    @property
    def fresh(self) -> bool:
        """Whether `choice` may have something; it takes far less than `choice`."""
        answer = self._answer
        return not self.ended and (answer.finish_reason is not None or len(answer.tokens) > self._given)

    def check(self) -> None:
        """`check_ended` of the answer."""
        check_ended(self._answer)

    def choice(self) -> tuple[dict[str, Any] | None, bool]:
        """The choice of the next chunk, None where nothing is new; whether there is more at once."""
        answer = self._answer
        asked = self._asked
        over = answer.finish_reason is not None  # looked at first: what is true of it is true of the ids
        new = answer.tokens[self._given : self._given + _SLICE]
        self._given += len(new)
        known = len(answer.alternatives) if over else self._given
        shown_now = self._echoed()
        piece = ""
        if not shown_now and asked.max_tokens:
            shown_now = list[Any](answer.alternatives[self._noted : min(known, self._noted + _SLICE)])
            self._noted += len(shown_now)
        known = min(known, len(answer.alternatives)) if asked.max_tokens else 0
        all_shown = not self._echoes and self._noted >= known
        self.ended = ended = over and self._given >= len(answer.tokens) and all_shown
        new = new if asked.max_tokens else []
        if self._echo:
            self._echo = False
            special = asked.skip_special_tokens
            piece = prompt_text(self._tokenizer, answer.request.ids, new, special)
        piece += "".join(map(self._said.push, new)) + (self._said.finish() if ended else "")
        more = not ended and (len(new) == _SLICE or over or not all_shown)
        if not (piece or ended or shown_now or (new and asked.token_ids)):
            return None, more
        return self._shown(piece, new, shown_now, ended), more

    def _echoed(self) -> list[Any]:
        """The next of the prompt's tokens, where they are echoed."""
        if self._asked.echo and self._echoes is None:
            request = self._answer.request
            self._echoes = echoed(request.ids, request.prompt_logprobs)[::-1]
        if not self._echoes:
            return []
        taken = self._echoes[-_SLICE:][::-1]
        del self._echoes[-_SLICE:]
        return taken

    def _shown(self, piece: str, new: list[int], shown_now: list[Any], ended: bool) -> dict[str, Any]:
        reason = (self._answer.finish_reason or "") if self._asked.max_tokens else "length"
        choice: dict[str, Any] = dict(index=self._index)
        choice["finish_reason"] = REASONS.get(reason, reason) if ended else None
        if self._asked.kind == "chat":
            found = zip(("reasoning_content", "content"), self._thoughts.push(piece, ended), strict=True)
            choice["delta"] = {name: text for name, text in found if text}
        else:
            choice["text"] = piece
        if self._asked.logprobs is not None:
            choice["logprobs"] = shown_logprobs(self._texts, self._asked, shown_now)
        if self._asked.token_ids:
            choice["token_ids"] = new
        return choice


async def chunks(
    asked: Asked, requests: Sequence[Request], tokenizer: Tokenizer, usage: Any, head: Any, opened: bool
) -> AsyncIterator[dict[str, Any] | None]:
    """The chunks of a stream; None: nothing to say for a while. usage: what the last one says, at the end.

    Raises:
        Refused: the deadline passed before an answer had a token.
    """
    chat = asked.kind == "chat"
    head = dict(head, object="chat.completion.chunk" if chat else "text_completion")
    answers = [answer for request in requests for answer in request.answers]
    deltas = [Delta(i, answer, asked, tokenizer, opened) for i, answer in enumerate(answers)]
    for index in range(len(answers) if chat else 0):
        first = dict(index=index, finish_reason=None, delta=dict(role="assistant", content=""))
        yield dict(head, choices=[first])
    async for fresh in news(requests, _QUIET_SECONDS):
        if not fresh:
            yield None
        for delta in [delta for delta in deltas if delta.fresh]:
            more = True
            while more:
                delta.check()
                choice, more = delta.choice()
                if choice:
                    yield dict(head, choices=[choice])
                    await asyncio.sleep(0)  # others are not kept waiting for a thousand answers
        deltas = [delta for delta in deltas if not delta.ended]
        if not deltas:
            break
    if usage is not None:
        yield dict(head, choices=[], usage=usage())


def check_ended(answer: Answer) -> None:
    """Raises what broke an answer off; Refused where the deadline passed before it had a token."""
    answer.request.raise_error()
    if answer.finish_reason == "deadline" and not answer.logprobs:
        raise Refused(503, "the deadline of the server passed before the answer had a token: come again")


class _Sent(Response):
    """A response of which each part is sent within so many seconds; who does not read is cut off. `closed` is
    called whatever happened.
    """

    def __init__(self, closed: Callable[[], None], stall: float, **more: Any):
        super().__init__(None, **more)
        self._closed = closed
        self._stall = stall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(OSError, ClientDisconnect):  # who does not read: a TimeoutError
                await before_leaving(self._write(send), receive)
        finally:
            self._closed()

    async def _start(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await asyncio.wait_for(send(start), self._stall)

    async def _put(self, send: Send, data: bytes, more: bool = True) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": more}
        await asyncio.wait_for(send(message), self._stall)

    async def _write(self, send: Send) -> None:
        raise NotImplementedError


class WholeResponse(_Sent):
    """JSON that is there as a whole, in parts."""

    def __init__(self, parts: Iterable[bytes], closed: Callable[[], None], stall: float):
        super().__init__(closed, stall, media_type="application/json")
        self._body = b"".join(parts)
        self.headers["content-length"] = str(len(self._body))

    async def _write(self, send: Send) -> None:
        await self._start(send)
        for at in range(0, len(self._body), _SLICE_BYTES):
            end = at + _SLICE_BYTES
            await self._put(send, self._body[at:end], end < len(self._body))


class EventStream(_Sent):
    """Server-sent events. The client that goes away, or does not read for so long, ends it."""

    def __init__(
        self, events: AsyncIterator[dict[str, Any] | None], closed: Callable[[], None], stall: float
    ):
        super().__init__(closed, stall, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events

    async def _write(self, send: Send) -> None:
        await self._start(send)
        try:
            async for event in self._events:
                await self._put(send, b": waiting\n\n" if event is None else _event(event))
        except OSError:
            raise
        except Exception as error:  # of the engine, in midstream
            why = one_line(error) or type(error).__name__
            error_fields = dict(message=why, type="server_error", param=None, code=None)
            await self._put(send, _event(dict(error=error_fields)))
        await self._put(send, b"data: [DONE]\n\n", False)


async def before_leaving(work: Coroutine[Any, Any, _Result], receive: Receive) -> _Result:
    """What the work gives, where it ends before the client goes; it goes no further then.

    Raises:
        ClientDisconnect: the client went first.
        Exception: what the work does.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(gone())
    tasks: list[asyncio.Future[Any]] = [working, leaving]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _event(value: dict[str, Any]) -> bytes:
    data = json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    return b"data: " + data + b"\n\n"
