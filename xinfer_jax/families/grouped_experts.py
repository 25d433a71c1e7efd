"""Experts of DeepSeek-V3's kind, which several families have: the first layers have an MLP, all others have
experts that the grouped router chooses, and some that all tokens use.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..config.layer_spec import ExpertsSpec, LayerSpec
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..feed_forward.grouped_topk import GroupedTopkSpec
from .family import Names
from .layer_fields import EXPERTS, STACKED, with_experts
from .values import get_boolean, get_count, get_integer, get_integer_at_most, get_number

MOST_SHARED_EXPERTS = 2**16
_ROUTER = ("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")  # fields of the spec too
SHARED_EXPERTS = {f"shared.{leaf}": f"mlp.shared_experts.{leaf}_proj" for leaf in ("gate", "up", "down")}
CORRECTION_BIAS = {"router.correction_bias": "mlp.gate.e_score_correction_bias"}
NAMES = Names(EXPERTS | CORRECTION_BIAS | SHARED_EXPERTS, STACKED)
DEFAULTS: dict[str, Any] = dict(n_group=1, topk_group=1, first_k_dense_replace=0, routed_scaling_factor=1.0)


def with_grouped_experts(
    hf: Mapping, layers: Iterable[LayerSpec], sparse: Sequence[bool] | None = None, **router_fields: Any
) -> tuple[LayerSpec, ...]:
    """Returns the layers, of which some have experts.

    Args:
        hf: config.json, with its defaults.
        layers: the layers with an MLP.
        sparse: True for each layer with experts. None: the layers from `first_k_dense_replace` on.
        router_fields: fields of `GroupedTopkSpec` that config.json does not have.
    """
    layers = tuple(layers)
    if sparse is None:
        dense = get_count(hf, "first_k_dense_replace")
        sparse = [i >= dense for i in range(len(layers))]
    if not any(sparse):  # config.json may lack the sizes of experts
        return layers
    return with_experts(layers, sparse, read_grouped_experts(hf, **router_fields))


def read_grouped_experts(hf: Mapping, **router_fields: Any) -> ExpertsSpec:
    """Returns the experts. router_fields: as in `with_grouped_experts`."""
    experts = get_integer(hf, "n_routed_experts")
    chosen = get_integer_at_most(hf, "num_experts_per_tok", experts)
    width = get_integer(hf, "moe_intermediate_size")
    router = GroupedTopkSpec(
        n_group=get_integer(hf, "n_group"),
        topk_group=get_integer(hf, "topk_group"),
        norm_topk_prob=get_boolean(hf, "norm_topk_prob"),
        routed_scaling_factor=get_number(hf, "routed_scaling_factor"),
        **router_fields,
    )
    _check_groups(router, experts, chosen)
    shared = get_count(hf, "n_shared_experts", MOST_SHARED_EXPERTS) * width
    return ExpertsSpec(experts, chosen, width, router, shared_intermediate_size=shared, shared_gated=False)


def _check_groups(router: GroupedTopkSpec, experts: int, chosen: int) -> None:
    """Raises InputError for groups that the experts do not fill, or that have too few for a token."""
    groups = router.n_group
    if router.topk_group > groups:
        raise InputError(f"config.json: topk_group {router.topk_group} is above n_group {groups}")
    if experts % groups:
        raise InputError(f"config.json: n_routed_experts {experts} is not a multiple of n_group {groups}")
    size = experts // groups
    if groups > 1 and size < 2 and router.group_score == "top2":
        raise InputError(
            f"config.json: n_group {groups} makes groups of one expert, and the score of a group is the sum"
            f" of two: n_group must be at most {experts // 2}"
        )
    if chosen > size * router.topk_group:
        raise InputError(
            f"config.json: num_experts_per_tok {chosen} is above {size * router.topk_group}, the experts in"
            f" topk_group {router.topk_group} of the {groups} groups"
        )


def write_grouped_experts(config: ModelConfig) -> dict[str, Any]:
    """Returns the inverse of `with_grouped_experts`."""
    dense = sum(layer.experts is None for layer in config.layers)
    settings: dict[str, Any] = dict(first_k_dense_replace=dense)
    if experts := config.experts:
        shared = experts.shared_intermediate_size // experts.intermediate_size
        settings |= write_router_and_sizes(experts) | dict(n_shared_experts=shared)
    return settings


def write_router_and_sizes(experts: ExpertsSpec) -> dict[str, Any]:
    """Returns the inverse of `read_grouped_experts`, without the experts that all tokens use."""
    router: Any = experts.router
    return {name: getattr(router, name) for name in _ROUTER} | dict(
        n_routed_experts=experts.num_experts,
        num_experts_per_tok=experts.num_experts_per_tok,
        moe_intermediate_size=experts.intermediate_size,
    )
