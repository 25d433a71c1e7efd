"""The common part of the kernels for prompts that walk the tokens of a row in blocks, for some of its heads.
The states of these heads stay in on-chip memory meanwhile.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..delta_blocks import BLOCK, PAIRS
from .parts import dot

TOKENS = 256  # of a grid step
SUBLANES = 8
VMEM_BYTES = 64 * 2**20


def tile_within(tokens: int, count: Any, row: Any, tile: Any) -> Any:
    """Returns the index of a tile of tokens within the length, so that tiles past it are not copied."""
    return jnp.minimum(tile, jnp.maximum(pl.cdiv(count[row], tokens) - 1, 0))


def rows_before(before: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the inputs of convolutions before the tokens, [B, heads, W, width], as [B, 8, heads · width]:
    the last W of 8 rows.
    """
    B, _, W, _ = before[0].shape
    rows = [jnp.swapaxes(x, 1, 2).reshape(B, W, -1) for x in before]
    return [jnp.pad(x, ((0, 0), (SUBLANES - W, 0), (0, 0))) for x in rows]


def walk_blocks(refs: Any, block: Callable) -> None:
    """Runs the blocks of a grid step that have tokens, and clears the results of others. Before the first
    tokens of a row, states and inputs are those of the row.

    Args:
        refs: the references of a kernel for prompts, `_Refs` or another such tuple.
        block: takes the number of the block in the grid step, its slice of tokens, and how many tokens are
            left from its begin on.
    """
    row = pl.program_id(0)
    tile = pl.program_id(2)
    tokens = refs.out.shape[1]
    left = refs.count[row] - tile * tokens  # tokens

    @pl.when(tile == 0)
    def _begin() -> None:
        is_kept = (refs.start[row] > 0) | (refs.count[row] == 0)
        refs.after[...] = jnp.where(is_kept, refs.old[...], 0)
        for before, inputs in zip(refs.before, refs.inputs, strict=True):
            inputs[:SUBLANES] = before[0]

    def each(i: Any, _: None) -> None:
        at = pl.ds(pl.multiple_of(i * BLOCK, BLOCK), BLOCK)
        has_tokens = left > i * BLOCK
        pl.when(has_tokens)(partial(block, i, at, left - i * BLOCK))

        @pl.when(jnp.logical_not(has_tokens))
        def _clear() -> None:
            refs.out[0, at] = jnp.zeros((BLOCK, refs.out.shape[2]), refs.out.dtype)

    lax.fori_loop(0, tokens // BLOCK, each, None)


def convolve(refs: Any, j: int, at: Any, is_real_C1: jax.Array, bias: Any = 0.0) -> jax.Array:
    """Returns silu of the convolution, float32 [C, heads · width], of the j-th array of new tokens. Stores
    its last inputs. refs: as `walk_blocks` takes them.
    """
    inputs = refs.inputs[j]
    inputs[SUBLANES:] = jnp.where(is_real_C1, refs.new[j][0, at].astype(jnp.float32), 0)
    taps = refs.taps[j][...].astype(jnp.float32)
    first = SUBLANES + 1 - len(taps)
    y: Any = sum(inputs[first + w : first + w + BLOCK] * taps[w : w + 1] for w in range(len(taps)))
    inputs[:SUBLANES] = inputs[BLOCK:]
    return jax.nn.silu(y + bias)


def dot_parts(a: Sequence[jax.Array], b: Sequence[jax.Array], axis: int) -> jax.Array:
    """Runs `parts.dot` of float32 operands in parts. All products of parts that count are one, as deep as a
    matrix unit: of 64 or 128 numbers it would use a part of it six times.
    """
    left = jnp.concatenate([a[i] for i, _ in PAIRS], 1)
    right = jnp.concatenate([b[i] for _, i in PAIRS], axis)
    return dot(left, right, axis)
