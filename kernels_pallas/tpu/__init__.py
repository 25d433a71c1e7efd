"""Kernels that Mosaic TPU compiles, through `pl.pallas_call`. They read keys and values `SideBySide`."""

from .append import rope_append
from .attention import decode_attention, prefill_attention

__all__ = ["decode_attention", "prefill_attention", "rope_append"]
