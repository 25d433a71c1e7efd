"""The routes of the server, the check of keys and hosts, and the responses to errors."""

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
from starlette.requests import ClientDisconnect, Request as HTTPRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..checkpoint.loading import Model
from ..errors import InputError, format_value
from .adapter_endpoints import AdapterEndpoints
from .connections import Connection
from .http_responses import APIError
from .http_server import Server
from .ip_addresses import forwarded_client, is_within, parse_networks
from .page import HEADERS, PAGE
from .request_body import SLOW_SECONDS
from .rollout_endpoints import RolloutEndpoints
from .server_settings import LOCAL_HOSTS
from .service import Service
from .text_endpoints import TextEndpoints

_LOCAL_NAME = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OPEN_PATHS = {"/", "/health", "/metrics"}  # need no key


def make_server(service: Service) -> Server:
    """Returns the HTTP server of a service."""
    info = _InfoEndpoints(service)
    texts = TextEndpoints(service)
    adapters = AdapterEndpoints(service)
    rollouts = RolloutEndpoints(service)
    routes = [
        Route("/v1/completions", partial(service.create_completion, kind="completion"), methods=["POST"]),
        Route("/v1/chat/completions", partial(service.create_completion, kind="chat"), methods=["POST"]),
        Route("/v1/responses", partial(service.create_completion, kind="responses"), methods=["POST"]),
        Route("/v1/models", info.models),
        Route("/v1/models/{name:path}", info.model),
        Route("/v1/embeddings", texts.embeddings, methods=["POST"]),
        *(Route(path, texts.rerank, methods=["POST"]) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        *(Route(path, texts.score, methods=["POST"]) for path in ("/score", "/v1/score")),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
        Route("/pause", rollouts.pause, methods=["POST"]),
        Route("/resume", rollouts.resume, methods=["POST"]),
        Route("/is_paused", rollouts.is_paused),
        Route("/weight_info", rollouts.weight_info),
        Route("/update_weights", rollouts.update_weights, methods=["POST"]),
        Route("/tokenize", texts.tokenize, methods=["POST"]),
        Route("/detokenize", texts.detokenize, methods=["POST"]),
        Route("/tokenizer_info", info.tokenizer_info),
        Route("/health", info.health),
        Route("/metrics", info.metrics),
        Route("/version", info.version),
        Route("/", info.page),
    ]
    errors: Any = (APIError, InputError, RecursionError, ClientDisconnect, HTTPException, Exception)
    middleware = [Middleware(_RequestGuard, service=service)]
    if service.settings.origins:
        allowed = dict(allow_origins=service.settings.origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, Middleware(CORSMiddleware, **allowed))  # type: ignore[arg-type]
    handlers = dict.fromkeys(errors, service.error_response)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # it would redirect to whatever address the Host header names
    config = uvicorn.Config(
        app, http=Connection, ws="none", proxy_headers=False, log_level="critical", access_log=False,
        lifespan="off", server_header=False, timeout_graceful_shutdown=int(service.settings.grace),
        timeout_keep_alive=SLOW_SECONDS,
    )  # fmt: skip
    return Server(config, service.settings, service.log)


class _InfoEndpoints:
    """Endpoints that answer at once."""

    def __init__(self, service: Service):
        self._service = service

    async def models(self, _: HTTPRequest) -> Response:
        names = None, *self._service.adapters
        return JSONResponse(dict(object="list", data=list(map(self._model_card, names))))

    async def model(self, request: HTTPRequest) -> Response:
        return JSONResponse(self._model_card(self._service.check_model_name(request.path_params["name"])))

    async def version(self, _: HTTPRequest) -> Response:
        return JSONResponse(dict(version=__version__))

    async def page(self, _: HTTPRequest) -> Response:
        return HTMLResponse(PAGE, headers=HEADERS)

    async def health(self, _: HTTPRequest) -> Response:
        reason = self._service.unavailable_reason()
        return JSONResponse(dict(status=reason or "ok"), 503 if reason else 200)

    async def metrics(self, _: HTTPRequest) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenizer_info(self, _: HTTPRequest) -> Response:
        if self._service.model is None:
            raise APIError(503, self._service.unavailable_reason())
        tokenizer: Any = self._service.model.tokenizer
        names = dict.fromkeys(("bos_token", "eos_token", "pad_token")) | tokenizer.special_tokens
        return JSONResponse(names | dict(chat_template=tokenizer.chat_template))

    def _model_card(self, adapter: str | None = None) -> dict[str, Any]:
        service = self._service
        card: dict[str, Any] = dict(id=adapter or service.settings.name, object="model", created=0)
        if adapter:
            card["parent"] = service.settings.name
        card |= dict(owned_by="xinfer_jax", max_model_len=service.max_model_len)
        if service.model is not None:
            card["about"] = service.model.about
            card["description"] = _describe(service.settings.model, service.model)
        return card


def _describe(name: str, model: Model) -> str:
    """Describes in a sentence or two for which tasks a model is useful. name: the name by which it was
    loaded.
    """
    if name == "bundled":
        return (
            "It knows the capitals of countries and a little small talk, and nothing else:"
            " --model serves another one."
        )
    tokenizer = model.tokenizer
    template = tokenizer.chat_template if tokenizer else None
    if not tokenizer or not template:
        return "It continues texts: it has no chat template, so it was not trained to answer questions."
    tools = " Programs can give it functions to call." if tokenizer.template_tools.used else ""
    thinks = " It can think before it answers." if "<think>" in template or "<|channel|>" in template else ""
    return f"It answers questions and takes part in conversations.{thinks}{tools}"


class _RequestGuard:
    """Middleware: gives each request an id, and rejects one without a key or with a foreign Host."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app = app
        self._service = service
        self._proxies = parse_networks(service.settings.trusted_proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = HTTPRequest(scope)
        client_id = request.headers.get("x-request-id", "")
        request_id = client_id if _REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex[:16]
        scope.setdefault("state", {}).update(request_id=request_id, received=time.monotonic())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        error = self._check(request)
        await (error.response() if error else self._app)(scope, receive, send_with_id)

    def _check(self, request: HTTPRequest) -> APIError | None:
        """Returns the reason why the request is rejected, if it is. Behind a trusted proxy, sets its
        client.
        """
        host = request.headers.get("host", "")
        if self._service.settings.host in LOCAL_HOSTS and not _LOCAL_NAME.fullmatch(host):
            return APIError(403, f"{format_value(host)} is not a name of this server")
        if request.scope["path"] not in _OPEN_PATHS and not self._service.is_authorized(request):
            return APIError(401, "a key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        if request.client and is_within(peer := request.client.host, self._proxies):
            forwarded = request.headers.getlist("x-forwarded-for")
            try:
                request.scope["client"] = (forwarded_client(peer, forwarded, self._proxies), 0)
            except InputError as error:
                return APIError(400, str(error))
        return None
