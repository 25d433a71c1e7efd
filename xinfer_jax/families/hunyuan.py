"""Hunyuan: norms of each head of queries and keys after RoPE. The mixtures have experts in every layer, and
one more that all tokens use.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, ExpertsSpec, LayerSpec
from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..feed_forward.grouped_topk import GroupedTopkSpec
from .family import Family, Names
from .layer_fields import EXPERTS, STACKED, attention_bias, with_experts
from .rope_settings import flat_rope_settings, read_rope
from .values import get_integer, get_integer_at_most, get_number


def read_hunyuan(hf: Mapping, layers: int) -> dict[str, Any]:
    layer = LayerSpec((AttentionSpec(**attention_bias(hf), qk_norm="rotated_head"),))
    return dict(rope=read_rope(_without_alpha(hf)), layers=(layer,) * layers)


def _without_alpha(hf: Mapping) -> Mapping:
    """Returns the settings with a larger `rope_theta` in place of `alpha` of the RoPE type dynamic, which
    stretches wavelengths in the same way at every length.
    """
    scaling = flat_rope_settings(hf)
    if scaling.get("rope_type", scaling.get("type")) != "dynamic" or scaling.get("alpha") is None:
        return hf
    width = get_integer(hf, "head_dim")
    if width < 4:
        raise InputError(f"rope_scaling with alpha needs a head_dim above 2, got {width}")
    given = [x["rope_theta"] for x in (scaling, hf) if x.get("rope_theta") is not None]
    theta = get_number({"rope_theta": [*given, 10000.0][0]}, "rope_theta")
    theta = theta * get_number(scaling, "alpha") ** (width / (width - 2))
    return {**hf, "rope_scaling": None, "rope_parameters": dict(rope_type="default", rope_theta=theta)}


def read_hunyuan_moe(hf: Mapping, layers: int) -> dict[str, Any]:
    experts = get_integer(hf, "num_experts")
    chosen = get_integer_at_most(
        {"moe_topk": _experts_of_a_token(hf["moe_topk"], layers)}, "moe_topk", experts
    )
    width = get_integer(hf, "intermediate_size")
    router = GroupedTopkSpec("softmax", correction_bias=False, norm_epsilon=0.0)  # in float32
    spec = ExpertsSpec(experts, chosen, width, router, shared_intermediate_size=width, shared_gated=False)
    read = read_hunyuan(hf, layers)
    return read | dict(layers=with_experts(read["layers"], (True,) * layers, spec))


def _experts_of_a_token(value: Any, layers: int) -> Any:
    """Returns the number in `moe_topk`, which may list it for each layer."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) != layers or any(x != value[0] for x in value):
        raise InputError(
            f"moe_topk {format_value(value)} is not supported: give one number for all {layers} layers"
        )
    return value[0]


def write_hunyuan_moe(config: ModelConfig) -> dict[str, Any]:
    return dict(num_experts=config.num_experts, moe_topk=config.num_experts_per_tok)


_NORMS = {f"{part[0]}_norm": f"self_attn.{part}_layernorm.weight" for part in ("query", "key")}
_EXPERTS = EXPERTS | dict(router="mlp.gate.wg")
_EXPERTS |= {f"shared.{leaf}": f"mlp.shared_mlp.{leaf}_proj" for leaf in ("gate", "up", "down")}
DENSE = Family(
    dict(max_position_embeddings=2048, rms_norm_eps=1e-5),
    read_hunyuan,
    "HunYuanDenseV1ForCausalLM",
    names=Names(_NORMS),
)
MOE = Family(
    DENSE.defaults | dict(num_experts=1, moe_topk=1),
    read_hunyuan_moe,
    "HunYuanMoEV1ForCausalLM",
    write_hunyuan_moe,
    Names(_NORMS | _EXPERTS, STACKED),
)
