"""The decode step of Mamba-2 on TPUs, in place: all that is between its products, except the gate and the
norm.

A grid step takes some heads of one row, about 1 MiB of its state, which the pipeline copies while the step
before computes. The first step of a row computes its convolutions. Steps of rows without a token have the
block of a row before or after, so nothing is copied for them (but row 0 if no row has a token).

The state has its S numbers in lanes, and the Y numbers of a head in sublanes. A product with ones puts each
number of x into all lanes: the matrix unit is idle, and a unit for lanes would be slower than the copies. Its
factors are three parts of x, so nothing is rounded. Results are summed over sublanes, after a transposition,
because they are then side by side as the output has them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..delta_blocks import split
from ..dispatch import result_type
from ..key_layouts import LANES
from ..reference_mamba import MambaState, MambaToken, MambaWeights, decay_and_dt
from .delta import VMEM_BYTES, groups_of_heads, rows_on_chip
from .parts import dot, emulator, keep_in_hbm

SUBLANES = 8
_ROWS = 32  # whose tokens are on the chip at once
_PARTS = 3  # of x


class _Refs(NamedTuple):
    """The operands, results and memory of the kernel, in their order. A chunk has n heads. A product spreads
    the numbers of 8 heads.
    """

    block: Any  # the row whose state each step has; in scalar memory, as the next two
    start: Any
    count: Any
    new: Any  # `MambaToken`: of the rows of a tile
    weights: Any  # `MambaWeights`, the taps [W + 1, heads · width], others [1, …]
    old: Any  # `MambaState`: of one row, inputs [1, W, heads, width] or [1, W, width, heads]
    out: Any
    after: Any  # `MambaState`, the same memory as the old one
    inputs: Any  # of x, b and c: float32 [R, heads, width]; D x, when a row is done
    taps: Any  # of x, b and c, then the bias: float32 [W + 2, ...], as the inputs of the state
    steps: Any  # exp of the decay, and dt: float32 [N, R, 128], each number in all lanes
    skip_NY: Any  # D: float32
    ones: Any  # bfloat16 [3 · 8, 8 · 128], which spreads x
    columns: Any  # x of a row, in parts: bfloat16 [N / 8, Y, 3 · 8]
    pair: Any  # b and c of a row: float32 [G, 1, S]
    results: Any  # float32 [N Y / 128, R, 128]


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
    vectors = [memory((R, *shape)) for shape in ((N, Y), (G, S), (G, S))]
    taps = [memory((W + 2, *x.shape[2:])) for x in old[:3]]
    ones = pltpu.VMEM((_PARTS * SUBLANES, SUBLANES * LANES), jnp.bfloat16)
    columns = pltpu.VMEM((N // SUBLANES, Y, _PARTS * SUBLANES), jnp.bfloat16)
    steps = [memory((N, R, LANES))] * 2
    results = memory((N * Y // LANES, R, LANES))
    scratch = [vectors, taps, steps, memory((N, Y)), ones, columns, [memory((G, 1, S))] * 2, results]
    state_blocks = [*map(of_row, old[:3]), pl.BlockSpec((1, N // chunks, Y, S), of_heads)]
    arrays = jax.tree.leaves((scalars, new, weights))
    out_types = [result_type(x.shape, jnp.float32, *arrays, *old) for x in (new.x, *old)]
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
    has_token = refs.count[row] > 0

    @pl.when((row == 0) & (refs.count[refs.block[0]] == 0))
    def _keep() -> None:  # no row has a token: the block is written back all the same
        for before, after in zip(refs.old, refs.after, strict=True):
            after[...] = before[...]

    @pl.when(has_token)
    def _step() -> None:
        begins = refs.start[row] == 0
        pl.when(chunk == 0)(partial(_convolve_row, refs, r, begins))
        _step_heads(refs, r, chunk, begins)

    @pl.when(jnp.logical_not(has_token) & (chunk == 0))
    def _clear() -> None:
        refs.inputs[0][r] = jnp.zeros(refs.inputs[0].shape[1:], jnp.float32)

    is_last = (r == pl.num_programs(1) - 1) & (chunk == pl.num_programs(2) - 1)
    pl.when(is_last)(partial(_finish, refs))


def _prepare_weights(refs: _Refs) -> None:
    """Puts the weights of heads into rows, or into columns as the inputs of the state."""
    for taps, bias, to_ref, inputs in zip(
        refs.weights[:3], refs.weights[3:6], refs.taps, refs.inputs, strict=True
    ):
        (_, heads, width) = inputs.shape
        for w in range(len(to_ref)):
            ref, row = (bias, 0) if w == len(taps) else (taps, w)
            for n in range(heads):
                inputs[0, n : n + 1] = _of_head(ref, n, width, slice(row, row + 1))
            is_row = to_ref.shape[1:] == (heads, width)
            to_ref[w] = inputs[0] if is_row else inputs[0].T
    (N, Y) = refs.skip_NY.shape
    refs.skip_NY[...] = jnp.broadcast_to(refs.weights.skip_N[...].astype(jnp.float32), (Y, N)).T
    part, lane = (lax.broadcasted_iota(jnp.int32, refs.ones.shape, axis) for axis in (0, 1))
    is_of_head = part % SUBLANES == lane // LANES
    refs.ones[...] = jnp.where(is_of_head, 1.0, 0.0).astype(jnp.bfloat16)


def _prepare(refs: _Refs) -> None:
    """Puts heads into rows, and computes decay and dt, for all rows of a tile."""
    for x_ref, inputs_ref in zip(refs.new[:3], refs.inputs, strict=True):
        (_, heads, width) = inputs_ref.shape
        for n in range(heads):
            inputs_ref[:, n] = _of_head(x_ref, n, width)
    numbers = refs.new.dt, refs.weights.log_rate_N, refs.weights.dt_bias_N
    decay_RN, dt_RN = decay_and_dt(*(ref[...] for ref in numbers))
    shrink_RN = jnp.exp(decay_RN)
    for x_RN, to_ref in zip((shrink_RN, dt_RN), refs.steps, strict=True):
        for n in range(len(to_ref)):
            to_ref[n] = jnp.broadcast_to(x_RN[:, n : n + 1], to_ref.shape[1:])
    refs.results[...] = jnp.zeros(refs.results.shape, jnp.float32)


def _of_head(ref: Any, n: int, width: int, rows: Any = slice(None)) -> jax.Array:  # noqa: B008
    """Returns the numbers of head n in some rows, float32 [rows, width]. They are rotated before others put
    them into rows: the compiler would rotate each row.
    """
    offset = n * width % LANES
    first = n * width - offset
    x = ref[rows, first : first + max(width, LANES)].astype(jnp.float32)
    return pltpu.roll(x, LANES - offset, 1)[:, :width] if offset else x[:, :width]


def _convolve_row(refs: _Refs, r: Any, begins: Any) -> None:
    """Stores x, b and c of row r of a tile after the convolution, and D x. Moves its inputs by one."""
    x, b_GS, c_GS = (_convolve(refs, i, r, begins) for i in range(3))
    x_NY = x if x.shape == refs.skip_NY.shape else x.T
    refs.inputs[0][r] = x_NY * refs.skip_NY[...]
    parts = [part.astype(jnp.float32) for part in split(x_NY)]
    for i in range(len(refs.columns)):
        heads = slice(i * SUBLANES, (i + 1) * SUBLANES)
        rows = jnp.concatenate([part[heads] for part in parts], 0)
        refs.columns[i] = rows.T.astype(jnp.bfloat16)
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
    (_, n, Y, S) = refs.old.state.shape
    heads = len(refs.steps[0]) // len(refs.pair[0])  # of a group
    first = chunk * (n * Y // LANES)  # of the chunk's results
    terms: list[jax.Array] = []  # [Y, 128], whose sums over lanes are results
    for m in range(n):
        if m % SUBLANES == 0:
            eight = chunk * (n // SUBLANES) + m // SUBLANES
            x_Y8L = dot(refs.columns[eight], refs.ones[...], 0)
        if m % heads == 0:
            group = (chunk * n + m) // heads
            b_1S, c_1S = (ref[group] for ref in refs.pair)
        shrink_1S, dt_1S = (
            jnp.concatenate([ref[chunk * n + m, pl.ds(r, 1)]] * (S // LANES), 1) for ref in refs.steps
        )
        lanes = slice(m % SUBLANES * LANES, (m % SUBLANES + 1) * LANES)
        x_YS = jnp.concatenate([x_Y8L[:, lanes]] * (S // LANES), 1)
        state_YS = jnp.where(begins, 0, refs.old.state[0, m]) * shrink_1S + x_YS * (dt_1S * b_1S)
        refs.after.state[0, m] = state_YS
        result_YS = state_YS * c_1S
        terms.append(sum(result_YS[:, i : i + LANES] for i in range(0, S, LANES)))
        if len(terms) * Y >= LANES:
            rows = jnp.concatenate(terms, 0)
            for i in range(0, len(rows), LANES):
                at = first + ((m + 1) * Y - len(rows) + i) // LANES
                refs.results[at, pl.ds(r, 1)] = rows[i : i + LANES].T.sum(0, keepdims=True)
            terms = []


def _finish(refs: _Refs) -> None:
    """Adds D x to the results of all rows of a tile."""
    (_, _, Y) = refs.inputs[0].shape
    for i in range(len(refs.results)):
        lanes = slice(i * LANES, (i + 1) * LANES)
        heads = range(i * LANES // Y, max(1, LANES // Y) + i * LANES // Y)
        terms = [refs.inputs[0][:, n] for n in heads]
        first = i * LANES % Y
        added = jnp.concatenate(terms, 1)[:, first : first + LANES]
        refs.out[:, lanes] = refs.results[i] + added
