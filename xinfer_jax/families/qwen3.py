"""Qwen3: norms of each head of queries and keys."""

from collections.abc import Mapping

from ..config.layer_spec import AttentionSpec, LayerSpec
from .family import Family
from .layer_fields import attention_bias, late_windows, with_windows
from .qwen2 import DEFAULTS


def read_qwen3(hf: Mapping, layers: int) -> dict:
    layer = LayerSpec(AttentionSpec(**attention_bias(hf), qk_norm="head"))
    return dict(layers=with_windows(layer, late_windows(hf, layers)))


FAMILY = Family(DEFAULTS | dict(head_dim=128), read_qwen3)
