"""The field `return_routed_experts`: the response says which experts of a mixture the tokens used."""

import base64
import io
from typing import Any

import numpy as np

from ..config.model_config import ModelConfig
from ..model.routes import routes_shape
from .fields import BodyError, Fields

FIELD = "return_routed_experts"
_START = "routed_experts_prompt_start"


def parse_routed_experts(fields: Fields, config: ModelConfig, shortest_prompt: int) -> int | None:
    """Returns the index of the first token whose experts the response has, or None if it has none.

    Args:
        fields: the fields of the body: SGLang's `return_routed_experts` and vLLM's
            `routed_experts_prompt_start`.
        config: the config of the model.
        shortest_prompt: the number of tokens of the shortest prompt of the body.

    Raises:
        BodyError: the model has no mixture of experts, or the start is beyond the prompt.
    """
    asked = fields.boolean(FIELD)
    start: int = fields.integer(_START, 0, 2**31 - 1) or 0
    if not asked:
        return None
    if all(layer.experts is None for layer in config.layers):
        said = "this model has no mixture of experts"
        raise BodyError(FIELD, f"{FIELD} is not served here, since {said}: leave it out")
    if start >= shortest_prompt:
        said = f"{_START} {start} is not below the {shortest_prompt} tokens of the prompt"
        raise BodyError(_START, f"{said}: lower it")
    return start


def check_recorded(start: int | None, is_recorded: bool) -> None:
    """Raises BodyError if a body asks for experts that the engine does not record.

    Args:
        start: the result of `parse_routed_experts`.
        is_recorded: True: the engine was made with `routed_experts=True`.
    """
    if start is not None and not is_recorded:
        remedy = "start the command with --routed_experts, or leave the field out"
        raise BodyError(FIELD, f"{FIELD} needs an engine that records experts: {remedy}")


def encoded_bytes_per_token(config: ModelConfig) -> int:
    """Returns the bytes that `encode_routed_experts` writes for each token."""
    layers, used = routes_shape(config)
    return -(-4 * layers * used * 4 // 3)


def encode_routed_experts(routes_TLU: Any, start: int) -> str | None:
    """Encodes `choices[].routed_experts` as vLLM does: an .npy file in base64.

    Args:
        routes_TLU: `Answer.routed_experts`, int32 [T, L, U] of the T tokens of the prompt and the answer.
        start: the first token whose experts are encoded.

    Returns:
        The text of int32 [T - 1 - start, L, U]. The last token has no experts, since the model did not read
        it. None: the answer ended while it had no slot, so nothing is known.
    """
    kept_TLU = np.ascontiguousarray(routes_TLU[start:-1])
    if not (kept_TLU >= 0).any():
        return None
    file = io.BytesIO()
    np.save(file, kept_TLU)
    return base64.b64encode(file.getbuffer()).decode()
