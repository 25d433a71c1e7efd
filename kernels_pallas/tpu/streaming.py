"""The call of a kernel that multiplies few rows with matrices. The matrices come from on-chip memory, to
which XLA copies small matrices while other operations run, or tile by tile from HBM.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..dispatch import result_type
from ..key_layouts import LANES
from ..reference_products import FP8_BLOCK, Matrix
from .fp8 import column_of
from .matrices import Form
from .parts import as_row, emulator, keep_in_hbm, rows_after_norm

RESIDENT_BYTES = 24 * 2**20  # of the matrices of a kernel
STEP_BYTES = 2**22  # of matrices that a grid step takes
_VMEM_BYTES = 48 * 2**20  # at most, of both buffers of a step, and of x


class Settings(NamedTuple):
    """The settings that are the same for every grid step."""

    forms: tuple[Form, ...]
    tiles: tuple[int, ...]  # outputs of a tile of each matrix
    counts: tuple[int, ...]  # of tiles
    eps: float
    offset: float
    activation: str | None
    soft_cap: float | None
    is_resident: bool  # the matrices are whole in on-chip memory


class Operands(NamedTuple):
    """Arrays, their blocks, or references to these."""

    x: Any
    matrices: Any  # a list for each
    of_outputs: Any  # for each a scale per output and a bias; None where there is none
    norm: Any
    residual: Any
    added: Any = ()  # to the product of each matrix, float32 [M, O]; None: nothing


class Memory(NamedTuple):
    """The on-chip memory that steps share."""

    rows: Any  # float32 [R, I]: x after its norm
    x: Any  # what `Form.prepare` makes of it
    of_outputs: Any  # those of the operands, float32 [1, outputs of all tiles]
    groups: Any  # `Form.group_memory` for each matrix


class Step(NamedTuple):
    """A grid step of a kernel: references, except for its number and the settings."""

    number: Any
    settings: Settings
    operands: Operands
    results: Any
    memory: Memory
    scratch: Any


def settings_of(  # noqa: PLR0913
    x_MI, matrices, eps=0.0, offset=0.0, activation=None, soft_cap=None, dtype=None
) -> Settings:
    """Returns the settings of a call. dtype: the dtype in which x is multiplied. None: its own dtype."""
    forms = tuple(Form.of(matrix, dtype or x_MI.dtype, len(x_MI)) for matrix in matrices)
    size = sum(matrix.values.nbytes for matrix in matrices)
    is_resident = size <= RESIDENT_BYTES
    steps = 1 if is_resident else max(1, round(size / STEP_BYTES))
    tiles = tuple(min(form.outputs, LANES * pl.cdiv(form.outputs, LANES * steps)) for form in forms)
    counts = tuple(pl.cdiv(form.outputs, tile) for form, tile in zip(forms, tiles, strict=True))
    return Settings(forms, tiles, counts, eps, offset, activation, soft_cap, is_resident)


def _tile(settings: Settings, n: int, shape: tuple[int, ...], axis: int) -> pl.BlockSpec:
    """Returns the block that a grid step takes of matrix n or its rows: tile i along an axis, or the last
    tile if none is left.
    """
    last = settings.counts[n] - 1
    return pl.BlockSpec(
        shape, lambda i: tuple(jnp.minimum(i, last) if at == axis else 0 for at in range(len(shape)))
    )


def rows_of_tile(rows: int, settings: Settings, n: int) -> pl.BlockSpec:
    return _tile(settings, n, (rows, settings.tiles[n]), 1)


def call(  # noqa: PLR0913
    kernel, settings: Settings, x_MI, matrices: Sequence[Matrix], results, name: str, interpret: bool,
    norm_I=None, residual_MO=None, added=(), scratch=(),
) -> list[jax.Array]:  # fmt: skip
    """Runs a kernel of a `Step` for each. results: shapes, dtypes and blocks. XLA leaves streamed matrices in
    HBM: a kernel that waits for them to be copied could not compute meanwhile.
    """
    forms = settings.forms
    pairs = list(zip(forms, matrices, strict=True))
    arrays = [form.arrays(matrix) for form, matrix in pairs]
    of_outputs = [(form.output_scale(matrix), matrix.bias) for form, matrix in pairs]
    operands = Operands(x_MI, arrays, of_outputs, norm_I, residual_MO, added)
    blocks = jax.tree.map(lambda _: pl.BlockSpec(), operands)._replace(
        matrices=[
            [_tile(settings, n, *shape) for shape in form.tile_shapes(settings.tiles[n])]
            for n, form in enumerate(forms)
        ],
        residual=None if residual_MO is None else rows_of_tile(len(x_MI), settings, 0),
        added=[None if y is None else rows_of_tile(len(x_MI), settings, n) for n, y in enumerate(added)],
    )
    if not settings.is_resident:
        operands = operands._replace(matrices=keep_in_hbm(arrays, interpret))
    rows = [
        jax.tree.map(lambda _, size=tile * count: pltpu.VMEM((1, size), jnp.float32), pair)
        for pair, tile, count in zip(of_outputs, settings.tiles, settings.counts, strict=True)
    ]
    x_RI = pltpu.VMEM((forms[0].rows, forms[0].inputs), jnp.float32)
    groups = [form.group_memory(tile) for form, tile in zip(forms, settings.tiles, strict=True)]
    memory = Memory(x_RI, forms[0].prepared(), rows, groups)
    leaves = jax.tree.leaves(operands)
    outs = [result_type(shape, dtype, *leaves) for shape, dtype, _ in results]
    structure = jax.tree.structure((operands, outs, memory, list(scratch)))

    def run(*refs):
        number = 0 if settings.is_resident else pl.program_id(0)
        kernel(Step(number, settings, *jax.tree.unflatten(structure, refs)))

    specs = jax.tree.leaves(blocks), [block for _, _, block in results]
    if settings.is_resident:
        specs = jax.tree.map(lambda block: pl.BlockSpec(memory_space=pltpu.VMEM), specs)
    return pl.pallas_call(
        run,
        grid=() if settings.is_resident else (max(settings.counts),),
        in_specs=specs[0],
        out_specs=specs[1],
        out_shape=outs,
        scratch_shapes=[*jax.tree.leaves(memory), *scratch],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_BYTES),
        cost_estimate=_cost(len(operands.x), operands.matrices),
        interpret=emulator(interpret),
        name=name,
    )(*leaves)


def _cost(rows: int, matrices: Any) -> pl.CostEstimate:
    """Returns the cost that XLA takes into account when it schedules copies of other operands next to the
    kernel.
    """
    arrays = jax.tree.leaves(matrices)
    return pl.CostEstimate(
        flops=2 * rows * sum(array.size for array in arrays),
        bytes_accessed=sum(array.nbytes for array in arrays),
        transcendentals=0,
    )


def prepare(step: Step) -> None:
    """Stores x after its norm, in the form of the matrices. Rows past M may be anything."""
    _, settings, operands, _, memory, _ = step
    M, inputs = operands.x.shape
    x_MI = rows_after_norm(operands.x, operands.norm, settings.eps, settings.offset)
    if inputs < memory.rows.shape[1]:
        memory.rows[...] = jnp.zeros(memory.rows.shape, jnp.float32)
    memory.rows[:M, :inputs] = x_MI
    settings.forms[0].prepare(memory.rows[...], memory.x)
    for ref, array in zip(*map(jax.tree.leaves, (memory.of_outputs, operands.of_outputs)), strict=True):
        ref[:, : len(array)] = as_row(array)


def multiply_tile(step: Step, n: int) -> jax.Array:
    """Returns x · tileᵀ of matrix n with its bias, float32 [R, outputs of the tile]."""
    number, settings, operands, _, memory, _ = step
    tile = settings.tiles[n]
    first = 0 if settings.counts[n] == 1 else pl.multiple_of(number * tile, LANES)
    columns = pl.ds(first, tile)
    form = settings.forms[n]

    def block_scale(ref: Any, i: int) -> jax.Array:
        block = jnp.minimum(number * pl.cdiv(tile, FP8_BLOCK) + i, len(ref) - 1)
        return column_of(ref[pl.ds(block, 1)])

    read = block_scale if form.has_blocks else None
    y_RO = form.multiply(memory.x, operands.matrices[n], memory.groups[n], read)
    scale, bias = memory.of_outputs[n]
    if scale is not None:
        y_RO *= scale[:, columns]
    return y_RO if bias is None else y_RO + bias[:, columns]
