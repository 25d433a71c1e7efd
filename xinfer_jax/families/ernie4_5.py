"""ERNIE 4.5: interleaved RoPE, and one setting for the biases of all matrices of attention and MLP."""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from ..config.model_config import ModelConfig
from .family import Family
from .rope_settings import read_rope
from .values import get_boolean


def read_ernie4_5(hf: Mapping, layers: int) -> dict[str, Any]:
    bias = get_boolean(hf, "use_bias")
    layer = LayerSpec((AttentionSpec(qkv_bias=bias, o_bias=bias),), MlpSpec(bias=bias))
    return dict(rope=read_rope(hf, interleaved=True), layers=(layer,) * layers)


def write_ernie4_5(config: ModelConfig) -> dict[str, Any]:
    mixer: Any = config.layers[0].attention
    return dict(use_bias=mixer.o_bias)


ERNIE4_5 = Family(
    dict(
        num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=5e5, tie_word_embeddings=True, use_bias=False,
    ),
    read_ernie4_5,
    "Ernie4_5ForCausalLM",
    write_ernie4_5,
)  # fmt: skip
