"""The reference of `rope_append` in plain jnp."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .key_layouts import HeadNorms, Latents, Levels, SideBySide, join, quantize, rotate_pairs, separate


def rope_append(  # noqa: PLR0913
    q_BTNH, k_BTKH, v_BTKH, cos_BTP, sin_BTP, k_PKSH, v_PKSH, start_B, num_tokens_B, *, capacity,
    table_BP=None, ring=False, norms=None,
) -> tuple[jax.Array, Any, Any]:  # fmt: skip
    """Returns queries and keys rotated in float32 by the angles of their pairs (i, i + P), with the rest of a
    head as it is. Also returns the caches with the keys and values of the first num_tokens_B[b] tokens from
    position start_B[b] on, without tokens at or past the capacity.

    - Position p of row b is in slot p of k_PKSH[b]. With `ring` it is in slot p % S. With a block table it is
      in slot p % S of page table_BP[b, p // S].
    - `Levels` are quantized to nearest, between the smallest and the largest number of a vector.
    - `SideBySide` or `Latents` is the first cache, and the second is None. Of latents the values are not
      read.
    - Without angles (None) nothing is rotated. norms: None, or `HeadNorms` before RoPE.
    """
    B, T, _, H = q_BTNH.shape
    q_BTNH, k_BTKH = norm_heads(q_BTNH, k_BTKH, norms)
    if isinstance(k_PKSH, SideBySide):
        pair = separate(k_PKSH)
        options = dict(capacity=capacity, table_BP=table_BP, ring=ring)
        new = q_BTNH, k_BTKH, v_BTKH, cos_BTP, sin_BTP
        q_BTNH, k, v = rope_append(*new, *pair, start_B, num_tokens_B, **options)
        return q_BTNH, join(k, v), None
    q_BTNH, k_BTKH = (rotate(x, cos_BTP, sin_BTP) for x in (q_BTNH, k_BTKH))
    if isinstance(k_PKSH, Latents):
        k_BTKH = jnp.pad(k_BTKH, [(0, 0)] * 3 + [(0, k_PKSH.shape[3] - H)])
    position_BT = start_B[:, None] + jnp.arange(T)
    written_BT = (jnp.arange(T) < num_tokens_B[:, None]) & (position_BT < capacity)
    S = k_PKSH.shape[2]
    owner_BT = jnp.broadcast_to(jnp.arange(B)[:, None], (B, T))
    slot_BT = position_BT % S if ring or table_BP is not None else position_BT
    if table_BP is not None:
        written_BT &= position_BT < S * table_BP.shape[1]
        owner_BT = jnp.take_along_axis(table_BP, position_BT // S, 1, mode="clip")
    slot_BT = jnp.where(written_BT, slot_BT, S)  # a slot that does not exist

    def write(old_PKSX, new_BTKX):
        return old_PKSX.at[owner_BT, :, slot_BT].set(new_BTKX.astype(old_PKSX.dtype), mode="drop")

    def append(old, new_BTKH):
        if old is None:
            return None
        if isinstance(old, Latents):
            return dataclasses.replace(old, values=write(old.values, new_BTKH))
        if not isinstance(old, Levels):
            return write(old, new_BTKH)
        bits = 8 * old.values.shape[-1] // H
        return Levels(*map(write, old, quantize(new_BTKH, bits)))

    return q_BTNH, append(k_PKSH, k_BTKH), append(v_PKSH, v_BTKH)


def norm_heads(q_BTNH, k_BTKH, norms: HeadNorms | None) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys after these norms. None: as they are."""
    if norms is None:
        return q_BTNH, k_BTKH

    def norm(x: jax.Array, weight_H: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + norms.eps)
        if norms.offset is not None:
            return (y * (norms.offset + weight_H.astype(jnp.float32))).astype(x.dtype)
        return (weight_H * y.astype(x.dtype)).astype(x.dtype)

    return norm(q_BTNH, norms.q_H), norm(k_BTKH, norms.k_H)


def rotate(x_BTNH, cos_BTP, sin_BTP):
    """Returns heads rotated in float32 by the angles of their pairs. Without angles they stay as they are."""
    if cos_BTP is None:
        return x_BTNH
    cos, sin = (x[:, :, None] for x in (cos_BTP, sin_BTP))
    return rotate_pairs(x_BTNH.astype(jnp.float32), cos, sin).astype(x_BTNH.dtype)
