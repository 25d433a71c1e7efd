"""The operands of Mamba-2 (Dao and Gu 2024) between its products, and its reference in plain jnp: a decode
step, and the tokens of a prompt one after the other. The gate and the norm of the result are not a part of
it.

N heads, Y width of a head, G groups of heads with the same B and C, S size of the state of a number, W tokens
before the current one that the convolution reads.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .reference_delta import before_tokens, inputs_after, weighted_inputs, zeros_past


class MambaToken(NamedTuple):
    """The outputs of products for one token of each row, float32 or bfloat16, with the numbers of all heads
    or groups side by side. For prompts the shape is [B, T, ...].
    """

    x: Any  # [B, N Y]
    b: Any  # [B, G S]
    c: Any
    dt: Any  # [B, N]


class MambaWeights(NamedTuple):
    """The other parameters of a layer."""

    x: Any  # [N Y, W + 1], taps of the convolution
    b: Any  # [G S, W + 1]
    c: Any
    bias_x: Any  # [N Y], of the convolution
    bias_b: Any  # [G S]
    bias_c: Any
    log_rate_N: Any
    dt_bias_N: Any
    skip_N: Any


class MambaState(NamedTuple):
    """The state of a row, float32: the last W inputs of the convolution, and the state of each head."""

    x: Any  # [B, N, W, Y]
    b: Any  # [B, G, W, S]
    c: Any
    state: Any  # [B, N, Y, S]


def mamba_step(
    new: MambaToken, weights: MambaWeights, old: MambaState, start_B, num_tokens_B
) -> tuple[jax.Array, MambaState]:
    """Returns the results of each row's token, float32 [B, N Y], and the state after it. Before position 0
    the inputs and the state were zeros. A row without a token (num_tokens_B is 0) keeps its state, and its
    result is zeros.

    The state h of a head becomes a h + dt x bᵀ, and the result is h c + D x. Here dt is softplus(dt + bias),
    a is exp(-exp(A_log) dt), and x, b and c are silu of their convolutions.
    """
    tokens = jax.tree.map(lambda x: x[:, None], new)
    out, state = mamba_prefill(tokens, weights, old, start_B, num_tokens_B)
    return out[:, 0], state


def mamba_prefill(
    new: MambaToken, weights: MambaWeights, old: MambaState, start_B, num_tokens_B
) -> tuple[jax.Array, MambaState]:
    """Runs `mamba_step` for the first num_tokens_B of T tokens of each row, from position start_B on: results
    float32 [B, T, N Y], zeros past them, and the state after them.
    """

    def step(state_BNYS: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x_BNY, b_BGS, c_BGS, decay_BN, dt_BN = token
        heads = x_BNY.shape[1] // b_BGS.shape[1]
        b_BN1S, c_BN1S = (jnp.repeat(z, heads, 1)[:, :, None] for z in (b_BGS, c_BGS))
        state_BNYS *= jnp.exp(decay_BN)[..., None, None]
        state_BNYS += (dt_BN[..., None] * x_BNY)[..., None] * b_BN1S
        return state_BNYS, (state_BNYS * c_BN1S).sum(-1)

    *before, state = before_tokens(old, start_B, num_tokens_B)
    x, b, c = convolved(before, new, weights, num_tokens_B)
    tokens = x, b, c, *log_steps(new, weights, num_tokens_B)
    state, out_TBNY = lax.scan(step, state, tuple(jnp.swapaxes(z, 0, 1) for z in tokens))
    out_BTNY = jnp.swapaxes(out_TBNY, 0, 1) + weights.skip_N.astype(jnp.float32)[:, None] * x
    out = zeros_past(out_BTNY.reshape(new.x.shape), num_tokens_B)
    return out, MambaState._make([*inputs_after(before, new, num_tokens_B), state])


def convolved(
    before: list[jax.Array], new: MambaToken, weights: MambaWeights, num_tokens_B: jax.Array
) -> list[jax.Array]:
    """Returns silu of the convolution of x, b and c, float32 [B, T, heads or groups, width]. Tokens past the
    length count as zeros. before: the inputs before the tokens.
    """

    def convolve(
        before_BKWH: jax.Array, new_BTX: jax.Array, taps_XW: jax.Array, bias: jax.Array
    ) -> jax.Array:
        B, K, _, H = before_BKWH.shape
        y_BTX = weighted_inputs(before_BKWH, zeros_past(new_BTX, num_tokens_B), taps_XW)
        return jax.nn.silu(y_BTX + bias.astype(jnp.float32)).reshape(B, -1, K, H)

    return list(map(convolve, before, new[:3], weights[:3], weights[3:6]))


def log_steps(new: MambaToken, weights: MambaWeights, num_tokens_B: jax.Array) -> list[jax.Array]:
    """Returns, float32 [B, T, N], the logarithm of the decay of each token, and dt. Both are 0 past the
    length.
    """
    steps = decay_and_dt(new.dt, weights.log_rate_N, weights.dt_bias_N)
    return [zeros_past(x, num_tokens_B) for x in steps]


def decay_and_dt(dt: Any, log_rate: Any, bias: Any) -> tuple[jax.Array, jax.Array]:
    """Returns float32: the logarithm of the decay, and dt after softplus."""
    dt, log_rate, bias = (x.astype(jnp.float32) for x in (dt, log_rate, bias))
    dt += bias
    dt = jnp.maximum(dt, 0) + jnp.log1p(jnp.exp(-jnp.abs(dt)))
    return -jnp.exp(log_rate) * dt, dt
