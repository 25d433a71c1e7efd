"""What the kernels for prompts of linear attention share (Gated DeltaNet in blocks, by the WY form: Yang et
al. 2024, "Parallelizing linear transformers with the delta rule").

C tokens of a block; other letters as in `reference_delta`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .reference_delta import DeltaWeights, NewToken, gated_norm

BLOCK = 64  # tokens
# Which parts (`split`) of two factors are multiplied, the smallest products first; others are below float32.
PAIRS = ((1, 1), (2, 0), (0, 2), (1, 0), (0, 1), (0, 0))

Parts = tuple[Any, Any, Any]
# Two numbers whose sum is the logarithm of the decay up to a token: differences of the first are exact.
LogDecay = Sequence[Any]

_COARSE = 2**-10  # the first one is a multiple of it: 64 tokens of at most 128 have 23 bits
_MOST_DECAY = 128  # of a token's decay, whose exponential is 0 in float32


def split(x: jax.Array) -> Parts:
    """bfloat16 numbers whose sum is float32 x, the largest first: products of matrices are on matrix units of
    16 bits, and none of its digits are dropped.
    """
    high = _rounded(x)
    rest = x - high
    middle = _rounded(rest)
    return high.astype(jnp.bfloat16), middle.astype(jnp.bfloat16), (rest - middle).astype(jnp.bfloat16)


def _rounded(x: jax.Array) -> jax.Array:
    """float32 x rounded to bfloat16's digits, by its bits: XLA leaves out a conversion there and back."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x8000) & ~0xFFFF, jnp.float32)


def pad_tokens(new: NewToken) -> NewToken:
    """Tokens [B, T, ...] up to whole blocks."""
    missing = -new.q.shape[1] % BLOCK
    return NewToken(*(jnp.pad(x, ((0, 0), (0, missing), (0, 0))) for x in new)) if missing else new


