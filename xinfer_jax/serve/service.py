"""`Service`: the engine behind the routes, and how the body of a completion becomes a response."""

import dataclasses
import hashlib
import hmac
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request as HTTPRequest
from starlette.responses import Response

from ..api.bodies import ParsedBody
from ..api.fields import BodyError, with_field_names
from ..api.responses_request import errors_of_chat
from ..checkpoint.loading import Model
from ..checkpoint.model_defaults import options_of_model
from ..engine.engines import Engine
from ..engine.requests import Request, request_updates
from ..engine.row import HeldAdapter
from ..errors import GrammarError, InputError, NoTokenLeftError, format_message, format_value
from ..generation.options import GenerateOptions
from ..grammar.pool import GrammarPool
from ..sampling.random_keys import key_from_seed
from .admission import AdmissionControl, Reservation
from .checked_body import CheckedBody, check_body
from .chunks import check_answer, stream_chunks
from .http_responses import APIError, event_stream, json_response, typed_event_stream, until_disconnect
from .ip_addresses import address_group
from .json_encoding import response_to_json
from .metrics import Metrics
from .request_body import load_json_body, receive_body
from .responses_api import ResponsesAnswer
from .served_request import ServedRequest, usage_with_cached
from .server_settings import ServerSettings
from .worker_pool import LARGE_TOKENS, WorkerPool, is_large

# These need a key of an admin.
ADMIN_PATHS = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/pause",
    "/resume",
    "/is_paused",
    "/weight_info",
    "/update_weights",
)
_CLIENT_CLOSED_REQUEST = 499  # nginx's status; nobody receives it
_ID_PREFIXES = dict(completion="cmpl-", chat="chatcmpl-", responses="resp_")


