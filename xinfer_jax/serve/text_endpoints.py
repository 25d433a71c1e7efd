"""Endpoints that need the model but no engine: /tokenize, /detokenize, /v1/embeddings. The limits of clients
hold here too.
"""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import jax
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from ..api.fields import BodyError, Fields
from ..api.prompts import PromptEncoder
from ..api.tool_fields import parse_tools
from ..checkpoint.conversation import prompt_ids
from ..checkpoint.loading import Model
from ..checks import check_token_ids
from .admission import Reservation
from .api_errors import APIError
from .embedding_requests import EmbeddingInputs, create_embeddings, parse_embedding_inputs
from .http_responses import JSONBodyResponse, until_disconnect
from .json_encoding import list_to_json, object_to_json
from .request_body import receive_body
from .service import Service
from .worker_pool import is_large

_TOKENIZE_FIELDS = {
    "model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs", "reasoning_effort",
}  # fmt: skip


class TextEndpoints:
    """The endpoints of one server."""

    def __init__(self, service: Service):
        self._service = service

    async def tokenize(self, request: HTTPRequest) -> Response:
        """The token ids of a text, or of messages."""
        return await self._respond(request, partial(self._run, work=self._tokenize))

    async def detokenize(self, request: HTTPRequest) -> Response:
        """The text of token ids."""
        return await self._respond(request, partial(self._run, work=self._detokenize))

    async def embeddings(self, request: HTTPRequest) -> Response:
        """A vector for each text."""
        if jax.process_count() > 1:
            raise APIError(404, "/v1/embeddings is not served by a model over several processes")
        return await self._respond(request, self._embed)

    async def _respond(
        self,
        request: HTTPRequest,
        work: Callable[[Reservation, list[bytes]], Coroutine[Any, Any, bytes]],
    ) -> Response:
        """Sends the JSON that the work makes of a body, unless the client disconnects."""
        settings = self._service.settings
        reservation = self._service.admit(request)
        try:
            data = [await receive_body(request, reservation, settings.max_body_bytes)]
            body = await until_disconnect(work(reservation, data), request.receive)
        except BaseException:
            reservation.release()
            raise
        return JSONBodyResponse(body, reservation.release, settings.stall_seconds)

    async def _run(
        self,
        reservation: Reservation,
        data: list[bytes],
        work: Callable[[Model, dict[str, Any]], bytes],
    ) -> bytes:
        """Runs the work on a parsed body in a thread."""

        def run() -> bytes:
            body = {name: x for name, x in self._service.load_body(data, None).items() if x is not None}
            self._service.check_model(body)
            response = work(self._model, body)
            reservation.reserve(bytes=len(response))  # until the client has read it
            return response

        response: bytes = await self._service.workers.run(reservation.client, is_large(data), run)
        return response

    def _tokenize(self, model: Model, body: dict[str, Any]) -> bytes:
        assert model.tokenizer is not None
        chat = "messages" in body
        _check_known("/tokenize", body, _TOKENIZE_FIELDS | ({"tools"} if chat else set()))
        escape = self._service.settings.escape
        if not chat and not isinstance(body.get("prompt"), str):
            raise APIError(400, "the body needs a prompt, which is a text, or messages", "prompt")
        tools = parse_tools(Fields(body), model.tokenizer)
        limit = model.config.context_length if chat else 2**31  # only the body's size limits a text
        prompts = PromptEncoder(
            Fields(body), "chat" if chat else "completion", partial(prompt_ids, model.tokenizer),
            tools.tools if tools else None, model.config.vocab_size, limit, escape,
        )  # fmt: skip
        (ids,) = prompts.encode(limit)
        head = dict(count=len(ids), max_model_len=self._service.max_model_len)
        return object_to_json(head, tokens=list_to_json(ids))

    def _detokenize(self, model: Model, body: dict[str, Any]) -> bytes:
        assert model.tokenizer is not None
        _check_known("/detokenize", body, {"model", "tokens"})
        ids = check_token_ids("tokens", body.get("tokens"), model.config.vocab_size)
        return object_to_json(dict(prompt=model.tokenizer.decode(ids, False)))

    async def _embed(self, reservation: Reservation, data: list[bytes]) -> bytes:
        service = self._service
        model = self._model

        def parse() -> EmbeddingInputs:
            body = service.load_body(data, "input")
            service.check_model(body)
            inputs = parse_embedding_inputs(model, body, service.max_model_len or 0)
            reservation.reserve(tokens=inputs.tokens, bytes=0)
            return inputs

        client = reservation.client
        inputs = await service.workers.run(client, is_large(data), parse)
        return await create_embeddings(model, inputs, service.workers, client, service.settings.name)

    @property
    def _model(self) -> Model:
        assert self._service.model is not None  # `admit` has checked it
        return self._service.model


def _check_known(path: str, body: dict[str, Any], known: set[str]) -> None:
    """Raises BodyError for a field that is not known."""
    if others := sorted(body.keys() - known):
        raise BodyError(others[0], f"{others[0]!r} is not a field of {path}: leave it out")
