"""Granite: as Llama, with factors on embeddings, scores, residuals and logits."""

from collections.abc import Mapping
from typing import Any

from ..config.model_config import ModelConfig
from .family import Family
from .llama import read_llama
from .values import get_number

_FACTORS = ("residual_multiplier", "logits_scaling")  # names of the config's fields too


def read_granite(hf: Mapping, layers: int) -> dict[str, Any]:
    (layer, *_) = read_llama(hf, layers)["layers"]
    layer = layer.with_mixer(attention_multiplier=get_number(hf, "attention_multiplier"))
    return read_factors(hf) | dict(layers=(layer,) * layers)


def read_factors(hf: Mapping) -> dict[str, Any]:
    """Returns the factors of embeddings, residuals and logits."""
    factors = {name: get_number(hf, name) for name in _FACTORS}
    return factors | dict(embed_scale=get_number(hf, "embedding_multiplier"))


def write_granite(config: ModelConfig) -> dict[str, Any]:
    """Returns all factors. Without layers of attention, the factor of scores is not among them."""
    mixer: Any = next(filter(None, (layer.attention for layer in config.layers)), None)
    factors = {name: getattr(config, name) for name in _FACTORS}
    factors |= {} if mixer is None else dict(attention_multiplier=mixer.attention_multiplier)
    return factors | dict(embedding_multiplier=config.embed_scale)


DEFAULTS: dict[str, Any] = dict(
    max_position_embeddings=2048, attention_multiplier=1.0, embedding_multiplier=1.0
) | dict.fromkeys(_FACTORS, 1.0)
FAMILY = Family(
    DEFAULTS,
    read_granite,
    "GraniteForCausalLM",
    write_granite,
)
