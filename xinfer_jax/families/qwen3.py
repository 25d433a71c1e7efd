"""Qwen3: norms of each head of queries and keys."""

from collections.abc import Mapping

from .family import Family
from .layer_fields import attention_bias, late_windows
from .qwen2 import DEFAULTS


def read_qwen3(hf: Mapping, layers: int) -> dict:
    return attention_bias(hf) | dict(qk_norm=True, layer_windows=late_windows(hf, layers))


FAMILY = Family(DEFAULTS | dict(head_dim=128), read_qwen3)