class Service:
    """Answers HTTP requests for completions with one model."""

    def __init__(self, settings: ServerSettings, log: Callable[[str], None]):
        """Makes a service. log: a function that writes a line of the log."""
        self.settings = settings
        self.log = log
        self.load_error = ""  # why the model cannot be loaded
        self.closing = False
        self.engine: Engine | None = None  # until the model is loaded
        self.metrics = Metrics(settings.name)
        self.admission = AdmissionControl(settings)
        self.workers = WorkerPool()
        self._numbers = itertools.count(1)
        self.defaults = GenerateOptions()

    def start(self, model: Model, defaults: GenerateOptions, engine: Any = None) -> None:
        """Makes the engine, unless it is given. Afterwards the service can answer."""
        if model.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer.json: it cannot be served")
        self.tokenizer = model.tokenizer
        self.defaults = options_of_model(model, defaults)
        settings = self.settings
        self.engine = engine or Engine(model, settings.engine).__enter__()
        self.admission.rows = self.engine.rows
        self.grammars = GrammarPool(self.tokenizer, model.config.vocab_size)
        self.metrics.watch(self.engine)

    @property
    def model(self) -> Model | None:
        """The model with the weights of the last update. None: it is not loaded yet."""
        return self.engine.model if self.engine else None

    @property
    def max_model_len(self) -> int | None:
        """The maximum number of tokens of a prompt and its answer. None: not known yet."""
        return self.engine.usable_capacity if self.engine else None

    @property
    def in_flight(self) -> Counter[str]:
        """Returns, for each client, the number of its answers that have not ended. A complete body counts as
        one answer until it is parsed.
        """
        return self.admission.used["answers"]

    async def error_response(self, request: HTTPRequest, error: Exception) -> Response:
        """Logs an error and returns its response."""
        api_error = self.to_api_error(error)
        if api_error.status != _CLIENT_CLOSED_REQUEST:  # `ServedRequest` logs those
            name = f"{request.state.request_id} {request.method} {quote(request.scope['path'])}"
            self.log(format_message(f"{name}: {api_error.status} {api_error}"))
        return api_error.response()

    def close(self) -> None:
        """Closes the engine, and the processes of grammars."""
        if self.engine is not None:
            self.engine.close()
            self.grammars.close()

    def unavailable_reason(self) -> str:
        """Returns the reason why no request can be answered now. "": requests can be answered."""
        if self.load_error or self.engine is None:
            return self.load_error or "the model is being loaded: try again later"
        if self.closing:
            return "the server is shutting down"
        if self.engine.missing:
            return self.engine.missing
        for engine in self.engine.engines:
            if engine.error is not None:
                return f"{engine.name} has failed"
            if (silent := time.monotonic() - engine.last_step_time) > self.settings.stuck_seconds:
                return f"{engine.name} has made no step for {silent:.0f} seconds"
        return ""

    async def create_completion(self, http_request: HTTPRequest, kind: str) -> Response:
        """Answers a request for completions. kind: "completion", "chat" or "responses"."""
        reservation = self.admit(http_request)
        state = http_request.state
        number = next(self._numbers)
        served = ServedRequest(self, state.request_id, reservation, number, state.received)
        try:
            data = [await receive_body(http_request, reservation, self.settings.max_body_bytes)]
            return await until_disconnect(self._respond(served, kind, data), http_request.receive)
        except BaseException as error:
            served.finish()
            if not isinstance(error, Exception) or isinstance(error, APIError):
                raise
            raise self.to_api_error(error, bool(served.requests)) from error

    async def _respond(self, served: ServedRequest, kind: str, data: list[bytes]) -> Response:
        client = served.reservation.client
        large = is_large(data)
        body = await self.workers.run(client, large, partial(check_body, self, served, kind, data))
        with errors_of_chat() if body.responses else nullcontext():
            await self._compile_and_submit(served, body, large)
        parsed = body.parsed
        requests = served.requests
        own_id = f"{_ID_PREFIXES[kind]}{served.request_id}"
        name = requests[0].adapter.name if requests[0].adapter else self.settings.name
        head = dict(id=own_id, created=int(time.time()), model=name, seed=parsed.seed)
        answer = None
        if body.responses:
            answer = ResponsesAnswer(body.responses, parsed, self.tokenizer, head)
        if body.stream.streamed:
            return self._stream(served, body, head, answer)
        await _wait_until_ended(requests)
        format_response = partial(self._format, parsed, served, head, answer)
        large = served.reservation.amounts["tokens"] > LARGE_TOKENS
        encoded = await self.workers.run(client, large, format_response)
        return json_response(encoded, served.finish, self.settings.stall_seconds)

    async def _compile_and_submit(self, served: ServedRequest, body: CheckedBody, large: bool) -> None:
        client = served.reservation.client
        parsed = body.parsed
        if (grammar := parsed.options.grammar) is not None:
            try:
                grammar = await self.grammars.compile(client, grammar)  # type: ignore[arg-type]
            except GrammarError as error:
                raise BodyError(body.grammar_field, error) from error
            parsed.options = dataclasses.replace(parsed.options, grammar=grammar)
        await self.workers.run(client, large, partial(self._submit, served, parsed))

    def _stream(
        self, served: ServedRequest, body: CheckedBody, head: dict[str, Any], answer: ResponsesAnswer | None
    ) -> Response:
        requests = served.requests
        parsed = body.parsed
        stall_seconds = self.settings.stall_seconds
        usage = partial(usage_with_cached, parsed, requests)
        if answer is None:
            last = usage if body.stream.usage else None
            chunks = stream_chunks(parsed, requests, self.tokenizer, last, head, body.stream.continuous_usage)
            return event_stream(chunks, served.finish, stall_seconds)
        chunks = stream_chunks(parsed, requests, self.tokenizer, None, head)
        run = partial(self.workers.run, served.reservation.client, True)
        return typed_event_stream(answer.events(chunks, run, usage), served.finish, stall_seconds)

    def _submit(self, served: ServedRequest, parsed: ParsedBody) -> None:
        """Submits a body to the engine. Runs in a thread."""
        assert self.engine is not None and parsed.seed is not None
        reservation = served.reservation
        settings = self.settings
        reservation.check()
        asked = parsed.request_options
        own_salt = f"{reservation.client}:" if settings.api_keys and not settings.share_prefixes else ""
        asked = dataclasses.replace(
            asked,
            priority=min(0, asked.priority),  # a client may only lower its priority
            deadline=settings.deadline or None,
            salt=own_salt + asked.salt,
            client=reservation.client,
            received=served.received,
        )
        keys = parsed.keys(key_from_seed(parsed.seed))
        requests = self.engine.submit_many(parsed.prompts, parsed.options, asked, keys=keys)
        served.set_submitted(parsed, requests)

    def load_body(self, data: list[bytes], list_name: str | None = "prompt") -> dict[str, Any]:
        """Returns the JSON object of a body. Empties `data`, so that the bytes are freed."""
        assert self.engine is not None
        body = load_json_body(data[0], self.engine.usable_capacity, self.settings.max_body_bytes, list_name)
        data.clear()
        return body

    def _format(
        self, parsed: ParsedBody, served: ServedRequest, head: dict[str, Any], answer: ResponsesAnswer | None
    ) -> bytes:
        """Returns the body of the response. Runs in a thread."""
        requests = served.requests
        for request in requests:
            for one in request.answers:
                check_answer(one)
        outs = [request.result() for request in requests]
        prompt_logprobs = [request.prompt_logprobs for request in requests]
        usage = usage_with_cached(parsed, requests)
        if answer is not None:
            return answer.whole(outs[0], usage)
        head = dict(head, usage=usage)
        check = served.reservation.check
        return response_to_json(parsed, outs, prompt_logprobs, self.tokenizer, check, **head)

    def to_api_error(self, error: Exception, submitted: bool = False) -> APIError:
        """Converts any error. submitted: it came after the request was submitted to the engine."""
        if isinstance(error, APIError):
            return error
        if isinstance(error, ClientDisconnect):
            return APIError(_CLIENT_CLOSED_REQUEST, "the client has disconnected")
        if isinstance(error, HTTPException):
            return APIError(error.status_code, error.detail)
        if isinstance(error, RecursionError):
            error = InputError("the body is nested too deeply: send one that is flatter")
        invalid = isinstance(error, NoTokenLeftError) or isinstance(error, InputError) and not submitted
        status = 400 if invalid else 500
        if self.engine is not None and not self.engine.alive:
            status = 503
        message = format_message(with_field_names(error)) or type(error).__name__
        return APIError(status, message, getattr(error, "param", None), getattr(error, "code", None))

    def check_model(self, body: dict[str, Any]) -> str | None:
        """Returns the adapter that the body names as its model. None: it names the model, or nothing."""
        return self.check_model_name(body.get("model") or self.settings.name)

    def check_model_name(self, name: Any) -> str | None:
        """Returns the adapter of this name. None: it is the model's. Raises APIError if nothing has it."""
        settings = self.settings
        if name in (settings.name, settings.model):
            return None
        if isinstance(name, str) and name in self.adapters:
            return name
        message = f"the model {format_value(name)} is not served here, {settings.name!r} is"
        raise APIError(404, message, "model", "model_not_found")

    @property
    def adapters(self) -> Mapping[str, HeldAdapter]:
        """The adapters that requests may name as their model."""
        return self.engine.adapters if self.engine else {}

    def admit(self, request: HTTPRequest) -> Reservation:
        """Admits a request. Clients are distinguished by key, or without keys by address."""
        if reason := self.unavailable_reason():
            raise APIError(503, reason)
        client = address = address_group(request.client.host) if request.client else ""
        if self.settings.api_keys:
            client = hashlib.sha256(_key(request)).hexdigest()[:32]
        return self.admission.admit(client, address)

    def is_authorized(self, request: HTTPRequest) -> bool:
        """Returns True if the request has one of the keys, or if no key is needed."""
        keys = self.settings.api_keys
        if is_admin := request.scope["path"] in ADMIN_PATHS:
            keys = self.settings.admin_keys
        return not (keys or is_admin) or any([hmac.compare_digest(_key(request), key) for key in keys])


async def _wait_until_ended(requests: Sequence[Request]) -> None:
    left = list(requests)
    async for _ in request_updates(requests):
        while left and left[-1].ended:
            left.pop()
        if not left:
            return


def _key(request: HTTPRequest) -> bytes:
    """Returns the key of a request, or empty bytes if it has none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""  # the bytes as received
