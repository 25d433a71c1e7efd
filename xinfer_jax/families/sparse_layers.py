"""Fields and names of a mixture of experts that several families share."""

from collections.abc import Mapping
from typing import Any

from ..errors import InputError, format_value
from .family import Joined
from .values import get_integer, get_integer_at_most

# Names of tensors: one for each expert, or all of them in one.
EXPERTS = dict(router="mlp.gate") | {
    f"experts.{leaf}": f"mlp.experts.{{}}.{leaf}_proj" for leaf in ("gate", "up", "down")
}
STACKED = (
    Joined("mlp.experts.gate_up_proj", ("experts.gate", "experts.up"), stacked=True),
    Joined("mlp.experts.down_proj", ("experts.down",), stacked=True),
)


def read_experts(hf: Mapping) -> dict[str, Any]:
    """Returns the numbers of experts, and the width of one."""
    experts = get_integer(hf, "num_experts" if hf.get("num_local_experts") is None else "num_local_experts")
    return dict(
        num_experts=experts,
        num_experts_per_tok=get_integer_at_most(hf, "num_experts_per_tok", experts),
        moe_intermediate_size=get_integer(hf, "moe_intermediate_size"),
    )


def read_sparse_layers(hf: Mapping, layers: int) -> tuple[bool, ...]:
    """Returns which layers have experts, by `mlp_only_layers` and `decoder_sparse_step`."""
    dense = hf["mlp_only_layers"]
    step = get_integer(hf, "decoder_sparse_step")
    dense = () if dense is None else dense
    if not isinstance(dense, list | tuple) or not all(type(i) is int and i >= 0 for i in dense):
        raise InputError(f"mlp_only_layers must be a list of layers, got {format_value(dense)}")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
