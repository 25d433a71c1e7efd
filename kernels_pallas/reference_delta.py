"""The operands of linear attention (Gated DeltaNet, Yang et al. 2024) between its products, and its
reference in plain jnp: a decode step, and the tokens of a prompt one after the other.

K key heads, N value heads (a multiple of K), H width of a key, Y of a value, W tokens before the current one
that the convolution reads.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

UNIT_EPS = 1e-6  # of the norm of queries and keys


class NewToken(NamedTuple):
    """What products give of one token of each row, in one dtype, numbers of all heads side by side; of
    prompts [B, T, ...].
    """

    q: Any  # [B, K H]
    k: Any
    v: Any  # [B, N Y]
    z: Any  # the gate of the result
    b: Any  # [B, N]: sigmoid(b) is the strength of the write
    a: Any  # gives the decay


class DeltaWeights(NamedTuple):
    """The other parameters of a layer."""

    taps_q: Any  # [K H, W + 1], of the convolution
    taps_k: Any
    taps_v: Any  # [N Y, W + 1]
    log_rate_N: Any
    decay_bias_N: Any
    norm_Y: Any  # of the RMS norm of each head's result


class DeltaState(NamedTuple):
    """What a row keeps, float32: the last W inputs of the convolution, and the map from keys to values."""

    q: Any  # [B, K, W, H]
    k: Any
    v: Any  # [B, N, W, Y]
    state: Any  # [B, N, H, Y]


def delta_step(
    new: NewToken, weights: DeltaWeights, old: DeltaState, start_B, num_tokens_B, *, eps: float
) -> tuple[jax.Array, DeltaState]:
    """The normed and gated results of each row's token [B, N Y], in the dtype of the token, and the state
    after it: zeros were before position 0. A row without a token (num_tokens_B is 0) keeps its state, and its
    result is zeros.

    The state S of a head becomes exp(g) S, then S + k (β (v − Sᵀk))ᵀ, and the result is Sᵀq; queries, keys
    and values are silu of their convolutions, queries and keys of length 1. eps: of the norm.
    """
    has_token_B = num_tokens_B > 0

    def choose(is_B, x, y):
        return jnp.where(is_B.reshape(-1, *(1,) * (y.ndim - 1)), x, y)

    before = jax.tree.map(lambda x: choose(start_B == 0, 0, x), old)
    inputs = [
        jnp.concatenate([x, y.astype(jnp.float32).reshape(*x.shape[:2], 1, -1)], 2)
        for x, y in zip(before[:3], new[:3], strict=True)
    ]
    q_BKH, k_BKH, v_BNY = map(_convolve, inputs, weights[:3])
    groups = v_BNY.shape[1] // k_BKH.shape[1]
    q_BNH, k_BNH = (jnp.repeat(unit(x), groups, 1) for x in (q_BKH, k_BKH))
    q_BNH *= q_BNH.shape[-1] ** -0.5
    rate_N, bias_N = (x.astype(jnp.float32) for x in weights[3:5])
    decay_BN = jnp.exp(-jnp.exp(rate_N) * jax.nn.softplus(new.a.astype(jnp.float32) + bias_N))
    beta_BN1 = jax.nn.sigmoid(new.b.astype(jnp.float32))[..., None]
    state_BNHY = before.state * decay_BN[..., None, None]
    added_BNY = beta_BN1 * (v_BNY - (state_BNHY * k_BNH[..., None]).sum(2))
    state_BNHY += k_BNH[..., None] * added_BNY[:, :, None]
    out_BNY = (state_BNHY * q_BNH[..., None]).sum(2)
    out_BX = gated_norm(out_BNY, new.z.reshape(out_BNY.shape), weights.norm_Y, eps).reshape(new.z.shape)
    after = DeltaState._make([*(x[:, :, 1:] for x in inputs), state_BNHY])
    kept = jax.tree.map(lambda x, y: choose(has_token_B, x, y), after, old)
    return choose(has_token_B, out_BX, jnp.zeros_like(out_BX)), kept


def delta_prefill(
    new: NewToken, weights: DeltaWeights, old: DeltaState, start_B, num_tokens_B, *, eps: float
) -> tuple[jax.Array, DeltaState]:
    """`delta_step` for the first num_tokens_B of T tokens of each row, from position start_B on: results
    [B, T, N Y], zeros past them, and the state after them.
    """

    def step(state: DeltaState, token: tuple[Any, NewToken]) -> tuple[DeltaState, jax.Array]:
        t, of_rows = token
        args = of_rows, weights, state, start_B + t, (t < num_tokens_B).astype(jnp.int32)
        return delta_step(*args, eps=eps)[::-1]

    tokens = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), new)
    state, out_TBX = lax.scan(step, old, (jnp.arange(new.q.shape[1]), tokens))
    return jnp.swapaxes(out_TBX, 0, 1), state


def gated_norm(out: jax.Array, z: jax.Array, norm_Y: jax.Array, eps: float) -> jax.Array:
    """The RMS norm of float32 heads [..., Y] times silu(z), rounded to the dtype of z where models round."""
    x = out.astype(z.dtype).astype(jnp.float32)
    x = x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps)
    x = norm_Y.astype(jnp.float32) * x.astype(z.dtype).astype(jnp.float32)
    x = x.astype(z.dtype).astype(jnp.float32)
    z32 = z.astype(jnp.float32)
    return (x * (z32 * jax.nn.sigmoid(z32))).astype(z.dtype)


def _convolve(x_BKSH: jax.Array, taps_XS: jax.Array) -> jax.Array:
    """silu of the weighted sum of each head's inputs."""
    (_, K, S, H) = x_BKSH.shape
    y_BKH = (x_BKSH * jnp.swapaxes(taps_XS.astype(jnp.float32).reshape(K, H, S), 1, 2)).sum(2)
    return y_BKH * jax.nn.sigmoid(y_BKH)


def unit(x: jax.Array) -> jax.Array:
    """Vectors, the last axis of x, of length 1."""
    return x * lax.rsqrt((x * x).sum(-1, keepdims=True) + UNIT_EPS)
