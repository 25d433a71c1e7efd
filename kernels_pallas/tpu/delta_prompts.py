"""Prompts in linear attention (Gated DeltaNet) on TPUs, in blocks of 64 tokens. The kernel does everything
between the product for queries, keys and values and the output product.

The grid walks the tokens of a row in order, for some key heads with the value heads that share them. Their
states stay in on-chip memory meanwhile. Products of keys and queries with the states of a key head's value
heads are one product. The triangular system of a block is solved by substitution on the vector unit, while
the matrix unit computes products of other heads: products that invert it would take longer than all the
others.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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
from ..dispatch import result_type
from ..reference_delta import (
    DeltaState,
    DeltaWeights,
    NewToken,
    before_tokens,
    gated_norm,
    inputs_after,
    unit,
)  # fmt: skip
from .parts import emulator
from .prompt_blocks import (
    SUBLANES,
    TOKENS,
    VMEM_BYTES,
    convolve,
    dot_parts,
    rows_before,
    tile_within,
    walk_blocks,
)  # fmt: skip

_VALUE_HEADS = 16  # of a grid step, if it has more than one key head
_HALF = BLOCK // 2


class _Refs(NamedTuple):
    """The operands, results and memory of the kernel, in their order."""

    start: Any  # in scalar memory, as the next one
    count: Any
    new: Any  # q, k, v and z of a step's tokens and heads, [1, tokens, heads · width]
    total: LogDecay  # [1, 1, blocks, n, C]: of the decay
    columns: Any  # [1, 1, tokens, 3n]: the same, then beta
    taps: Any  # of q, k and v, [W + 1, heads · width]
    norm_Y: Any
    before: Any  # inputs of q, k and v before the tokens, float32 [1, 8, heads · width]
    old: Any  # the states, [1, n, H, Y]
    out: Any
    after: Any  # the same memory as the old states
    inputs: Any  # the last 8 of q, k and v, float32 [8, heads · width]


def delta_prefill(
    new: NewToken, weights: DeltaWeights, old: DeltaState, start_B, num_tokens_B, *, eps, interpret=False
) -> tuple[jax.Array, DeltaState]:
    """Computes `reference_delta.delta_prefill`. The tokens are float32 or bfloat16. interpret: True: emulate
    a TPU on a CPU, slowly, and raise if accesses to memory race.
    """
    T = new.q.shape[1]
    B, K, W, H = old.q.shape
    N, _, Y = old.state.shape[1:]
    new = pad_tokens(new)
    before = before_tokens(old[:3], start_B, num_tokens_B)
    heads = _key_heads(K, N // K)
    groups = K // heads
    n = N // groups
    tokens = min(TOKENS, new.q.shape[1])
    steps = jax.tree.leaves(gates(new, weights, num_tokens_B))
    steps = [x.reshape(B, groups, n, *x.shape[2:]) for x in steps]
    columns = jnp.moveaxis(jnp.concatenate(steps, 2).reshape(B, groups, 3 * n, -1), 2, 3)
    total = tuple(jnp.moveaxis(x, 2, 3) for x in steps[:2])
    rows = rows_before(before)
    operands = _Refs(
        start_B, num_tokens_B, new[:4], total, columns, tuple(x.T for x in weights[:3]),
        weights.norm_Y[None], rows, old.state, new.z, old.state, None,
    )  # fmt: skip
    tile = partial(tile_within, tokens)

    def of_tokens(x: Any) -> pl.BlockSpec:
        index = lambda b, g, t, _, count: (b, tile(count, b, t), g)  # noqa: E731
        return pl.BlockSpec((1, tokens, x.shape[2] // groups), index)

    def of_lanes(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((x.shape[0], x.shape[1] // groups), lambda b, g, *_: (0, g))

    of_total = pl.BlockSpec(
        (1, 1, tokens // BLOCK, n, BLOCK), lambda b, g, t, _, count: (b, g, tile(count, b, t), 0, 0)
    )
    of_out = pl.BlockSpec((1, tokens, n * Y), lambda b, g, t, *_: (b, t, g))
    of_before = [pl.BlockSpec((1, SUBLANES, x.shape[2] // groups), lambda b, g, *_: (b, 0, g)) for x in rows]
    of_states = pl.BlockSpec((1, n, H, Y), lambda b, g, *_: (b, g, 0, 0))
    of_columns = pl.BlockSpec((1, 1, tokens, 3 * n), lambda b, g, t, _, count: (b, g, tile(count, b, t), 0))
    of_norm = pl.BlockSpec((1, Y), lambda *_: (0, 0))
    in_specs = [*map(of_tokens, operands.new), of_total, of_total, of_columns, *map(of_lanes, operands.taps)]
    scratch = [pltpu.VMEM((SUBLANES + BLOCK, x.shape[2] // groups), jnp.float32) for x in rows]
    structure = jax.tree.structure(operands._replace(inputs=scratch))
    arrays = jax.tree.leaves(operands._replace(out=None, after=None))
    out, state = pl.pallas_call(
        lambda *refs: _kernel(jax.tree.unflatten(structure, refs), (heads, eps)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, groups, pl.cdiv(new.q.shape[1], tokens)),
            in_specs=[*in_specs, of_norm, *of_before, of_states],
            out_specs=[of_out, of_states],
            scratch_shapes=scratch,
        ),
        out_shape=[result_type(x.shape, x.dtype, *arrays) for x in (new.z, old.state)],
        input_output_aliases={len(arrays) - 1: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=emulator(interpret),
        name="delta_prefill",
    )(*arrays)
    return out[:, :T], DeltaState._make([*inputs_after(before, new, num_tokens_B), state])


def _key_heads(key_heads: int, group: int) -> int:
    """Returns the number of key heads of a grid step. Each key head has `group` value heads."""
    most = max(_VALUE_HEADS, group)
    return max(n for n in range(1, key_heads + 1) if key_heads % n == 0 and n * group <= most)


def _kernel(refs: _Refs, static: tuple[int, float]) -> None:
    (heads, eps) = static
    walk_blocks(refs, partial(_block, refs, heads=heads, eps=eps))


def _block(refs: _Refs, i: Any, at: Any, left: Any, heads: int, eps: float) -> None:
    """Computes block i of a grid step, `left` of whose tokens are valid. Each stage is done for all heads, so
    that the compiler has other work while products are on their way.
    """
    (n, H, Y) = refs.after.shape[1:]
    is_real_C1 = lax.broadcasted_iota(jnp.int32, (BLOCK, 1), 0) < left
    q, k, v = (convolve(refs, j, at, is_real_C1) for j in range(3))
    coarse, fine, beta = (refs.columns[0, 0, at, j * n : (j + 1) * n] for j in range(3))
    from_begin = jnp.exp(coarse + fine)
    to_end = jnp.exp(decay_between((coarse[-1:], fine[-1:]), (coarse, fine)))
    group = n // heads
    keys = [unit(k[:, h * H : (h + 1) * H]) for h in range(heads)]
    both = [
        split(jnp.concatenate([keys[h], unit(q[:, h * H : (h + 1) * H]) * H**-0.5], 0)) for h in range(heads)
    ]
    with_keys = [jnp.split(dot_parts(x, tuple(part[:BLOCK] for part in x), 1), 2) for x in both]
    states = [jnp.concatenate([refs.after[0, h * group + m] for m in range(group)], 1) for h in range(heads)]
    with_states = [dot_parts(both[h], split(states[h]), 0) for h in range(heads)]
    lower: list[jax.Array] = []
    weights: list[jax.Array] = []
    right = []
    for m in range(n):
        h = m // group
        column = slice(m, m + 1)
        total_C1 = coarse[:, column], fine[:, column]
        total_1C = [x[0, 0, i, column] for x in refs.total]
        beta_C1 = beta[:, column]
        (keys_CC, queries_CC) = with_keys[h]
        (lower_CC, weights_CC) = system(keys_CC, queries_CC, total_C1, total_1C, beta_C1)
        lower.append(lower_CC)
        weights.append(weights_CC)
        of_state_CY = with_states[h][:BLOCK, m % group * Y : (m % group + 1) * Y]
        right.append(beta_C1 * (v[:, m * Y : (m + 1) * Y] - from_begin[:, column] * of_state_CY))
    written = _solve(lower, right)
    inside = [dot_parts(split(x), split(y), 0) for x, y in zip(weights, written, strict=True)]
    for h in range(heads):
        values = range(h * group, (h + 1) * group)
        added = [to_end[:, m : m + 1] * written[m] for m in values]
        more = dot_parts(tuple(x[:BLOCK].T for x in both[h]), split(jnp.concatenate(added, 1)), 0)
        for j, m in enumerate(values):
            lanes = slice(j * Y, (j + 1) * Y)
            decay_C1 = from_begin[:, m : m + 1]
            refs.after[0, m] = refs.after[0, m] * decay_C1[-1:] + more[:, lanes]
            out_CY = decay_C1 * with_states[h][BLOCK:, lanes] + inside[m]
            at_m = slice(m * Y, (m + 1) * Y)
            normed = gated_norm(out_CY, refs.new[3][0, at, at_m], refs.norm_Y[...], eps)
            refs.out[0, at, at_m] = jnp.where(is_real_C1, normed, jnp.zeros_like(normed))


def _solve(lower: list[jax.Array], right: list[jax.Array]) -> list[jax.Array]:
    """Returns the solutions of (I + L) x = right side, of strictly lower triangles L, half of the rows after
    the other.
    """
    inverses = _inverses(lower)
    first = [dot_parts(a, split(y[:_HALF]), 0) for (a, _), y in zip(inverses, right, strict=True)]
    taken = [dot_parts(split(x[_HALF:, :_HALF]), split(y), 0) for x, y in zip(lower, first, strict=True)]
    second = [
        dot_parts(b, split(y[_HALF:] - z), 0) for (_, b), y, z in zip(inverses, right, taken, strict=True)
    ]
    return [jnp.concatenate(halves, 0) for halves in zip(first, second, strict=True)]


def _inverses(lower: list[jax.Array]) -> list[tuple[Parts, Parts]]:
    """Returns the inverses of I + D, of both squares D [C / 2, C / 2] on the diagonal of each strictly lower
    triangle, by substitution: each row that is known is taken from the rows after it, a register of rows
    after the other. The squares of two triangles are side by side in lanes.
    """
    row, lane = (lax.broadcasted_iota(jnp.int32, (_HALF, 2 * BLOCK), axis) for axis in (0, 1))
    pairs = [
        jnp.concatenate([lower[i], lower[min(i + 1, len(lower) - 1)]], 1) for i in range(0, len(lower), 2)
    ]
    squares = [jnp.where(lane % BLOCK < _HALF, pair[:_HALF], pair[_HALF:]) for pair in pairs]
    rest = [jnp.where(row == lane % _HALF, 1.0, 0.0)] * len(pairs)
    done = []
    for first in range(0, _HALF, SUBLANES):
        for j in range(SUBLANES):
            index = lane[first:] // _HALF * _HALF + first + j
            rest = [
                x - jnp.take_along_axis(square[first:], index, 1) * x[j : j + 1]
                for x, square in zip(rest, squares, strict=True)
            ]
        done.append([x[:SUBLANES] for x in rest])
        rest = [x[SUBLANES:] for x in rest]
    parts = [split(jnp.concatenate(rows, 0)) for rows in zip(*done, strict=True)]
    squares_of = [
        [tuple(x[:, i : i + _HALF] for x in part) for i in range(0, 2 * BLOCK, _HALF)] for part in parts
    ]
    found = [(a, b) for four in squares_of for a, b in (four[:2], four[2:])]
    return found[: len(lower)]
