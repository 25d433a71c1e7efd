"""Qwen2: biases of queries, keys and values; late layers may have a sliding window."""

from collections.abc import Mapping

from ..config.layer_spec import AttentionSpec, LayerSpec
from .family import Family
from .layer_fields import late_windows, with_windows

DEFAULTS = dict(
    num_key_value_heads=32, max_position_embeddings=32768, sliding_window=4096, max_window_layers=28
)


def read_qwen2(hf: Mapping, layers: int) -> dict:
    return dict(layers=with_windows(LayerSpec(AttentionSpec(qkv_bias=True)), late_windows(hf, layers)))


FAMILY = Family(DEFAULTS, read_qwen2)
