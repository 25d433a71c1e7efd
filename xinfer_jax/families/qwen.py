"""Qwen2 (biases of queries, keys and values), Qwen3 (norms of each head of queries and keys), and Qwen3 with
experts in some layers.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from .family import Family, Names
from .layer_fields import (
    EXPERTS,
    STACKED,
    attention_bias,
    layer_windows,
    read_experts,
    read_sparse_layers,
    same_windows,
    with_experts,
    with_windows,
)
from .values import get_boolean, get_count


def _late_windows(hf: Mapping, layers: int) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on have a sliding window."""
    first = get_count(hf, "max_window_layers")
    return layer_windows(hf, [i >= first for i in range(layers)])


def _qwen3_layer(hf: Mapping) -> LayerSpec:
    return LayerSpec(AttentionSpec(**attention_bias(hf), qk_norm="head"))


def read_qwen2(hf: Mapping, layers: int) -> dict[str, Any]:
    return dict(layers=with_windows(LayerSpec(AttentionSpec(qkv_bias=True)), _late_windows(hf, layers)))


def read_qwen3(hf: Mapping, layers: int) -> dict[str, Any]:
    return dict(layers=with_windows(_qwen3_layer(hf), _late_windows(hf, layers)))


def read_qwen3_moe(hf: Mapping, layers: int) -> dict[str, Any]:
    windowed = hf if get_boolean(hf, "use_sliding_window") else {**hf, "sliding_window": None}
    experts = read_experts(hf, norm_topk_prob=get_boolean(hf, "norm_topk_prob"))
    specs = with_windows(_qwen3_layer(hf), same_windows(windowed, layers))
    return dict(layers=with_experts(specs, read_sparse_layers(hf, layers), experts))


QWEN2 = Family(
    dict(num_key_value_heads=32, max_position_embeddings=32768, sliding_window=4096, max_window_layers=28),
    read_qwen2,
)
QWEN3 = Family(QWEN2.defaults | dict(head_dim=128), read_qwen3)
QWEN3_MOE = Family(
    dict(
        num_key_value_heads=4, max_position_embeddings=32768, sliding_window=4096, decoder_sparse_step=1,
        moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128, norm_topk_prob=False,
        mlp_only_layers=None,
    ),
    read_qwen3_moe,
    Names(EXPERTS, STACKED),
)  # fmt: skip
