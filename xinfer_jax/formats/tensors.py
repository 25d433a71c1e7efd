"""Opens the safetensors files of a checkpoint, one file or shards: headers first, tensor data on request.

Data is read, not memory-mapped: mapped pages would count as this process's memory.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ..device import aligned_empty, run_in_blocks
from ..errors import InputError, format_names
from ..families.conversion import TensorOfLeaves
from .files import WEIGHTS, file_exists, read_index
from .other_formats import describe_files

DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64,
    "I32": np.int32, "I16": np.int16, "I8": np.int8, "U32": np.uint32, "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
_MAX_HEADER = 2**24  # bytes; 100,000 tensors take 12 MB
# Bytes that a core copies at a time: starting another core costs more than a smaller copy.
_COPY_BLOCK = 1 << 23


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, or a slice of one."""

    file: Path
    start: int  # the byte of the file at which it begins
    type: str  # its safetensors name; `DTYPES` has those that can be read
    shape: tuple[int, ...]
    stride: int | None = None  # elements from the start of a row (the last axis) to the next; None: no gaps

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, DTYPES[self.type])

    def view(self, first_row: int, shape: tuple[int, ...]) -> "StoredTensor":
        """Returns the tensor of that shape that begins at a row."""
        row = math.prod(shape[1:-1]) * self.stride if self.stride else math.prod(shape[1:])
        start = self.start + first_row * row * self.struct.dtype.itemsize
        return dataclasses.replace(self, start=start, shape=shape)

    def slice_axis(self, axis: int, start: int, size: int) -> "StoredTensor":
        """Returns a slice along the first axis (0) or the last (any other number)."""
        if axis == 0:
            return self.view(start, (size, *self.shape[1:]))
        if size == self.shape[-1]:
            return self
        first_byte = self.start + start * self.struct.dtype.itemsize
        stride = self.stride or self.shape[-1]
        return dataclasses.replace(self, start=first_byte, shape=(*self.shape[:-1], size), stride=stride)

    def transposed(self, first: int, step: int) -> list["TransposedMatrix"]:
        """Returns each expert's columns from `first` on, every `step`-th, as rows: of a tensor [experts,
        inputs, columns] or, of biases, [experts, columns].
        """
        inputs, columns = (self.shape if len(self.shape) > 2 else (0, 1, self.shape[1]))[1:]
        flat = dataclasses.replace(self, shape=(self.shape[0] * inputs, columns))
        experts = (flat.view(i * inputs, (inputs, columns)) for i in range(self.shape[0]))
        return [TransposedMatrix(expert, first, step) for expert in experts]

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, end, _ = rows.indices(self.shape[0])
        out = np.empty((max(0, end - first), *self.shape[1:]), self.struct.dtype)
        self.read_into(out, first)
        return out

    def read_into(self, out: np.ndarray, first: int) -> None:
        """Fills an array with rows (of the first axis) from `first` on, converted to its type. Raises
        InputError if the file has become shorter, or cannot be read.
        """
        dtype = self.struct.dtype
        data = out if out.dtype == dtype else np.empty(out.shape, dtype)
        start = self.view(first, out.shape).start
        step = (self.stride or 0) * dtype.itemsize
        runs = data.reshape(-1, out.shape[-1]) if step else data.reshape(1, -1)
        read_runs(self.file, ((start + i * step, run) for i, run in enumerate(runs)))
        if data is not out:
            with np.errstate(over="ignore"):
                np.copyto(out, data, casting="unsafe")

    def array(self) -> np.ndarray:
        """Returns the whole tensor, in memory that a device array can keep."""
        out = aligned_empty(self.struct)
        rows = np.atleast_1d(out)
        width = max(1, rows[:1].nbytes)
        run_in_blocks(lambda at: self.read_into(rows[at], at.start), len(rows), width, _COPY_BLOCK)
        return out


