"""Prompts in linear attention (Gated DeltaNet) on NVIDIA GPUs, in blocks of 64 tokens.

XLA computes the convolution, which is elementwise, and the norms. In the rest, only the part that reads the
state has to wait for the block before. So there are two kernels:

- Programs of the first kernel take a block of a value head each, all at once. They compute the inverse of the
  triangular system, and the weights with which written values count in the results.
- Programs of the second kernel walk the blocks of a row in order, for some columns of a value head's state.
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
    Parts,
    decay_between,
    gates,
    pad_tokens,
    split,
    system,
)  # fmt: skip
from ..reference_delta import (
    DeltaState,
    DeltaWeights,
    NewToken,
    before_tokens,
    convolved,
    inputs_after,
    normed_results,
)  # fmt: skip
from .recurrent import call_kernel, dot_parts, load_parts, wait

_SQUARE = BLOCK // 2  # of a triangular system, that a program inverts
_COLUMNS = 16  # of the state, that a program walks with
# Depths of products over the width of keys: less of them is in registers at once.
_SOLVE_DEPTH = 16
_WALK_DEPTH = 64


class _Blocks(NamedTuple):
    """The inputs of both kernels. T is a multiple of C."""

    count: Any  # int32 [B]
    queries: Any  # parts (`split`), each [B, T, K, H]
    keys: Any
    total: LogDecay  # float32 [B, N, blocks, C]: of the decay from the begin of the block
    beta: Any


class _Solved(NamedTuple):
    """The results of the first kernel that the second kernel reads, in parts, each [B, N, blocks, C, C]."""

    inverse: Any
    weights: Any


def delta_prefill(
    new: NewToken, weights: DeltaWeights, old: DeltaState, start_B, num_tokens_B, *, eps, interpret=False
) -> tuple[jax.Array, DeltaState]:
    """Runs `reference_delta.delta_prefill`. Widths of heads are powers of two. interpret: run on any device,
    slowly, by Pallas's interpreter.
    """
    T = new.z.shape[1]
    (B, N, _, Y) = old.state.shape
    padded = pad_tokens(new)
    before = before_tokens(old[:3], start_B, num_tokens_B)
    q, k, v = convolved(before, padded, weights, num_tokens_B)
    read = _Blocks(num_tokens_B, split(q), split(k), *gates(padded, weights, num_tokens_B))
    blocks, C = read.beta.shape[2:]
    call = partial(call_kernel, interpret=interpret)
    squares = (jax.ShapeDtypeStruct((B, N, blocks, C, C), jnp.bfloat16),) * 3
    solved = call(
        partial(_solve, interpret), (blocks, N, B), (read,), _Solved(squares, squares), "delta_blocks", 2
    )
    columns = min(Y, _COLUMNS)
    # Keys are given twice: the compiler would keep all addresses of the first loads for the second ones.
    operands = read, solved, read.keys, v, start_B, old.state
    walk = partial(_walk, columns, interpret)
    out, state = call(walk, (Y // columns, N, B), operands, (v, old.state), "delta_prefill", 4, in_place=1)
    out = normed_results(out[:, :T], new, weights, num_tokens_B, eps)
    return out, DeltaState._make([*inputs_after(before, new, num_tokens_B), state])


def _solve(interpret: bool, read: _Blocks, *solved: Any) -> None:
    """Runs the first kernel: a block of a value head of a row."""
    out = _Solved(*solved)
    (i, n, row) = map(pl.program_id, range(3))
    head = lax.div(n, read.beta.shape[1] // read.keys[0].shape[2])

    def half(r: Any, first: Any = 0) -> Any:
        return pl.ds(first + r * _SQUARE, _SQUARE)

    def store(to: Parts, r: Any, c: Any, x: jax.Array) -> None:
        for ref, part in zip(to, split(x), strict=True):
            ref[row, n, i, half(r), half(c)] = part

    def square(r: Any, c: Any) -> jax.Array:
        """Returns its part of the system, and stores its part of the weights."""
        rows, columns = half(r, i * BLOCK), half(c, i * BLOCK)

        def add(p: Any, products: tuple[jax.Array, jax.Array]) -> Any:
            depth = pl.ds(p * _SOLVE_DEPTH, _SOLVE_DEPTH)
            keys_PC = load_parts(read.keys, (row, columns, head, depth), transposed=True)
            left = (load_parts(x, (row, rows, head, depth)) for x in (read.keys, read.queries))
            return tuple(y + dot_parts(x, keys_PC) for x, y in zip(left, products, strict=True))

        zeros = jnp.zeros((_SQUARE, _SQUARE), jnp.float32)
        keys_CC, queries_CC = lax.fori_loop(0, read.keys[0].shape[3] // _SOLVE_DEPTH, add, (zeros, zeros))
        *total_C1, beta_C1 = (ref[row, n, i, half(r)][:, None] for ref in (*read.total, read.beta))
        total_1C = [ref[row, n, i, half(c)][None] for ref in read.total]
        lower, weights = system(keys_CC, queries_CC, total_C1, total_1C, beta_C1, (r - c) * _SQUARE)
        store(out.weights, r, c, weights)
        return lower

    @pl.when(i * BLOCK < read.count[row])
    def _block() -> None:
        def invert(r: Any, _: None) -> None:
            store(out.inverse, r, r, _inverse(square(r, r)))

        lax.fori_loop(0, 2, invert, None)
        below = split(square(1, 0))
        wait(interpret)  # until all warps have stored the inverses
        first, second = (load_parts(out.inverse, (row, n, i, half(r), half(r))) for r in range(2))
        store(out.inverse, 1, 0, -dot_parts(split(dot_parts(second, below)), first))
        for to in out:
            store(to, 0, 1, jnp.zeros((_SQUARE, _SQUARE), jnp.float32))


def _walk(  # noqa: PLR0913
    width: int, interpret: bool, read: _Blocks, solved: _Solved, keys: Parts, v_ref, start_ref, old_ref,
    out_ref, after_ref,
) -> None:  # fmt: skip
    """Runs the second kernel: the blocks of a row, for some columns of a value head."""
    (part, n, row) = map(pl.program_id, range(3))
    head = lax.div(n, read.beta.shape[1] // read.keys[0].shape[2])
    count = read.count[row]
    columns = pl.ds(part * width, width)
    depths = [pl.ds(p, _WALK_DEPTH) for p in range(0, read.keys[0].shape[3], _WALK_DEPTH)]

    def block(i: Any, state: list[jax.Array]) -> list[jax.Array]:
        tokens = pl.ds(i * BLOCK, BLOCK)
        *total_C1, beta_C1 = (ref[row, n, i][:, None] for ref in (*read.total, read.beta))
        from_begin_C1 = jnp.exp(sum(total_C1))
        of_keys_CX: Any = 0
        of_queries_CX: Any = 0
        for depth, x_PX in zip(depths, state, strict=True):
            x_parts = split(x_PX)
            of_keys_CX += dot_parts(load_parts(read.keys, (row, tokens, head, depth)), x_parts)
            wait(interpret)
            of_queries_CX += dot_parts(load_parts(read.queries, (row, tokens, head, depth)), x_parts)
            wait(interpret)
        right_CX = beta_C1 * (v_ref[row, tokens, n, columns] - from_begin_C1 * of_keys_CX)
        written_CX = dot_parts(load_parts(solved.inverse, (row, n, i)), split(right_CX))
        wait(interpret)
        inside_CX = dot_parts(load_parts(solved.weights, (row, n, i)), split(written_CX))
        out_ref[row, tokens, n, columns] = from_begin_C1 * of_queries_CX + inside_CX
        end = [ref[row, n, i, BLOCK - 1] for ref in read.total]
        added = split(jnp.exp(decay_between(end, total_C1)) * written_CX)
        after = []
        for depth, x_PX in zip(depths, state, strict=True):
            wait(interpret)
            keys_PC = load_parts(keys, (row, tokens, head, depth), transposed=True)
            after.append(x_PX * jnp.exp(sum(end)) + dot_parts(keys_PC, added))
        return after

    is_kept = (start_ref[row] > 0) | (count == 0)
    state = [jnp.where(is_kept, old_ref[row, n, depth, columns], 0) for depth in depths]
    state = lax.fori_loop(0, lax.div(count + BLOCK - 1, BLOCK), block, state)
    for depth, x_PX in zip(depths, state, strict=True):
        after_ref[row, n, depth, columns] = x_PX


def _inverse(lower_CC: jax.Array) -> jax.Array:
    """Returns the inverse of I + a strictly lower triangle, by products of ever larger squares on the
    diagonal: the inverse of [[A, 0], [L, B]] has -B⁻¹ L A⁻¹ below them.
    """
    row, column = (lax.broadcasted_iota(jnp.int32, lower_CC.shape, axis) for axis in (0, 1))

    def below(i: Any) -> jax.Array:
        """Returns the parts L of squares that have twice 2**i rows."""
        is_below = (row >> i + 1 == column >> i + 1) & (row >> i != column >> i)
        return jnp.where(is_below, lower_CC, 0)

    def double(i: Any, inverse_CC: jax.Array) -> jax.Array:
        inverse = split(inverse_CC)
        return inverse_CC - dot_parts(split(dot_parts(inverse, split(below(i)))), inverse)

    first_CC = jnp.where(row == column, 1.0, 0.0) - below(0)
    return lax.fori_loop(1, len(lower_CC).bit_length() - 1, double, first_CC)
