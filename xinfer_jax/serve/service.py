"""What stands behind the addresses: the engine, who waits for it, and what of it is counted."""

import asyncio
import hmac
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request as Call
from starlette.responses import JSONResponse, Response

from ..api.bodies import Asked, BodyError, read_body
from ..api.responses import response, usage
from ..checkpoint.loading import Model
from ..engine.engines import AnyEngine, engine_of
from ..engine.requests import Request, news
from ..errors import InputError, one_line, shown
from ..generation.options import GenerateOptions
from ..sampling.choice import seeded
from .metrics import Metrics
from .settings import Settings
from .streams import EventStream, before_leaving, chunks

_BODY_BYTES = 2**24
SLOW_SECONDS = 30  # that the head or the body of a request may take to come
_GONE = 499  # nobody reads it
_STALL_SECONDS = 30.0  # that a client may take to read what is there


class Refused(Exception):
    """What is answered instead: a status, a message, and the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def response(self) -> Response:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = dict(message=str(self), type=kind, param=self.param, code=self.code)
        headers = {"retry-after": "1"} if self.status in (429, 503) else {}
        return JSONResponse(dict(error=error), self.status, headers)


class Service:
    """A model that answers.

    Attributes:
        engine: None: it is not ready.
        broken: why it never will be.
        open: requests that have not ended.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None]):
        """say: takes the lines of the log."""
        self.settings, self.say, self.broken, self.closing = settings, say, "", False
        self.model: Model | None = None
        self.engine: AnyEngine | None = None
        self.metrics, self.open = Metrics(settings.name), Counter[str]()
        self._numbers, self._defaults = itertools.count(1), GenerateOptions()

    def start(self, model: Model, defaults: GenerateOptions) -> None:
        """Takes the model, and warms up: `ready` afterwards."""
        if model.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer.json: it cannot be served")
        self.model, self.tokenizer, self._defaults = model, model.tokenizer, defaults
        self.engine = engine_of(model, **self.settings.shape).__enter__()
        self.metrics.watch(self.engine)

    @property
    def room(self) -> int | None:
        """Tokens of a prompt and its answer; None: not known yet."""
        return self.engine.room if self.engine else None

    async def failed(self, call: Call, error: Exception) -> Response:
        """The response to an error, and its line of the log."""
        found = self.refusal(error)
        if found.status != _GONE:  # of whom another line tells
            who = f"{call.state.request_id} {call.method} {call.scope['path']}"
            self.say(one_line(f"{who}: {found.status} {found}"))
        return found.response()

    def close(self) -> None:
        """Ends the engine."""
        if self.engine is not None:
            self.engine.close()

    def ailing(self) -> str:
        """Why nothing can be answered now; "": it can."""
        if self.broken or self.engine is None:
            return self.broken or "the model is being loaded: come again"
        if self.closing:
            return "the server is going down"
        for engine in self.engine.engines:
            if engine.error is not None:
                return f"{engine.name} broke down"
            if (silent := time.monotonic() - engine.last_turn) > self.settings.stuck_seconds:
                return f"{engine.name} has not moved for {silent:.0f} seconds"
        return ""

    async def answer(self, call: Call, kind: str) -> Response:
        """Answers a body; Refused where it cannot."""
        if why := self.ailing():
            raise Refused(503, why)
        under_way = _UnderWay(self, call, self._admitted(call), next(self._numbers))
        requests = under_way.requests
        try:
            body = await self.body(call)
            asked, streamed, with_usage = await asyncio.to_thread(self._read, kind, body)
            under_way.asked = asked
            opened = kind == "chat" and self._opens(asked.prompts[0])
            await self._submit(asked, under_way)
            head: dict[str, Any] = dict(created=int(time.time()), model=self.settings.name)
            head["id"] = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{call.state.request_id}"
            if streamed:
                last = partial(_usage, asked, requests) if with_usage else None
                events = chunks(asked, requests, self.tokenizer, last, head, opened)
                return EventStream(events, under_way.end, _STALL_SECONDS)
            if not await before_leaving(_ended(requests), call.receive):
                raise ClientDisconnect
            outs = [request.result() for request in requests]
            noted = [request.prompt_logprobs for request in requests]
            found = response(asked, outs, noted, self.tokenizer, opened, **head)
        except BaseException as error:
            under_way.end()
            if not isinstance(error, Exception):
                raise
            raise self.refusal(error, bool(requests)) from error
        under_way.end()
        return JSONResponse(found | dict(usage=_usage(asked, requests)))

    def refusal(self, error: Exception, begun: bool = False) -> Refused:
        """What to say of an error; begun: the engine has the request already."""
        if isinstance(error, Refused):
            return error
        if isinstance(error, ClientDisconnect):
            return Refused(_GONE, "the client has gone")
        if isinstance(error, HTTPException):
            return Refused(error.status_code, error.detail)
        if isinstance(error, RecursionError):
            error = InputError("the body is nested too deeply: send one that is flatter")
        status = 500 if begun or not isinstance(error, InputError) else 400
        if self.engine is not None and not self.engine.alive:
            status = 503
        return Refused(status, one_line(error) or type(error).__name__, getattr(error, "param", None))

    async def body(self, call: Call) -> dict[str, Any]:
        """The JSON object of a body."""
        if call.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise Refused(415, "the body must be application/json")
        data = bytearray()
        try:
            async with asyncio.timeout(SLOW_SECONDS):
                async for part in call.stream():
                    data += part
                    if len(data) > _BODY_BYTES:
                        raise Refused(413, f"the body has more than {_BODY_BYTES} bytes")
            body = json.loads(data.decode("utf-8"), parse_constant=_no_number)
        except TimeoutError as error:
            raise Refused(408, f"the body took more than {SLOW_SECONDS} seconds to come") from error
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not readable JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refused(400, "the body must be a JSON object")
        return body

    def _read(self, kind: str, body: dict[str, Any]) -> tuple[Asked, bool, bool]:
        """The body checked; whether it is streamed, and with usage at its end."""
        assert self.model is not None and self.engine is not None
        settings, wanted = self.settings, body.get("model") or self.settings.name
        if wanted not in (settings.name, settings.model):
            message = f"the model {shown(wanted)} is not served here, {settings.name!r} is"
            raise Refused(404, message, "model", "model_not_found")
        options = body.pop("stream_options", None)
        streamed = body.pop("stream", None)
        if streamed not in (None, True, False):
            raise BodyError("stream", f"stream must be true or false, got {streamed!r}")
        if options is not None and not (isinstance(options, Mapping) and streamed):
            raise BodyError("stream_options", "stream_options is an object, and needs stream: true beside it")
        asked = read_body(self.model, kind, body, self._defaults, self.engine.room, settings.escape)
        if asked.unknown:
            self.say(one_line(f"unknown fields: {', '.join(asked.unknown)}"))
        if streamed and asked.options.best_of not in (None, asked.options.n):
            raise BodyError("best_of", "best_of cannot be streamed: leave one of them out")
        return asked, bool(streamed), bool((options or {}).get("include_usage"))

    async def _submit(self, asked: Asked, under_way: "_UnderWay") -> None:
        assert self.engine is not None
        seed, requests, number = asked.seed, under_way.requests, under_way.number
        key = jax.random.fold_in(seeded(self.settings.seed), number) if seed is None else seeded(seed)
        submit, options = asked.submit | dict(deadline=self.settings.deadline or None), asked.options
        answers = options.best_of or options.n
        for i, prompt in enumerate(asked.prompts):
            # Who has much under way stands behind who has not, and nobody says to be more urgent; the engine
            # lets nobody wait for ever.
            if i:
                await asyncio.sleep(0)  # others are not kept waiting for a thousand prompts
            submit["priority"] = min(0, asked.submit["priority"]) - self.open[under_way.client] - i * answers
            own = jax.random.fold_in(key, i) if i else key
            requests.append(self.engine.submit(prompt, options, key=own, **submit))

    def _admitted(self, call: Call) -> str:
        """Who asks: by key, or else by address."""
        client = _key(call).hex() if self.settings.api_keys else call.client.host if call.client else ""
        if self.open[client] >= self.settings.max_waiting_per_client:
            raise Refused(429, f"{self.open[client]} requests of yours are under way: wait for one to end")
        assert self.engine is not None
        if self.open.total() >= self.settings.max_waiting + self.engine.rows:
            raise Refused(429, "too many requests wait: come again")
        return client

    def allowed(self, call: Call) -> bool:
        """Whether the caller has the key, if there is one."""
        keys = self.settings.api_keys
        return not keys or any([hmac.compare_digest(_key(call), key) for key in keys])

    def _opens(self, ids: Sequence[int]) -> bool:
        """Whether the prompt has begun a thought."""
        return self.tokenizer.decode(ids[-8:], skip_special_tokens=False).rstrip().endswith("<think>")


