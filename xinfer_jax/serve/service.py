"""What stands behind the addresses: the engine, and how a body becomes a response."""

import asyncio
import hashlib
import hmac
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import jax
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request as Call
from starlette.responses import Response

from ..api.bodies import Asked, read_body
from ..api.fields import BodyError, in_fields
from ..checkpoint.conversation import prompt_ids
from ..checkpoint.loading import Model
from ..engine.engines import AnyEngine, engine_of
from ..engine.requests import Request, news
from ..errors import InputError, NoTokenLeftError, one_line, shown
from ..generation.options import GenerateOptions
from ..sampling.choice import seeded
from .addresses import counted
from .admission import Admission, Refused, Ticket, answers_of, tokens_of
from .body_scan import parse_body
from .formatting import encoded_response
from .metrics import Metrics
from .offload import LARGE_TOKENS, Offload, is_large
from .settings import Settings
from .streams import EventStream, WholeResponse, before_leaving, check_ended, chunks
from .under_way import UnderWay, usage_of

_GZIP = b"\x1f\x8b"  # what a gzip file begins with
SLOW_SECONDS = 30  # that the head or the body of a request may take to come
_GONE = 499  # nobody reads it


class Service:
    """A model that answers.

    Attributes:
        engine: None: it is not ready.
        broken: why it never will be.
        admission: what clients have under way.
        offload: where heavy work runs.
    """

    def __init__(self, settings: Settings, say: Callable[[str], None]):
        """say: takes the lines of the log."""
        self.settings = settings
        self.say = say
        self.broken = ""
        self.closing = False
        self.model: Model | None = None
        self.engine: AnyEngine | None = None
        self.metrics = Metrics(settings.name)
        self.admission = Admission(settings)
        self.offload = Offload()
        self._numbers = itertools.count(1)
        self._defaults = GenerateOptions()

    def start(self, model: Model, defaults: GenerateOptions) -> None:
        """Takes the model, and warms up: `ready` afterwards."""
        if model.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer.json: it cannot be served")
        self.model = model
        self.tokenizer = model.tokenizer
        self._defaults = defaults
        self.engine = engine_of(model, **self.settings.shape).__enter__()
        self.admission.rows = self.engine.rows
        self.metrics.watch(self.engine)

    @property
    def room(self) -> int | None:
        """Tokens of a prompt and its answer; None: not known yet."""
        return self.engine.room if self.engine else None

    @property
    def open(self) -> Counter[str]:
        """Answers of each client that have not ended, and requests of which no more is known yet."""
        return self.admission.used["answers"]

    async def failed(self, call: Call, error: Exception) -> Response:
        """The response to an error, and its line of the log."""
        found = self.refusal(error)
        if found.status != _GONE:  # of whom another line tells
            who = f"{call.state.request_id} {call.method} {quote(call.scope['path'])}"
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
        received = call.state.received
        ticket = self.enter(call)
        under_way = UnderWay(self, call.state.request_id, ticket, next(self._numbers), received)
        try:
            data = [await self.body(call, ticket)]
            return await before_leaving(self._answered(under_way, kind, data), call.receive)
        except BaseException as error:
            under_way.end()
            if not isinstance(error, Exception):
                raise
            raise self.refusal(error, bool(under_way.requests)) from error

    async def _answered(self, under_way: UnderWay, kind: str, data: list[bytes]) -> Response:
        client = under_way.ticket.client
        prepare = partial(self._prepare, under_way, kind, data)
        asked, streamed, with_usage, opened = await self.offload.run(client, is_large(data), prepare)
        requests = under_way.requests
        head: dict[str, Any] = dict(created=int(time.time()), model=self.settings.name, seed=asked.seed)
        head["id"] = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{under_way.name}"
        if streamed:
            last = partial(usage_of, asked, requests) if with_usage else None
            events = chunks(asked, requests, self.tokenizer, last, head, opened)
            return EventStream(events, under_way.end, self.settings.stall_seconds)
        await _ended(requests)
        format_all = partial(self._format, asked, under_way, opened, head)
        large = under_way.ticket.held["tokens"] > LARGE_TOKENS
        parts = [await self.offload.run(client, large, format_all)]
        return WholeResponse(parts, under_way.end, self.settings.stall_seconds)

    def _prepare(self, under_way: UnderWay, kind: str, data: list[bytes]) -> tuple[Asked, bool, bool, bool]:
        """The body checked, and submitted to the engine; whether it is streamed, with usage at its end, and
        whether the prompt has begun a thought. In a thread.
        """
        assert self.engine is not None
        ticket = under_way.ticket
        settings = self.settings
        body = self.parse(data)
        asked, streamed, with_usage = self._read(kind, body, ticket)
        if asked.seed is None:
            asked.seed = _drawn_seed(settings.seed, under_way.number)
        ticket.hold(answers=answers_of(asked), tokens=tokens_of(asked), bytes=0)
        if ticket.left:
            raise ClientDisconnect
        key = seeded(asked.seed)
        keys = [jax.random.fold_in(key, i) if i else key for i in range(len(asked.prompts))]
        submit = asked.submit | dict(deadline=settings.deadline or None, client=ticket.client)
        submit["priority"] = min(0, submit["priority"])  # nobody says to be more urgent
        if settings.api_keys and not settings.share_prefixes:
            submit["salt"] = f"{ticket.client}:{submit['salt']}"
        submit["received"] = under_way.received
        under_way.begin(asked, self.engine.submit_many(asked.prompts, asked.options, keys=keys, **submit))
        return asked, streamed, with_usage, kind == "chat" and self._opens(asked.prompts[0])

    def parse(self, data: list[bytes], list_name: str | None = "prompt") -> dict[str, Any]:
        """The body, whose bytes are given up."""
        assert self.engine is not None
        body = parse_body(data[0], self.engine.room, self.settings.max_body_bytes, list_name)
        data.clear()
        return body

    def _format(self, asked: Asked, under_way: UnderWay, opened: bool, head: dict[str, Any]) -> bytes:
        """The response, in a thread."""
        requests = under_way.requests

        def check() -> None:
            if under_way.ticket.left:
                raise ClientDisconnect

        for request in requests:
            for answer in request.answers:
                check_ended(answer)
        outs = [request.result() for request in requests]
        noted = [request.prompt_logprobs for request in requests]
        more = dict(head, usage=usage_of(asked, requests))
        return encoded_response(asked, outs, noted, self.tokenizer, opened, check, **more)

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
        known = isinstance(error, NoTokenLeftError) or isinstance(error, InputError) and not begun
        status = 400 if known else 500
        if self.engine is not None and not self.engine.alive:
            status = 503
        why = in_fields(one_line(error)) or type(error).__name__
        return Refused(status, why, getattr(error, "param", None), getattr(error, "code", None))

    async def body(self, call: Call, ticket: Ticket) -> bytes:
        """The bytes of a JSON body, held by the ticket."""
        if call.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise Refused(415, "the body must be application/json")
        if (encoding := call.headers.get("content-encoding", "identity").strip().lower()) != "identity":
            raise Refused(415, f"content-encoding {shown(encoding)}: send the body uncompressed")
        most = self.settings.max_body_bytes
        told = call.headers.get("content-length", "")
        if told.isdecimal() and int(told[:20]) > most:
            raise Refused(413, f"the body has {told[:20]} bytes: send at most {most}")
        data = bytearray()
        try:
            async with asyncio.timeout(SLOW_SECONDS):
                async for part in call.stream():
                    data += part
                    if len(data) > most:
                        raise Refused(413, f"the body has more than {most} bytes: send at most so many")
                    ticket.hold(bytes=len(data))
        except TimeoutError as error:
            raise Refused(408, f"the body took more than {SLOW_SECONDS} seconds to come") from error
        if data.startswith(_GZIP):
            raise Refused(415, "the body is compressed by gzip: send it uncompressed")
        return bytes(data)

    def _read(self, kind: str, body: dict[str, Any], ticket: Ticket) -> tuple[Asked, bool, bool]:
        """The body checked; whether it is streamed, and with usage at its end."""
        assert self.model is not None and self.engine is not None
        self.check_model(body)
        options = body.pop("stream_options", None)
        streamed = body.pop("stream", None)
        if streamed not in (None, True, False):
            raise BodyError("stream", f"stream must be true or false, got {streamed!r}")
        if options is not None and not (isinstance(options, Mapping) and streamed):
            raise BodyError("stream_options", "stream_options is an object, and needs stream: true beside it")
        if {*(options or {})} - {"include_usage"}:
            raise BodyError("stream_options", "stream_options has include_usage alone here: leave out others")
        with_usage = (options or {}).get("include_usage")
        if with_usage not in (None, True, False):
            raise BodyError("stream_options", f"include_usage must be true or false, got {shown(with_usage)}")

        def encode(prompt: Any, limit: int, **how: Any) -> list[int]:
            if ticket.left:  # the client has gone
                raise ClientDisconnect
            return prompt_ids(self.tokenizer, prompt, limit, **how)

        escape = self.settings.escape
        room = self.engine.room
        asked = read_body(self.model, kind, body, self._defaults, room, escape, encode)
        if asked.unknown:
            self.say(one_line(f"unknown fields: {', '.join(asked.unknown)}"))
        if streamed and asked.options.best_of not in (None, asked.options.n):
            raise BodyError("best_of", "best_of cannot be streamed: leave one of them out")
        return asked, bool(streamed), bool(with_usage)

    def check_model(self, body: dict[str, Any]) -> None:
        """Raises Refused where the body asks for another model."""
        settings = self.settings
        wanted = body.get("model") or self.settings.name
        if wanted not in (settings.name, settings.model):
            message = f"the model {shown(wanted)} is not served here, {settings.name!r} is"
            raise Refused(404, message, "model", "model_not_found")

    def enter(self, call: Call) -> Ticket:
        """A place for one request. Who asks is told by key, or else by address.

        Raises:
            Refused: the server cannot answer now, or the client has too much under way.
        """
        if why := self.ailing():
            raise Refused(503, why)
        address = counted(call.client.host) if call.client else ""
        return self.admission.enter(
            hashlib.sha256(_key(call)).hexdigest()[:32] if self.settings.api_keys else address
        )

    def allowed(self, call: Call) -> bool:
        """Whether the caller has the key, if there is one."""
        keys = self.settings.api_keys
        return not keys or any([hmac.compare_digest(_key(call), key) for key in keys])

    def _opens(self, ids: Sequence[int]) -> bool:
        """Whether the prompt has begun a thought."""
        return self.tokenizer.decode(ids[-8:], skip_special_tokens=False).rstrip().endswith("<think>")


async def _ended(requests: Sequence[Request]) -> None:
    left = list(requests)
    async for _ in news(requests):
        while left and left[-1].ended:  # each is looked at once after it has ended
            left.pop()
        if not left:
            return


def _drawn_seed(server_seed: int, number: int) -> int:
    """Of a request without one: 53 bits, which JSON numbers of every client hold."""
    digest = hashlib.sha256(f"{server_seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 11


def _key(call: Call) -> bytes:
    """The key that came; b"": none."""
    scheme, _, key = call.headers.get("authorization", "").partition(" ")
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""  # bytes as they came
