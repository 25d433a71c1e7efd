"""Kernels that Triton compiles, for any NVIDIA GPU from Ampere on, through `pl.pallas_call`."""

from .append import rope_append as rope_append
from .argmax import argmax as argmax, int8_head_argmax as int8_head_argmax, lm_head_argmax as lm_head_argmax
from .attention import decode_attention as decode_attention, prefill_attention as prefill_attention
from .delta import delta_step as delta_step
from .delta_drafts import delta_drafts as delta_drafts
from .delta_prompts import delta_prefill as delta_prefill
from .experts import gated_experts as gated_experts
from .logits import summarize_logits as summarize_logits
from .mamba import mamba_step as mamba_step
from .mamba_prompts import mamba_prefill as mamba_prefill
from .products import product as product
