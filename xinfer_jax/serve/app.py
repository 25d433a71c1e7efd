"""Addresses: which there are, who may ask, what is said of errors."""

import asyncio
import base64
import re
import uuid
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request as Call
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..checks import token_ids
from ..errors import InputError, shown
from ..text import encode_prompt
from .service import SLOW_SECONDS, Refused, Service
from .settings import LOCAL

_PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_LOCAL_NAME = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
_OPEN = {"/", "/health", "/metrics"}  # without a key
_TEXT = 2**20  # characters that /tokenize takes


class _Hurried(H11Protocol):
    """Hangs up where the head of a request does not come in time, the first and the next."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(SLOW_SECONDS, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        self.conn.receive_data(data)  # the clock stops at a whole head, not at its first byte
        self.handle_events()


def make_server(service: Service) -> uvicorn.Server:
    """What serves a service."""
    at = _Addresses(service)
    routes = [
        Route("/v1/completions", partial(service.answer, kind="completion"), methods=["POST"]),
        Route("/v1/chat/completions", partial(service.answer, kind="chat"), methods=["POST"]),
        Route("/v1/responses", at.responses, methods=["POST"]),
        Route("/v1/models", at.models),
        Route("/tokenize", at.tokenize, methods=["POST"]),
        Route("/detokenize", at.detokenize, methods=["POST"]),
        Route("/tokenizer_info", at.tokenizer_info),
        Route("/health", at.health),
        Route("/metrics", at.metrics),
        Route("/", at.page),
    ]
    errors: Any = (Refused, InputError, RecursionError, ClientDisconnect, HTTPException, Exception)
    middleware = [Middleware(_Gate, service=service)]
    if service.settings.origins:
        allowed = dict(allow_origins=service.settings.origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, Middleware(CORSMiddleware, **allowed))  # type: ignore[arg-type]
    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers=dict.fromkeys(errors, service.failed)
    )
    app.router.redirect_slashes = False  # to an address that the host header names
    config = uvicorn.Config(
        app, http=_Hurried, log_level="critical", access_log=False, lifespan="off", server_header=False,
        timeout_graceful_shutdown=int(service.settings.grace), timeout_keep_alive=SLOW_SECONDS,
        h11_max_incomplete_event_size=2**16,
    )  # fmt: skip
    return uvicorn.Server(config)


class _Addresses:
    """Those that need no turn of the engine."""

    def __init__(self, service: Service):
        self._service = service

    async def models(self, _: Call) -> Response:
        one = dict(id=self._service.settings.name, object="model", created=0, owned_by="xinfer_jax")
        return JSONResponse(dict(object="list", data=[dict(one, max_model_len=self._service.room)]))

    async def health(self, _: Call) -> Response:
        why = self._service.ailing()
        return JSONResponse(dict(status=why or "ok"), 503 if why else 200)

    async def metrics(self, _: Call) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self, _: Call) -> Response:
        return HTMLResponse(_PAGE, headers=_page_headers())

    async def responses(self, _: Call) -> Response:
        raise Refused(404, "/v1/responses is not served: use /v1/chat/completions")

    async def tokenize(self, call: Call) -> Response:
        model, body = self._model(), await self._service.body(call)
        special, prompt = body.get("add_special_tokens", True) is True, body.get("prompt")
        if isinstance(body.get("messages"), list):
            encode = partial(encode_prompt, escape_control_tokens=self._service.settings.escape)
            ids = await asyncio.to_thread(encode, model, body["messages"])
        elif isinstance(prompt, str) and len(prompt) <= _TEXT:
            ids = await asyncio.to_thread(model.tokenizer.encode, prompt, special)
        else:
            raise Refused(400, f"a prompt of at most {_TEXT} characters is needed, or messages", "prompt")
        return JSONResponse(dict(tokens=ids, count=len(ids), max_model_len=self._service.room))

    async def detokenize(self, call: Call) -> Response:
        model, body = self._model(), await self._service.body(call)
        ids = token_ids("tokens", body.get("tokens"), model.config.vocab_size)
        text = await asyncio.to_thread(model.tokenizer.decode, ids, False)
        return JSONResponse(dict(prompt=text))

    async def tokenizer_info(self, _: Call) -> Response:
        tokenizer = self._model().tokenizer
        names = dict.fromkeys(("bos_token", "eos_token", "pad_token")) | tokenizer.special_tokens
        return JSONResponse(names | dict(chat_template=tokenizer.chat_template))

    def _model(self) -> Any:
        if self._service.model is None:
            raise Refused(503, self._service.ailing())
        return self._service.model


class _Gate:
    """Names each request; turns away who may not ask, or asks under another name than ours."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        call, settings = Call(scope), self._service.settings
        given = call.headers.get("x-request-id", "")
        good = given.isascii() and given.isprintable() and 0 < len(given) <= 64
        scope.setdefault("state", {})["request_id"] = name = given if good else uuid.uuid4().hex[:16]

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        host, refused = call.headers.get("host", ""), None
        if settings.host in LOCAL and not _LOCAL_NAME.fullmatch(host):
            refused = Refused(403, f"{shown(host)} is not a name of this server")
        elif scope["path"] not in _OPEN and not self._service.allowed(call):
            refused = Refused(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        await (refused.response() if refused else self._app)(scope, receive, named)


def _page_headers() -> dict[str, str]:
    """Only what stands in the page runs, and it speaks to its own server alone."""
    allowed = []
    for tag in ("script", "style"):
        inside = _PAGE.split(f"<{tag}>", 1)[1].split(f"</{tag}>", 1)[0]
        digest = base64.b64encode(sha256(inside.encode()).digest()).decode()
        allowed.append(f"{tag}-src 'sha256-{digest}'")
    allowed += [f"{name} 'none'" for name in ("default-src", "base-uri", "form-action", "frame-ancestors")]
    policy = {"content-security-policy": "; ".join([*allowed, "connect-src 'self'"])}
    return policy | {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
