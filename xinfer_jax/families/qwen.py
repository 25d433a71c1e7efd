"""Qwen2 (biases of queries, keys and values), Qwen3 (norms of each head of queries and keys), and both with
experts in some layers, in Qwen2 also with one that all tokens use.
"""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from ..config.model_config import ModelConfig
from .family import Family, Names
from .layer_fields import (
    EXPERTS,
    SHARED_EXPERT,
    STACKED,
    attention_bias,
    layer_windows,
    read_experts,
    read_shared_experts,
    read_sparse_layers,
    same_windows,
    unused_shared_experts,
    with_experts,
    with_windows,
    write_experts,
    write_layer_types,
    write_window,
)
from .values import get_boolean, get_count


def _late_windows(hf: Mapping, layers: int) -> tuple[int | None, ...]:
    """Returns the windows of the layers. Layers from `max_window_layers` on have a sliding window."""
    first = get_count(hf, "max_window_layers")
    return layer_windows(hf, [i >= first for i in range(layers)])


def _qwen3_layer(hf: Mapping) -> LayerSpec:
    return LayerSpec((AttentionSpec(**attention_bias(hf), qk_norm="head"),))


def read_qwen2(hf: Mapping, layers: int) -> dict[str, Any]:
    return dict(layers=with_windows(LayerSpec((AttentionSpec(qkv_bias=True),)), _late_windows(hf, layers)))


def read_qwen3(hf: Mapping, layers: int) -> dict[str, Any]:
    return dict(layers=with_windows(_qwen3_layer(hf), _late_windows(hf, layers)))


def read_qwen3_moe(hf: Mapping, layers: int) -> dict[str, Any]:
    windowed = hf if get_boolean(hf, "use_sliding_window") else {**hf, "sliding_window": None}
    experts = read_experts(hf, norm_topk_prob=get_boolean(hf, "norm_topk_prob"))
    specs = with_windows(_qwen3_layer(hf), same_windows(windowed, layers))
    return dict(layers=with_experts(specs, read_sparse_layers(hf, layers), experts))


def read_qwen2_moe(hf: Mapping, layers: int) -> dict[str, Any]:
    last = get_count(hf, "max_window_layers")
    windows = layer_windows(hf, [i % 2 == 0 and i < last for i in range(layers)])
    specs = with_windows(LayerSpec((AttentionSpec(qkv_bias=get_boolean(hf, "qkv_bias")),)), windows)
    experts = read_shared_experts(hf, get_boolean(hf, "norm_topk_prob"))
    return dict(layers=with_experts(specs, read_sparse_layers(hf, layers), experts))


def write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    mixer: Any = config.layers[0].attention
    return write_layer_types(config) | write_experts(config) | dict(qkv_bias=mixer.qkv_bias)


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    has_window = config.layer_windows[0] is not None
    return write_window(config) | write_experts(config) | dict(use_sliding_window=has_window)


QWEN2 = Family(
    dict(num_key_value_heads=32, max_position_embeddings=32768, sliding_window=4096, max_window_layers=28),
    read_qwen2,
    "Qwen2ForCausalLM",
    write_layer_types,
)
QWEN3 = Family(QWEN2.defaults | dict(head_dim=128), read_qwen3, "Qwen3ForCausalLM", write_layer_types)
QWEN3_MOE = Family(
    dict(
        num_key_value_heads=4, max_position_embeddings=32768, sliding_window=4096, decoder_sparse_step=1,
        moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128, norm_topk_prob=False,
        mlp_only_layers=None,
    ),
    read_qwen3_moe,
    "Qwen3MoeForCausalLM",
    write_qwen3_moe,
    Names(EXPERTS, STACKED),
)  # fmt: skip
QWEN2_MOE = Family(
    dict(
        num_key_value_heads=16, max_position_embeddings=32768, sliding_window=4096, max_window_layers=28,
        decoder_sparse_step=1, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
        num_experts_per_tok=4, num_experts=60, norm_topk_prob=False, mlp_only_layers=None, qkv_bias=True,
    ),
    read_qwen2_moe,
    "Qwen2MoeForCausalLM",
    write_qwen2_moe,
    Names(EXPERTS | SHARED_EXPERT, STACKED),
    unused=unused_shared_experts,
)  # fmt: skip
