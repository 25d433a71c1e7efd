"""Parses the body of /v1/embeddings."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ..checkpoint.loading import Model
from ..embedding import POOLINGS, TextEncoder, embedding_size
from ..errors import format_value
from .fields import BodyError, Fields, errors_of

EMBEDDING_FIELDS = {
    "input", "model", "encoding_format", "dimensions", "pooling", "prompt_name", "truncate_prompt_tokens",
    "truncation_side", "user",
}  # fmt: skip
MAX_TEXTS = 2048  # of a request: the OpenAI API's limit


@dataclasses.dataclass(frozen=True)
class EmbeddingBody:
    """A body after its checks."""

    texts: list[list[int]]  # token ids of each
    pooling: str | None  # None: the checkpoint's
    dimensions: int | None  # None: whole vectors
    as_base64: bool  # how vectors are encoded


def parse_embedding_body(
    model: Model, body: dict[str, Any], max_length: int, escape: bool, count: Callable[[int], None]
) -> EmbeddingBody:
    """Checks a body without null fields, and encodes its texts. Raises BodyError.

    Args:
        max_length: the most tokens of a text.
        escape: True: control tokens that a text after a prompt spells stay ordinary text.
        count: a function that is called with the number of tokens so far, before each text. It raises if
            there are too many, or if nobody needs the body.
    """
    prompts = model.embedding.prompts if model.embedding else {}
    for name, choices in dict(
        encoding_format=("float", "base64"), pooling=POOLINGS, truncation_side=("left", "right"),
        prompt_name=(*prompts,),
    ).items():  # fmt: skip
        if name in body and body[name] not in choices:
            said = f"one of {', '.join(choices)}" if choices else "left out: the model has no prompts"
            raise BodyError(name, f"{name} must be {said}, got {format_value(body[name])}")
    with errors_of("dimensions"):
        width = embedding_size(model, body.get("dimensions"))
    with errors_of("truncate_prompt_tokens"):
        encoder = TextEncoder(
            model,
            body.get("prompt_name"),
            Fields(body).integer("truncate_prompt_tokens", -1, max_length),
            max_length=max_length,
            truncation_side=body.get("truncation_side"),
            escape=escape,
        )
    texts = list[list[int]]()
    tokens = 0
    for text in _inputs(body):
        count(tokens)
        with errors_of("input"):
            texts.append(encoder.encode("an input", text))
        tokens += len(texts[-1]) + width // 4
    count(tokens)
    return EmbeddingBody(
        texts, body.get("pooling"), body.get("dimensions"), body.get("encoding_format") == "base64"
    )


def _inputs(body: dict[str, Any]) -> list[Any]:
    inputs = body.get("input")
    if isinstance(inputs, str) or isinstance(inputs, list) and inputs and type(inputs[0]) is int:
        return [inputs]
    if not isinstance(inputs, list) or not 0 < len(inputs) <= MAX_TEXTS:
        wanted = f"a text, token ids, or a list of 1 to {MAX_TEXTS} of them"
        raise BodyError("input", f"input must be {wanted}, got {format_value(inputs)}")
    return inputs
