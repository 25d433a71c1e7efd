"""The blocks of a grid step of a mixture of experts on a TPU: parts of an expert's matrices."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..key_layouts import LANES
from ..reference_products import FP8_BLOCK
from .matrices import Form

_EXPERT_BYTES = (
    14 * 2**20
)  # of the matrices of an expert that are read at once, of which there are two in VMEM
_PART_BYTES = 8 * 2**20  # of a part of gate and up, or of down


class ExpertSettings(NamedTuple):
    """The settings that are the same for every grid step."""

    inputs: int  # matrices of the tokens: gate and up, or up if there is no gate
    forms: tuple[Form, ...]  # of gate and up, and of down
    widths: tuple[int, ...]  # outputs of a part of them
    parts: tuple[int, ...]
    activation: Callable
    limit: float | None

    @property
    def is_whole(self) -> bool:
        """Returns True if an expert is read at once."""
        return self.parts == (1, 1)

    @property
    def indices(self) -> list[Callable]:
        """The functions that give the expert and part of a grid step, for each matrix."""
        return [*[at_gate] * self.inputs, at_down]

    def phase(self, matrix: int) -> int:
        """Returns 0 for gate and up, and 1 for down. matrix: its place among the matrices."""
        return int(matrix == self.inputs)


def expert_settings(dtype: Any, rows: int, matrices, activation, limit) -> ExpertSettings:
    forms = []
    sizes = []
    for matrix in (matrices[0], matrices[-1]):
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), matrix)
        forms.append(Form.of(one, dtype, rows))
        sizes.append(sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(one)))
    inputs = len(matrices) - 1
    sizes[0] *= inputs
    if sum(sizes) <= _EXPERT_BYTES:
        widths = [form.outputs for form in forms]
    else:
        widths = [_width(form.outputs, size) for form, size in zip(forms, sizes, strict=True)]
    parts = [pl.cdiv(form.outputs, width) for form, width in zip(forms, widths, strict=True)]
    return ExpertSettings(inputs, tuple(forms), tuple(widths), tuple(parts), activation, limit)


def _width(outputs: int, size: int) -> int:
    """Returns outputs of a part, all or a multiple of 128: if possible a part of all."""
    parts = pl.cdiv(size, _PART_BYTES)
    most = LANES * pl.cdiv(outputs, LANES * parts)
    if parts == 1 or most >= outputs:
        return outputs
    return next((w for w in range(most, most // 2, -LANES) if outputs % w == 0), most)


def at_gate(settings: ExpertSettings, tiles: int, b, t, part, experts, counts=None) -> tuple[Any, Any]:
    """Returns the expert and the part of gate and up. The matrices of the next tile are read during this one,
    so a tile that computes nothing keeps the last.
    """
    expert = experts[b * tiles + t]
    last = settings.parts[0] - 1
    if last == 0:
        return expert, 0
    return expert, jnp.where(_is_idle(experts, counts, b, t, tiles), last, jnp.minimum(part, last))


def at_down(settings: ExpertSettings, tiles: int, b, t, part, experts, counts=None) -> tuple[Any, Any]:
    """Returns the expert and the part of down: while gate and up are computed still the last of the tile
    before.
    """
    at = b * tiles + t
    if settings.is_whole:
        return experts[at], 0
    first, count = settings.parts
    is_before = (part < first) & (at > 0)
    expert = experts[jnp.where(is_before, at - 1, at)]
    is_last = _is_idle(experts, counts, b, t, tiles) | is_before
    return expert, jnp.where(is_last, count - 1, jnp.maximum(part - first, 0))


def _is_idle(experts, counts, b, t, tiles: int) -> Any:
    """Returns True if a tile has no rows or, in a call with few tokens, has the expert of the tile before."""
    return repeats(experts, t) if counts is None else t >= counts[b]


def repeats(experts, tile) -> Any:
    return (tile > 0) & (experts[tile] == experts[jnp.maximum(tile - 1, 0)])


def of_expert(shape: tuple[int, ...], axis: int, index: Callable) -> pl.BlockSpec:
    """Returns blocks of one expert. axis: the axis of its outputs."""

    def block_index(*at):
        expert, part = index(*at)
        return expert, *(part if n == axis else 0 for n in range(len(shape)))

    return pl.BlockSpec((None, *shape), block_index)


def scales_by_inputs(form: Form, width: int) -> bool:
    """Returns True if scales of blocks lie by inputs, then outputs. XLA stores them so if that fills tiles
    better. A block of only some outputs could not be taken from scales in this order.
    """
    outputs, inputs = form.block_counts

    def padded(count: int) -> int:
        return 8 * pl.cdiv(count, 8) if count > 4 else pl.next_power_of_2(count)

    return width == form.outputs and inputs * padded(outputs) < outputs * padded(inputs)


def _block_scales(scale_XOQ: jax.Array, form: Form, width: int, index: Callable) -> tuple[Any, Any]:
    """Returns scales of blocks of FP8 with experts in lanes, as XLA stores 128 of them, and their blocks."""
    shape = min(len(scale_XOQ), LANES), pl.cdiv(width, FP8_BLOCK), form.block_counts[1]
    axes = (2, 1, 0) if scales_by_inputs(form, width) else (1, 2, 0)

    def block_index(*at):
        expert, part = index(*at)
        return part, 0, lax.div(expert, shape[0])

    return jnp.transpose(scale_XOQ, axes), pl.BlockSpec([shape[axis] for axis in axes], block_index)


def matrix_blocks(settings: ExpertSettings, matrices: Any, indices: Any) -> tuple[list[Any], list[Any]]:
    """Returns the operands and their blocks for gate, up and down. indices: functions that give the expert
    and part of a grid step.
    """
    arrays = []
    specs = []
    for n, (matrix, index) in enumerate(zip(matrices, indices, strict=True)):
        form = settings.forms[settings.phase(n)]
        width = settings.widths[settings.phase(n)]
        arrays.append(form.arrays(matrix))
        specs.append([of_expert(*shape, index) for shape in form.tile_shapes(width)])
        if form.has_blocks:
            arrays[-1][1], specs[-1][1] = _block_scales(arrays[-1][1], form, width, index)
    return arrays, specs


def blocks_bytes(settings: ExpertSettings, matrices: Any) -> int:
    """Returns the bytes of the blocks of matrices in VMEM. There are two blocks of each matrix."""
    total = 0
    arrays, specs = matrix_blocks(settings, matrices, settings.indices)
    for array, spec in zip(jax.tree.leaves(arrays), jax.tree.leaves(specs), strict=True):
        *rows, lanes = [size or 1 for size in spec.block_shape]
        total += 2 * math.prod(rows) * LANES * pl.cdiv(lanes, LANES) * array.dtype.itemsize
    return total


def of_rows(rows_XO: jax.Array, width: int, index: Callable) -> pl.BlockSpec:
    """Returns blocks of an array with a row for each expert, together with other rows that fill a tile."""
    size = 32 // rows_XO.dtype.itemsize

    def block_index(*at):
        expert, part = index(*at)
        return lax.div(expert, size), part

    return pl.BlockSpec((size, width), block_index)
