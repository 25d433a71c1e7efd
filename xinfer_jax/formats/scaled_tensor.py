"""A quantized matrix of a file as a tensor of float numbers, whose rows and columns are read when asked for.

Every format is small numbers and scales, each shared by a block of rows and columns. A format's file says
which tensors hold both (`ScaledNumbers`). Splits, fused tensors, experts and meshes are slices of it
(`ScaledTensor`).
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax
import numpy as np

from ..errors import InputError
from .tensors import RowsAsTensor, Shape, StoredFormat, StoredTensor, Tensors, TransposedMatrix

_SLOW = re.compile(r"\)[*+{]")  # a group that is repeated
Read = Callable[[slice, slice], np.ndarray]  # returns those rows and columns


@dataclasses.dataclass(frozen=True)
class ScaledNumbers:
    """Matrices of one shape, one below the other: (numbers - zeros) * scales + offsets."""

    name: str
    shape: tuple[int, int]  # of one matrix
    block: tuple[int, int]  # rows and columns that share a scale
    numbers: Read  # int8 or float32
    scales: Read  # a row and a column for each block
    zeros: Read | None = None  # int8, like the scales
    offsets: Read | None = None  # float32, like the scales
    rounded_to: Any = None  # a type of floats to which its values are rounded; None: float32
    group_of: np.ndarray | None = None  # of each column the column of its scale; None: by the block
    # How it can stay as it is: a function like `kept_leaves.whole_numbers_form`, which may use the others.
    kept: Callable | None = None  # None: it is read as floats
    stored: tuple[StoredTensor, ...] = ()  # tensors whose bytes stay
    bits: int = 0  # of whole numbers
    has_float16_scales: bool = False

    def floats(self, rows: slice, columns: slice) -> np.ndarray:
        """Returns these rows and columns of all matrices, float32. Raises InputError: a scale or an offset is
        NaN or inf.
        """
        numbers = self.numbers(rows, columns).astype(np.float32, copy=False)
        start = columns.start
        end = columns.stop
        J = self.block[1]
        step = 1
        if self.group_of is None and start // J == (end - 1) // J:
            step = end - start
        elif self.group_of is None and start % J == end % J == 0:
            step = J
        at = np.arange(start, end, step)
        blocks = numbers.reshape(len(numbers), len(at), step)
        if self.zeros is not None:
            blocks = blocks - self.per_row(self.zeros, rows, at).astype(np.float32)[..., None]
        with np.errstate(over="ignore"):
            blocks = blocks * self.finite_per_row(self.scales, rows, at)[..., None]
            if self.offsets is not None:
                blocks += self.finite_per_row(self.offsets, rows, at)[..., None]
        values = blocks.reshape(numbers.shape)
        return values if self.rounded_to is None else values.astype(self.rounded_to).astype(np.float32)

    def finite_per_row(self, read: Read, rows: slice, columns: np.ndarray) -> np.ndarray:
        """Returns `per_row` of scales or offsets, float32. Raises InputError: one is NaN or inf."""
        scales = self.per_row(read, rows, columns).astype(np.float32)
        if not np.isfinite(scales).all():
            raise InputError(f"{self.name}: its scales hold NaN or inf: fetch the checkpoint again")
        return scales

    def per_row(self, read: Read, rows: slice, columns: np.ndarray) -> np.ndarray:
        """Reads `scales`, `zeros` or `offsets` for these rows and columns, and returns one value for each of
        them.
        """
        (height, _) = self.shape
        (matrix, row) = np.divmod(np.arange(rows.start, rows.stop), height)
        row = matrix * -(-height // self.block[0]) + row // self.block[0]
        column = columns // self.block[1] if self.group_of is None else self.group_of[columns]
        left = column.min()
        part = read(slice(row[0], row[-1] + 1), slice(left, column.max() + 1))
        return part[row - row[0]][:, column - left]


@dataclasses.dataclass(frozen=True)
class ScaledTensor(RowsAsTensor):
    """A slice of `ScaledNumbers`, with the methods of a `StoredTensor`."""

    numbers: ScaledNumbers
    shape: Shape
    first_row: int = 0  # of all matrices
    step: int = 1  # from one of its rows to the next
    first_column: int = 0
    type: ClassVar = "F32"

    def rows(self, at: slice) -> slice:
        """Returns the rows of the file that hold the tensor's rows. Every `step`-th of them belongs to the
        tensor. at: a slice of the tensor's first axis.
        """
        (first, end, _) = at.indices(self.shape[0])
        each = math.prod(self.shape[1:-1])
        last = self.first_row + (end * each - 1) * self.step
        return slice(self.first_row + first * each * self.step, last + 1)

    @property
    def kept(self) -> Callable | None:
        return self.numbers.kept

    @property
    def columns(self) -> slice:
        return slice(self.first_column, self.first_column + self.shape[-1])

    def __getitem__(self, at: slice) -> np.ndarray:
        rows = self.numbers.floats(self.rows(at), self.columns)[:: self.step]
        return rows.reshape(-1, *self.shape[1:])

    def view(self, first_row: int, shape: Shape) -> "ScaledTensor":
        first = self.first_row + first_row * math.prod(shape[1:-1]) * self.step
        return dataclasses.replace(self, first_row=first, shape=shape)

    def slice_axis(self, axis: int, start: int, size: int) -> "ScaledTensor":
        if axis == 0:
            return self.view(start, (size, *self.shape[1:]))
        first = self.first_column + start
        return dataclasses.replace(self, first_column=first, shape=(*self.shape[:-1], size))

    def transposed(self, first: int, step: int) -> list[Any]:
        (experts, inputs, columns) = self.shape
        matrices = (self.view(i * inputs, (inputs, columns)) for i in range(experts))
        return [TransposedMatrix(matrix, first, step) for matrix in matrices]


class MatrixFormat(StoredFormat):
    """A format whose matrices can be read as tensors of floats. It finds `ScaledNumbers` for each.

    A matrix has the name that it has in a float checkpoint. `tensor_specs` are specs of the matrices that
    `find` returns.
    """

    stays_quantized = True  # whether its matrices stay as they are stored, unless they are dequantized

    def of_files(self, tensors: Tensors) -> Self:
        """Returns the format of a checkpoint with these tensors, by their names in the files. Raises
        InputError if its settings do not fit them.
        """
        return self

    def find(self, tensors: Tensors) -> dict[str, Shape]:
        """Returns the names and shapes of the quantized matrices, or of the experts' matrices. Sizes may be
        zeros if only one layout is possible.
        """
        raise NotImplementedError

    def open(self, name: str, shape: Shape, tensors: Tensors) -> Any:
        """Returns the tensor of floats of a matrix with the checked `tensor_specs`: a `ScaledTensor`, or a
        similar class.
        """
        raise NotImplementedError

    def with_matrices(self, tensors: Tensors) -> dict[str, Any]:
        """Returns the tensors with quantized matrices as if they were floats, as `find` has their shapes."""
        found = self.find(tensors).items()
        return {**tensors, **{name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in found}}


def quantized_shapes(shapes: Mapping[str, Shape], tensors: Mapping[str, Any]) -> dict[str, Shape]:
    """Returns the shapes that belong to matrices of `with_matrices`. Vectors are left out."""
    is_quantized = lambda name: isinstance(tensors.get(name), jax.ShapeDtypeStruct)  # noqa: E731
    return {name: shape for name, shape in shapes.items() if len(shape) > 1 and is_quantized(name)}


def is_quick_pattern(text: str) -> bool:
    """Returns True if a text is a regular expression that takes little time: no group in it is repeated."""
    with contextlib.suppress(re.error):
        return bool(re.compile(text)) and not _SLOW.search(text) and len(re.findall(r"[*+{]", text)) < 9
    return False


def check_groups(name: str, inputs: int, J: int) -> None:
    """Raises InputError if groups of J inputs do not divide the inputs of a matrix."""
    if inputs % J:
        raise InputError(f"{name} has {inputs} inputs, which groups of {J} do not divide")


def read_bytes(stored: StoredTensor, table: np.ndarray) -> Read:
    """Returns a reader of numbers that are stored in bytes, inputs last. table: the numbers of each byte,
    [256, numbers in a byte].
    """
    per_byte = table.shape[1]
    raw = flat_bytes(stored)

    def read(rows: slice, columns: slice) -> np.ndarray:
        first = columns.start // per_byte
        part = raw.slice_axis(1, first, -(-columns.stop // per_byte) - first)[rows]
        numbers = np.take(table, part, axis=0).reshape(len(part), -1)
        skipped = columns.start - first * per_byte
        return numbers[:, skipped : skipped + columns.stop - columns.start]

    return read


def flat_bytes(stored: StoredTensor) -> StoredTensor:
    """Returns all rows of a tensor as bytes, [rows, bytes]."""
    width = stored.shape[-1] * stored.struct.dtype.itemsize
    return dataclasses.replace(stored, type="U8", shape=(math.prod(stored.shape[:-1]), width))


def read_rows(stored: StoredTensor, shape: tuple[int, int], finish: Callable | None = None) -> Read:
    """Returns a reader of scales in this shape, float32. finish: gets the scales of the file and returns them
    changed.
    """
    flat = dataclasses.replace(stored, shape=shape)

    def read(rows: slice, columns: slice) -> np.ndarray:
        part = flat.slice_axis(1, columns.start, columns.stop - columns.start)
        scales = part[rows].astype(np.float32)
        return scales if finish is None else finish(scales)

    return read


def group_of_inputs(name: str, stored: StoredTensor, J: int) -> np.ndarray | None:
    """Returns the group of each input as a file has it. None: neighbours share one. Raises InputError."""
    group_I = stored.array()
    natural_I = np.arange(len(group_I)) // J
    if np.array_equal(group_I, natural_I):
        return None
    if not np.array_equal(np.sort(group_I), natural_I):
        raise InputError(
            f"{name}: g_idx does not give every group its {J} inputs: fetch the checkpoint again"
        )
    return group_I
