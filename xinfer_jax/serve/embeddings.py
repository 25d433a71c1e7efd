"""/v1/embeddings: what a body asks for, and its vectors, made in batches that leave the engine its turns."""

import base64
import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..api.fields import BodyError
from ..checkpoint.loading import Model
from ..checks import token_ids
from ..embedding import POOLINGS, embed_texts
from ..errors import ContextLengthError, InputError, shown
from ..generation.loop import bucket
from .formatting import encoded, encoded_embeddings
from .offload import Offload

_MOST_INPUTS = 2048  # as the API has it
_BATCH_TOKENS = 512  # padding included; between two batches other clients have their turn
_FIELDS = {"input", "model", "encoding_format", "dimensions", "pooling", "user"}


@dataclasses.dataclass
class Inputs:
    """Of one body.

    Attributes:
        texts: token ids of each.
        pooling: as in `embed_texts`.
        base64: vectors are float32 in base64, not lists of numbers.
        tokens: as which it counts: those of its texts, and a quarter of the numbers of its vectors.
    """

    texts: list[list[int]]
    pooling: str
    base64: bool
    tokens: int


def read_inputs(model: Model, body: Mapping[str, Any], room: int) -> Inputs:
    """Checks a body, and encodes its texts.

    Raises:
        BodyError: with the field at fault.
    """
    given = {name: value for name, value in body.items() if value is not None}
    if others := given.keys() - _FIELDS:
        name = sorted(others)[0]
        raise BodyError(name, f"{shown(name)} is not a field of /v1/embeddings: leave it out")
    if "dimensions" in given:
        raise BodyError("dimensions", "dimensions is not served here: leave it out for the whole vectors")
    form = given.get("encoding_format", "float")
    pooling = given.get("pooling", "mean")
    for name, value, known in (
        ("encoding_format", form, ("float", "base64")),
        ("pooling", pooling, POOLINGS),
    ):
        if value not in known:
            raise BodyError(name, f"{name} must be one of {', '.join(known)}, got {shown(value)}")
    several = given.get("input")
    if isinstance(several, str) or isinstance(several, list) and several and type(several[0]) is int:
        several = [several]
    if not isinstance(several, list) or not 0 < len(several) <= _MOST_INPUTS:
        raise BodyError(
            "input",
            f"input must be a text, token ids, or a list of 1 to {_MOST_INPUTS} of them,"
            f" got {shown(several)}",
        )
    try:
        texts = [_ids(model, one, room) for one in several]
    except InputError as error:
        raise BodyError("input", error) from error
    tokens = sum(map(len, texts)) + len(texts) * model.config.hidden_size // 4
    return Inputs(texts, pooling, form == "base64", tokens)


def _ids(model: Model, text: Any, room: int) -> list[int]:
    assert model.tokenizer is not None
    if isinstance(text, str):
        if len(text) > 16 * room and (fewest := model.tokenizer.fewest_ids(text)) > room:
            raise ContextLengthError(f"an input has at least {fewest} tokens, of {room} at most: shorten it")
        ids = model.tokenizer.encode(text)
    else:
        ids = token_ids("an input", text, model.config.vocab_size)
    if not ids:
        raise InputError(f"the input {shown(text)} has no tokens: give some text")
    if len(ids) > room:
        raise ContextLengthError(f"an input has {len(ids)} tokens, of {room} at most: shorten it")
    return ids


async def embedded(model: Model, inputs: Inputs, offload: Offload, client: str, name: str) -> bytes:
    """The response. Batches of all clients take turns, one at a time."""
    vectors = list[bytes]()
    at = 0
    widths = [bucket(len(ids)) for ids in inputs.texts]
    while at < len(widths):
        end = at + 1
        tokens = widths[at]
        while end < len(widths) and tokens + widths[end] <= _BATCH_TOKENS:
            tokens += widths[end]
            end += 1
        vectors += await offload.run(client, True, partial(_batch, model, inputs, at, end), alone=True)
        at = end
    return encoded_embeddings(iter(vectors), name, sum(map(len, inputs.texts)))


def _batch(model: Model, inputs: Inputs, begin: int, end: int) -> list[bytes]:
    vectors_ND = embed_texts(model, inputs.texts[begin:end], pooling=inputs.pooling, normalize=True)
    if inputs.base64:
        return [encoded(base64.b64encode(vector.tobytes()).decode()) for vector in vectors_ND.astype("<f4")]
    return [encoded(vector.tolist()) for vector in vectors_ND]
