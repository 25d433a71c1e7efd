"""Kernels that Mosaic TPU compiles, through `pl.pallas_call`. Those of attention read keys and values
`SideBySide`.
"""

from .append import rope_append
from .attention import decode_attention, prefill_attention
from .experts import gated_experts
from .head import int8_head_argmax, lm_head_argmax
from .products import product

__all__ = [
    "decode_attention",
    "gated_experts",
    "int8_head_argmax",
    "lm_head_argmax",
    "prefill_attention",
    "product",
    "rope_append",
]