def read_runs(path: Path, runs: Iterable[tuple[int, np.ndarray]]) -> None:
    """Fills arrays with bytes of a file, each from its start on. Raises InputError: there are too few."""
    try:
        with open(path, "rb") as file:
            for start, run in runs:
                file.seek(start)
                if file.readinto(run.view(np.uint8).data) < run.nbytes:
                    raise InputError(f"{path} has become shorter while it was read: load it again")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from error


class RowsAsTensor:
    """A matrix that is computed from stored rows, by `shape`, `type` and `self[rows]` of a subclass."""

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        matrix: Any = self
        return jax.ShapeDtypeStruct(matrix.shape, DTYPES[matrix.type])

    def read_into(self, out: np.ndarray, first: int) -> None:
        """Fills an array with the rows from `first` on, converted to its type."""
        matrix: Any = self
        with np.errstate(over="ignore"):
            np.copyto(out, matrix[first : first + len(out)], casting="unsafe")


@dataclasses.dataclass(frozen=True)
class TransposedMatrix(RowsAsTensor):
    """A matrix that a file stores with its inputs first, and with its outputs by turns with the outputs of
    other matrices.
    """

    stored: Any  # [inputs, columns]
    first: int  # of its columns
    step: int  # from one of its columns to the next

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape[1] // self.step, self.stored.shape[0]

    @property
    def type(self) -> str:
        return self.stored.type

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, end, _ = rows.indices(self.shape[0])
        part = self.stored.slice_axis(1, first * self.step, max(0, end - first) * self.step)
        return np.ascontiguousarray(part[:][:, self.first :: self.step].T)


@dataclasses.dataclass(frozen=True)
class JoinedRows:
    """Matrices of one shape as one: the rows of the first, then the rows of the second, and so on."""

    parts: list[StoredTensor]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.parts) * self.parts[0].shape[0], self.parts[0].shape[1]

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, end, _ = rows.indices(self.shape[0])
        size = self.parts[0].shape[0]
        wanted = range(first // size, -(-end // size))
        return np.concatenate([self.parts[i][max(0, first - i * size) : end - i * size] for i in wanted])


Shape = tuple[int, ...]
TensorSpec = tuple[Shape, set[str]]  # shape and possible types of a tensor in a file
Tensors = Mapping[str, StoredTensor]  # of a checkpoint, by name


Require = Callable[[bool, str], None]  # raises unless a setting, by its name, is supported


class StoredFormat:
    """A format of quantized matrices in a checkpoint. It recognizes its settings in config.json, checks them,
    and reads and writes matrices. Each format is one object.

    A matrix has its name X.weight, and its shape [O, I]. `quantized_formats.FORMATS` lists the formats, and
    no other file names one.
    """

    methods: ClassVar[tuple[str, ...]]  # values of quant_method in config.json
    method: str  # the one of this checkpoint
    files: ClassVar[tuple[str, ...]] = ()  # next to config.json, in which programs wrote its settings
    kept_as: ClassVar[str | None] = None  # value of `quantize` without which matrices become floats
    kept_needs: ClassVar[str] = ""  # the matrices that stay with it, for errors
    is_written: ClassVar[bool] = True
    joined_are_written: ClassVar[bool] = True  # also if published files join matrices
    floats_field: ClassVar[str] = "modules_to_not_convert"  # setting that lists modules with float matrices

    @classmethod
    def find_settings(cls, settings: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
        """Returns the settings of a checkpoint whose `quantization_config` names no method, with
        `quant_method`. None: they are not in this format. settings: config.json of the directory.
        """
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], require: Require) -> "StoredFormat":
        """Returns the format of these settings. Raises InputError: they are not supported."""
        raise NotImplementedError

    @classmethod
    def settings_for(cls, leaves: Sequence[Any]) -> dict[str, Any] | None:
        """Returns the settings for leaves that are from no file of a format. None: they are not for it."""
        return None

    @classmethod
    def with_floats(cls, settings: Mapping[str, Any], floats: list[str]) -> dict[str, Any]:
        """Returns the settings of a checkpoint whose modules `floats` have float matrices, and the others
        packed ones.
        """
        names = settings.get(cls.floats_field)
        names = [*names] if isinstance(names, list | tuple) else ["lm_head"]
        added = [module for module in floats if not is_listed(module, map(str, names))]
        return {**settings, cls.floats_field: names + added} if added else {**settings}

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        """Returns the stored tensors of a matrix, or of experts' matrices. It is empty if they are not
        quantized.
        """
        raise NotImplementedError

    def pack(self, leaves: Mapping[str, Any], dtype: Any) -> dict[str, TensorOfLeaves]:
        """Returns the tensors of quantized leaves by their names. Raises InputError if the format has no such
        matrix. dtype: the dtype of the float tensors next to them.
        """
        raise self.misfit(*next(iter(leaves.items())))

    def misfit(self, name: str, leaf: Any) -> InputError:
        """Returns the error of `pack` for this matrix."""
        if reason := getattr(leaf, "not_written", None):
            return InputError(f"{name.replace('{}', '*')} {reason}")
        return InputError(
            f"{name} cannot be written in the format {self.method} with the settings of the checkpoint that"
            " the model is from: dataclasses.replace(config, quantization_config=None) chooses our own format"
        )

    def is_unused(self, name: str, tensors: Tensors) -> bool:
        """Returns True if a tensor can be ignored. For example, scales of activations can, because
        activations stay floats.
        """
        return False


