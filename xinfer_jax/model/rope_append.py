"""Norms and RoPE of new queries and keys, and the append of keys and values to a layer's cache."""

from functools import partial
from typing import Any, NamedTuple

import jax

from ..cache.contiguous import Contiguous
from ..ops.operation import run
from .layers import apply_rope, rms_norm

_QKV = tuple[jax.Array, jax.Array, jax.Array]  # [B, T, N or K, H]


class HeadNorms(NamedTuple):
    """RMS norms of the queries and keys of each head, with `eps` and `offset` of `rms_norm`."""

    q_H: jax.Array
    k_H: jax.Array
    eps: float
    offset: float | None


def rotate(qkv: _QKV, norms: HeadNorms | None, angles: Any) -> _QKV:
    """Queries and keys after their norms and RoPE, and the values. norms: of the heads; None: there are none.
    angles: cos and sin; None: no RoPE.
    """
    q_BTNH, k_BTKH, v_BTKH = norm_heads(qkv, norms)
    if angles is None:
        return q_BTNH, k_BTKH, v_BTKH
    return apply_rope(q_BTNH, *angles), apply_rope(k_BTKH, *angles), v_BTKH


def rotate_and_append(  # noqa: PLR0913
    qkv: _QKV,
    norms: HeadNorms | None,
    angles: Any,
    kv: Contiguous,
    start_B: jax.Array,
    num_tokens_B: jax.Array,
    impl: str | None,
) -> tuple[jax.Array, Contiguous]:
    """The queries after norm and RoPE, and the cache with the new keys and values. Arguments as in `rotate`
    and `Contiguous.append`.
    """
    weights, static = (None, None) if norms is None else (norms[:2], norms[2:])
    operands = qkv, weights, angles, kv, start_B, num_tokens_B
    return run("rope_append", partial(plain_append, norm=static), *operands, impl=impl, norm=static)


def norm_heads(qkv: _QKV, norms: HeadNorms | None) -> _QKV:
    """Queries and keys after the norms of their heads."""
    if norms is None:
        return qkv
    q_BTNH, k_BTKH, v_BTKH = qkv
    q_H, k_H, eps, offset = norms
    return rms_norm(q_BTNH, q_H, eps, offset), rms_norm(k_BTKH, k_H, eps, offset), v_BTKH


def head_norms(weights: Any, norm: Any) -> HeadNorms | None:
    """Of the weights for queries and keys, and of eps and offset; None: there are none."""
    return None if weights is None else HeadNorms(*weights, *norm)


def plain_append(qkv, weights, angles, kv: Contiguous, start_B, num_tokens_B, norm):  # noqa: PLR0913
    """`rotate_and_append` in plain jnp. weights, norm: as in `head_norms`."""
    q_BTNH, k_BTKH, v_BTKH = rotate(qkv, head_norms(weights, norm), angles)
    return q_BTNH, kv.append(k_BTKH, v_BTKH, start_B, num_tokens_B)
