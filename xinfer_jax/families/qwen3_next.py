"""Qwen3-Next: a hybrid whose projections of linear attention are in two tensors, by key head."""

from collections.abc import Mapping
from typing import Any

from . import hybrids
from .family import Family, Joined
from .sparse_layers import read_sparse_layers, with_experts
from .values import get_boolean


def read_qwen3_next(hf: Mapping, layers: int) -> dict[str, Any]:
    fields = hybrids.read_hybrid(hf, layers)
    sparse = read_sparse_layers(hf, layers)
    if hybrids.is_zero(hf["num_experts"]) or not any(sparse):
        return fields
    experts = hybrids.read_shared_experts(hf, get_boolean(hf, "norm_topk_prob"))
    return fields | dict(layers=with_experts(fields["layers"], sparse, experts))


_QKVZ = Joined("linear_attn.in_proj_qkvz", ("q", "k", "v", "z"), groups="num_key_heads")
_BA = Joined("linear_attn.in_proj_ba", ("b", "a"), groups="num_key_heads")
FAMILY = Family(
    hybrids.SPARSE
    | dict(
        num_experts=512, num_experts_per_tok=10, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=None,
    ),
    read_qwen3_next,
    hybrids.NAMES,
    hybrids.linear_names({leaf: f"{leaf}_proj" for leaf in "zba"}, _QKVZ, _BA),
)  # fmt: skip
