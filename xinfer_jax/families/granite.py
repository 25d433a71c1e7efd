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
    factors = {name: get_number(hf, name) for name in _FACTORS}
    return factors | dict(embed_scale=get_number(hf, "embedding_multiplier"), layers=(layer,) * layers)


def write_granite(config: ModelConfig) -> dict[str, Any]:
    mixer: Any = config.layers[0].attention
    factors = {name: getattr(config, name) for name in _FACTORS}
    return factors | dict(
        attention_multiplier=mixer.attention_multiplier, embedding_multiplier=config.embed_scale
    )


DEFAULTS: dict[str, Any] = dict(
    max_position_embeddings=2048, attention_multiplier=1.0, embedding_multiplier=1.0
) | dict.fromkeys(_FACTORS, 1.0)
FAMILY = Family(
    DEFAULTS,
    read_granite,
    "GraniteForCausalLM",
    write_granite,
)
