"""The operands of linear attention (Gated DeltaNet, Yang et al. 2024) between its products, and its
reference in plain jnp: a decode step, and the tokens of a prompt one after the other.

K key heads, N value heads (a multiple of K), H width of a key, Y of a value, W tokens before the current one
that the convolution reads.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

UNIT_EPS = 1e-6  # of the norm of queries and keys


class NewToken(NamedTuple):
    """The outputs of products for one token of each row, in one dtype, with the numbers of all heads side by
    side. For prompts the shape is [B, T, ...].
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
    """The state of a row, float32: the last W inputs of the convolution, and the map from keys to values."""

    q: Any  # [B, K, W, H]
    k: Any
    v: Any  # [B, N, W, Y]
    state: Any  # [B, N, H, Y]


def delta_step(
    new: NewToken, weights: DeltaWeights, old: DeltaState, start_B, num_tokens_B, *, eps: float
) -> tuple[jax.Array, DeltaState]:
    """Returns the normed and gated results of each row's token [B, N Y], in the dtype of the token, and the
    state after it. Before position 0 the inputs were zeros. A row without a token (num_tokens_B is 0) keeps
    its state, and its result is zeros.

    The state S of a head becomes exp(g) S, then S + k (β (v − Sᵀk))ᵀ, and the result is Sᵀq. Queries, keys
    and values are silu of their convolutions, with queries and keys of length 1. eps: the eps of the norm.
    """
    tokens = jax.tree.map(lambda x: x[:, None], new)
    out, state = delta_prefill(tokens, weights, old, start_B, num_tokens_B, eps=eps)
    return out[:, 0], state


def delta_prefill(
    new: NewToken, weights: DeltaWeights, old: DeltaState, start_B, num_tokens_B, *, eps: float
) -> tuple[jax.Array, DeltaState]:
    """Runs `delta_step` for the first num_tokens_B of T tokens of each row, from position start_B on: results
    [B, T, N Y], zeros past them, and the state after them.
    """

    def step(state_BNHY: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_BKH, k_BKH, v_BNY, decay_BN, beta_BN = token
        groups = v_BNY.shape[1] // k_BKH.shape[1]
        q_BNH1, k_BNH1 = (jnp.repeat(x, groups, 1)[..., None] for x in (q_BKH, k_BKH))
        state_BNHY *= jnp.exp(decay_BN)[..., None, None]
        added_BNY = beta_BN[..., None] * (v_BNY - (state_BNHY * k_BNH1).sum(2))
        state_BNHY += k_BNH1 * added_BNY[:, :, None]
        return state_BNHY, (state_BNHY * q_BNH1).sum(2)

    *before, state = before_tokens(old, start_B, num_tokens_B)
    tokens = *convolved(before, new, weights, num_tokens_B), *log_steps(new, weights, num_tokens_B)
    state, out_TBNY = lax.scan(step, state, tuple(jnp.swapaxes(x, 0, 1) for x in tokens))
    out = normed_results(jnp.swapaxes(out_TBNY, 0, 1), new, weights, num_tokens_B, eps)
    return out, DeltaState._make([*inputs_after(before, new, num_tokens_B), state])


def gated_norm(out: jax.Array, z: jax.Array, norm_Y: jax.Array, eps: float) -> jax.Array:
    """Returns the RMS norm of float32 heads [..., Y] times silu(z), rounded to the dtype of z at the same
    place as in models.
    """
    x = rounded(out, z.dtype)
    return gated(x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + eps), z, norm_Y)


