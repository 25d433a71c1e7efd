"""Qwen3.5: hybrids, dense or with experts, whose projections of linear attention are apart."""

from collections.abc import Mapping
from typing import Any

from . import hybrids
from .family import Family, Joined
from .sparse_layers import with_experts


def read_qwen3_5_moe(hf: Mapping, layers: int) -> dict[str, Any]:
    """Experts in every layer; their weights always sum to 1."""
    fields = hybrids.read_hybrid(hf, layers)
    experts = hybrids.read_shared_experts(hf)
    return fields | dict(layers=with_experts(fields["layers"], (True,) * layers, experts))


_QKV = Joined("linear_attn.in_proj_qkv", ("q", "k", "v"))
_LINEAR = hybrids.linear_names({leaf: f"in_proj_{leaf}" for leaf in "zba"}, _QKV)
DENSE = Family(hybrids.SHARED | dict(num_key_value_heads=4), hybrids.read_hybrid, hybrids.NAMES, _LINEAR)
# No layer has an MLP: the width is not read.
_SPARSE = hybrids.SPARSE | dict(num_experts=256, num_experts_per_tok=8, intermediate_size=1)
MOE = Family(_SPARSE, read_qwen3_5_moe, hybrids.NAMES, _LINEAR)
