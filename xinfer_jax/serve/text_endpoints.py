"""Endpoints that need the model but no engine: /tokenize, /detokenize, /v1/embeddings, /v1/rerank. The limits
of clients hold here too.
"""

import base64
import uuid
from collections.abc import Callable, Coroutine, Iterator
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
from ..embedding import POOLINGS, answer_scores, embed_texts, no_yes_ids, rerank_token_ids, text_token_ids
from ..errors import InputError, format_value
from ..generation.executor import bucket
from .admission import Reservation
from .http_responses import APIError, json_response, until_disconnect
from .json_encoding import embeddings_to_json, list_to_json, object_to_json, to_json
from .request_body import receive_body
from .service import Service
from .worker_pool import is_large

_TOKENIZE_FIELDS = {
    "model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs", "reasoning_effort",
}  # fmt: skip
_EMBEDDING_FIELDS = {"input", "model", "encoding_format", "dimensions", "pooling", "user"}
_RERANK_FIELDS = {"model", "query", "documents", "top_n", "instruction", "user"}
_MAX_INPUTS = 2048  # texts of a request: the OpenAI API's limit
_BATCH_TOKENS = 512  # with padding; the engine and other clients' batches run between two batches


class TextEndpoints:
    """The endpoints of one server."""

    def __init__(self, service: Service):
        self._service = service

    async def tokenize(self, request: HTTPRequest) -> Response:
        """The token ids of a text, or of messages."""
        return await self._respond(request, partial(self._run, self._tokenize))

    async def detokenize(self, request: HTTPRequest) -> Response:
        """The text of token ids."""
        return await self._respond(request, partial(self._run, self._detokenize))

    async def embeddings(self, request: HTTPRequest) -> Response:
        """A vector for each text."""
        self._check_one_process("/v1/embeddings")
        return await self._respond(request, self._embed)

    async def rerank(self, request: HTTPRequest) -> Response:
        """Documents, those first that answer a query best."""
        self._check_one_process("/v1/rerank")
        return await self._respond(request, self._rerank)

    def _check_one_process(self, path: str) -> None:
        if jax.process_count() > 1:
            raise APIError(404, f"{path} is not served by a model over several processes")

    async def _respond(
        self, request: HTTPRequest, work: Callable[..., Coroutine[Any, Any, bytes]]
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
        return json_response(body, reservation.release, settings.stall_seconds)

    async def _run(
        self, work: Callable[[Model, dict[str, Any]], bytes], reservation: Reservation, data: list[bytes]
    ) -> bytes:
        """Runs the work on a parsed body in a thread."""

        def run() -> bytes:
            response = work(self._model, self._body(data, None))
            reservation.reserve(bytes=len(response))  # until the client has read it
            return response

        response: bytes = await self._service.workers.run(reservation.client, is_large(data), run)
        return response

    def _body(self, data: list[bytes], list_name: str | None) -> dict[str, Any]:
        """The fields of a body that are not null."""
        body = self._service.load_body(data, list_name)
        if self._service.check_model(body) and list_name is not None:
            raise BodyError("model", "vectors and ranks are those of the model without an adapter: name that")
        return {name: value for name, value in body.items() if value is not None}

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
        """Computes the vectors in batches, of which only one of all clients runs at a time."""
        model = self._model
        service = self._service
        client = reservation.client

        def parse() -> tuple[list[list[int]], str | None, bool]:
            body = self._body(data, "input")
            found = _parse_embedding(model, body, service.max_model_len or 0)
            numbers = len(found[0]) * model.config.hidden_size
            reservation.reserve(tokens=sum(map(len, found[0])) + numbers // 4, bytes=0)
            return found

        texts, *how = await service.workers.run(client, is_large(data), parse)
        vectors = list[bytes]()
        for batch in _batches(texts):
            work = partial(_embed, model, batch, *how)
            vectors += await service.workers.run(client, True, work, exclusive=True)
        return embeddings_to_json(iter(vectors), service.settings.name, sum(map(len, texts)))

    async def _rerank(self, reservation: Reservation, data: list[bytes]) -> bytes:
        """Computes the scores in batches, of which only one of all clients runs at a time."""
        model = self._model
        workers = self._service.workers
        client = reservation.client

        def parse() -> tuple[list[list[int]], list[str], int]:
            found = _parse_rerank(model, self._body(data, "documents"))
            reservation.reserve(tokens=sum(map(len, found[0])), bytes=sum(map(len, found[1])))
            return found

        rows, documents, top = await workers.run(client, is_large(data), parse)
        scores = list[float]()
        for batch in _batches(rows):
            found = await workers.run(client, True, partial(answer_scores, model, batch), exclusive=True)
            scores += found.tolist()
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[:top]
        results = [dict(index=i, document=dict(text=documents[i]), relevance_score=scores[i]) for i in best]
        head = dict(id=f"rerank-{uuid.uuid4().hex}", model=self._service.settings.name)
        return to_json(head | dict(usage=dict(total_tokens=sum(map(len, rows))), results=results))

    @property
    def _model(self) -> Model:
        assert self._service.model is not None  # `admit` has checked it
        return self._service.model


def _check_known(path: str, body: dict[str, Any], known: set[str], model: Model | None = None) -> None:
    """Raises BodyError for a field that is not known. model: that must have weights in this process."""
    if model is not None and not isinstance(model.params["final_norm"], jax.Array):
        raise APIError(404, f"{path} is not served by a process without weights")
    if others := sorted(body.keys() - known):
        raise BodyError(others[0], f"{format_value(others[0])} is not a field of {path}: leave it out")


def _parse_embedding(
    model: Model, body: dict[str, Any], max_length: int
) -> tuple[list[list[int]], str | None, bool]:
    """Token ids of each text, of at most `max_length`; the pooling; whether vectors are encoded in base64."""
    _check_known("/v1/embeddings", body, _EMBEDDING_FIELDS, model)
    if "dimensions" in body:
        raise BodyError("dimensions", "dimensions is not served here: leave it out for whole vectors")
    encoding = body.get("encoding_format", "float")
    pooling = body.get("pooling")
    choices = (("encoding_format", encoding, ("float", "base64")), ("pooling", pooling, (None, *POOLINGS)))
    for name, value, known in choices:
        if value not in known:
            shown = ", ".join(filter(None, known))
            raise BodyError(name, f"{name} must be one of {shown}, got {format_value(value)}")
    inputs = body.get("input")
    if isinstance(inputs, str) or isinstance(inputs, list) and inputs and type(inputs[0]) is int:
        inputs = [inputs]
    if not isinstance(inputs, list) or not 0 < len(inputs) <= _MAX_INPUTS:
        wanted = f"a text, token ids, or a list of 1 to {_MAX_INPUTS} of them"
        raise BodyError("input", f"input must be {wanted}, got {format_value(inputs)}")
    try:
        texts = [text_token_ids("an input", text, model, max_length) for text in inputs]
    except InputError as error:
        raise BodyError("input", error) from error
    return texts, pooling, encoding == "base64"


def _parse_rerank(model: Model, body: dict[str, Any]) -> tuple[list[list[int]], list[str], int]:
    """Token ids of each question; the documents; how many of them are returned."""
    _check_known("/v1/rerank", body, _RERANK_FIELDS, model)
    documents = body.get("documents")
    if not isinstance(documents, list) or not 0 < len(documents) <= _MAX_INPUTS:
        wanted = f"a list of 1 to {_MAX_INPUTS} texts"
        raise BodyError("documents", f"documents must be {wanted}, got {format_value(documents)}")
    top = body.get("top_n", len(documents))
    if type(top) is not int or top < 1:
        raise BodyError("top_n", f"top_n must be a whole number from 1 on, got {format_value(top)}")
    for name in ("query", "instruction"):
        if not isinstance(body.get(name, ""), str) or name == "query" and name not in body:
            raise BodyError(name, f"{name} must be a text, got {format_value(body.get(name))}")
    asked = (body["query"], body.get("instruction"))
    try:
        no_yes_ids(model)
        rows = [rerank_token_ids("a document", model, asked[0], text, asked[1]) for text in documents]
    except InputError as error:
        raise BodyError("documents", error) from error
    return rows, documents, top


def _batches(texts: list[list[int]]) -> Iterator[list[list[int]]]:
    batch: list[list[int]] = []
    tokens = 0
    for ids in texts:
        tokens += bucket(len(ids))
        if batch and tokens > _BATCH_TOKENS:
            yield batch
            batch = []
            tokens = bucket(len(ids))
        batch.append(ids)
    yield batch


def _embed(model: Model, texts: list[list[int]], pooling: str | None, as_base64: bool) -> list[bytes]:
    vectors_ND = embed_texts(model, texts, pooling=pooling)
    if as_base64:
        return [to_json(base64.b64encode(vector.tobytes()).decode()) for vector in vectors_ND.astype("<f4")]
    return [to_json(vector.tolist()) for vector in vectors_ND]
