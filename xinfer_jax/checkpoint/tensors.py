"""The tensors of safetensors files, one file or shards, by name: headers first, numbers when asked for.
Plain reads, not a memory map, whose pages would count as this process's memory.
"""

import dataclasses
import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import InputError, few
from ..host import aligned, by_blocks
from .files import is_there, read_json

TYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64,
    "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
}  # fmt: skip
_COPIED = 1 << 23  # bytes at a time of what is only copied: less is not worth another core's wait


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, or some of its rows.

    Attributes:
        start: byte of the file at which it begins.
        type: as safetensors names it; `TYPES` has those that can be read.
        stride: numbers from the beginning of a row, the last axis, to that of the next; None: no gaps.
    """

    file: Path
    start: int
    type: str
    shape: tuple[int, ...]
    stride: int | None = None

    @property
    def form(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, TYPES[self.type])

    def piece(self, first: int, shape: tuple[int, ...]) -> "StoredTensor":
        """What stands in that shape from a row on."""
        row = math.prod(shape[1:-1]) * self.stride if self.stride else math.prod(shape[1:])
        start = self.start + first * row * self.form.dtype.itemsize
        return dataclasses.replace(self, start=start, shape=shape)

    def part(self, axis: int, first: int, size: int) -> "StoredTensor":
        """So many along the first axis or the last."""
        if axis == 0:
            return self.piece(first, (size, *self.shape[1:]))
        start = self.start + first * self.form.dtype.itemsize
        stride = self.stride or self.shape[-1]
        return dataclasses.replace(self, start=start, shape=(*self.shape[:-1], size), stride=stride)

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, end, _ = rows.indices(self.shape[0])
        shape = (max(0, end - first), *self.shape[1:])
        out = np.empty(shape, self.form.dtype)
        self.piece(first, shape).read(out.reshape(-1))
        return out

    def read(self, out: np.ndarray, first: int = 0) -> None:
        """Fills a flat array with its numbers from one on, converted to the type of `out`.

        Raises:
            InputError: the file has become shorter, or cannot be read.
        """
        kind = self.form.dtype
        held = out if out.dtype == kind else np.empty(out.shape, kind)
        try:
            with open(self.file, "rb") as file:
                count = self._read(file, held, first)
        except OSError as error:
            raise InputError(f"{self.file} cannot be read: {error}") from error
        if count < held.nbytes:
            raise InputError(f"{self.file} has become shorter while it was read: load it again")
        if held is not out:
            with np.errstate(over="ignore"):
                np.copyto(out, held, casting="unsafe")

    def _read(self, file: Any, out: np.ndarray, first: int) -> int:
        """How many bytes came."""
        at = 0
        size = out.itemsize
        count = 0
        width = self.shape[-1] if self.stride else out.size
        while at < out.size:  # a row, or the rest of one
            row, column = divmod(first + at, width) if self.stride else (0, first)
            some = min(width - column, out.size - at) if self.stride else out.size
            file.seek(self.start + (row * (self.stride or 0) + column) * size)
            count += file.readinto(out[at : at + some].view(np.uint8).data)
            at += some
        return count

    def array(self) -> np.ndarray:
        """All of it, in memory that a device array can keep."""
        out = aligned(self.form)
        flat = out.reshape(-1)
        by_blocks(lambda run: self.read(flat[run], run.start), flat.size, flat.itemsize, _COPIED)
        return out


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a directory by name: of the single file, or of the shards that the index names."""
    placed: dict[str, str] = {}
    if is_there(path / "model.safetensors"):
        names = ["model.safetensors"]
    elif (index := read_json(path / "model.safetensors.index.json")) is not None:
        names = _shard_names(path, index)
        placed = index["weight_map"]
    else:
        raise InputError(
            f"{path} holds neither model.safetensors nor model.safetensors.index.json: only safetensors"
            " weights are read"
        )
    held = {name: _header(path / name) for name in names}
    for tensor, name in placed.items():
        if tensor not in held[name]:
            raise InputError(f"{path}: the index says that {name} holds {tensor}, but it does not")
    tensors = dict(chain.from_iterable(part.items() for part in held.values()))
    if len(tensors) < sum(map(len, held.values())):
        raise InputError(f"{path}: two shards hold the same tensor; fetch the checkpoint again")
    return tensors


def _header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file: JSON behind its length in 8 bytes; offsets count from where that ends."""
    try:
        with safe_open(file, "numpy"):  # checks all of it
            pass
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{file} is truncated or no safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(file, 8 + size + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
    }


def _shard_names(path: Path, index: dict[str, Any]) -> list[str]:
    shards = index.get("weight_map")
    named = isinstance(shards, dict) and all(isinstance(name, str) for name in shards.values())
    if not named or not shards:
        raise InputError(
            f"{path / 'model.safetensors.index.json'} holds no weight_map of tensor names to file names"
        )
    names = sorted(set(shards.values()))
    # Of the name alone: in a hub cache the file itself is a link to elsewhere.
    if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise InputError(
            f"{path}: the index names shards outside the directory: {few(outside)}; correct the index"
        )
    if absent := [name for name in names if not is_there(path / name)]:
        raise InputError(
            f"{path}: the index names shards that are absent: {few(absent)}; fetch the checkpoint again"
        )
    return names
