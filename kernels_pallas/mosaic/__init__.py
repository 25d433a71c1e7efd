"""Kernels for Hopper (compute capability 9.0) through Mosaic GPU: TMA loads into shared memory, wgmma on the
tensor cores.
"""

from .argmax import argmax as argmax, lm_head_argmax as lm_head_argmax
from .decode import decode_attention as decode_attention
from .prefill import prefill_attention as prefill_attention
