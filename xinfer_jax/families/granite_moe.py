"""Granite with experts in every layer (granite-3.0-1b-a400m and 3b-a800m), and with an MLP beside them that
all tokens use (`granitemoeshared`). The matrices of all experts are one tensor.
"""

from collections.abc import Mapping
from typing import Any

from ..config.model_config import ModelConfig
from .family import Family, Joined, Names
from .granite import DEFAULTS, read_granite, write_granite
from .layer_fields import read_experts, with_experts
from .values import get_count


def read_granite_moe(hf: Mapping, layers: int) -> dict[str, Any]:
    return _with_experts(hf, layers)


def read_granite_moe_shared(hf: Mapping, layers: int) -> dict[str, Any]:
    shared = get_count(hf, "shared_intermediate_size")
    return _with_experts(hf, layers, shared_intermediate_size=shared, shared_gated=False)


def _with_experts(hf: Mapping, layers: int, **options: Any) -> dict[str, Any]:
    """Returns the fields of a model with experts in every layer. options: fields of `ExpertsSpec`."""
    fields = read_granite(hf, layers)
    experts = read_experts({**hf, "moe_intermediate_size": hf["intermediate_size"]}, **options)
    return fields | dict(layers=with_experts(fields["layers"], (True,) * layers, experts))


def write_granite_moe(config: ModelConfig) -> dict[str, Any]:
    sizes = dict(num_local_experts=config.num_experts, num_experts_per_tok=config.num_experts_per_tok)
    return write_granite(config) | sizes


def write_granite_moe_shared(config: ModelConfig) -> dict[str, Any]:
    experts: Any = config.experts
    return write_granite_moe(config) | dict(shared_intermediate_size=experts.shared_intermediate_size)


# Published names. `skipped_tensors` knows the names of transformers 5. No file has single experts.
GRANITE_EXPERTS = {"router": "block_sparse_moe.router.layer"} | {
    f"experts.{leaf}": f"block_sparse_moe.experts.{{}}.{leaf}_proj" for leaf in ("gate", "up", "down")
}
GRANITE_SHARED = {
    "shared.gate": "shared_mlp.gate_linear",
    "shared.up": "shared_mlp.up_linear",
    "shared.down": "shared_mlp.output_linear",
}
GRANITE_JOINED = (
    Joined("block_sparse_moe.input_linear.weight", ("experts.gate", "experts.up"), stacked=True),
    Joined("block_sparse_moe.output_linear.weight", ("experts.down",), stacked=True),
    Joined("shared_mlp.input_linear", ("shared.gate", "shared.up")),
)
_DEFAULTS = DEFAULTS | dict(num_local_experts=8, num_experts_per_tok=2)
MOE = Family(
    _DEFAULTS,
    read_granite_moe,
    "GraniteMoeForCausalLM",
    write_granite_moe,
    Names(GRANITE_EXPERTS, GRANITE_JOINED),
)
SHARED = Family(
    _DEFAULTS | dict(shared_intermediate_size=0),
    read_granite_moe_shared,
    "GraniteMoeSharedForCausalLM",
    write_granite_moe_shared,
    Names(GRANITE_EXPERTS | GRANITE_SHARED, GRANITE_JOINED),
)
