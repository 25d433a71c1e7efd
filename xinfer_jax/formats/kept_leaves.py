"""Quantized matrices of a file that stay as they are stored: leaves in int8, int4, MXFP4 and FP8, to the bit.

In int8 with a scale for each output, activations keep 15 bits on a CPU. As one group of inputs they stay
floats there, at 1.3 times the time of a row; GPUs and TPUs have kernels for the former alone.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

import kernels_pallas

from ..device import aligned_empty, run_in_blocks
from ..errors import InputError
from ..weights.fp8_weight import FP8_BLOCK, Fp8Weight, fp8_struct
from ..weights.grouped_weight import GroupedWeight, grouped_struct, pack_int4
from ..weights.int8_weight import Int8Weight
from ..weights.mxfp4 import BYTES, GROUP, Mxfp4Weight, mxfp4_struct
from .scaled_tensor import ScaledTensor, flat_bytes
from .tensors import Shape

_BLOCK = 1 << 21  # bytes that a core handles at a time: AWQ and GPTQ store outputs last, in many short runs


class KeptForm(NamedTuple):
    """The form of a leaf whose numbers are those of the file."""

    kind: type  # of the leaf
    fill: Callable[..., None]  # reads rows of a tensor: gets the leaf, the form, the tensor, its first row in
    # the leaf, and a slice of its own rows
    bits: int = 0
    group: int = 0  # inputs that share a scale
    scale: Any = np.float32  # the type of scales
    order: np.ndarray | None = None  # the inputs of each group
    has_offsets: bool = False
    has_blocks: bool = False  # of FP8

    def struct(self, shape: Shape) -> Any:
        """Shapes and types of a leaf, or of a part of one."""
        (*experts, outputs, inputs) = shape
        if self.kind is Mxfp4Weight:
            return mxfp4_struct(shape)
        if self.kind is Fp8Weight:
            return fp8_struct(shape, self.has_blocks)
        struct: Any = jax.ShapeDtypeStruct
        leaf: Any = Int8Weight(struct((outputs, inputs), np.int8), struct((outputs,), np.float32))
        if self.kind is GroupedWeight:
            has_order = self.order is not None
            leaf = grouped_struct((outputs, inputs), self.bits, self.group, self.scale, has_order)
            if self.has_offsets:
                leaf = dataclasses.replace(leaf, zero=None, offset=leaf.scale)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*experts, *x.shape), x.dtype), leaf)


def kept_form(
    shape: Shape, parts: Sequence[Any], devices: int = 1, keeps_fp8: bool = False
) -> KeptForm | None:
    """Returns the form in which the tensors of a matrix, or of experts, stay; None: they are read as floats.

    devices: over which the inputs are divided; keeps_fp8: so do those in FP8.
    """
    if not all(isinstance(part, ScaledTensor) for part in parts):
        return None
    numbers = [part.numbers for part in parts]
    inputs = shape[-1]
    if all(x.fp8 for x in numbers):
        return _fp8_form(shape, parts) if keeps_fp8 else None
    if all(x.mxfp4 for x in numbers):
        return KeptForm(Mxfp4Weight, _fill_mxfp4) if inputs % GROUP == 0 else None
    fields = ("group_of", "zeros", "offsets")
    (first, *others) = {
        (x.bits, x.block[1], *(getattr(x, field) is None for field in fields)) for x in numbers
    }
    (bits, J, is_natural, has_no_zeros, has_no_offsets) = first
    even = inputs + inputs % 2
    J = min(J, even) if bits == 8 or J < inputs else even
    if others or not bits or bits == 4 and J % 2:
        return None
    if not is_natural and (len(shape) > 2 or any(x is not numbers[0] for x in numbers)):
        return None
    has_kernels = kernels_pallas.device_impl().impl != "xla"
    if bits == 8 and J >= inputs and is_natural and has_no_zeros and has_kernels:
        return KeptForm(Int8Weight, _fill_int8)
    smaller = math.gcd(J, inputs // devices)
    if devices > 1 and is_natural and smaller % 2 == 0:  # groups that cross devices are divided
        J = smaller
    scale = np.float16 if all(x.has_float16_scales for x in numbers) else np.float32
    order = None if is_natural else np.argsort(numbers[0].group_of, kind="stable").astype(np.int32)  # type: ignore
    return KeptForm(GroupedWeight, _fill_groups, bits, J, scale, order, not has_no_offsets)


def _fp8_form(shape: Shape, parts: Sequence[ScaledTensor]) -> KeptForm | None:
    """The form of matrices with a scale for blocks that are those of the leaf, or for each output."""

    def keeps_blocks(part: ScaledTensor) -> bool:
        starts = (part.first_row % part.numbers.shape[0] % FP8_BLOCK, part.first_column % FP8_BLOCK)
        is_whole = part.shape[0] == shape[-2] or part.shape[0] % FP8_BLOCK == 0
        return (
            part.numbers.block == (FP8_BLOCK, FP8_BLOCK) and starts == (0, 0) and part.step == 1 and is_whole
        )

    if all(map(keeps_blocks, parts)):
        return KeptForm(Fp8Weight, _fill_fp8, has_blocks=True)
    is_by_output = all(part.numbers.block[1] >= part.numbers.shape[1] for part in parts)
    return KeptForm(Fp8Weight, _fill_fp8) if is_by_output else None


def read_kept(shape: Shape, parts: Sequence[Any], form: KeptForm) -> Any:
    """Reads a leaf of this shape and form on the host."""
    leaf = jax.tree.map(aligned_empty, form.struct(shape))
    if form.order is not None:
        leaf.order[:] = form.order
    rows = 0
    for part in parts:
        (expert, first) = divmod(rows, shape[-2])
        target = leaf if len(shape) == 2 else jax.tree.map(lambda x, i=expert: x[i], leaf)
        fill = partial(form.fill, target, form, part, first)
        run_in_blocks(fill, part.shape[0], part.shape[1], _BLOCK)
        rows += part.shape[0]
    return leaf


def _fill_mxfp4(leaf: Any, form: KeptForm, part: ScaledTensor, first: int, at: slice) -> None:
    rows = part.rows(at)
    group = part.first_column // GROUP
    Q = part.shape[1] // GROUP
    at_Q = np.arange(group, group + Q) * GROUP
    part.numbers.finite_per_row(part.numbers.scales, rows, at_Q)  # raises where one is NaN
    (values, scales) = map(flat_bytes, part.numbers.mxfp4 or ())
    values_OY = values.slice_axis(1, group * BYTES, Q * BYTES)[rows][:: part.step]
    to = slice(first + at.start, first + at.stop)
    leaf.values[..., to] = values_OY.reshape(-1, Q, BYTES).transpose(1, 2, 0)
    leaf.scale[:, to] = scales.slice_axis(1, group, Q)[rows][:: part.step].T


def _fill_fp8(leaf: Any, form: KeptForm, part: ScaledTensor, first: int, at: slice) -> None:
    rows = part.rows(at)
    to = np.arange(first + at.start, first + at.stop)
    inputs = part.shape[1]
    stored = flat_bytes(part.numbers.fp8)  # type: ignore[arg-type]
    values_OI = stored.slice_axis(1, part.first_column, inputs)[rows][:: part.step]
    if ((values_OI & 127) == 127).any():
        raise InputError(f"{part.numbers.name} holds NaN: fetch the checkpoint again")
    leaf.values[to] = values_OI.view(leaf.values.dtype)
    columns = part.first_column + np.arange(0, inputs, FP8_BLOCK if form.has_blocks else inputs)
    scale_OQ = part.numbers.finite_per_row(part.numbers.scales, rows, columns)[:: part.step]
    if form.has_blocks:
        is_first = to % FP8_BLOCK == 0
        leaf.scale[to[is_first] // FP8_BLOCK] = scale_OQ[is_first]
    else:
        leaf.scale[to] = scale_OQ[:, 0]


def _fill_int8(leaf: Any, form: KeptForm, part: ScaledTensor, first: int, at: slice) -> None:
    rows = part.rows(at)
    to = slice(first + at.start, first + at.stop)
    column = np.array([part.first_column])
    leaf.values[to] = part.numbers.numbers(rows, part.columns)
    leaf.scale[to] = part.numbers.finite_per_row(part.numbers.scales, rows, column)[:, 0]


def _fill_groups(leaf: Any, form: KeptForm, part: ScaledTensor, first: int, at: slice) -> None:
    rows = part.rows(at)
    to = slice(first + at.start, first + at.stop)
    J = form.group
    numbers_IO = part.numbers.numbers(rows, part.columns).T
    column_Q = np.arange(part.first_column, part.columns.stop, J)
    if form.order is not None:
        numbers_IO = numbers_IO[form.order]
        column_Q = form.order[::J]
    numbers_QJO = np.pad(numbers_IO, ((0, -len(numbers_IO) % J), (0, 0))).reshape(-1, J, numbers_IO.shape[1])
    middle = np.int8(8 if form.bits == 4 else 0)
    leaf.values[..., to] = numbers_QJO if form.bits == 8 else pack_int4((numbers_QJO + middle).view(np.uint8))
    scale_OQ = part.numbers.finite_per_row(part.numbers.scales, rows, column_Q)
    leaf.scale[:, to] = scale_OQ.T
    zero_OQ = _zeros(form, part, rows, column_Q) + middle
    if part.numbers.offsets is not None:
        offset_OQ = part.numbers.finite_per_row(part.numbers.offsets, rows, column_Q)
        leaf.offset[:, to] = (offset_OQ - zero_OQ * scale_OQ).T
    elif form.bits == 4:
        leaf.zero[:, to] = zero_OQ.T


def _zeros(form: KeptForm, part: ScaledTensor, rows: slice, columns: np.ndarray) -> np.ndarray:
    """The zero points of these columns. Raises InputError: one of 8 bits is not the middle number."""
    numbers = part.numbers
    if numbers.zeros is None:
        return np.zeros((rows.stop - rows.start, len(columns)), np.int8)
    zeros = numbers.per_row(numbers.zeros, rows, columns)
    if form.bits == 8 and numbers.offsets is None and zeros.any():
        raise InputError(
            f"{numbers.name}: 8 bits are only supported if symmetric, with all zeros 128, got"
            f" {int(zeros[zeros != 0][0]) + 128}: load it with dequantize"
        )
    return zeros
