"""The family gpt_oss: attention with sinks, and in every layer experts with biases and a clamped SwiGLU."""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, ClampedSwiglu, LayerSpec
from ..config.model_config import ModelConfig
from .family import Family, Joined, Names
from .layer_fields import (
    EXPERTS,
    attention_bias,
    layer_windows,
    read_experts,
    with_windows,
    write_layer_types,
)
from .rope_settings import read_rope
from .values import get_integer, get_number

_ROPE = dict(  # where config.json has none
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=4096,
)  # fmt: skip

_DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1.5e5,
    sliding_window=128, attention_bias=True, num_local_experts=128, num_experts_per_tok=4, swiglu_alpha=1.702,
    swiglu_limit=7.0,
)  # fmt: skip


def read_gpt_oss(hf: Mapping, layers: int) -> dict[str, Any]:
    if hf.get("layer_types") is None:
        get_integer(hf, "sliding_window")
    windows = layer_windows({**hf, "use_sliding_window": True}, [i % 2 == 0 for i in range(layers)])
    if hf.get("rope_scaling") is None and hf.get("rope_parameters") is None:
        hf = {**hf, "rope_parameters": _ROPE}
    swiglu = ClampedSwiglu(get_number(hf, "swiglu_alpha"), get_number(hf, "swiglu_limit"))
    width = get_integer(hf, "intermediate_size")
    experts = read_experts({**hf, "moe_intermediate_size": width}, bias=True, swiglu=swiglu)
    layer = LayerSpec((AttentionSpec(**attention_bias(hf), sinks=True),), experts)
    return dict(rope=read_rope(hf), norm_offset=0.0, layers=with_windows(layer, windows))


def write_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    experts: Any = config.experts
    return write_layer_types(config) | dict(
        num_local_experts=experts.num_experts,
        num_experts_per_tok=experts.num_experts_per_tok,
        swiglu_alpha=experts.swiglu.alpha,
        swiglu_limit=experts.swiglu.limit,
    )


_STACKED = (  # inputs first; outputs of gate and up by turns
    Joined("mlp.experts.gate_up_proj", ("experts.gate", "experts.up"), stacked=True, interleaved=True),
    Joined("mlp.experts.down_proj", ("experts.down",), stacked=True, interleaved=True),
)
_NAMES = {leaf: name.replace(".{}", "") for leaf, name in EXPERTS.items()}
FAMILY = Family(
    _DEFAULTS,
    read_gpt_oss,
    "GptOssForCausalLM",
    write_gpt_oss,
    Names(_NAMES | dict(router="mlp.router", sinks="self_attn.sinks"), _STACKED),
)
