"""Answers on their way to a client: what is new of them, as server-sent events; who goes away is noticed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..api.bodies import Asked
from ..api.responses import REASONS, echoed, prompt_text, shown_logprobs, split_thoughts
from ..checkpoint.tokenizer import Tokenizer
from ..engine.requests import Answer, Request, news
from ..errors import one_line
from ..text import Said

_QUIET_SECONDS = 5.0  # after which a comment tells client and proxies that somebody is there


class Delta:
    """What is new of one answer since it was last looked at."""

    def __init__(self, index: int, answer: Answer, asked: Asked, tokenizer: Tokenizer, opened: bool):
        """opened: the prompt has begun a thought that the answer goes on with."""
        self._index, self._answer, self._asked, self._tokenizer = index, answer, asked, tokenizer
        self._said = Said(tokenizer, asked.options.stop_strings)
        self._text, self._sent, self._opened = "", ["", ""], opened
        self._given = self._noted = self._at = 0
        self._echoes, self.ended = asked.echo, False

    def choice(self) -> dict[str, Any] | None:
        """The choice of the next chunk; None where nothing is new."""
        if self.ended:
            return None
        new, ended = self._answer.since(self._given)
        self._given += len(new)
        new = new if self._asked.max_tokens else []
        piece = "".join(map(self._said.push, new)) + (self._said.finish() if ended else "")
        known = len(self._answer.alternatives) if ended else self._given
        chosen = self._answer.alternatives[self._noted : known] if self._asked.max_tokens else []
        if not (piece or ended or chosen or (new and self._asked.token_ids)):
            return None
        self._noted += len(chosen)
        self.ended, shown_now = ended, list[Any](chosen)
        if self._echoes:  # the first time, when its numbers are known
            request, self._echoes = self._answer.request, False
            piece = prompt_text(self._tokenizer, request.ids) + piece
            shown_now = [*echoed(request.ids, request.prompt_logprobs), *chosen]
        reason = (self._answer.finish_reason or "") if self._asked.max_tokens else "length"
        shown = REASONS.get(reason, reason) if ended else None
        choice: dict[str, Any] = dict(index=self._index, finish_reason=shown)
        choice |= dict(delta=self._delta(piece, ended)) if self._asked.kind == "chat" else dict(text=piece)
        if self._asked.logprobs is not None:
            choice["logprobs"] = shown_logprobs(self._tokenizer, self._asked, shown_now, self._at)
            self._at += sum(map(len, choice["logprobs"].get("tokens", ())))
        if self._asked.token_ids:
            choice["token_ids"] = new
        return choice

    def _delta(self, piece: str, ended: bool) -> dict[str, str]:
        """Of a message: content, and thoughts where the template has them."""
        self._text += piece
        found = split_thoughts(self._text, self._opened, ended)
        delta = {}
        for i, name in enumerate(("reasoning_content", "content")):
            if new := (found[i] or "")[len(self._sent[i]) :]:
                delta[name] = new
                self._sent[i] += new
        return delta


async def chunks(
    asked: Asked, requests: Sequence[Request], tokenizer: Tokenizer, usage: Any, head: Any, opened: bool
) -> AsyncIterator[dict[str, Any] | None]:
    """The chunks of a stream; None: nothing to say for a while. usage: what the last one says, at the end."""
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
        for request in requests:
            request.raise_error()
        choices = [choice for delta in deltas if (choice := delta.choice())]
        for choice in choices:
            yield dict(head, choices=[choice])
        if all(delta.ended for delta in deltas):
            break
    if usage is not None:
        yield dict(head, choices=[], usage=usage())


class EventStream(Response):
    """Server-sent events. The client that goes away, or does not read for so long, ends it; `closed` is
    called whatever happened.
    """

    def __init__(self, events: AsyncIterator[dict[str, Any] | None], closed: Any, stall: float, **more: Any):
        super().__init__(None, media_type="text/event-stream", **more)
        del self.headers["content-length"]
        self._events, self._closed, self._stall = events, closed, stall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(OSError):  # who does not read is cut off: a TimeoutError
                await before_leaving(self._write(send), receive)
        finally:
            self._closed()

    async def _write(self, send: Send) -> None:
        async def put(data: bytes, more: bool = True) -> None:
            message = {"type": "http.response.body", "body": data, "more_body": more}
            await asyncio.wait_for(send(message), self._stall)

        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await asyncio.wait_for(send(start), self._stall)
        try:
            async for event in self._events:
                await put(b": waiting\n\n" if event is None else _event(event))
        except OSError:
            raise
        except Exception as error:  # of the engine, in midstream
            why = one_line(error) or type(error).__name__
            await put(_event(dict(error=dict(message=why, type="server_error", param=None, code=None))))
        await put(b"data: [DONE]\n\n", False)


async def before_leaving(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Whether the work ends before the client goes; it goes no further then.

    Raises:
        Exception: what the work does.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if done := working.done():
            working.result()
        return done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _event(value: dict[str, Any]) -> bytes:
    data = json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    return b"data: " + data + b"\n\n"
