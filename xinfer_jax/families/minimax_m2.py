"""MiniMax-M2: every layer has experts, which sigmoid scores with a bias choose. Norms of queries and keys are
over all heads of a token, and RoPE rotates a part of each head.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from ..config.model_config import ModelConfig
from ..feed_forward.grouped_topk import GroupedTopkSpec
from .family import Family, Joined, Names
from .layer_fields import read_experts
from .mixtral import JOINED, NAMES
from .rope_settings import read_rope, write_partial_rope
from .values import get_integer


def read_minimax_m2(hf: Mapping, layers: int) -> dict[str, Any]:
    if hf.get("rotary_dim") is not None:
        part = get_integer(hf, "rotary_dim") / get_integer(hf, "head_dim")
        hf = {"partial_rotary_factor": part, **hf}
    experts = read_experts(
        {**hf, "moe_intermediate_size": hf["intermediate_size"]}, router=GroupedTopkSpec(norm_epsilon=0.0)
    )
    layer = LayerSpec((AttentionSpec(qk_norm="joint"),), experts)
    return dict(rope=read_rope(hf, partial=True), layers=(layer,) * layers)


def write_minimax_m2(config: ModelConfig) -> dict[str, Any]:
    return dict(
        num_local_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        rotary_dim=config.rope.rotated_width(config.head_dim),
        rope_parameters=write_partial_rope(config.rope),
    )


_BIAS = "e_score_correction_bias"
# Its name in transformers 5.
_JOINED_BIAS = Joined(f"mlp.{_BIAS}", ("router.correction_bias",), is_published=False)
FAMILY = Family(
    dict(num_key_value_heads=8, head_dim=128, max_position_embeddings=196608, rope_theta=5e6)
    | dict(num_local_experts=256, num_experts_per_tok=8),
    read_minimax_m2,
    "MiniMaxM2ForCausalLM",
    write_minimax_m2,
    Names(NAMES | {"router.correction_bias": f"block_sparse_moe.{_BIAS}"}, (*JOINED, _JOINED_BIAS)),
)
