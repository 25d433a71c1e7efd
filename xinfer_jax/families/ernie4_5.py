"""ERNIE 4.5: interleaved RoPE, and one setting for the biases of all matrices of attention and MLP. The
mixtures have experts that a softmax with a bias chooses, and some that all tokens use. Files also have
tensors that draft tokens (multi-token prediction). They are not read.
"""

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

from ..config.layer_spec import AttentionSpec, ExpertsSpec, LayerSpec, MlpSpec
from ..config.model_config import ModelConfig
from ..feed_forward.grouped_topk import GroupedTopkSpec
from .family import Family, Joined, Names
from .grouped_experts import MOST_SHARED_EXPERTS, SHARED_EXPERTS
from .layer_fields import EXPERTS, STACKED, unused_shared_experts, with_experts
from .rope_settings import read_rope
from .values import (
    get_boolean,
    get_count,
    get_integer,
    get_integer_at_most,
    get_number,
    reject_setting,
)


def read_ernie4_5(hf: Mapping, layers: int) -> dict[str, Any]:
    bias = get_boolean(hf, "use_bias")
    layer = LayerSpec((AttentionSpec(qkv_bias=bias, o_bias=bias),), MlpSpec(bias=bias))
    return dict(rope=read_rope(hf, interleaved=True), layers=(layer,) * layers)


def write_ernie4_5(config: ModelConfig) -> dict[str, Any]:
    mixer: Any = config.layers[0].attention
    return dict(use_bias=mixer.o_bias)


def read_ernie4_5_moe(hf: Mapping, layers: int) -> dict[str, Any]:
    reject_setting(hf, "use_bias")  # the head would have a bias
    fields = read_ernie4_5(hf, layers)
    experts = get_integer(hf, "moe_num_experts")
    chosen = get_integer_at_most(hf, "moe_k", experts)
    width = get_integer(hf, "moe_intermediate_size")
    shared = get_count(hf, "moe_num_shared_experts", MOST_SHARED_EXPERTS) * width
    least = get_number(hf, "moe_norm_min", (1e-30, 1.0))
    router = GroupedTopkSpec("softmax", norm_epsilon=0.0, norm_minimum=least)
    spec = ExpertsSpec(experts, chosen, width, router, shared_intermediate_size=shared, shared_gated=False)
    return fields | dict(layers=with_experts(fields["layers"], _sparse_layers(hf, layers), spec))


def _sparse_layers(hf: Mapping, layers: int) -> list[bool]:
    """Returns which layers have experts: one in each interval, between a first and a last one."""
    first = get_count(hf, "moe_layer_start_index")
    last = hf["moe_layer_end_index"]
    last = layers - 1 if last == -1 else get_count(hf, "moe_layer_end_index")
    interval = get_integer(hf, "moe_layer_interval")
    return [(i + 1) % interval == 0 and first <= i <= last for i in range(layers)]


def write_ernie4_5_moe(config: ModelConfig) -> dict[str, Any]:
    sparse = [i for i, layer in enumerate(config.layers) if layer.experts]
    steps = {after - before for before, after in pairwise(sparse)}
    settings = write_ernie4_5(config) | dict(
        moe_layer_start_index=sparse[0] if sparse else config.num_hidden_layers,
        moe_layer_end_index=sparse[-1] if sparse else config.num_hidden_layers,
        moe_layer_interval=min(steps, default=sparse[0] + 1 if sparse else 1),
    )
    if experts := config.experts:
        router: Any = experts.router
        settings |= dict(
            moe_num_experts=experts.num_experts,
            moe_k=experts.num_experts_per_tok,
            moe_intermediate_size=experts.intermediate_size,
            moe_num_shared_experts=experts.shared_intermediate_size // experts.intermediate_size,
            moe_norm_min=router.norm_minimum,
        )
    return settings


def unused_ernie4_5_moe(config: ModelConfig, names: Collection[str]) -> set[str]:
    """Returns the names of tensors that draft tokens, and of shared experts of width 0."""
    return {name for name in names if name.startswith("model.mtp_")} | unused_shared_experts(config, names)


_DEFAULTS = dict(max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=5e5, use_bias=False)
ERNIE4_5 = Family(
    _DEFAULTS | dict(num_key_value_heads=2, head_dim=128, tie_word_embeddings=True),
    read_ernie4_5,
    "Ernie4_5ForCausalLM",
    write_ernie4_5,
)
_BIAS = "moe_statics.e_score_correction_bias"  # of a single row
MOE = Family(
    _DEFAULTS
    | dict(
        tie_word_embeddings=True, num_key_value_heads=4, moe_num_experts=64, moe_k=6, moe_num_shared_experts=2
    )
    | dict(moe_intermediate_size=1536, moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1)
    | dict(moe_norm_min=1e-12),
    read_ernie4_5_moe,
    "Ernie4_5_MoeForCausalLM",
    write_ernie4_5_moe,
    Names(
        EXPERTS | SHARED_EXPERTS | {"router.correction_bias": f"mlp.gate.{_BIAS}"},
        (*STACKED, Joined(f"mlp.{_BIAS}", ("router.correction_bias",), axes_of_leaves=(None, 0))),
    ),
    unused=unused_ernie4_5_moe,
)
