"""Kernels that Triton compiles, for any NVIDIA GPU from Ampere on, through `pl.pallas_call`."""

from .append import rope_append
from .argmax import argmax, int8_head_argmax, lm_head_argmax
from .attention import decode_attention, prefill_attention
from .experts import gated_experts
from .logits import summarize_logits
from .products import product

__all__ = [
    "argmax",
    "decode_attention",
    "gated_experts",
    "int8_head_argmax",
    "lm_head_argmax",
    "prefill_attention",
    "product",
    "rope_append",
    "summarize_logits",
]
