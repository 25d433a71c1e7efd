"""Llama: biases on request."""

from collections.abc import Mapping

from ..config.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from .family import Family
from .layer_fields import attention_bias
from .values import get_boolean


def read_llama(hf: Mapping, layers: int) -> dict:
    return dict(layers=(llama_layer(hf),) * layers)


def llama_layer(hf: Mapping) -> LayerSpec:
    """A layer, with biases on request."""
    return LayerSpec(AttentionSpec(**attention_bias(hf)), MlpSpec(bias=get_boolean(hf, "mlp_bias")))


FAMILY = Family(dict(max_position_embeddings=2048), read_llama)
