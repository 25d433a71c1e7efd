"""Norms and RoPE of new queries and keys, and the append of keys and values to a layer's cache."""

from functools import partial
from typing import Any

import jax

from ..cache.contiguous import Contiguous
from ..config.run_config import RunConfig
from ..ops.operation import run
from ..weights.layers import apply_rope, rms_norm

_QKV = tuple[jax.Array, jax.Array, jax.Array]  # [B, T, N or K, H]
# RMS norms of each head: the weights for queries and keys; `eps` and `offset` of `rms_norm`.
HeadNorms = tuple[tuple[jax.Array, jax.Array], tuple[float, float | None]]


def rotate(qkv: _QKV, norms: HeadNorms | None, angles: Any) -> _QKV:
    """Queries and keys after their norms and RoPE, and the values. norms: of the heads; None: there are none.
    angles: cos and sin; None: no RoPE.
    """
    q_BTNH, k_BTKH, v_BTKH = norm_heads(qkv, norms)
    if angles is None:
        return q_BTNH, k_BTKH, v_BTKH
    return apply_rope(q_BTNH, *angles), apply_rope(k_BTKH, *angles), v_BTKH


def rotate_and_append(
    qkv: _QKV,
    norms: HeadNorms | None,
    angles: Any,
    kv: Contiguous,
    start_B: jax.Array,
    num_tokens_B: jax.Array,
    run_config: RunConfig,
) -> tuple[jax.Array, Contiguous]:
    """The queries after norm and RoPE, and the cache with the new keys and values. Arguments as in `rotate`
    and `Contiguous.append`.
    """
    weights, static = norms or (None, None)
    operands: dict[str, Any] = dict(qkv=qkv, weights=weights, angles=angles, kv=kv)
    operands |= dict(start_B=start_B, num_tokens_B=num_tokens_B)
    return run(
        "rope_append", partial(plain_append, norm=static), run_config, static=dict(norm=static), **operands
    )


def norm_heads(qkv: _QKV, norms: HeadNorms | None) -> _QKV:
    """Queries and keys after the norms of their heads."""
    if norms is None:
        return qkv
    q_BTNH, k_BTKH, v_BTKH = qkv
    (q_H, k_H), static = norms
    return rms_norm(q_BTNH, q_H, *static), rms_norm(k_BTKH, k_H, *static), v_BTKH


def plain_append(qkv, weights, angles, kv: Contiguous, start_B, num_tokens_B, norm):
    """`rotate_and_append` in plain jnp. weights, norm: the parts of `HeadNorms`, or None."""
    q_BTNH, k_BTKH, v_BTKH = rotate(qkv, None if weights is None else (weights, norm), angles)
    return q_BTNH, kv.append(k_BTKH, v_BTKH, start_B, num_tokens_B)
