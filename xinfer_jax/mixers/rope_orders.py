"""RoPE in other orders than that of Llama: of the numbers in a head, or of norms and rotation.

`apply_rope` and its kernels rotate the pairs (i, i + P) of a head. Interleaved pairs (2i, 2i + 1) of queries
and keys are brought into that order first. Scores are sums over a head, so they stay the same.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..config.layer_spec import AttentionSpec
from ..config.model_config import ModelConfig
from ..config.rope import RopeConfig
from .rope_append import QKV, HeadNorms, norm_heads, rotate


def halves_first(x: jax.Array, rope: RopeConfig) -> jax.Array:
    """Returns x [..., H] with the first numbers of all P rotated pairs before the second ones. The rest of a
    head, which is not rotated, stays.
    """
    width = rope.rotated_width(x.shape[-1])
    return jnp.concatenate([x[..., :width:2], x[..., 1:width:2], x[..., width:]], -1)


def reordered(
    spec: AttentionSpec, config: ModelConfig, qkv: QKV, norms: HeadNorms | None, angles: Any
) -> tuple[QKV, HeadNorms | None, Any]:
    """Returns the arguments of `rotate` that have the result of this order of pairs, norms and RoPE."""
    rope = spec.rope or config.rope
    if rope.interleaved and angles is not None:
        q_BTNH, k_BTKH, v_BTKH = qkv
        qkv = halves_first(q_BTNH, rope), halves_first(k_BTKH, rope), v_BTKH
        if norms is not None:
            q_norm, k_norm = (
                dataclasses.replace(norm, weight=halves_first(norm.weight, rope)) for norm in norms
            )
            norms = q_norm, k_norm
    if spec.qk_norm != "rotated_head":
        return qkv, norms, angles
    return norm_heads(rotate(qkv, None, angles), norms), None, None
