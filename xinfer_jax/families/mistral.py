"""Mistral: one sliding window for all layers."""

from collections.abc import Mapping

from .family import Family
from .layer_fields import same_windows


def read_mistral(hf: Mapping, layers: int) -> dict:
    return dict(layer_windows=same_windows(hf, layers))


FAMILY = Family(
    dict(num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096), read_mistral
)
