"""Endpoints that need the model but no engine: /tokenize, /detokenize, /v1/embeddings, /rerank, /score. The
limits of clients hold here too.
"""

import base64
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import jax
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from ..api.embedding_body import EMBEDDING_FIELDS, EmbeddingBody, parse_embedding_body
from ..api.fields import BodyError, Fields
from ..api.prompts import PromptEncoder
from ..api.rerank_body import (
    RERANK_FIELDS,
    SCORE_FIELDS,
    Pairs,
    RerankBody,
    parse_pairs_body,
    parse_rerank_body,
    score_list_name,
)
from ..api.tool_fields import parse_tools
from ..checkpoint.loading import Model
from ..checks import check_token_ids
from ..embedding import embed_texts
from ..errors import format_value
from ..generation.executor import bucket
from ..reranking import answer_scores
from ..tokenization.conversation import prompt_ids
from .admission import Reservation
from .http_responses import APIError, json_response, until_disconnect
from .json_encoding import embeddings_to_json, list_to_json, object_to_json, objects_to_json, to_json
from .request_body import receive_body
from .service import Service
from .worker_pool import LARGE_TOKENS, is_large

_TOKENIZE_FIELDS = {
    "model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message",
    "chat_template_kwargs", "reasoning_effort",
}  # fmt: skip
_BATCH_TOKENS = 512  # with padding; the engine and other clients' batches run between two batches


class TextEndpoints:
    """The endpoints of one server."""

    def __init__(self, service: Service):
        self._service = service

    async def tokenize(self, request: HTTPRequest) -> Response:
        """Returns the token ids of a text, or of messages."""
        return await self._respond(request, partial(self._run, self._tokenize))

    async def detokenize(self, request: HTTPRequest) -> Response:
        """Returns the text of token ids."""
        return await self._respond(request, partial(self._run, self._detokenize))

    async def embeddings(self, request: HTTPRequest) -> Response:
        """Returns a vector for each text."""
        self._check_one_process("/v1/embeddings")
        return await self._respond(request, self._embed)

    async def rerank(self, request: HTTPRequest) -> Response:
        """Sorts documents, with the ones first that answer a query best."""
        self._check_one_process("/rerank")
        return await self._respond(request, self._rerank)

    async def score(self, request: HTTPRequest) -> Response:
        """Scores how well each document answers a query. There is one query for all documents, or one for
        each.
        """
        self._check_one_process("/score")
        return await self._respond(request, self._score)

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
        """Returns the fields of a body that are not null."""
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
        parse = partial(parse_embedding_body, max_length=service.max_model_len or 0)
        body: EmbeddingBody = await self._parse(
            reservation, data, "/v1/embeddings", EMBEDDING_FIELDS, parse, "input"
        )
        reservation.reserve(bytes=0)
        lengths = [len(text) for text in body.texts]
        vectors = list[bytes]()
        for batch in _batches(lengths):
            work = partial(_embed, model, body, batch)
            vectors += await service.workers.run(reservation.client, True, work, exclusive=True)
        encode = partial(embeddings_to_json, iter(vectors), service.settings.name, sum(lengths))
        return await self._encode(reservation, encode)

    async def _rerank(self, reservation: Reservation, data: list[bytes]) -> bytes:
        body: RerankBody = await self._parse(
            reservation, data, "/rerank", RERANK_FIELDS, parse_rerank_body, "documents"
        )
        scores, usage = await self._scores(reservation, body.pairs)
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top]
        results: list[dict[str, Any]] = [dict(index=i, relevance_score=scores[i]) for i in best]
        if body.documents is not None:
            results = [one | dict(document=body.documents[one["index"]]) for one in results]
        head = dict(id=f"rerank-{uuid.uuid4().hex}", model=self._service.settings.name, usage=usage)
        return await self._encode(reservation, partial(objects_to_json, head, "results", results))

    async def _score(self, reservation: Reservation, data: list[bytes]) -> bytes:
        list_name = score_list_name(data[0])
        pairs: Pairs = await self._parse(
            reservation, data, "/score", SCORE_FIELDS, parse_pairs_body, list_name
        )
        scores, usage = await self._scores(reservation, pairs)
        found = [dict(index=i, object="score", score=score) for i, score in enumerate(scores)]
        head = dict(id=f"score-{uuid.uuid4().hex}", object="list", created=int(time.time()))
        head |= dict(model=self._service.settings.name, usage=usage)
        return await self._encode(reservation, partial(objects_to_json, head, "data", found))

    async def _parse(
        self,
        reservation: Reservation,
        data: list[bytes],
        path: str,
        known: set[str],
        parse: Callable[..., Any],
        list_name: str,
    ) -> Any:
        """Parses a body with `parse` in a thread. known: the known fields. list_name: the field that may hold
        many texts.
        """
        escape = self._service.settings.escape

        def run() -> Any:
            body = self._body(data, list_name)
            _check_known(path, body, known, self._model)
            count = lambda tokens: reservation.reserve(tokens=tokens)  # noqa: E731
            return parse(self._model, body, escape=escape, count=count)

        return await self._service.workers.run(reservation.client, is_large(data), run)

    async def _encode(self, reservation: Reservation, encode: Callable[[], bytes]) -> bytes:
        """Encodes a response in a thread."""
        large = reservation.amounts["tokens"] > LARGE_TOKENS
        response: bytes = await self._service.workers.run(reservation.client, large, encode)
        return response

    async def _scores(self, reservation: Reservation, pairs: Pairs) -> tuple[list[float], dict[str, int]]:
        """Computes the scores in batches, of which only one of all clients runs at a time. Returns the scores
        and the usage.
        """
        model = self._model
        lengths = pairs.lengths()
        scores = list[float]()
        for batch in _batches(lengths):
            work = lambda batch=batch: answer_scores(model, pairs.rows(batch)).tolist()  # noqa: E731
            scores += await self._service.workers.run(reservation.client, True, work, exclusive=True)
        return scores, dict.fromkeys(("prompt_tokens", "total_tokens"), sum(lengths))

    @property
    def _model(self) -> Model:
        assert self._service.model is not None  # `admit` has checked it
        return self._service.model


def _check_known(path: str, body: dict[str, Any], known: set[str], model: Model | None = None) -> None:
    """Raises BodyError for a field that is not known. model: the model, which must have weights in this
    process.
    """
    if model is not None and not isinstance(model.params["final_norm"], jax.Array):
        raise APIError(404, f"{path} is not served by a process without weights")
    if others := sorted(body.keys() - known):
        raise BodyError(others[0], f"{format_value(others[0])} is not a field of {path}: leave it out")


def _batches(lengths: list[int]) -> Iterator[slice]:
    start = tokens = 0
    for i, length in enumerate(lengths):
        tokens += bucket(length)
        if i > start and tokens > _BATCH_TOKENS:
            yield slice(start, i)
            start = i
            tokens = bucket(length)
    yield slice(start, len(lengths))


def _embed(model: Model, body: EmbeddingBody, batch: slice) -> list[bytes]:
    vectors_ND = embed_texts(model, body.texts[batch], pooling=body.pooling, dimensions=body.dimensions)
    if body.as_base64:
        return [to_json(base64.b64encode(vector.tobytes()).decode()) for vector in vectors_ND.astype("<f4")]
    return [to_json(vector.tolist()) for vector in vectors_ND]