def gates(new: NewToken, weights: DeltaWeights, num_tokens_B: jax.Array) -> tuple[LogDecay, jax.Array]:
    """float32 [B, N, blocks, C]: the logarithm of the decay from before a block up to each token, and beta.
    Of tokens past the length, which may be NaN, both change nothing: no decay, and beta 0.
    """
    steps = log_steps(new, weights, num_tokens_B)
    B, T, N = steps[0].shape
    decay, beta = (jnp.moveaxis(x, 2, 1).reshape(B, N, T // BLOCK, BLOCK) for x in steps)
    decay = jnp.maximum(decay, -_MOST_DECAY)
    coarse = jnp.round(decay / _COARSE) * _COARSE
    return (jnp.cumsum(coarse, -1), jnp.cumsum(decay - coarse, -1)), beta


def log_steps(new: NewToken, weights: DeltaWeights, num_tokens_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 [B, T, N]: the logarithm of the decay of each token, and beta; 0 past the length."""
    a_BTN, b_BTN, rate_N, bias_N = (x.astype(jnp.float32) for x in (new.a, new.b, *weights[3:5]))
    is_real_BT1 = (jnp.arange(a_BTN.shape[1]) < num_tokens_B[:, None])[..., None]
    decay_BTN = -jnp.exp(rate_N) * jax.nn.softplus(a_BTN + bias_N)
    return jnp.where(is_real_BT1, decay_BTN, 0), jnp.where(is_real_BT1, jax.nn.sigmoid(b_BTN), 0)


def decay_between(later: LogDecay, earlier: LogDecay) -> jax.Array:
    """The logarithm of the decay. It may be small where that from the block's begin is large: what float32
    rounds off from the latter would be a large part of it.
    """
    return (later[0] - earlier[0]) + (later[1] - earlier[1])


def inputs_before(old: Sequence[Any], start_B: jax.Array, num_tokens_B: jax.Array) -> list[jax.Array]:
    """Inputs of the convolution before the tokens, [B, heads, W, width]: zeros where a row begins."""
    begins_B111 = ((start_B == 0) & (num_tokens_B > 0))[:, None, None, None]
    return [jnp.where(begins_B111, 0, x) for x in old[:3]]


def inputs_after(before: list[jax.Array], new: NewToken, num_tokens_B: jax.Array) -> list[jax.Array]:
    """The last W inputs after the tokens, [B, heads, W, width]."""
    W = before[0].shape[2]
    slot_BW1 = (num_tokens_B[:, None] - W + jnp.arange(W))[..., None]

    def last(x_BKWH: jax.Array, new_BTX: jax.Array) -> jax.Array:
        B, K, _, H = x_BKWH.shape
        taken_BWX = jnp.take_along_axis(new_BTX, jnp.maximum(slot_BW1, 0), 1).astype(jnp.float32)
        kept_BKWH = jnp.take_along_axis(x_BKWH, jnp.minimum(slot_BW1 + W, W - 1)[:, None], 2)
        taken_BKWH = jnp.swapaxes(taken_BWX.reshape(B, W, K, H), 1, 2)
        return jnp.where(slot_BW1[:, None] < 0, kept_BKWH, taken_BKWH)

    return [last(*pair) for pair in zip(before, new[:3], strict=True)]


def convolve(
    before_BKWH: jax.Array, new_BTX: jax.Array, taps_XW: jax.Array, num_tokens_B: jax.Array
) -> jax.Array:
    """silu of the convolution of queries, keys or values, float32 [B, T, heads, width]. Tokens past the
    length, which may be NaN, count as zeros. before_BKWH: the inputs before the tokens.
    """
    B, T = new_BTX.shape[:2]
    W = before_BKWH.shape[2]
    is_real_BT1 = (jnp.arange(T) < num_tokens_B[:, None])[..., None]
    before_BWX = jnp.swapaxes(before_BKWH, 1, 2).reshape(B, W, -1)
    x_BSX = jnp.concatenate([before_BWX, jnp.where(is_real_BT1, new_BTX.astype(jnp.float32), 0)], 1)
    y: Any = sum(x_BSX[:, w : w + T] * taps_XW[:, w].astype(jnp.float32) for w in range(W + 1))
    return (y * jax.nn.sigmoid(y)).reshape(B, T, *before_BKWH.shape[1::2])


def normed_results(
    out_BTNY: jax.Array, new: NewToken, weights: DeltaWeights, num_tokens_B: jax.Array, eps: float
) -> jax.Array:
    """The normed and gated results [B, T, N Y] in the dtype of the tokens; zeros past the length."""
    is_real_BT1 = (jnp.arange(out_BTNY.shape[1]) < num_tokens_B[:, None])[..., None]
    normed = gated_norm(out_BTNY, new.z.reshape(out_BTNY.shape), weights.norm_Y, eps).reshape(new.z.shape)
    return jnp.where(is_real_BT1, normed, jnp.zeros_like(normed))


def system(  # noqa: PLR0913
    keys_CC: jax.Array, queries_CC: jax.Array, total_C1: LogDecay, total_1C: LogDecay, beta_C1: jax.Array,
    offset: int = 0,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The strictly lower triangle L of I + L, whose solution for β (v − Γ Sᵀk) a block writes, where Γ is the
    decay up to each token; and the weights of what is written in the results. Both [C, C], or a part of them.

    Args:
        keys_CC, queries_CC: products of keys, and of queries, with the keys.
        total_C1, total_1C: the logarithm of the decay up to each token.
        beta_C1: strengths of the writes.
        offset: by how many the first row is below the first column.
    """
    row, column = (lax.broadcasted_iota(jnp.int32, keys_CC.shape, axis) for axis in (0, 1))
    row += offset
    between_CC = jnp.exp(jnp.where(row >= column, decay_between(total_C1, total_1C), -jnp.inf))
    return jnp.where(row > column, beta_C1 * keys_CC * between_CC, 0), queries_CC * between_CC
