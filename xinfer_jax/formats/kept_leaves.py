"""Quantized matrices of a file that stay as they are stored, to the bit. The kinds of whole numbers are here.

A format's file says how its matrices stay, as `ScaledNumbers.kept`. In int8 with a scale for each output,
activations keep 15 bits on a CPU. As one group of inputs they stay floats there, and a row takes 1.3 times as
long. GPUs and TPUs have kernels for the former alone.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import kernels_pallas
from ..device import aligned_empty, run_in_blocks
from ..errors import InputError
from ..weights.grouped_weight import grouped_struct, pack_int4
from ..weights.int8_weight import Int8Weight
from .scaled_tensor import ScaledTensor
from .tensors import Shape

_BLOCK = 1 << 21  # bytes that a core handles at a time: AWQ and GPTQ store outputs last, in many short runs


class KeptForm(NamedTuple):
    """The form of a leaf whose numbers are the numbers of the file.

    Attributes:
        struct: returns the shapes and types of a leaf of this shape: the matrix, experts or a part of them.
        fill: reads rows of a tensor. It gets the leaf, the tensor, its first row in the leaf, and a slice of
            its own rows.
        order: the inputs of each group. None: in their own order.
        block: outputs and inputs that stay on one device.
    """

    struct: Callable[[Shape], Any]
    fill: Callable[..., None]
    order: np.ndarray | None = None
    block: int = 1


def kept_form(shape: Shape, parts: Sequence[Any], devices: int, asked: str | None) -> KeptForm | None:
    """Returns the form in which the tensors of a matrix, or of experts, stay. None: they are read as floats.

    devices: over which the inputs are divided. asked: the format that `quantize` names, if it is one.
    """
    (find, *others) = {getattr(part, "kept", None) for part in parts}
    return None if find is None or others else find(shape, parts, devices, asked)


def whole_numbers_form(
    shape: Shape, parts: Sequence[ScaledTensor], devices: int, asked: str | None
) -> KeptForm | None:
    """Returns `ScaledNumbers.kept` of int8 and int4."""
    numbers = [part.numbers for part in parts]
    inputs = shape[-1]
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
        return KeptForm(_int8_struct, _fill_int8)
    smaller = math.gcd(J, inputs // devices)
    if devices > 1 and is_natural and smaller % 2 == 0:  # groups that cross devices are divided
        J = smaller
    scale = np.float16 if all(x.has_float16_scales for x in numbers) else np.float32
    order = None if is_natural else np.argsort(numbers[0].group_of, kind="stable").astype(np.int32)  # type: ignore
    struct = partial(groups_struct, bits, J, scale, not is_natural, not has_no_offsets)
    return KeptForm(struct, partial(_fill_groups, bits, J, order), order)


def _int8_struct(shape: Shape) -> Int8Weight:
    struct: Any = jax.ShapeDtypeStruct
    return Int8Weight(struct(shape, np.int8), struct(shape[:-1], np.float32))


def groups_struct(bits: int, J: int, scale: Any, has_order: bool, has_offsets: bool, shape: Shape) -> Any:
    """Returns the shapes and types of a `GroupedWeight`, or of the matrices of experts. It takes the
    arguments of `grouped_struct`.
    """
    (*experts, outputs, inputs) = shape
    leaf = grouped_struct((outputs, inputs), bits, J, scale, has_order)
    if has_offsets:
        leaf = dataclasses.replace(leaf, zero=None, offset=leaf.scale)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*experts, *x.shape), x.dtype), leaf)


def read_kept(shape: Shape, parts: Sequence[Any], form: KeptForm) -> Any:
    """Reads a leaf of this shape and form on the host."""
    leaf = jax.tree.map(aligned_empty, form.struct(shape))
    if form.order is not None:
        leaf.order[:] = form.order
    rows = 0
    for part in parts:
        (expert, first) = divmod(rows, shape[-2])
        target = leaf if len(shape) == 2 else jax.tree.map(lambda x, i=expert: x[i], leaf)
        fill = partial(form.fill, target, part, first)
        run_in_blocks(fill, part.shape[0], part.shape[1], _BLOCK)
        rows += part.shape[0]
    return leaf


def _fill_int8(leaf: Any, part: ScaledTensor, first: int, at: slice) -> None:
    rows = part.rows(at)
    to = slice(first + at.start, first + at.stop)
    column = np.array([part.first_column])
    leaf.values[to] = part.numbers.numbers(rows, part.columns)
    leaf.scale[to] = part.numbers.finite_per_row(part.numbers.scales, rows, column)[:, 0]


def _fill_groups(
    bits: int, J: int, order: np.ndarray | None, leaf: Any, part: ScaledTensor, first: int, at: slice
) -> None:
    rows = part.rows(at)
    to = slice(first + at.start, first + at.stop)
    numbers_IO = part.numbers.numbers(rows, part.columns).T
    column_Q = np.arange(part.first_column, part.columns.stop, J)
    if order is not None:
        numbers_IO = numbers_IO[order]
        column_Q = order[::J]
    numbers_QJO = np.pad(numbers_IO, ((0, -len(numbers_IO) % J), (0, 0))).reshape(-1, J, numbers_IO.shape[1])
    middle = np.int8(8 if bits == 4 else 0)
    leaf.values[..., to] = numbers_QJO if bits == 8 else pack_int4((numbers_QJO + middle).view(np.uint8))
    scale_OQ = part.numbers.finite_per_row(part.numbers.scales, rows, column_Q)
    leaf.scale[:, to] = scale_OQ.T
    zero_OQ = _zeros(bits, part, rows, column_Q) + middle
    if part.numbers.offsets is not None:
        offset_OQ = part.numbers.finite_per_row(part.numbers.offsets, rows, column_Q)
        leaf.offset[:, to] = (offset_OQ - zero_OQ * scale_OQ).T
    elif bits == 4:
        leaf.zero[:, to] = zero_OQ.T


def _zeros(bits: int, part: ScaledTensor, rows: slice, columns: np.ndarray) -> np.ndarray:
    """Returns the zero points of these columns. Raises InputError: one of 8 bits is not the middle number."""
    numbers = part.numbers
    if numbers.zeros is None:
        return np.zeros((rows.stop - rows.start, len(columns)), np.int8)
    zeros = numbers.per_row(numbers.zeros, rows, columns)
    if bits == 8 and numbers.offsets is None and zeros.any():
        raise InputError(
            f"{numbers.name}: 8 bits are only supported if symmetric, with all zeros 128, got"
            f" {int(zeros[zeros != 0][0]) + 128}: load it with dequantize"
        )
    return zeros
