"""Addresses: which there are, who may ask, what is said of errors."""

import re
import time
import uuid
from functools import partial
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

from .. import __version__
from ..errors import InputError, shown
from .addresses import forwarded_client, is_within, networks
from .admission import Refused
from .connections import Connection, Server
from .page import HEADERS, PAGE
from .service import SLOW_SECONDS, Service
from .settings import LOCAL
from .texts import Texts

_LOCAL_NAME = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OPEN = {"/", "/health", "/metrics"}  # without a key


def make_server(service: Service) -> Server:
    """What serves a service."""
    at = _Addresses(service)
    texts = Texts(service)
    routes = [
        Route("/v1/completions", partial(service.answer, kind="completion"), methods=["POST"]),
        Route("/v1/chat/completions", partial(service.answer, kind="chat"), methods=["POST"]),
        Route("/v1/responses", at.responses, methods=["POST"]),
        Route("/v1/models", at.models),
        Route("/v1/models/{name:path}", at.model),
        Route("/v1/embeddings", texts.embeddings, methods=["POST"]),
        Route("/tokenize", texts.tokenize, methods=["POST"]),
        Route("/detokenize", texts.detokenize, methods=["POST"]),
        Route("/tokenizer_info", at.tokenizer_info),
        Route("/health", at.health),
        Route("/metrics", at.metrics),
        Route("/version", at.version),
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
        app, http=Connection, ws="none", proxy_headers=False, log_level="critical", access_log=False,
        lifespan="off", server_header=False, timeout_graceful_shutdown=int(service.settings.grace),
        timeout_keep_alive=SLOW_SECONDS, h11_max_incomplete_event_size=2**16,
    )  # fmt: skip
    return Server(config, service.settings, service.say)


class _Addresses:
    """Those that need no turn of the engine."""

    def __init__(self, service: Service):
        self._service = service

    async def models(self, _: Call) -> Response:
        return JSONResponse(dict(object="list", data=[self._described()]))

    async def model(self, call: Call) -> Response:
        asked = call.path_params["name"]
        settings = self._service.settings
        if asked not in (settings.name, settings.model):
            why = f"the model {shown(asked)} is not served here, {settings.name!r} is"
            raise Refused(404, why, "model", "model_not_found")
        return JSONResponse(self._described())

    async def version(self, _: Call) -> Response:
        return JSONResponse(dict(version=__version__))

    async def health(self, _: Call) -> Response:
        why = self._service.ailing()
        return JSONResponse(dict(status=why or "ok"), 503 if why else 200)

    async def metrics(self, _: Call) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self, _: Call) -> Response:
        return HTMLResponse(PAGE, headers=HEADERS)

    async def responses(self, _: Call) -> Response:
        raise Refused(404, "/v1/responses is not served: use /v1/chat/completions")

    async def tokenizer_info(self, _: Call) -> Response:
        tokenizer = self._model().tokenizer
        names = dict.fromkeys(("bos_token", "eos_token", "pad_token")) | tokenizer.special_tokens
        return JSONResponse(names | dict(chat_template=tokenizer.chat_template))

    def _described(self) -> dict[str, Any]:
        one = dict(id=self._service.settings.name, object="model", created=0, owned_by="xinfer_jax")
        return one | dict(max_model_len=self._service.room)

    def _model(self) -> Any:
        if self._service.model is None:
            raise Refused(503, self._service.ailing())
        return self._service.model


class _Gate:
    """Names each request; turns away who may not ask, or asks under another name than ours."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service
        self._proxies = networks(service.settings.trusted_proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        call = Call(scope)
        settings = self._service.settings
        given = call.headers.get("x-request-id", "")
        name = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex[:16]
        scope.setdefault("state", {}).update(request_id=name, received=time.monotonic())

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        host = call.headers.get("host", "")
        refused = None
        if settings.host in LOCAL and not _LOCAL_NAME.fullmatch(host):
            refused = Refused(403, f"{shown(host)} is not a name of this server")
        elif scope["path"] not in _OPEN and not self._service.allowed(call):
            refused = Refused(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        elif call.client and is_within(peer := call.client.host, self._proxies):
            try:
                client = forwarded_client(peer, call.headers.getlist("x-forwarded-for"), self._proxies)
                scope["client"] = (client, 0)
            except InputError as error:
                refused = Refused(400, str(error))
        await (refused.response() if refused else self._app)(scope, receive, named)
