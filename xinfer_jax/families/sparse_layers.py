"""Fields and names of a mixture of experts that several families share."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ..config.layer_spec import ExpertsSpec, LayerSpec
from ..errors import InputError, format_value
from .family import Joined
from .values import get_integer, get_integer_at_most

# Names of tensors: one for each expert, or all of them in one.
EXPERTS = dict(router="mlp.gate") | {
    f"experts.{leaf}": f"mlp.experts.{{}}.{leaf}_proj" for leaf in ("gate", "up", "down")
}
STACKED = (
    Joined("mlp.experts.gate_up_proj", ("experts.gate", "experts.up"), stacked=True, is_published=False),
    Joined("mlp.experts.down_proj", ("experts.down",), stacked=True, is_published=False),
)


def read_experts(hf: Mapping, **options: Any) -> ExpertsSpec:
    """Returns the experts of a layer. options: fields that not all families have."""
    experts = get_integer(hf, "num_experts" if hf.get("num_local_experts") is None else "num_local_experts")
    chosen = get_integer_at_most(hf, "num_experts_per_tok", experts)
    return ExpertsSpec(experts, chosen, get_integer(hf, "moe_intermediate_size"), **options)


def with_experts(
    layers: Iterable[LayerSpec], sparse: Iterable[bool], experts: ExpertsSpec
) -> tuple[LayerSpec, ...]:
    """Returns the layers, those that are sparse with experts in place of the MLP."""
    return tuple(
        dataclasses.replace(layer, mlp=None, experts=experts) if is_sparse else layer
        for layer, is_sparse in zip(layers, sparse, strict=True)
    )


def read_sparse_layers(hf: Mapping, layers: int) -> tuple[bool, ...]:
    """Returns which layers have experts, by `mlp_only_layers` and `decoder_sparse_step`."""
    dense = hf["mlp_only_layers"]
    step = get_integer(hf, "decoder_sparse_step")
    dense = () if dense is None else dense
    if not isinstance(dense, list | tuple) or not all(type(i) is int and i >= 0 for i in dense):
        raise InputError(f"mlp_only_layers must be a list of layers, got {format_value(dense)}")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
