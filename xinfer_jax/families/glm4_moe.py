"""GLM-4.5, GLM-4.6 and GLM-4.5-Air: the first layers have an MLP, all others experts that a sigmoid router
chooses and one that all tokens use. Files also have layers that draft tokens (multi-token prediction) after
the last one of the model. They are not read.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, ExpertsSpec, LayerSpec
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..feed_forward.grouped_topk import GroupedTopkSpec
from .family import Family, Names
from .layer_fields import EXPERTS, STACKED, unused_shared_experts, with_experts
from .rope_settings import read_rope, write_rope
from .values import get_boolean, get_count, get_integer, get_integer_at_most, get_number

_ROPE_TYPES = ("default", "linear", "yarn")  # each also with a part of a head
_MOST_EXPERTS = 2**16


def read_glm4_moe(hf: Mapping, layers: int) -> dict[str, Any]:
    mixer = AttentionSpec(
        qkv_bias=get_boolean(hf, "attention_bias"),
        qk_norm="head" if get_boolean(hf, "use_qk_norm") else None,
    )
    dense = get_count(hf, "first_k_dense_replace")
    specs = with_experts(
        [LayerSpec((mixer,))] * layers, [i >= dense for i in range(layers)], read_routed_experts(hf)
    )
    return dict(rope=read_rope(hf, _ROPE_TYPES, partial=True), layers=specs)


def read_routed_experts(hf: Mapping) -> ExpertsSpec:
    """Returns the experts of a layer, which a sigmoid router chooses in groups."""
    experts = get_integer_at_most(hf, "n_routed_experts", _MOST_EXPERTS)
    chosen = get_integer_at_most(hf, "num_experts_per_tok", experts)
    width = get_integer(hf, "moe_intermediate_size")
    router = GroupedTopkSpec(
        n_group=get_integer(hf, "n_group"),
        topk_group=get_integer(hf, "topk_group"),
        norm_topk_prob=get_boolean(hf, "norm_topk_prob"),
        routed_scaling_factor=get_number(hf, "routed_scaling_factor"),
    )
    _check_groups(router, experts, chosen)
    shared = get_count(hf, "n_shared_experts", _MOST_EXPERTS) * width
    return ExpertsSpec(experts, chosen, width, router, shared_intermediate_size=shared, shared_gated=False)


def _check_groups(router: GroupedTopkSpec, experts: int, chosen: int) -> None:
    """Raises InputError for groups that the experts do not fill, or that have too few for a token."""
    groups = router.n_group
    if router.topk_group > groups:
        raise InputError(f"config.json: topk_group {router.topk_group} is above n_group {groups}")
    if experts % groups:
        raise InputError(f"config.json: n_routed_experts {experts} is not a multiple of n_group {groups}")
    size = experts // groups
    if groups > 1 and size < 2:
        raise InputError(
            f"config.json: n_group {groups} makes groups of one expert, and the score of a group is the sum"
            f" of two: n_group must be at most {experts // 2}"
        )
    if chosen > size * router.topk_group:
        raise InputError(
            f"config.json: num_experts_per_tok {chosen} is above {size * router.topk_group}, the experts in"
            f" topk_group {router.topk_group} of the {groups} groups"
        )


def write_glm4_moe(config: ModelConfig) -> dict[str, Any]:
    mixer: Any = config.layers[0].attention
    partial = dict(partial_rotary_factor=config.rope.partial_rotary_factor)
    settings: dict[str, Any] = dict(
        attention_bias=mixer.qkv_bias,
        use_qk_norm=mixer.qk_norm is not None,
        first_k_dense_replace=sum(layer.experts is None for layer in config.layers),
        num_nextn_predict_layers=0,
        rope_parameters=write_rope(config.rope) | partial,
    )
    return settings | write_routed_experts(config)


def write_routed_experts(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_routed_experts`."""
    experts = config.experts
    if experts is None:
        return {}
    router: Any = experts.router
    names = ("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
    return {name: getattr(router, name) for name in names} | dict(
        n_routed_experts=experts.num_experts,
        num_experts_per_tok=experts.num_experts_per_tok,
        moe_intermediate_size=experts.intermediate_size,
        n_shared_experts=experts.shared_intermediate_size // experts.intermediate_size,
    )


def unused_glm4_moe(config: ModelConfig, names: Collection[str]) -> set[str]:
    """The names of layers that draft tokens: those after the last one that have a matrix "eh_proj"."""
    found = (re.match(r"model\.layers\.([0-9]{1,9})\.eh_proj\.", name) for name in names)
    drafting = {int(match[1]) for match in found if match and int(match[1]) >= config.num_hidden_layers}
    prefixes = tuple(f"model.layers.{layer}." for layer in drafting)
    return {name for name in names if name.startswith(prefixes)} | unused_shared_experts(config, names)


ROUTED_NAMES = EXPERTS | {"router.correction_bias": "mlp.gate.e_score_correction_bias"}
ROUTED_NAMES |= {f"shared.{leaf}": f"mlp.shared_experts.{leaf}_proj" for leaf in ("gate", "up", "down")}
FAMILY = Family(
    dict(
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, partial_rotary_factor=0.5,
        use_qk_norm=False, first_k_dense_replace=1, moe_intermediate_size=1408, num_experts_per_tok=8,
        n_routed_experts=128, n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=1.0,
    ),
    read_glm4_moe,
    "Glm4MoeForCausalLM",
    write_glm4_moe,
    Names(ROUTED_NAMES, STACKED),
    unused=unused_glm4_moe,
)  # fmt: skip
