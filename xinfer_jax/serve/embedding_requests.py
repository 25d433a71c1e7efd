"""/v1/embeddings: parses a body, and computes its vectors in batches. The engine runs between two batches."""

import base64
import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from ..api.fields import BodyError
from ..checkpoint.loading import Model
from ..embedding import POOLINGS, embed_texts, text_token_ids
from ..errors import InputError, format_value
from ..generation.executor import bucket
from .api_errors import APIError
from .json_encoding import embeddings_to_json, to_json
from .worker_pool import WorkerPool

_MAX_INPUTS = 2048  # the OpenAI API's limit
_BATCH_TOKENS = 512  # with padding; other clients' batches run between two batches
_FIELDS = {"input", "model", "encoding_format", "dimensions", "pooling", "user"}


@dataclasses.dataclass
class EmbeddingInputs:
    """A parsed body.

    Attributes:
        texts: token ids of each text.
        pooling: as in `embed_texts`.
        base64: encode vectors as float32 in base64, not as lists of numbers.
        tokens: to reserve: those of the texts, and one for every four numbers of the vectors.
    """

    texts: list[list[int]]
    pooling: str
    base64: bool
    tokens: int


def parse_embedding_inputs(model: Model, body: Mapping[str, Any], max_length: int) -> EmbeddingInputs:
    """Checks a body, and tokenizes its texts, of at most `max_length` tokens each.

    Raises:
        APIError: the model has no weights here.
        BodyError: with the field at fault.
    """
    if not isinstance(model.params["final_norm"], jax.Array):
        raise APIError(404, "/v1/embeddings is not served by a process without weights")
    given = {name: value for name, value in body.items() if value is not None}
    if others := given.keys() - _FIELDS:
        name = sorted(others)[0]
        raise BodyError(name, f"{format_value(name)} is not a field of /v1/embeddings: leave it out")
    if "dimensions" in given:
        raise BodyError("dimensions", "dimensions is not served here: leave it out for whole vectors")
    encoding = given.get("encoding_format", "float")
    pooling = given.get("pooling", "mean")
    for name, value, known in (
        ("encoding_format", encoding, ("float", "base64")),
        ("pooling", pooling, POOLINGS),
    ):
        if value not in known:
            raise BodyError(name, f"{name} must be one of {', '.join(known)}, got {format_value(value)}")
    inputs = given.get("input")
    if isinstance(inputs, str) or isinstance(inputs, list) and inputs and type(inputs[0]) is int:
        inputs = [inputs]
    if not isinstance(inputs, list) or not 0 < len(inputs) <= _MAX_INPUTS:
        raise BodyError(
            "input",
            f"input must be a text, token ids, or a list of 1 to {_MAX_INPUTS} of them,"
            f" got {format_value(inputs)}",
        )
    try:
        texts = [text_token_ids("an input", text, model, max_length) for text in inputs]
    except InputError as error:
        raise BodyError("input", error) from error
    tokens = sum(map(len, texts)) + len(texts) * model.config.hidden_size // 4
    return EmbeddingInputs(texts, pooling, encoding == "base64", tokens)


async def create_embeddings(
    model: Model, inputs: EmbeddingInputs, workers: WorkerPool, client: str, name: str
) -> bytes:
    """Returns the response. Only one batch of all clients runs at a time.

    Args:
        model: computes the vectors.
        inputs: of one body.
        workers: run the batches.
        client: who sent the body.
        name: the model's name in the response.
    """
    vectors = list[bytes]()
    at = 0
    widths = [bucket(len(ids)) for ids in inputs.texts]
    while at < len(widths):
        end = at + 1
        tokens = widths[at]
        while end < len(widths) and tokens + widths[end] <= _BATCH_TOKENS:
            tokens += widths[end]
            end += 1
        vectors += await workers.run(client, True, partial(_embed, model, inputs, at, end), exclusive=True)
        at = end
    return embeddings_to_json(iter(vectors), name, sum(map(len, inputs.texts)))


def _embed(model: Model, inputs: EmbeddingInputs, begin: int, end: int) -> list[bytes]:
    vectors_ND = embed_texts(model, inputs.texts[begin:end], pooling=inputs.pooling, normalize=True)
    if inputs.base64:
        return [to_json(base64.b64encode(vector.tobytes()).decode()) for vector in vectors_ND.astype("<f4")]
    return [to_json(vector.tolist()) for vector in vectors_ND]