class _UnderWay:
    """One call, until it is answered or whoever asked has gone."""

    def __init__(self, service: Service, call: Call, client: str, number: int):
        self._service, self._call, self.client, self.number = service, call, client, number
        self._began, self._over = time.monotonic(), False
        service.open[client] += 1
        self.asked: Asked | None = None
        self.requests: list[Request] = []

    def end(self) -> None:
        """It is over; once is enough."""
        if self._over:
            return
        self._over, service = True, self._service
        service.open -= Counter([self.client])
        for request in self.requests:
            if not request.ended:
                request.cancel()
            service.metrics.ended(request)
        if self.asked is not None:
            service.say(f"{self._call.state.request_id} {self._said(self.asked)}")

    def _said(self, asked: Asked) -> str:
        answers = [answer for request in self.requests for answer in request.answers]
        read, chosen = sum(map(len, asked.prompts)), sum(len(answer.tokens) for answer in answers)
        firsts = [r.times["first"] - r.submitted for r in self.requests if "first" in r.times]
        first = f", first after {1e3 * min(firsts):.0f} ms" if firsts else ""
        own = f"server seed {self._service.settings.seed} number {self.number}"
        key = own if asked.seed is None else f"seed {asked.seed}"
        prompts = f", {asked.prompts}" if self._service.settings.log_prompts else ""
        reasons = ",".join(dict.fromkeys(answer.finish_reason or "gone" for answer in answers))
        seconds = time.monotonic() - self._began
        return f"{asked.kind}: {read} + {chosen} tokens in {seconds:.2f} s{first}, {reasons}, {key}{prompts}"


def _usage(asked: Asked, requests: Sequence[Request]) -> dict[str, Any]:
    cached = dict(cached_tokens=sum(request.answers[0].row.hits for request in requests))
    rows = [answer.logprobs for request in requests for answer in request.answers]
    return dict(usage(asked, rows), prompt_tokens_details=cached)


async def _ended(requests: Sequence[Request]) -> None:
    async for _ in news(requests):
        if all(request.ended for request in requests):
            return


def _key(call: Call) -> bytes:
    """The key that came; b"": none."""
    scheme, _, key = call.headers.get("authorization", "").partition(" ")
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""  # bytes as they came


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")
