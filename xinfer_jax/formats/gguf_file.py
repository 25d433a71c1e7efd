"""Reads GGUF files: their metadata, and rows of their tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` dequantizes. Its own
reader maps whole files, and takes many seconds for a large vocabulary.
"""

import dataclasses
import math
import mmap
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, format_value
from .files import file_exists
from .tensors import DTYPES, RowsAsTensor, read_runs

_MAX_HEADER = 2**26  # bytes; a vocabulary of 250,000 tokens takes a quarter
_MAX_KEYS = 2**14
_MAX_TENSORS = 2**16
_MAX_ITEMS = 2**22  # of all arrays; a vocabulary of 250,000 tokens, with types and merges, has a third
_MAX_AXES = 4
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8"}
_SCALARS |= {12: "<f8"}
_GAP = 64  # rows that are not needed and yet read, rather than in two reads
_TEXT = 8
_ARRAY = 9
_SIZE = struct.Struct("<Q")
_SPLIT = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf", re.DOTALL)

Rows = range | np.ndarray


class GgufFile(NamedTuple):
    """A file, or several splits as one."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, "GgufTensor"]


@dataclasses.dataclass(frozen=True, eq=False)
class GgufTensor(RowsAsTensor):
    """A tensor in a file, or some of its rows and columns. Quantized ones are read as float32 numbers."""

    file: Path
    name: str
    start: int  # the byte of the file at which it begins
    kind: Any  # its `gguf.GGMLQuantizationType`
    shape: tuple[int, ...]
    width: int  # numbers in a row of the file; of a vector: 1
    rows: Rows  # which rows of the file it has; of experts' matrices, those of all
    columns: Rows | None = None  # which numbers of a row of the file; None: all
    convert: Callable[[np.ndarray], np.ndarray] | None = None  # of its numbers, elementwise
    factors: np.ndarray | None = None  # of the numbers of each row of the file; None: 1
    kept: Callable | None = None  # `gguf_format.gguf_form`, of an opened checkpoint

    @property
    def is_plain(self) -> bool:
        """Returns True if the tensor's numbers are the numbers of the file."""
        return self.convert is None and self.factors is None

    @property
    def type(self) -> str:
        return self.kind.name if self.kind.name in DTYPES and self.is_plain else "F32"

    @property
    def block(self) -> tuple[int, int]:
        """Numbers and bytes of a block of its type."""
        import gguf

        return gguf.GGML_QUANT_SIZES[self.kind]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the file."""
        return self.width // self.block[0] * self.block[1]

    def view(self, first_row: int, shape: tuple[int, ...]) -> "GgufTensor":
        """Returns the matrix or vector of that shape that begins at a row."""
        return dataclasses.replace(self, rows=self.rows[first_row : first_row + shape[0]], shape=shape)

    def slice_axis(self, axis: int, start: int, size: int) -> "GgufTensor":
        """Returns a slice along the first axis (0) or the last (any other number)."""
        if axis == 0:
            each = len(self.rows) // self.shape[0]
            rows = self.rows[start * each : (start + size) * each]
            return dataclasses.replace(self, rows=rows, shape=(size, *self.shape[1:]))
        columns = range(self.width) if self.columns is None else self.columns
        shape = (*self.shape[:-1], size)
        return dataclasses.replace(self, columns=columns[start : start + size], shape=shape)

    def blocks(self, at: slice) -> np.ndarray:
        """Returns whole rows as the file has them, uint8 [rows, blocks, bytes of a block]. Raises
        InputError.
        """
        rows = self.rows[at]
        if isinstance(rows, range):
            return self._read(rows.start, len(rows))
        order = np.argsort(rows)
        gaps = np.flatnonzero(np.diff(rows[order]) > _GAP) + 1
        data = np.empty((len(rows), self.width // self.block[0], self.block[1]), np.uint8)
        for places in np.split(order, gaps):
            first = rows[places[0]]
            data[places] = self._read(first, rows[places[-1]] - first + 1)[rows[places] - first]
        return data

    def _read(self, first: int, count: int) -> np.ndarray:
        data = np.empty((count, self.width // self.block[0], self.block[1]), np.uint8)
        read_runs(self.file, [(self.start + int(first) * self.row_bytes, data)])
        return data

    def __getitem__(self, at: slice) -> np.ndarray:
        import gguf

        rows = self.blocks(at).reshape(len(self.rows[at]), -1)
        with np.errstate(all="ignore"):
            is_float = self.kind.name in DTYPES
            numbers = rows.view(DTYPES[self.kind.name]) if is_float else gguf.dequantize(rows, self.kind)
        if self.columns is not None:
            numbers = numbers[:, np.asarray(self.columns)]
        if self.factors is not None:
            numbers = numbers.astype(np.float32) * self.factors[np.asarray(self.rows[at]), None]
        if self.convert is not None:
            numbers = self.convert(numbers.astype(np.float32))
        return numbers if len(self.shape) > 1 else numbers[:, 0]

    def array(self) -> np.ndarray:
        """Returns the whole tensor."""
        return self[:].reshape(self.shape)


def open_gguf(path: Path) -> GgufFile:
    """Opens a file and, if it is one of several splits, the others. Raises InputError."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise InputError(f"{path} needs the package gguf: pip install gguf") from None
    found = _SPLIT.fullmatch(path.name)
    (stem, count) = found.groups() if found else ("", "00001")
    paths = [path.with_name(f"{stem}-{i + 1:05}-of-{count}.gguf") for i in range(int(count))]
    files = [_open_split(split, i, len(paths)) for i, split in enumerate(paths if found else [path])]
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    total = sum(len(file.tensors) for file in files)
    if not files or not len(tensors) == total == files[0].metadata.get("split.tensors.count", total):
        raise InputError(f"{path}: its splits have tensors twice, or lack some: fetch them again")
    return GgufFile(path, files[0].metadata, tensors)


