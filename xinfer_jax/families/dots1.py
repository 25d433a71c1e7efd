"""dots.llm1: experts of DeepSeek-V3's kind, norms of each head of queries and keys, late sliding windows."""

from collections.abc import Mapping
from typing import Any

from ..config.layer_spec import AttentionSpec, LayerSpec
from ..config.model_config import ModelConfig
from .family import Family
from .grouped_experts import DEFAULTS, NAMES, with_grouped_experts, write_grouped_experts
from .layer_fields import (
    attention_bias,
    layer_windows,
    unused_shared_experts,
    with_windows,
    write_layer_types,
)
from .values import get_count


def read_dots1(hf: Mapping, layers: int) -> dict[str, Any]:
    layer = LayerSpec((AttentionSpec(**attention_bias(hf), qk_norm="head"),))
    first = get_count(hf, "max_window_layers")
    windows = layer_windows({**hf, "use_sliding_window": True}, [i >= first for i in range(layers)])
    return dict(layers=with_grouped_experts(hf, with_windows(layer, windows)))


def write_dots1(config: ModelConfig) -> dict[str, Any]:
    return write_layer_types(config) | write_grouped_experts(config)


FAMILY = Family(
    DEFAULTS
    | dict(num_key_value_heads=32, max_position_embeddings=2048, sliding_window=4096, max_window_layers=62)
    | dict(moe_intermediate_size=1408, n_shared_experts=None, norm_topk_prob=False),
    read_dots1,
    "Dots1ForCausalLM",
    write_dots1,
    NAMES,
    unused=unused_shared_experts,
)
