"""The reference of `rope_append` in plain jnp."""

import jax
import jax.numpy as jnp


def rope_append(  # noqa: PLR0913
    q_BTNH, k_BTKH, v_BTKH, cos_BTP, sin_BTP, k_PKSH, v_PKSH, start_B, num_tokens_B, *, capacity,
    table_BP=None, ring=False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Queries and keys rotated in float32 by the angles of their pairs (i, i + P), the rest of a head as it
    is; and the caches with the keys and values of the first num_tokens_B[b] tokens from position start_B[b]
    on, without those at or past the capacity.

    Position p of row b is in slot p of k_PKSH[b]; with `ring` in slot p % S; with a block table in slot p % S
    of page table_BP[b, p // S]. No angles (None): nothing is rotated.
    """
    B, T = q_BTNH.shape[:2]
    S = k_PKSH.shape[2]
    q_BTNH, k_BTKH = (_rotate(x, cos_BTP, sin_BTP) for x in (q_BTNH, k_BTKH))
    for b in range(B):
        for t in range(T):
            position = start_B[b] + t
            written = (t < num_tokens_B[b]) & (position < capacity)
            owner = b
            slot = position
            if table_BP is not None:
                written &= position < S * table_BP.shape[1]
                owner = table_BP[b, position // S]
            if table_BP is not None or ring:
                slot = position % S
            slot = jnp.where(written, slot, S)  # a slot that does not exist
            k_PKSH = k_PKSH.at[owner, :, slot].set(k_BTKH[b, t].astype(k_PKSH.dtype), mode="drop")
            v_PKSH = v_PKSH.at[owner, :, slot].set(v_BTKH[b, t].astype(v_PKSH.dtype), mode="drop")
    return q_BTNH, k_PKSH, v_PKSH


def _rotate(x_BTNH, cos_BTP, sin_BTP):
    if cos_BTP is None:
        return x_BTNH
    P = cos_BTP.shape[-1]
    a, b, rest = jnp.split(x_BTNH.astype(jnp.float32), (P, 2 * P), axis=-1)
    cos, sin = (x[:, :, None] for x in (cos_BTP, sin_BTP))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1).astype(x_BTNH.dtype)
