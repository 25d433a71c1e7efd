"""Prompts in Mamba-2 on NVIDIA GPUs, in blocks of 64 tokens (SSD, Dao and Gu 2024): products of matrices.

XLA computes the convolution, which is elementwise. In the rest, only the part that reads the state has to
wait for the block before. So there are two kernels:

- Programs of the first kernel take a block of some heads of a group each, all at once. They compute the part
  of the results that comes from tokens of the same block. The products of b and c serve all of these heads.
- Programs of the second kernel walk the blocks of a row in order, for some columns of a head's state. They
  add the part of the results that comes from the state, in place.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..delta_blocks import (
    BLOCK,
    LogDecay,
    decay_between,
    decays_within,
    distances,
    in_blocks,
    pad_tokens,
    split,
)  # fmt: skip
from ..reference_delta import before_tokens, inputs_after, zeros_past
from ..reference_mamba import MambaState, MambaToken, MambaWeights, convolved, log_steps
from .recurrent import call_kernel, dot_parts, load_parts, wait

_HEADS = 4  # of a program of the first kernel at most
_RESULTS = 32  # columns of results of a head, that it computes at once
_COLUMNS = 16  # of the state, that a program walks with
# Depths of products over S: less of them is in registers at once.
_INSIDE_DEPTH = 32
_WALK_DEPTH = 64


class _Blocks(NamedTuple):
    """The inputs of both kernels. T is a multiple of C."""

    count: Any  # int32 [B]
    x: Any  # float32 [B, T, N, Y]
    b: Any  # parts (`split`), each [B, T, G, S]
    c: Any
    total: LogDecay  # float32 [B, N, blocks, C]: of the decay from the begin of the block
    dt: Any


def mamba_prefill(
    new: MambaToken, weights: MambaWeights, old: MambaState, start_B, num_tokens_B, *, interpret=False
) -> tuple[jax.Array, MambaState]:
    """Runs `reference_mamba.mamba_prefill`. Widths of heads and states are powers of two, from 64 on.
    interpret: run on any device, slowly, by Pallas's interpreter.
    """
    T = new.x.shape[1]
    (B, N, Y, _) = old.state.shape
    group = N // old.b.shape[1]
    padded = pad_tokens(new)
    before = before_tokens(old[:3], start_B, num_tokens_B)
    x, b, c = convolved(before, padded, weights, num_tokens_B)
    steps = in_blocks(*log_steps(padded, weights, num_tokens_B))
    read = _Blocks(num_tokens_B, x, split(b), split(c), *steps)
    blocks = x.shape[1] // BLOCK
    call = partial(call_kernel, interpret=interpret)
    heads = max(n for n in range(1, _HEADS + 1) if group % n == 0)
    kernel = partial(_inside, heads, interpret)
    (inside,) = call(kernel, (blocks, N // heads, B), (read, weights.skip_N), (x,), "mamba_blocks", 4)
    operands = read, start_B, inside, old.state
    walk = partial(_walk, _COLUMNS, interpret)
    grid = Y // _COLUMNS, N, B
    out, state = call(walk, grid, operands, (inside, old.state), "mamba_prefill", 4, in_place=2)
    out = zeros_past(out[:, :T].reshape(new.x.shape), num_tokens_B)
    return out, MambaState._make([*inputs_after(before, new, num_tokens_B), state])


def _group_of(read: _Blocks, n: Any) -> Any:
    """Returns the group of head n."""
    return lax.div(n, read.x.shape[2] // read.b[0].shape[2])


def _inside(heads: int, interpret: bool, read: _Blocks, skip_ref, out_ref) -> None:
    """Runs the first kernel: a block of some heads of a row."""
    (i, part, row) = map(pl.program_id, range(3))
    first = part * heads
    group = _group_of(read, first)
    tokens = pl.ds(i * BLOCK, BLOCK)
    Y = read.x.shape[3]
    S = read.b[0].shape[3]

    @pl.when(i * BLOCK < read.count[row])
    def _block() -> None:
        def add(p: Any, product_CC: jax.Array) -> jax.Array:
            depth = pl.ds(p * _INSIDE_DEPTH, _INSIDE_DEPTH)
            b_SC = load_parts(read.b, (row, tokens, group, depth), transposed=True)
            return product_CC + dot_parts(load_parts(read.c, (row, tokens, group, depth)), b_SC)

        product_CC = lax.fori_loop(0, S // _INSIDE_DEPTH, add, jnp.zeros((BLOCK, BLOCK), jnp.float32))

        def head(n: Any, _: None) -> None:
            *total_C1, dt_C1 = (ref[row, n, i][:, None] for ref in (*read.total, read.dt))
            total_1C = [ref[row, n, i][None] for ref in read.total]
            decays_CC = decays_within(distances(product_CC.shape), total_C1, total_1C)
            weights = split(product_CC * decays_CC)
            skip = skip_ref[n].astype(jnp.float32)
            for column in range(0, Y, _RESULTS):
                place = row, tokens, n, pl.ds(column, _RESULTS)
                x_CY = read.x[place]
                out_ref[place] = dot_parts(weights, split(dt_C1 * x_CY)) + skip * x_CY

        lax.fori_loop(first, first + heads, head, None)


def _walk(
    width: int, interpret: bool, read: _Blocks, start_ref, inside_ref, old_ref, out_ref, after_ref
) -> None:
    """Runs the second kernel: the blocks of a row, for some columns of a head."""
    (part, n, row) = map(pl.program_id, range(3))
    group = _group_of(read, n)
    count = read.count[row]
    columns = pl.ds(part * width, width)
    depths = [pl.ds(p, _WALK_DEPTH) for p in range(0, read.b[0].shape[3], _WALK_DEPTH)]

    def block(i: Any, state: list[jax.Array]) -> list[jax.Array]:
        tokens = pl.ds(i * BLOCK, BLOCK)
        place = row, tokens, n, columns
        *total_C1, dt_C1 = (ref[row, n, i][:, None] for ref in (*read.total, read.dt))
        of_state_CY: Any = 0
        for depth, x_SY in zip(depths, state, strict=True):
            of_state_CY += dot_parts(load_parts(read.c, (row, tokens, group, depth)), split(x_SY))
            wait(interpret)
        out_ref[place] = inside_ref[place] + jnp.exp(sum(total_C1)) * of_state_CY
        end = [ref[row, n, i, BLOCK - 1] for ref in read.total]
        added = split(jnp.exp(decay_between(end, total_C1)) * dt_C1 * read.x[place])
        after = []
        for depth, x_SY in zip(depths, state, strict=True):
            wait(interpret)
            b_SC = load_parts(read.b, (row, tokens, group, depth), transposed=True)
            after.append(x_SY * jnp.exp(sum(end)) + dot_parts(b_SC, added))
        return after

    is_kept = (start_ref[row] > 0) | (count == 0)
    state = [jnp.where(is_kept, old_ref[row, n, columns, depth].T, 0) for depth in depths]
    state = lax.fori_loop(0, lax.div(count + BLOCK - 1, BLOCK), block, state)
    for depth, x_SY in zip(depths, state, strict=True):
        after_ref[row, n, columns, depth] = x_SY.T
