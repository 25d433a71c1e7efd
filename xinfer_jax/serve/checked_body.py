"""Checks the body of a completion, a chat or a response, and reserves the room that its answers need."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..api.bodies import ParsedBody, StreamOptions, parse_request_body, pop_stream_options
from ..api.fields import BodyError
from ..api.grammar_fields import grammar_field
from ..api.responses_request import ResponsesRequest, errors_of_chat, parse_responses_request
from ..api.routed_experts import FIELD as ROUTED_EXPERTS, check_recorded
from ..errors import format_message
from .admission import count_answers, count_tokens
from .served_request import ServedRequest

if TYPE_CHECKING:
    from .service import Service


class CheckedBody(NamedTuple):
    """A body after its checks."""

    parsed: ParsedBody  # of /v1/responses: as a chat
    stream: StreamOptions
    grammar_field: str  # that the grammar of the answer is from
    responses: ResponsesRequest | None  # None: the body is of another API


def check_body(service: "Service", served: ServedRequest, kind: str, data: list[bytes]) -> CheckedBody:
    """Checks a body and reserves its answers and tokens. Takes long, so it runs in a thread.

    Args:
        service: the service that answers it.
        served: the request.
        kind: "completion", "chat" or "responses".
        data: the bytes of the body. The list is emptied.

    Raises:
        BodyError, APIError: the body cannot be served, or a limit is reached.
    """
    body = service.load_body(data, None if kind == "responses" else "prompt")
    adapter = service.check_model(body)
    stream = pop_stream_options(body)
    if kind != "responses":
        parsed = _parse(service, served, kind, body, stream)
        checked = CheckedBody(parsed, stream, grammar_field(body), None)
    else:
        request = parse_responses_request(body)
        with errors_of_chat():
            parsed = _parse(service, served, "chat", request.chat, stream)
        checked = CheckedBody(parsed, stream, grammar_field(request.chat), request)
    parsed.request_options = dataclasses.replace(parsed.request_options, adapter=adapter)
    return checked


def _parse(
    service: "Service", served: ServedRequest, kind: str, body: Mapping[str, Any], stream: StreamOptions
) -> ParsedBody:
    assert service.model is not None and service.engine is not None
    reservation = served.reservation
    settings = service.settings
    how: Any = dict(check=reservation.check, stop_in_reasoning=settings.stop_in_reasoning)
    most = service.engine.usable_capacity
    parsed = parse_request_body(service.model, kind, body, service.defaults, most, settings.escape, **how)
    if unknown := [*parsed.unknown_fields, *stream.unknown_fields]:
        service.log(format_message(f"unknown fields: {', '.join(unknown)}"))
    if stream.streamed and parsed.options.best_of not in (None, parsed.options.n):
        raise BodyError("best_of", "best_of cannot be streamed: leave one of them out")
    if stream.streamed and parsed.routed_experts_start is not None:
        raise BodyError(ROUTED_EXPERTS, f"{ROUTED_EXPERTS} cannot be streamed: leave one of them out")
    check_recorded(parsed.routed_experts_start, service.engine.routed_experts)
    if parsed.seed is None:
        parsed.seed = _derive_seed(settings.seed, served.number)
    parsed.call_prefix = f"call_{served.request_id}_{served.number}"
    reservation.reserve(answers=count_answers(parsed), tokens=count_tokens(parsed), bytes=0)
    return parsed


def _derive_seed(server_seed: int, number: int) -> int:
    """Returns the seed of a request without one: 53 bits, which a JSON number holds in every client."""
    digest = hashlib.sha256(f"{server_seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 11
