"""Norms and RoPE of new queries and keys, and the append of keys and values to a layer's cache."""

from typing import Any

import jax

from ..cache.contiguous import Contiguous
from ..config.run_config import RunConfig
from ..ops.operation import run
from ..weights.layers import Norm, apply_rope

QKV = tuple[jax.Array, jax.Array, jax.Array]  # [B, T, N or K, H]
HeadNorms = tuple[Norm, Norm]  # of each head of queries and keys


def rotate(qkv: QKV, norms: HeadNorms | None, angles: Any) -> QKV:
    """Returns queries and keys after their norms and RoPE, and the values. norms: the norms of the heads.
    None: there are none. angles: cos and sin. None: no RoPE.
    """
    q_BTNH, k_BTKH, v_BTKH = norm_heads(qkv, norms)
    if angles is None:
        return q_BTNH, k_BTKH, v_BTKH
    return apply_rope(q_BTNH, *angles), apply_rope(k_BTKH, *angles), v_BTKH


def rotate_and_append(
    qkv: QKV,
    norms: HeadNorms | None,
    angles: Any,
    kv: Contiguous,
    start_B: jax.Array,
    num_tokens_B: jax.Array,
    run_config: RunConfig,
) -> tuple[jax.Array, Contiguous]:
    """Returns the queries after norm and RoPE, and the cache with the new keys and values. It takes the
    arguments of `rotate` and `Contiguous.append`.
    """
    operands: dict[str, Any] = dict(qkv=qkv, norms=norms, angles=angles, kv=kv)
    operands |= dict(start_B=start_B, num_tokens_B=num_tokens_B)
    return run("rope_append", plain_append, run_config, **operands)


def norm_heads(qkv: QKV, norms: HeadNorms | None) -> QKV:
    """Returns queries and keys after the norms of their heads."""
    if norms is None:
        return qkv
    pairs = zip(qkv[:2], norms, strict=True)
    q_BTNH, k_BTKH = (norm(x) for x, norm in pairs)
    return q_BTNH, k_BTKH, qkv[2]


def plain_append(qkv, norms, angles, kv: Contiguous, start_B, num_tokens_B):
    """Runs `rotate_and_append` in plain jnp."""
    q_BTNH, k_BTKH, v_BTKH = rotate(qkv, norms, angles)
    return q_BTNH, kv.append(k_BTKH, v_BTKH, start_B, num_tokens_B)
