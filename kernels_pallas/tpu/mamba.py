"""The decode step of Mamba-2 on TPUs, in place: all that is between its products, except the gate and the
norm.

A grid step takes some heads of one row, about 1 MiB of its state, which the pipeline copies while the step
before computes. The first step of a row computes its convolutions. Steps of rows without a token have the
block of a row before or after, so nothing is copied for them (but row 0 if no row has a token).

The state has its S numbers in lanes, and the Y numbers of a head in sublanes. So x is transposed once for all
heads, and a result is a sum over lanes.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..dispatch import result_type
from ..key_layouts import LANES
from ..reference_mamba import MambaState, MambaToken, MambaWeights, decay_and_dt
from .delta import VMEM_BYTES, groups_of_heads, rows_on_chip
from .parts import emulator, keep_in_hbm

SUBLANES = 8
_ROWS = 32  # whose tokens are on the chip at once


class _Refs(NamedTuple):
    """The operands, results and memory of the kernel, in their order. n heads are in a grid step."""

    block: Any  # the row whose state each step has; in scalar memory, as the next two
    start: Any
    count: Any
    new: Any  # `MambaToken`: of the rows of a tile
    weights: Any  # `MambaWeights`, the taps [W + 1, heads · width], others [1, …]
    old: Any  # `MambaState`: of one row, inputs [1, W, heads, width] or [1, W, width, heads]
    out: Any
    after: Any  # `MambaState`, the same memory as the old one
    inputs: Any  # of x, b and c: float32 [R, heads, width]
    taps: Any  # of x, b and c, then the bias: float32 [W + 2, ...], as the inputs of the state
    steps: Any  # exp of the decay, and dt: float32 [chunks, R, n]
    skip: Any  # D: float32 [chunks, 1, n]
    columns: Any  # x of a row: float32 [chunks, Y, n]
    pair: Any  # b and c of a row: float32 [G, 1, S]
    results: Any  # float32 [R, N, Y]


def mamba_step(
    new: MambaToken, weights: MambaWeights, old: MambaState, start_B, num_tokens_B, *, interpret=False
) -> tuple[jax.Array, MambaState]:
    """Computes `reference_mamba.mamba_step`, and writes the state in place. XLA copies the state if it is
    used again. The token is float32 or bfloat16. interpret: True: emulate a TPU on a CPU, slowly, and raise
    if accesses to memory race.
    """
    B, G, W, S = old.b.shape
    N, Y = old.state.shape[1:3]
    chunks = chunks_of_heads(N, G, 4 * N * Y * S)
    n = N // chunks
    # XLA stores inputs in these orders of axes, so that few lanes are empty: nothing is copied.
    has_columns = Y % LANES > 0 and N % LANES == 0
    orders = ((0, 2, 3, 1) if has_columns else (0, 2, 1, 3), (0, 2, 1, 3), (0, 2, 1, 3))
    old = MambaState._make([*map(jnp.transpose, old[:3], orders), old.state])
    R = min(B, _ROWS)
    tiles = pl.cdiv(B, R)
    count_B = jnp.pad(num_tokens_B, (0, tiles * R - B))
    scalars = rows_on_chip(count_B), jnp.pad(start_B, (0, tiles * R - B)), count_B
    weights = MambaWeights(*(x.T for x in weights[:3]), *(x[None] for x in weights[3:]))

    def of_tile(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((R, x.shape[1]), lambda t, *_: (t, 0))

    def of_call(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0, 0))

    def of_row(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, *x.shape[1:]), lambda t, r, g, block, *_: (block[t * R + r], 0, 0, 0))

    def of_heads(t: Any, r: Any, g: Any, block: Any, *_: Any) -> tuple[Any, ...]:
        """Returns the index of the state of a step. A row without a token has the last one before it, or the
        first one after it.
        """
        row = t * R + r
        g = jnp.where(block[row] == row, g, jnp.where(block[row] < row, chunks - 1, 0))
        return block[row], g, 0, 0

    memory = partial(pltpu.VMEM, dtype=jnp.float32)
    rows = ((N, Y), (G, S), (G, S))
    vectors = [memory((R, *shape)) for shape in rows]
    taps = [memory((W + 2, *x.shape[2:])) for x in old[:3]]
    state_blocks = [*map(of_row, old[:3]), pl.BlockSpec((1, n, Y, S), of_heads)]
    arrays = jax.tree.leaves((scalars, new, weights))
    out_type = result_type(new.x.shape, jnp.float32, *arrays, *old)
    out_types = [out_type, *(result_type(x.shape, x.dtype, *arrays, *old) for x in old)]
    scratch = [
        vectors, taps, [memory((chunks, R, n))] * 2, memory((chunks, 1, n)), memory((chunks, Y, n)),
        [memory((G, 1, S))] * 2, vectors[0],
    ]  # fmt: skip
    structure = jax.tree.structure(_Refs(*scalars, new, weights, old, new.x, old, *scratch))
    out, *after = pl.pallas_call(
        lambda *refs: _kernel(jax.tree.unflatten(structure, refs)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(tiles, R, chunks),
            in_specs=[*map(of_tile, new), *map(of_call, weights), *state_blocks],
            out_specs=[of_tile(new.x), *state_blocks],
            scratch_shapes=jax.tree.leaves(scratch),
        ),
        out_shape=out_types,
        input_output_aliases={len(arrays) + i: 1 + i for i in range(len(old))},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=emulator(interpret),
        name="mamba_step",
    )(*arrays, *keep_in_hbm(old, interpret))
    *inputs, state = after
    back = ((0, 3, 1, 2) if has_columns else (0, 2, 1, 3), (0, 2, 1, 3), (0, 2, 1, 3))
    return out, MambaState._make([*map(jnp.transpose, inputs, back), state])


def chunks_of_heads(heads: int, groups: int, size: int) -> int:
    """Returns the number of chunks into which the heads of a row are divided. A chunk has whole groups of B
    and C, or a part of one. size: bytes of the state of a row.
    """
    most = groups_of_heads(heads, size)
    numbers = (n for n in range(1, most + 1) if heads % (n * SUBLANES) == 0)
    return max(n for n in numbers if n == 1 or n % groups == 0 or groups % n == 0)


def _kernel(refs: _Refs) -> None:
    (tile, r, chunk) = (pl.program_id(axis) for axis in range(3))
    row = tile * pl.num_programs(1) + r
    pl.when((row == 0) & (chunk == 0))(partial(_prepare_weights, refs))
    pl.when((r == 0) & (chunk == 0))(partial(_prepare, refs))

    @pl.when((row == 0) & (refs.count[refs.block[0]] == 0))
    def _keep() -> None:  # no row has a token: the block is written back all the same
        for before, after in zip(refs.old, refs.after, strict=True):
            after[...] = before[...]

    @pl.when(refs.count[row] > 0)
    def _step() -> None:
        begins = refs.start[row] == 0
        pl.when(chunk == 0)(partial(_convolve_row, refs, r, begins))
        _step_heads(refs, r, chunk, begins)

    is_last = (r == pl.num_programs(1) - 1) & (chunk == pl.num_programs(2) - 1)
    pl.when(is_last)(partial(_finish, refs))


def _prepare_weights(refs: _Refs) -> None:
    """Puts the weights of heads into rows, or into columns as the inputs of the state."""
    for taps, bias, to_ref, inputs in zip(
        refs.weights[:3], refs.weights[3:6], refs.taps, refs.inputs, strict=True
    ):
        (_, heads, width) = inputs.shape
        for w in range(len(to_ref)):
            row = bias[...] if w == len(taps) else taps[w : w + 1]
            for n in range(heads):
                inputs[0, n : n + 1] = row[:, n * width : (n + 1) * width].astype(jnp.float32)
            is_row = to_ref.shape[1:] == (heads, width)
            to_ref[w] = inputs[0] if is_row else inputs[0].T
    (chunks, _, n) = refs.skip.shape
    for chunk in range(chunks):
        refs.skip[chunk] = refs.weights.skip_N[:, chunk * n : (chunk + 1) * n].astype(jnp.float32)


def _prepare(refs: _Refs) -> None:
    """Puts heads into rows, and computes decay and dt, for all rows of a tile."""
    for x_ref, inputs_ref in zip(refs.new[:3], refs.inputs, strict=True):
        (_, heads, width) = inputs_ref.shape
        for n in range(heads):
            inputs_ref[:, n] = x_ref[:, n * width : (n + 1) * width].astype(jnp.float32)
    numbers = refs.new.dt, refs.weights.log_rate_N, refs.weights.dt_bias_N
    decay_RN, dt_RN = decay_and_dt(*(ref[...] for ref in numbers))
    shrink_RN = jnp.exp(decay_RN)
    (chunks, _, n) = refs.steps[0].shape
    for chunk in range(chunks):
        for x_RN, to_ref in zip((shrink_RN, dt_RN), refs.steps, strict=True):
            to_ref[chunk] = x_RN[:, chunk * n : (chunk + 1) * n]
    refs.results[...] = jnp.zeros(refs.results.shape, jnp.float32)


def _convolve_row(refs: _Refs, r: Any, begins: Any) -> None:
    """Stores x, b and c of row r of a tile after the convolution. Moves its inputs by one."""
    x, b_GS, c_GS = (_convolve(refs, i, r, begins) for i in range(3))
    (chunks, Y, n) = refs.columns.shape
    x_YN = x if x.shape == (Y, chunks * n) else x.T
    for chunk in range(chunks):
        refs.columns[chunk] = x_YN[:, chunk * n : (chunk + 1) * n]
    for x_GS, to_ref in zip((b_GS, c_GS), refs.pair, strict=True):
        for group in range(len(x_GS)):
            to_ref[group] = x_GS[group : group + 1]


def _convolve(refs: _Refs, i: int, r: Any, begins: Any) -> jax.Array:
    """Returns silu of the convolution, of x, b or c, as its inputs in the state are stored."""
    old_ref = refs.old[i]
    after_ref = refs.after[i]
    taps_ref = refs.taps[i]
    new = refs.inputs[i][r]
    if new.shape != old_ref.shape[2:]:
        new = new.T
    W = old_ref.shape[1]
    inputs = [jnp.where(begins, 0, old_ref[0, w]) for w in range(W)] + [new]
    total = taps_ref[W + 1]
    for w in range(W + 1):
        total += inputs[w] * taps_ref[w]
        if w:
            after_ref[0, w - 1] = inputs[w]
    return jax.nn.silu(total)


def _step_heads(refs: _Refs, r: Any, chunk: Any, begins: Any) -> None:
    """Writes the states of a chunk of heads of row r of a tile after its token, and their results."""
    (_, Y, n) = refs.columns.shape
    x_Yn = refs.columns[chunk]
    shrink_1n, dt_1n = (ref[chunk, pl.ds(r, 1)] for ref in refs.steps)
    written_Yn = dt_1n * x_Yn
    lane_Yn = lax.broadcasted_iota(jnp.int32, (Y, n), 1)
    results_Yn = refs.skip[chunk] * x_Yn
    heads = len(refs.columns) * n // len(refs.pair[0])  # of a group
    for m in range(n):
        if m % heads == 0:
            group = (chunk * n + m) // heads
            b_1S, c_1S = (ref[group] for ref in refs.pair)
        column = slice(m, m + 1)
        state_YS = jnp.where(begins, 0, refs.old.state[0, m])
        state_YS = state_YS * shrink_1n[:, column] + written_Yn[:, column] * b_1S
        refs.after.state[0, m] = state_YS
        result_Y1 = (state_YS * c_1S).sum(-1, keepdims=True)
        results_Yn += jnp.where(lane_Yn == m, result_Y1, 0)
    refs.results[r, pl.ds(pl.multiple_of(chunk * n, SUBLANES), n)] = results_Yn.T


def _finish(refs: _Refs) -> None:
    """Puts the results of all rows of a tile side by side."""
    (_, heads, Y) = refs.results.shape
    for n in range(heads):
        refs.out[:, n * Y : (n + 1) * Y] = refs.results[:, n]
