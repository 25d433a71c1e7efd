"""Addresses that need the model and no engine: /tokenize, /detokenize, /v1/embeddings. They count towards a
client's limits like any other.
"""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import jax
from starlette.requests import Request as Call
from starlette.responses import Response

from ..api.fields import BodyError, Fields
from ..api.prompts import Prompts
from ..checkpoint.conversation import prompt_ids
from ..checkpoint.loading import Model
from ..checks import token_ids
from .admission import Refused, Ticket
from .embeddings import Inputs, embedded, read_inputs
from .formatting import encoded_list, encoded_object
from .offload import is_large
from .service import Service
from .streams import WholeResponse, before_leaving

_OF_A_PROMPT = {
    "model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs",
}  # fmt: skip


class Texts:
    """Of one server."""

    def __init__(self, service: Service):
        self._service = service

    async def tokenize(self, call: Call) -> Response:
        """The ids of a text, or of messages."""
        return await self._answered(call, lambda ticket, data: self._worked(ticket, data, self._ids_of))

    async def detokenize(self, call: Call) -> Response:
        """The text of ids."""
        return await self._answered(call, lambda ticket, data: self._worked(ticket, data, self._text_of))

    async def embeddings(self, call: Call) -> Response:
        """A vector for each text."""
        if jax.process_count() > 1:
            raise Refused(404, "/v1/embeddings is not served by a model over several processes")
        return await self._answered(call, self._embedded)

    async def _answered(
        self, call: Call, work: Callable[[Ticket, list[bytes]], Coroutine[Any, Any, bytes]]
    ) -> Response:
        """The JSON that the work makes of a body, unless the client leaves."""
        ticket = self._service.enter(call)
        try:
            data = [await self._service.body(call, ticket)]
            found = await before_leaving(work(ticket, data), call.receive)
        except BaseException:
            ticket.leave()
            raise
        return WholeResponse([found], ticket.leave, self._service.settings.stall_seconds)

    async def _worked(
        self, ticket: Ticket, data: list[bytes], work: Callable[[Model, dict[str, Any]], bytes]
    ) -> bytes:
        def run() -> bytes:
            body = {name: x for name, x in self._service.parse(data, None).items() if x is not None}
            self._service.check_model(body)
            found = work(self._model, body)
            ticket.hold(bytes=len(found))  # until the client has read it
            return found

        found: bytes = await self._service.offload.run(ticket.client, is_large(data), run)
        return found

    def _ids_of(self, model: Model, body: dict[str, Any]) -> bytes:
        assert model.tokenizer is not None
        _check_fields("/tokenize", body, _OF_A_PROMPT)
        chat = "messages" in body
        escape = self._service.settings.escape
        if not chat and not isinstance(body.get("prompt"), str):
            raise Refused(400, "a prompt is needed, a text, or messages", "prompt")
        limit = model.config.context_length if chat else 2**31  # a text may be as long as a body
        prompts = Prompts(
            Fields(body), "chat" if chat else "completion", partial(prompt_ids, model.tokenizer),
            model.tokenizer.chat_template, model.config.vocab_size, limit, escape,
        )  # fmt: skip
        (ids,) = prompts.ids(limit)
        return encoded_object(
            dict(count=len(ids), max_model_len=self._service.room), tokens=encoded_list(ids)
        )

    def _text_of(self, model: Model, body: dict[str, Any]) -> bytes:
        assert model.tokenizer is not None
        _check_fields("/detokenize", body, {"model", "tokens"})
        ids = token_ids("tokens", body.get("tokens"), model.config.vocab_size)
        return encoded_object(dict(prompt=model.tokenizer.decode(ids, False)))

    async def _embedded(self, ticket: Ticket, data: list[bytes]) -> bytes:
        service = self._service
        model = self._model

        def read() -> Inputs:
            body = service.parse(data, "input")
            service.check_model(body)
            inputs = read_inputs(model, body, service.room or 0)
            ticket.hold(tokens=inputs.tokens, bytes=0)
            return inputs

        inputs = await service.offload.run(ticket.client, is_large(data), read)
        return await embedded(model, inputs, service.offload, ticket.client, service.settings.name)

    @property
    def _model(self) -> Model:
        assert self._service.model is not None  # `enter` has looked
        return self._service.model


def _check_fields(path: str, body: dict[str, Any], known: set[str]) -> None:
    """Raises BodyError for a field that is not among those known."""
    if others := sorted(body.keys() - known):
        raise BodyError(others[0], f"{others[0]!r} is not a field of {path}: leave it out")