def _open_split(path: Path, number: int, count: int) -> GgufFile:
    if not file_exists(path):
        raise InputError(f"{path}, a split of the model, is absent: fetch it too")
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), min(size, _MAX_HEADER), access=mmap.ACCESS_READ)
        with data:
            opened = read_header(_Cursor(path, data), size)
    except InputError:
        raise
    except (OSError, struct.error, ValueError, OverflowError) as error:
        long = f"has more than {_MAX_HEADER} bytes of metadata, or " if size > _MAX_HEADER else ""
        raise InputError(f"{path} {long}is truncated or not a GGUF file: {error}") from error
    place = tuple(opened.metadata.get(f"split.{name}", of_one) for name, of_one in (("no", 0), ("count", 1)))
    if place != (number, count) and place != (0, 0):
        raise InputError(
            f"{path} says that it is split {format_value(place)}, and its name {(number, count)}: names end"
            " with -00001-of-00003.gguf and so on"
        )
    return opened


class _Cursor:
    """Reads values one after the other. Raises struct.error or ValueError at the end of the data."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.items = 0  # of arrays so far

    def check_count(self, what: str, count: int, most: int) -> None:
        """Raises InputError if reading this number of values would take long."""
        if count > most:
            raise InputError(f"{self.path} has {count} {what}, the limit is {most}: fetch it again")

    def numbers(self, dtype: str, count: int) -> np.ndarray:
        values = np.frombuffer(self.data, dtype, count, self.at).copy() if count else np.empty(0, dtype)
        self.at += values.nbytes
        return values

    def integer(self, dtype: str = "<u4") -> int:
        return int(self.numbers(dtype, 1)[0])

    def texts(self, count: int) -> list[str]:
        texts = []
        at = self.at
        for _ in range(count):
            end = at + 8 + _SIZE.unpack_from(self.data, at)[0]
            texts.append(self.data[at + 8 : end].decode(errors="replace"))
            at = end
        self.at = at
        return texts

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.texts(1)[0]
        if kind == _ARRAY:
            kind = self.integer()
            count = self.integer("<u8")
            self.items += count
            self.check_count("values in the arrays of its metadata", self.items, _MAX_ITEMS)
            return self.texts(count) if kind == _TEXT else self.numbers(_dtype(kind), count).tolist()
        number = self.numbers(_dtype(kind), 1)[0]
        return float(str(number)) if number.dtype == np.float32 else number.item()  # 1e-6, not 9.99…e-7


def _dtype(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a value of type {kind}")
    return _SCALARS[kind]


def read_header(cursor: _Cursor, size: int) -> GgufFile:
    path = cursor.path
    start = (cursor.numbers("u1", 4).tobytes(), cursor.integer())
    if start not in ((b"GGUF", 2), (b"GGUF", 3)):
        raise InputError(f"{path} is not a GGUF file of version 2 or 3: it begins with {start}")
    num_tensors = cursor.integer("<u8")
    num_keys = cursor.integer("<u8")
    cursor.check_count("tensors", num_tensors, _MAX_TENSORS)
    cursor.check_count("keys", num_keys, _MAX_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        (key,) = cursor.texts(1)
        if key in metadata:
            raise InputError(f"{path} has the key {format_value(key)} twice: fetch it again")
        metadata[key] = cursor.value(cursor.integer())
    infos = []
    for _ in range(num_tensors):
        (name,) = cursor.texts(1)
        axes = cursor.integer()
        cursor.check_count(f"axes of {format_value(name)}", axes, _MAX_AXES)
        shape = cursor.numbers("<u8", axes).tolist()[::-1]
        infos.append((name, tuple(shape), cursor.integer(), cursor.integer("<u8")))
    align = metadata.get("general.alignment", 32)
    if cursor.at > len(cursor.data) or type(align) is not int or not 0 < align <= 2**16:
        raise ValueError(f"its metadata end at byte {cursor.at}, general.alignment is {format_value(align)}")
    data = -(-cursor.at // align) * align
    tensors = {name: _tensor(path, name, shape, kind, data + at) for name, shape, kind, at in infos}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end or len(tensors) < num_tensors:
            raise InputError(f"{path}: {name} overlaps a tensor, or has the name of one: fetch it again")
        end = tensor.start + len(tensor.rows) * tensor.row_bytes
        if end > size:
            raise InputError(f"{path} is truncated: {name} ends at byte {end} of {size}: fetch it again")
    return GgufFile(path, metadata, tensors)


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    import gguf

    try:
        known = gguf.GGMLQuantizationType(kind)
        (size, num_bytes) = gguf.GGML_QUANT_SIZES[known]
        gguf.dequantize(np.zeros((1, num_bytes), np.uint8), known)
    except (ValueError, NotImplementedError):
        raise InputError(f"{path}: {name} has type {kind}, which the package gguf does not read") from None
    width = shape[-1] if len(shape) > 1 else 1
    if not 1 <= len(shape) <= 3 or width % size or not 0 < min(shape) <= max(shape) < 2**31:
        raise InputError(f"{path}: {name} of type {known.name} has shape {list(shape)}")
    return GgufTensor(path, name, start, known, shape, width, range(math.prod(shape) // width))
