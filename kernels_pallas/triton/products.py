"""Matrix products for Triton that read packed weights, several matrices in one launch, with the RMS norm of
their input, biases, activation and residual.

- A program computes one tile of outputs of one matrix (with an activation: the same tile of both), for all
  rows up to 64. q, k and v are separate leaves: the program's number says whose tile it computes.
- The norm costs no additional pass: products of x * weight and the sum of squares run in one loop, and each
  row is scaled at the end. x * weight is rounded to 16 bits once, while norm and weight round twice. It must
  not overflow, so float16 takes no norm.
- Matrices in groups are in `groups`.
- Up to 16 rows a program reads far more of the weights than of x. With more rows x costs as much, from L2, so
  tiles are wider. Then few tiles cover a narrow matrix, and its inputs are divided among programs. That costs
  a launch, and partial sums of at most an eighth of the matrix's bytes. For up to 16 rows the launch would
  cost more than it saves.
- Hopper takes this kernel too. Its tensor cores multiply 64 rows of the left operand at least (wgmma), which
  Triton uses from 33 rows on. Below it uses the older instruction with 16.
- int8 activations are quantized by the caller. Sums are then exact, in int32.
- Nothing here was measured on a card: tiles, stages and splits are chosen by arithmetic.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..dispatch import result_type
from ..reference_products import ACTIVATIONS, FEW_ROWS, FP8_BLOCK
from .adapters import add_adapters, with_inner
from .fp8 import block_scale, flat_numbers, has_blocks
from .groups import Run, add_run, count_runs, group_run
from .parts import Range, dot, load_tile, tile_mask, tile_size

PROGRAMS = 132  # multiprocessors of an H200
_STAGE_BYTES = 8192  # of a matrix that one step of the loop reads


class _Tiles(NamedTuple):
    """Sizes that are the same for every program."""

    rows: int
    outputs: int
    splits: int  # of the inputs
    warps: int
    stages: int


class _Settings(NamedTuple):
    """The settings of the computation of a program."""

    tiles: _Tiles
    eps: float
    offset: float
    activation: str | None
    interpret: bool


def product(  # noqa: PLR0913
    x_MI, matrices, norm_I=None, residual_MO=None, step_M=None, *, eps=0.0, offset=0.0, activation=None,
    dtype=None, interpret=False,
) -> list[jax.Array]:  # fmt: skip
    """Returns the products of `reference_products.product` in one launch, in the dtype of x if none is given.

    x is bfloat16 or float16, or int8 for int8 matrices with a scale per output, whose sums are then exact.
    Matrices are of x's dtype, int8, FP8 or packed, in groups of a multiple of 16 bytes. A norm takes bfloat16
    only. interpret: run on any device, slowly, by Pallas's interpreter.
    """
    M = len(x_MI)
    matrices = [with_inner(matrix, x_MI, norm_I, offset) for matrix in matrices]
    tiles = _choose_tiles(x_MI, matrices, norm_I, activation)
    widths = [matrix.outputs for matrix in matrices[: 1 if activation else None]]
    settings = _Settings(tiles, eps, offset, activation, interpret)
    operands = (x_MI, matrices, norm_I, residual_MO, step_M)
    split = tiles.splits > 1
    if split:  # the rest follows on the sum
        operands = (x_MI, [matrix._replace(bias=None) for matrix in matrices], None, None, step_M)
    dtype = dtype or x_MI.dtype
    shapes = [(tiles.splits, M, width) if split else (M, width) for width in widths]
    ys = pl.pallas_call(
        partial(_kernel, settings=settings),
        grid=(sum(pl.cdiv(width, tiles.outputs) for width in widths), pl.cdiv(M, tiles.rows), tiles.splits),
        out_shape=[
            result_type(shape, jnp.float32 if split else dtype, *jax.tree.leaves(operands))
            for shape in shapes
        ],
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="product",
    )(*operands)
    if not split:
        return ys
    y_MO = ys[0].sum(0)
    for term in (matrices[0].bias, residual_MO):
        if term is not None:
            y_MO = y_MO + term.astype(jnp.float32)
    return [y_MO.astype(dtype)]


def _choose_tiles(x_MI, matrices, norm_I, activation) -> _Tiles:
    """Returns tiles that fill the multiprocessors, and compile for sm_80 and sm_89 without register
    spills.
    """
    M = len(x_MI)
    grouped = matrices[0].values.ndim == 3
    if M > FEW_ROWS:
        return _Tiles(128, 64, 1, 8, 3)
    rows = tile_size(M)
    total = sum(matrix.outputs for matrix in matrices[: 1 if activation else None])
    affordable = 1
    if rows > 16 and len(matrices) == 1 and norm_I is None:
        values = matrices[0].values
        written_and_read = 8 * M * total
        affordable = max(1, values.size * values.dtype.itemsize // (8 * written_and_read))
    smallest = 16 if rows == 16 and not grouped else 32  # 32 bytes are read from memory at once
    enough = PROGRAMS * 3 // 4
    outputs = next((size for size in (64, 32) if pl.cdiv(total, size) * affordable >= enough), smallest)
    splits = max(1, min(PROGRAMS // pl.cdiv(total, outputs), affordable))
    if rows > 16 or outputs == 64:
        return _Tiles(rows, outputs, splits, 4, 6 if rows == 16 and grouped else 4)
    # Few programs: each needs more loads in flight.
    packed_stages = 12 if len(matrices) == 1 else 8
    return _Tiles(rows, outputs, splits, 2 if outputs == 16 else 4, packed_stages if grouped else 5)


def _kernel(x_ref, matrices, norm_ref, residual_ref, step_ref, *out_refs, settings: _Settings):
    groups = [matrices] if settings.activation else [[matrix] for matrix in matrices]
    # Not in the branches, where the interpreter has no program_id.
    (tile, block, split) = (pl.program_id(axis) for axis in range(3))
    refs = (norm_ref, residual_ref, step_ref)
    for group, out_ref in zip(groups, out_refs, strict=True):
        tiles = pl.cdiv(group[0].outputs, settings.tiles.outputs)
        run = partial(_tile, x_ref, group, refs, out_ref, (tile, block, split), settings)
        if len(groups) == 1:
            run()
        else:
            pl.when((tile >= 0) & (tile < tiles))(run)
        tile -= tiles


def _tile(x_ref, matrices, refs, out_ref, numbers, settings: _Settings):
    """Computes one tile of outputs of a matrix, or of two with an activation. refs: the norm, the residual
    and the step. numbers: the numbers of the tile of outputs, of the block of rows, and of the split.
    """
    (norm_ref, residual_ref, step_ref) = refs
    (tile, block, split) = numbers
    (M, inputs) = x_ref.shape
    rows, outputs, splits, _, _ = settings.tiles
    row = Range.of(block * rows, rows, M)
    out = Range.of(tile * outputs, outputs, matrices[0].outputs)
    add = _add_grouped if matrices[0].values.ndim == 3 else _add_flat
    steps, step = add(x_ref, norm_ref, matrices, row, out, settings)
    begin = 0 if splits == 1 else lax.div(steps * split, splits)
    end = steps if splits == 1 else lax.div(steps * (split + 1), splits)
    zeros_MO = jnp.zeros((rows, outputs), jnp.float32 if step_ref is None else jnp.int32)
    start = [zeros_MO] * len(matrices), jnp.zeros(rows, jnp.float32)
    ys, square_M = lax.fori_loop(begin, end, step, start)

    for i, matrix in enumerate(matrices):
        if step_ref is not None:
            ys[i] = ys[i].astype(jnp.float32) * load_tile(step_ref, row)[:, None]
        if matrix.values.ndim == 2 and matrix.scale is not None and not has_blocks(matrix):
            ys[i] *= load_tile(matrix.scale, out)
        if matrix.adapters is not None:
            ys[i] = add_adapters(
                ys[i], matrix.adapters, row, out, M if splits == 1 else M * (split == 0).astype(jnp.int32)
            )
        if norm_ref is not None:
            ys[i] *= lax.rsqrt(square_M * (1 / inputs) + settings.eps)[:, None]
        if matrix.bias is not None:
            ys[i] += load_tile(matrix.bias, out).astype(jnp.float32)
    y_MO = ACTIVATIONS[settings.activation](ys[0]) * ys[1] if settings.activation else ys[0]
    if residual_ref is not None:
        y_MO += load_tile(residual_ref, row, out).astype(jnp.float32)
    index = (row.slice, out.slice) if splits == 1 else (split, row.slice, out.slice)
    pltriton.store(out_ref.at[index], y_MO.astype(out_ref.dtype), mask=tile_mask(row, out))


def _add_flat(x_ref, norm_ref, matrices, row, out, settings: _Settings):
    """Returns the steps over the inputs of matrices [O, I], and the function of one step."""
    inputs = x_ref.shape[1]
    width = _STAGE_BYTES // (settings.tiles.outputs * matrices[0].values.dtype.itemsize * len(matrices))
    width = min(max(64, width), 256 if settings.tiles.rows == 16 else 64, max(32, tile_size(inputs)))
    width = min(width, FP8_BLOCK) if has_blocks(matrices[0]) else width
    multiply = partial(jnp.dot, preferred_element_type=jnp.int32) if x_ref.dtype == jnp.int8 else dot

    def step(i, state):
        ys, square_M = state
        column = Range.of(i * width, width, inputs)
        x_MI, added_M = _load_x(x_ref, norm_ref, row, column, settings.offset)
        sums = []
        for y_MO, matrix in zip(ys, matrices, strict=True):
            tile_OI = flat_numbers(load_tile(matrix.values, out, column), x_MI.dtype, settings.interpret)
            added_MO = multiply(x_MI, tile_OI.T)
            if has_blocks(matrix):
                added_MO *= block_scale(matrix, (), out.slice.start, i * width)
            sums.append(y_MO + added_MO)
        return sums, square_M + added_M

    return pl.cdiv(inputs, width), step


def _add_grouped(x_ref, norm_ref, matrices, row, out, settings: _Settings):
    """Returns the steps over the groups of packed matrices, and the function of one step, which reads some
    runs of bytes.
    """
    values = matrices[0].values
    runs = count_runs(values)
    at_once = 2 if settings.tiles.rows <= FEW_ROWS and runs % 2 == 0 and len(matrices) == 1 else 1
    end = runs * group_run(values.shape[1]) * matrices[0].halves  # with the padding of the last group

    def add_one(number, state):
        ys, square_M = state
        run = Run.of(number, values)
        columns = [Range.of(first, run.bytes.slice.size, x_ref.shape[1], end) for first in run.inputs]
        parts = (_load_x(x_ref, norm_ref, row, column, settings.offset) for column in columns)
        xs, added = zip(*parts, strict=True)
        return add_run(ys, xs, matrices, (), run, out, settings.interpret), square_M + sum(added)

    def step(i, state):
        for j in range(at_once):
            state = add_one(i * at_once + j, state)
        return state

    return runs // at_once, step


def _load_x(x_ref, norm_ref, row, column, offset: float):
    """Returns a tile of x, times the weight of the norm if there is one, and the rows' sums of squares for
    it.
    """
    x_MI = load_tile(x_ref, row, column)
    if norm_ref is None:
        return x_MI, 0
    x32_MI = x_MI.astype(jnp.float32)
    weight_I = load_tile(norm_ref, column).astype(jnp.float32)
    weight_I = weight_I + offset if offset else weight_I
    sum_M = jnp.square(x32_MI).sum(1)
    # A sum is never negative. Without the condition every warp would compute the whole tile, in the registers
    # of its product's operand; with it they share the work, and pass the results on in shared memory.
    return jnp.where(sum_M[:, None] >= 0, x32_MI * weight_I, jnp.nan).astype(x_MI.dtype), sum_M
