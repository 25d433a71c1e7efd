"""OLMo 2 and 3: norms after attention and MLP only, and of all query or key heads of a token together. OLMoE:
the same norms of queries and keys, norms before attention and MLP, and experts in every layer.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from .family import Family, Names
from .layer_fields import (
    EXPERTS,
    STACKED,
    attention_bias,
    check_default_head_dim,
    period_windows,
    read_experts,
    with_windows,
    write_layer_types,
)
from .rope_settings import read_rope_per_layer_type, write_rope_per_layer_type
from .values import get_boolean, reject_setting

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


def read_olmoe(hf: Mapping, layers: int) -> dict[str, Any]:
    reject_setting(hf, "clip_qkv")
    check_default_head_dim(hf)  # norms of queries and keys have this width
    sizes = dict(moe_intermediate_size=hf["intermediate_size"], num_local_experts=None)
    experts = read_experts({**hf, **sizes}, get_boolean(hf, "norm_topk_prob"))
    layer = LayerSpec((AttentionSpec(**attention_bias(hf), qk_norm="joint"),), experts)
    return dict(layers=(layer,) * layers)


def write_olmoe(config: ModelConfig) -> dict[str, Any]:
    experts: Any = config.experts
    return dict(
        num_experts=experts.num_experts,
        num_experts_per_tok=experts.num_experts_per_tok,
        norm_topk_prob=experts.router.norm_topk_prob,
    )


def write_olmo3(config: ModelConfig) -> dict[str, Any]:
    return write_layer_types(config) | write_rope_per_layer_type(config)


OLMO2 = Family(dict(max_position_embeddings=2048, rms_norm_eps=1e-5), read_olmo2, "Olmo2ForCausalLM")
OLMO3 = Family(
    OLMO2.defaults | dict(sliding_window=4096, rope_theta=_THETA),
    read_olmo3,
    "Olmo3ForCausalLM",
    write_olmo3,
)
OLMOE = Family(
    dict(max_position_embeddings=4096, rms_norm_eps=1e-5, clip_qkv=None)
    | dict(num_experts=64, num_experts_per_tok=8, norm_topk_prob=False),
    read_olmoe,
    "OlmoeForCausalLM",
    write_olmoe,
    Names(EXPERTS, STACKED),
)
