"""LFM2 with experts: as LFM2, with an MLP in the first layers and experts in all others, which sigmoid scores
with a bias choose.

transformers computes the scores in the dtype of the model, and this library in float32. In float32 models the
results are equal.
"""

from collections.abc import Mapping
from typing import Any

from ..config.model_config import ModelConfig
from ..feed_forward.grouped_topk import GroupedTopkSpec
from .family import Family, Joined, Names
from .layer_fields import read_experts, with_experts
from .lfm2 import LEAVES, MIXER_NAMES, read_lfm2, write_lfm2
from .values import get_boolean, get_count, get_number

_EPSILON = 1e-6  # is added to the sum of a token's scores


def read_lfm2_moe(hf: Mapping, layers: int) -> dict[str, Any]:
    fields = read_lfm2({**hf, "block_auto_adjust_ff_dim": False}, layers)  # a field of LFM2 alone
    dense = get_count(hf, "num_dense_layers")
    if dense >= layers:  # config.json may lack the sizes of experts
        return fields
    router = GroupedTopkSpec(
        correction_bias=get_boolean(hf, "use_expert_bias"),
        norm_topk_prob=get_boolean(hf, "norm_topk_prob"),
        norm_epsilon=_EPSILON,
        routed_scaling_factor=get_number(hf, "routed_scaling_factor"),
    )
    sparse = [i >= dense for i in range(layers)]
    return fields | dict(layers=with_experts(fields["layers"], sparse, read_experts(hf, router=router)))


def write_lfm2_moe(config: ModelConfig) -> dict[str, Any]:
    settings = write_lfm2(config)
    del settings["block_auto_adjust_ff_dim"]  # a field of LFM2 alone
    settings["num_dense_layers"] = sum(layer.experts is None for layer in config.layers)
    if experts := config.experts:
        router: Any = experts.router
        settings |= dict(
            num_experts=experts.num_experts,
            num_experts_per_tok=experts.num_experts_per_tok,
            moe_intermediate_size=experts.intermediate_size,
            use_expert_bias=router.correction_bias,
            norm_topk_prob=router.norm_topk_prob,
            routed_scaling_factor=router.routed_scaling_factor,
        )
    return settings


_ROUTER = {"router": "feed_forward.gate", "router.correction_bias": "feed_forward.expert_bias"}
_EXPERTS = {
    f"experts.{leaf}": f"feed_forward.experts.{{}}.{LEAVES[leaf][-2:]}" for leaf in ("gate", "up", "down")
}
# The names of transformers 5.
_JOINED = (
    Joined(
        "feed_forward.experts.gate_up_proj", ("experts.gate", "experts.up"), stacked=True, is_published=False
    ),
    Joined("feed_forward.experts.down_proj", ("experts.down",), stacked=True, is_published=False),
)
FAMILY = Family(
    dict(
        intermediate_size=7168,
        moe_intermediate_size=1792,
        num_key_value_heads=8,
        max_position_embeddings=128000,
        rope_theta=1e6,
        norm_eps=1e-5,
        tie_word_embeddings=True,
        conv_bias=False,
        conv_L_cache=3,
        num_dense_layers=2,
        num_experts=32,
        num_experts_per_tok=4,
        use_expert_bias=True,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
    ),
    read_lfm2_moe,
    "Lfm2MoeForCausalLM",
    write_lfm2_moe,
    Names(LEAVES | _ROUTER | _EXPERTS, _JOINED),
    MIXER_NAMES,
)
