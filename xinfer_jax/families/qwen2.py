"""Qwen2: biases of queries, keys and values; late layers may have a sliding window."""

from collections.abc import Mapping

from .family import Family
from .layer_fields import late_windows

DEFAULTS = dict(
    num_key_value_heads=32, max_position_embeddings=32768, sliding_window=4096, max_window_layers=28
)


def read_qwen2(hf: Mapping, layers: int) -> dict:
    return dict(qkv_bias=True, layer_windows=late_windows(hf, layers))


FAMILY = Family(DEFAULTS, read_qwen2)
