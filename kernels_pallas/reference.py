"""References of all kernels in plain jnp and float32, for tests and `scripts/check_gpu.py`.

They store every score and every logit at once, so they are for checking, not for running a model.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def prefill_attention(
    q_BTNH, k_BKSH, v_BKSH, start_B, length_B, *, scale, window=None, soft_cap=None
) -> jax.Array:
    """Query t of row b, at position start_B[b] + t, sees the keys at positions up to its own (the last
    `window` of them) below length_B[b].

    A query that sees no key gives zeros. float32 [B, T, N, H].
    """
    B, T, N, H = q_BTNH.shape
    K, S = k_BKSH.shape[1:3]
    q, k, v = (x.astype(jnp.float32) for x in (q_BTNH.reshape(B, T, K, N // K, H), k_BKSH, v_BKSH))
    scores = jnp.einsum("btkgh,bksh->bkgts", q, k, precision=lax.Precision.HIGHEST) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    query_BT1 = (start_B[:, None] + jnp.arange(T))[..., None]
    key_S = jnp.arange(S)
    valid_BS = key_S < length_B[:, None]
    visible_BTS = (key_S <= query_BT1) & valid_BS[:, None]
    if window is not None:
        visible_BTS &= key_S > query_BT1 - window
    visible = visible_BTS[:, None, None]
    weights = jnp.where(visible, jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1), 0)
    v = jnp.where(valid_BS[:, None, :, None], v, 0)  # 0 * NaN is NaN
    return jnp.einsum("bkgts,bksh->btkgh", weights, v, precision=lax.Precision.HIGHEST).reshape(B, T, N, H)


def decode_attention(q_BNH, k_BKSH, v_BKSH, length_B, *, scale, window=None, soft_cap=None) -> jax.Array:
    """One query per row, at the position length_B[b] - 1. float32 [B, N, H]."""
    out = prefill_attention(
        q_BNH[:, None], k_BKSH, v_BKSH, length_B - 1, length_B, scale=scale, window=window, soft_cap=soft_cap
    )
    return out[:, 0]


def argmax(x_BV) -> jax.Array:
    """The index of each row's largest number, int32 [B]: the lowest of equal ones; the first NaN if any."""
    return jnp.argmax(x_BV, -1).astype(jnp.int32)


def lm_head_argmax(x_BD, weight_VD, *, soft_cap=None) -> tuple[jax.Array, jax.Array]:
    """The id of the largest of the logits x · weightᵀ, capped (int32 [B]; ties and NaN as in `argmax`), and
    its log-probability (float32 [B]).
    """
    logits_BV = jnp.einsum(
        "bd,vd->bv", x_BD.astype(jnp.float32), weight_VD.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    if soft_cap is not None:
        logits_BV = soft_cap * jnp.tanh(logits_BV / soft_cap)
    id_B = argmax(logits_BV)
    return id_B, jnp.take_along_axis(jax.nn.log_softmax(logits_BV, -1), id_B[:, None], -1)[:, 0]


def gated_experts(  # noqa: PLR0913
    x_MD, weight_MU, expert_MU, gate_XFD, up_XFD, down_XDF, *, activation, num_experts=None
) -> jax.Array:
    """Each token's weighted sum of the gated MLPs that it chose; experts outside 0 … X - 1 count as zeros.
    float32 [M, D].
    """
    x, gate, up, down = (array.astype(jnp.float32) for array in (x_MD, gate_XFD, up_XFD, down_XDF))
    product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    inner_MXF = activation(product("md,xfd->mxf", x, gate)) * product("md,xfd->mxf", x, up)
    used_MUX = expert_MU[..., None] == jnp.arange(len(gate))
    out_MUXD = jnp.where(used_MUX[..., None], product("mxf,xdf->mxd", inner_MXF, down)[:, None], 0)
    return (weight_MU[..., None] * out_MUXD.sum(2)).sum(1)
