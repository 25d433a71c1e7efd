"""Mistral: one sliding window for all layers."""

from collections.abc import Mapping

from ..config.layer_spec import LayerSpec
from .family import Family
from .layer_fields import same_windows, with_windows


def read_mistral(hf: Mapping, layers: int) -> dict:
    return dict(layers=with_windows(LayerSpec(), same_windows(hf, layers)))


FAMILY = Family(
    dict(num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096), read_mistral
)
