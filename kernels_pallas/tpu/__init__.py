"""Kernels that Mosaic TPU compiles, through `pl.pallas_call`. They read keys and values `SideBySide`."""

from .append import rope_append
from .attention import decode_attention, prefill_attention
from .experts import gated_experts

__all__ = ["decode_attention", "gated_experts", "prefill_attention", "rope_append"]
