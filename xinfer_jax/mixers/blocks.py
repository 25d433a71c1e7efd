"""Blocks of tokens, for mixers whose state shrinks by a decay of each head and token.

More than one token is processed in blocks of 64. Within a block the products of all tokens are a few matrix
products, and a `lax.scan` carries the state from block to block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..ops.product import float_precision

BLOCK = 64  # tokens; chunks of a prompt that are multiples of it give the same bits as the whole prompt
_MOST_DECAY = 128  # of a token, whose exponential is 0 in float32


class BlockDecays(NamedTuple):
    """The decays within a block of C tokens."""

    between_BNCC: jax.Array  # from the token of the last axis to the token before it; 0 if it comes later
    from_begin_BNC1: jax.Array  # from the block's begin to each token
    to_end_BNC1: jax.Array  # from each token to the block's end


def scan_blocks(
    block: Callable[[jax.Array, Any, BlockDecays], tuple[jax.Array, jax.Array]], tokens: Any, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [B, N, T, Y] of all tokens, and the state after them.

    Args:
        block: a function of the state, of the tokens of a block and of their decays. It returns the state
            after the block, and the outputs.
        tokens: a NamedTuple of arrays with T tokens on axis 2. It has `decay_BNT`, the logarithm of the
            decay, which is 0 at padding, and `first_B1T`, int32: where each token's segment begins. None: a
            row is one segment.
        state: the state before the tokens.
    """
    T = tokens.decay_BNT.shape[2]
    C = min(T, BLOCK) if isinstance(T, int) else BLOCK  # else T is symbolic
    blocks = -(-T // C)

    def split(x: jax.Array) -> jax.Array:  # [blocks, B, N, C, ...]
        padded = jnp.pad(x, [(0, blocks * C - T if axis == 2 else 0) for axis in range(x.ndim)])
        return jnp.moveaxis(padded.reshape(*x.shape[:2], blocks, C, *x.shape[3:]), 2, 0)

    def step(carry: tuple[jax.Array, Any], tokens: Any) -> tuple[tuple[jax.Array, Any], jax.Array]:
        state, first_B1 = carry
        state, out = block(state, tokens, _decays(tokens.decay_BNT, first_B1, tokens.first_B1T))
        first_B1 = first_B1 if tokens.first_B1T is None else tokens.first_B1T[..., -1]
        return (state, first_B1), out

    first_B1 = None if tokens.first_B1T is None else tokens.first_B1T[..., 0]
    (state, _), out = lax.scan(step, (state, first_B1), jax.tree.map(split, tokens))
    out_BNTY = jnp.moveaxis(out, 0, 2)
    return out_BNTY.reshape(*out_BNTY.shape[:2], blocks * C, -1)[:, :, :T], state


def _decays(decay_BNC: jax.Array, first_B1: Any, first_B1C: Any) -> BlockDecays:
    """Returns the decays of a block. first_B1: where the segment of the token before the block begins."""
    # In two parts: differences of the first are exact, so a small one of large sums loses no digits.
    decay_BNC = jnp.maximum(decay_BNC, -_MOST_DECAY)
    coarse_BNC = jnp.round(decay_BNC * 1024) / 1024
    total_2BNC = jnp.cumsum(jnp.stack([coarse_BNC, decay_BNC - coarse_BNC]), -1)
    C = decay_BNC.shape[-1]
    between_BNCC = (total_2BNC[..., :, None] - total_2BNC[..., None, :]).sum(0)
    between_BNCC = jnp.exp(jnp.where(jnp.tri(C, dtype=bool), between_BNCC, -jnp.inf))
    from_begin = jnp.exp(total_2BNC.sum(0))[..., None]
    to_end = jnp.exp((total_2BNC[..., -1:] - total_2BNC).sum(0))[..., None]
    if first_B1C is not None:  # nothing passes from one segment to another
        between_BNCC *= first_B1C[..., :, None] == first_B1C[..., None, :]
        from_begin *= (first_B1C == first_B1[..., None])[..., None]
        to_end *= (first_B1C == first_B1C[..., -1:])[..., None]
    return BlockDecays(between_BNCC, from_begin, to_end)


def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the product of float32 matrices, whose operands are not rounded."""
    return jnp.matmul(x, y, precision=float_precision())
