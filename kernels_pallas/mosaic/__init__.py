"""Kernels for Hopper (compute capability 9.0) through Mosaic GPU: TMA loads into shared memory, wgmma on the
tensor cores.
"""

from .argmax import argmax, lm_head_argmax
from .decode import decode_attention
from .prefill import prefill_attention

__all__ = ["argmax", "decode_attention", "lm_head_argmax", "prefill_attention"]