def gated(x: jax.Array, z: jax.Array, norm: jax.Array) -> jax.Array:
    """Returns the second half of `gated_norm`: of x divided by its root mean square."""
    x = rounded(norm.astype(jnp.float32) * rounded(x, z.dtype), z.dtype)
    return (x * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(dtype).astype(jnp.float32)


def zeros_past(x_BTX: jax.Array, num_tokens_B: jax.Array) -> jax.Array:
    """Returns x with zeros past the length of each row, at which numbers may be NaN."""
    is_real_BT1 = (jnp.arange(x_BTX.shape[1]) < num_tokens_B[:, None])[..., None]
    return jnp.where(is_real_BT1, x_BTX, jnp.zeros_like(x_BTX))


def log_steps(new: NewToken, weights: DeltaWeights, num_tokens_B: jax.Array) -> list[jax.Array]:
    """Returns, float32 [B, T, N], the logarithm of the decay of each token, and beta. Both are 0 past the
    length.
    """
    return [zeros_past(x, num_tokens_B) for x in decay_and_beta(new.a, new.b, *weights[3:5])]


def decay_and_beta(a, b, log_rate, bias) -> tuple[jax.Array, jax.Array]:
    """Returns float32: the logarithm of the decay, and beta."""
    a, b, log_rate, bias = (x.astype(jnp.float32) for x in (a, b, log_rate, bias))
    a += bias
    softplus = jnp.maximum(a, 0) + jnp.log1p(jnp.exp(-jnp.abs(a)))
    return -jnp.exp(log_rate) * softplus, jax.nn.sigmoid(b)


def before_tokens(old: Sequence[Any], start_B: jax.Array, num_tokens_B: jax.Array) -> list[jax.Array]:
    """Returns arrays of a state, [B, ...] of four axes, before the tokens. They are zeros at the beginning of
    a row.
    """
    begins_B111 = ((start_B == 0) & (num_tokens_B > 0))[:, None, None, None]
    return [jnp.where(begins_B111, 0, x) for x in old]


def inputs_after(before: Sequence[jax.Array], new: Sequence[Any], num_tokens_B: jax.Array) -> list[jax.Array]:
    """Returns the last W inputs after the tokens, [B, heads, W, width]."""
    W = before[0].shape[2]
    slot_BW1 = (num_tokens_B[:, None] - W + jnp.arange(W))[..., None]

    def last(x_BKWH: jax.Array, new_BTX: jax.Array) -> jax.Array:
        B, K, _, H = x_BKWH.shape
        taken_BWX = jnp.take_along_axis(new_BTX, jnp.maximum(slot_BW1, 0), 1).astype(jnp.float32)
        kept_BKWH = jnp.take_along_axis(x_BKWH, jnp.minimum(slot_BW1 + W, W - 1)[:, None], 2)
        taken_BKWH = jnp.swapaxes(taken_BWX.reshape(B, W, K, H), 1, 2)
        return jnp.where(slot_BW1[:, None] < 0, kept_BKWH, taken_BKWH)

    return [last(*pair) for pair in zip(before, new[:3], strict=True)]


def convolved(
    before: Sequence[jax.Array], new: Sequence[Any], weights: DeltaWeights, num_tokens_B: jax.Array
) -> list[jax.Array]:
    """Returns silu of the convolution, float32 [B, T, heads, width]: queries of length 1 over the square root
    of H, keys of length 1, and values. Tokens past the length count as zeros. before, new: the inputs of the
    convolution before the tokens, and theirs [B, T, ...].
    """

    def convolve(before_BKWH: jax.Array, new_BTX: jax.Array, taps_XW: jax.Array) -> jax.Array:
        B, K, _, H = before_BKWH.shape
        y_BTX = weighted_inputs(before_BKWH, zeros_past(new_BTX, num_tokens_B), taps_XW)
        return jax.nn.silu(y_BTX).reshape(B, -1, K, H)

    q, k, v = map(convolve, before, new[:3], weights[:3])
    return [unit(q) * q.shape[-1] ** -0.5, unit(k), v]


def weighted_inputs(before_BKWH: jax.Array, new_BTX: jax.Array, taps_XW: jax.Array) -> jax.Array:
    """Returns the sums of a convolution, float32 [B, T, X]. It adds padded arrays, since XLA would store
    concatenated inputs.
    """
    B, _, W, _ = before_BKWH.shape
    T = new_BTX.shape[1]
    before_BWX = jnp.swapaxes(before_BKWH, 1, 2).reshape(B, W, -1)

    def inputs(w: int) -> jax.Array:
        """Returns the input of each token that tap w multiplies."""
        old = jnp.pad(before_BWX[:, w:], ((0, 0), (0, T), (0, 0)))[:, :T]
        return old + jnp.pad(new_BTX, ((0, 0), (W - w, 0), (0, 0)))[:, :T].astype(jnp.float32)

    total: Any = sum(inputs(w) * taps_XW[:, w].astype(jnp.float32) for w in range(W + 1))
    return total


def normed_results(
    out_BTNY: jax.Array, new: NewToken, weights: DeltaWeights, num_tokens_B: jax.Array, eps: float
) -> jax.Array:
    """Returns the normed and gated results [B, T, N Y] in the dtype of the tokens, with zeros past the
    length.
    """
    normed = gated_norm(out_BTNY, new.z.reshape(out_BTNY.shape), weights.norm_Y, eps)
    return zeros_past(normed.reshape(new.z.shape), num_tokens_B)


def unit(x: jax.Array) -> jax.Array:
    """Returns vectors, the last axis of x, of length 1."""
    return x * lax.rsqrt((x * x).sum(-1, keepdims=True) + UNIT_EPS)
