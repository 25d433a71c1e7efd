"""The call of a kernel that multiplies few rows with matrices: from on-chip memory, where XLA copies small
matrices while other operations run, or tile by tile from HBM.
"""

from collections.abc import Callable, Sequence
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
    """What is the same for every grid step."""

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
    scales: Any  # per output; None where there are none
    biases: Any  # the same
    norm: Any
    residual: Any
    added: Any = ()  # to the product of each matrix, float32 [M, O]; None: nothing


class Memory(NamedTuple):
    """On-chip memory that steps share."""

    rows: Any  # float32 [R, I]: x after its norm
    x: Any  # what `Form.prepare` makes of it
    scales: Any  # float32 [1, outputs of all tiles]
    biases: Any
    groups: Any  # `Form.group_memory` for each matrix


def settings_of(x_MI, matrices, eps=0.0, offset=0.0, activation=None, soft_cap=None) -> Settings:  # noqa: PLR0913
    forms = tuple(Form.of(matrix, x_MI.dtype, len(x_MI)) for matrix in matrices)
    size = sum(matrix.values.nbytes for matrix in matrices)
    is_resident = size <= RESIDENT_BYTES
    steps = 1 if is_resident else max(1, round(size / STEP_BYTES))
    tiles = tuple(min(form.outputs, LANES * pl.cdiv(form.outputs, LANES * steps)) for form in forms)
    counts = tuple(pl.cdiv(form.outputs, tile) for form, tile in zip(forms, tiles, strict=True))
    return Settings(forms, tiles, counts, eps, offset, activation, soft_cap, is_resident)


def operands_and_blocks(  # noqa: PLR0913
    settings: Settings,
    x_MI,
    matrices: Sequence[Matrix],
    interpret: bool,
    norm_I=None,
    residual_MO=None,
    added=(),
) -> tuple[Operands, Operands]:
    """The operands of a kernel, and their blocks. XLA leaves streamed matrices in HBM: a kernel that waits
    for them to be copied could not compute meanwhile.
    """
    forms = settings.forms
    arrays = [form.arrays(matrix) for form, matrix in zip(forms, matrices, strict=True)]
    scales = [form.output_scale(matrix) for form, matrix in zip(forms, matrices, strict=True)]
    operands = Operands(
        x_MI, arrays, scales, [matrix.bias for matrix in matrices], norm_I, residual_MO, added
    )
    blocks = jax.tree.map(_whole, operands)._replace(
        matrices=[
            [_tile(*shape, _tile_number(settings, n)) for shape in form.tile_shapes(settings.tiles[n])]
            for n, form in enumerate(forms)
        ],
        residual=None if residual_MO is None else rows_of_tile(len(x_MI), settings, 0),
        added=[None if y is None else rows_of_tile(len(x_MI), settings, n) for n, y in enumerate(added)],
    )
    if not settings.is_resident:
        operands = operands._replace(matrices=keep_in_hbm(arrays, interpret))
    return operands, blocks


def _whole(array: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda i: (0,) * array.ndim)


def _tile_number(settings: Settings, n: int) -> Callable[[Any], Any]:
    """The number of the tile of matrix n that a grid step takes; of one without tiles left the last."""
    return lambda i: jnp.minimum(i, settings.counts[n] - 1)


def _tile(shape: tuple[int, ...], axis: int, number: Callable[[Any], Any]) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda i: tuple(number(i) if n == axis else 0 for n in range(len(shape))))


def rows_of_tile(rows: int, settings: Settings, n: int) -> pl.BlockSpec:
    number = _tile_number(settings, n)
    return pl.BlockSpec((rows, settings.tiles[n]), lambda i: (0, number(i)))


def call(  # noqa: PLR0913
    kernel, settings: Settings, operands, blocks, shapes, dtypes, out_blocks, scratch, interpret: bool,
    name: str,
) -> list[jax.Array]:  # fmt: skip
    """Runs a kernel of (settings, operands, results, memory, *scratch) for each step."""
    form = settings.forms[0]
    sizes = zip(settings.tiles, settings.counts, strict=True)
    rows = [pltpu.VMEM((1, tile * count), jnp.float32) for tile, count in sizes]
    scales, biases = (
        [None if array is None else row for array, row in zip(arrays, rows, strict=True)]
        for arrays in (operands.scales, operands.biases)
    )
    x_RI = pltpu.VMEM((form.rows, form.inputs), jnp.float32)
    groups = [form.group_memory(tile) for form, tile in zip(settings.forms, settings.tiles, strict=True)]
    memory = Memory(x_RI, form.prepared(), scales, biases, groups)
    leaves = jax.tree.leaves(operands)
    outs = [result_type(shape, dtype, *leaves) for shape, dtype in zip(shapes, dtypes, strict=True)]
    structure = jax.tree.structure((operands, outs, memory, scratch))

    def run(*refs):
        step = 0 if settings.is_resident else pl.program_id(0)
        kernel(step, settings, *jax.tree.unflatten(structure, refs))

    specs = jax.tree.leaves(blocks), out_blocks
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
    """What XLA takes into account when it schedules copies of other operands beside the kernel."""
    arrays = jax.tree.leaves(matrices)
    return pl.CostEstimate(
        flops=2 * rows * sum(array.size for array in arrays),
        bytes_accessed=sum(array.nbytes for array in arrays),
        transcendentals=0,
    )


def prepare(settings: Settings, operands: Operands, memory: Memory) -> None:
    """Stores x after its norm, in the form of the matrices. Rows past M may be anything."""
    M, inputs = operands.x.shape
    x_MI = rows_after_norm(operands.x, operands.norm, settings.eps, settings.offset)
    if inputs < memory.rows.shape[1]:
        memory.rows[...] = jnp.zeros(memory.rows.shape, jnp.float32)
    memory.rows[:M, :inputs] = x_MI
    settings.forms[0].prepare(memory.rows[...], memory.x)
    of_outputs = zip([*memory.scales, *memory.biases], [*operands.scales, *operands.biases], strict=True)
    for ref, array in of_outputs:
        if array is not None:
            ref[:, : len(array)] = as_row(array)


def multiply_tile(step: Any, n: int, settings: Settings, operands: Operands, memory: Memory) -> jax.Array:
    """x · tileᵀ of matrix n with its bias, float32 [R, outputs of the tile]."""
    tile = settings.tiles[n]
    columns = slice(0, tile) if settings.counts[n] == 1 else pl.ds(pl.multiple_of(step * tile, LANES), tile)
    form = settings.forms[n]

    def block_scale(ref: Any, i: int) -> jax.Array:
        block = jnp.minimum(step * pl.cdiv(tile, FP8_BLOCK) + i, len(ref) - 1)
        return column_of(ref[pl.ds(block, 1)])

    read = {"read": block_scale} if form.has_blocks else {}
    y_RO = form.multiply(memory.x, operands.matrices[n], memory.groups[n], **read)
    if memory.scales[n] is not None:
        y_RO *= memory.scales[n][:, columns]
    return y_RO if memory.biases[n] is None else y_RO + memory.biases[n][:, columns]
