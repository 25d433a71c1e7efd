"""Llama: biases on request."""

from collections.abc import Mapping

from .family import Family
from .layer_fields import attention_bias
from .values import get_boolean


def read_llama(hf: Mapping, layers: int) -> dict:
    return attention_bias(hf) | dict(mlp_bias=get_boolean(hf, "mlp_bias"))


FAMILY = Family(dict(max_position_embeddings=2048), read_llama)
