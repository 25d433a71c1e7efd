"""The common part of the kernels for prompts of linear attention. They run Gated DeltaNet in blocks, by the
WY form (Yang et al. 2024, "Parallelizing linear transformers with the delta rule").

C is the number of tokens of a block. Other letters are as in `reference_delta`.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from .reference_delta import DeltaWeights, NewToken, log_steps

BLOCK = 64  # tokens
# Which parts (`split`) of two factors are multiplied, the smallest products first; others are below float32.
PAIRS = ((1, 1), (2, 0), (0, 2), (1, 0), (0, 1), (0, 0))

Parts = tuple[Any, Any, Any]
Tokens = TypeVar("Tokens", bound=Any)  # `NewToken` or another named tuple
# Two numbers whose sum is the logarithm of the decay up to a token: differences of the first are exact.
LogDecay = Sequence[Any]

_COARSE = 2**-10  # the first one is a multiple of it: 64 tokens of at most 128 have 23 bits
_MOST_DECAY = 128  # of a token's decay, whose exponential is 0 in float32


def split(x: jax.Array) -> Parts:
    """Returns bfloat16 numbers whose sum is float32 x, the largest first: products of matrices are on matrix
    units of 16 bits, and none of its digits are dropped.
    """
    high = _rounded(x)
    rest = x - high
    middle = _rounded(rest)
    return high.astype(jnp.bfloat16), middle.astype(jnp.bfloat16), (rest - middle).astype(jnp.bfloat16)


def _rounded(x: jax.Array) -> jax.Array:
    """Returns float32 x rounded to bfloat16's digits, by its bits: XLA leaves out a conversion there and
    back.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x8000) & ~0xFFFF, jnp.float32)


def pad_tokens(new: Tokens) -> Tokens:
    """Returns tokens, a tuple of arrays [B, T, ...], up to whole blocks."""
    missing = -new[0].shape[1] % BLOCK
    return new._make(jnp.pad(x, ((0, 0), (0, missing), (0, 0))) for x in new) if missing else new


def gates(new: NewToken, weights: DeltaWeights, num_tokens_B: jax.Array) -> tuple[LogDecay, jax.Array]:
    """Returns float32 [B, N, blocks, C]: the logarithm of the decay from before a block up to each token, and
    beta. Of tokens past the length, which may be NaN, both change nothing: no decay, and beta 0.
    """
    return in_blocks(*log_steps(new, weights, num_tokens_B))


def in_blocks(decay_BTN: jax.Array, strength_BTN: jax.Array) -> tuple[LogDecay, jax.Array]:
    """Returns float32 [B, N, blocks, C]: the logarithm of the decay from before a block up to each token, and
    the strength of each write. decay_BTN: the logarithm of the decay of each token.
    """
    B, T, N = decay_BTN.shape
    shape = B, N, T // BLOCK, BLOCK
    decay, strength = (jnp.moveaxis(x, 2, 1).reshape(shape) for x in (decay_BTN, strength_BTN))
    decay = jnp.maximum(decay, -_MOST_DECAY)
    coarse = jnp.round(decay / _COARSE) * _COARSE
    return (jnp.cumsum(coarse, -1), jnp.cumsum(decay - coarse, -1)), strength


def decay_between(later: LogDecay, earlier: LogDecay) -> jax.Array:
    """Returns the logarithm of the decay. It may be small if the decay from the block's begin is large: the
    rounding error of the latter in float32 would be a large part of it.
    """
    return (later[0] - earlier[0]) + (later[1] - earlier[1])


def system(
    keys_CC: jax.Array, queries_CC: jax.Array, total_C1: LogDecay, total_1C: LogDecay, beta_C1: jax.Array,
    offset: int = 0,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns two matrices, both [C, C] or a part of them:

    - The strictly lower triangle L of I + L. A block writes its solution for β (v − Γ Sᵀk), with the decay Γ
      up to each token.
    - The weights with which the written values count in the results.

    Args:
        keys_CC, queries_CC: products of keys, and of queries, with the keys.
        total_C1, total_1C: the logarithm of the decay up to each token.
        beta_C1: strengths of the writes.
        offset: the distance by which the first row is below the first column.
    """
    distance_CC = distances(keys_CC.shape, offset)
    between_CC = decays_within(distance_CC, total_C1, total_1C)
    return jnp.where(distance_CC > 0, beta_C1 * keys_CC * between_CC, 0), queries_CC * between_CC


def distances(shape: tuple[int, ...], offset: int = 0) -> jax.Array:
    """Returns by how many tokens each row is after each column. offset: by how many the first ones are."""
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return row + offset - column


def decays_within(distance_CC: jax.Array, total_C1: LogDecay, total_1C: LogDecay) -> jax.Array:
    """Returns the decay from the token of each column to the token of each row, 0 if that is before it."""
    return jnp.exp(jnp.where(distance_CC >= 0, decay_between(total_C1, total_1C), -jnp.inf))