def is_listed(module: str, names: Iterable[str]) -> bool:
    """Returns True if a name of `modules_to_not_convert` is the beginning of the module's name, in whole
    components, or its end. This is the rule of transformers.
    """
    return any(f"{module}.".startswith(f"{name}.") or module.endswith(name) for name in names)


class QuantizedFormat(StoredFormat):
    """A format whose matrices are leaves, and are read as such only."""

    is_read_whole: ClassVar[bool] = False  # over a mesh too, since parts share stored numbers

    def struct(self, name: str, shape: Shape, tensors: Tensors) -> Any:
        """Returns the shapes and types of the result of `load`. Reads at most the order of inputs."""
        raise NotImplementedError

    def load(self, name: str, shape: Shape, tensors: Tensors) -> Any:
        """Reads a matrix with the checked `tensor_specs` as a leaf of NumPy arrays. Raises InputError."""
        raise NotImplementedError


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns all tensors of a directory by name: of its single file, or of the shards that its index
    names.
    """
    weight_map = {} if file_exists(path / WEIGHTS) else read_index(path)
    if weight_map is None:
        raise InputError(f"{path} {describe_files(os.listdir(path))}")
    names = sorted({*weight_map.values()}) or [WEIGHTS]
    if absent := [name for name in names if not file_exists(path / name)]:
        raise InputError(
            f"{path}: the index names shards that are absent: {format_names(absent)};"
            " fetch the checkpoint again"
        )
    shards = {name: read_tensor_file(path / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise InputError(f"{path}: the index says that {name} holds {tensor}, but it does not")
    tensors = dict(chain.from_iterable(shard.items() for shard in shards.values()))
    if len(tensors) < sum(map(len, shards.values())):
        raise InputError(f"{path}: two shards hold the same tensor; fetch the checkpoint again")
    return tensors


def read_tensor_file(file: Path, max_header: int = _MAX_HEADER) -> dict[str, StoredTensor]:
    """Returns the tensors of one file. Its header is 8 bytes with the length of the JSON that follows.
    Offsets count from the end of that JSON. max_header: the limit of that length, which is compared before
    anything is parsed.
    """
    file_exists(file)  # raises for a git-LFS pointer
    try:
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if max_header < size < os.path.getsize(file):  # a longer one is not there
                raise InputError(f"{file} has a header of {size} bytes, the limit is {max_header}")
            with safe_open(file, "numpy"):  # validates the whole header
                pass
            header = json.loads(opened.read(size))
    except InputError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{file} is truncated or not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(file, 8 + size + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
    }
