"""OLMo 2 and 3: norms after attention and MLP only, and of all query or key heads of a token together."""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from .family import Family
from .layer_fields import attention_bias, period_windows, with_windows, write_layer_types
from .rope_settings import read_rope_per_layer_type, write_rope_per_layer_type

_THETA = 500000.0


def _layer(hf: Mapping) -> LayerSpec:
    attention = AttentionSpec(**attention_bias(hf), qk_norm="joint")
    return LayerSpec((attention,), pre_norm=False, post_norm=True)


def read_olmo2(hf: Mapping, layers: int) -> dict[str, Any]:
    return dict(norm_offset=0.0, layers=(_layer(hf),) * layers)


def read_olmo3(hf: Mapping, layers: int) -> dict[str, Any]:
    # Versions of transformers disagree about the sliding layers where rope_theta is not the default.
    if hf["rope_theta"] != _THETA:
        raise InputError(
            f"rope_theta {format_value(hf['rope_theta'])} is not supported for model_type 'olmo3': give"
            " rope_parameters per layer type"
        )
    windows = period_windows(hf, layers, 4)
    rope, sliding_rope = read_rope_per_layer_type(hf, _THETA)
    return dict(norm_offset=0.0, rope=rope, layers=with_windows(_layer(hf), windows, sliding_rope))


def write_olmo3(config: ModelConfig) -> dict[str, Any]:
    return write_layer_types(config) | write_rope_per_layer_type(config)


OLMO2 = Family(dict(max_position_embeddings=2048, rms_norm_eps=1e-5), read_olmo2, "Olmo2ForCausalLM")
OLMO3 = Family(
    OLMO2.defaults | dict(sliding_window=4096, rope_theta=_THETA),
    read_olmo3,
    "Olmo3ForCausalLM",
    write_olmo3,
)
