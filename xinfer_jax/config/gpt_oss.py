"""The family gpt_oss: attention with sinks, and in every layer experts with biases and a clamped SwiGLU."""

from collections.abc import Mapping
from typing import Any

from .rope import read_rope
from .sparse_layers import read_experts
from .values import get_boolean, get_integer, get_number

_ROPE = dict(  # where config.json has none
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=4096,
)  # fmt: skip

# Of config.json, as in transformers.
DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1.5e5,
    sliding_window=128, attention_bias=True, num_local_experts=128, num_experts_per_tok=4, swiglu_alpha=1.702,
    swiglu_limit=7.0,
)  # fmt: skip


def gpt_oss(hf: Mapping, layers: int) -> dict[str, Any]:
    """All but the sliding windows."""
    bias = get_boolean(hf, "attention_bias")
    if hf.get("rope_scaling") is None and hf.get("rope_parameters") is None:
        hf = {**hf, "rope_parameters": _ROPE}
    width = get_integer(hf, "intermediate_size")
    return read_experts({**hf, "moe_intermediate_size": width}) | dict(
        rope=read_rope(hf),
        qkv_bias=bias,
        o_bias=bias,
        norm_offset=0.0,
        attention_sinks=True,
        layer_experts=(True,) * layers,
        norm_topk_prob=True,
        swiglu_limit=get_number(hf, "swiglu_limit"),
        swiglu_alpha=get_number(hf, "swiglu_alpha"),
    )
