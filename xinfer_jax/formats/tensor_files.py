"""Writes checkpoint files tensor by tensor, and a directory that appears when it is whole."""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm  # type: ignore[import-untyped]

from ..errors import InputError
from .files import INDEX, WEIGHTS
from .tensors import DTYPES, StoredTensor

_NAME_OF_DTYPE = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_BLOCK = 1 << 23  # numbers that are converted and written at a time


class TensorToWrite(NamedTuple):
    """A tensor of a file that is to be written."""

    type: str  # its safetensors name
    shape: tuple[int, ...]
    num_bytes: int
    blocks: Callable[[], Any]  # its bytes, block by block


def tensor_of_leaves(
    shape: tuple[int, ...], dtype: Any, make: Callable[[Callable[[Any], Any]], Any]
) -> TensorToWrite:
    dtype = np.dtype(dtype)

    def blocks() -> Iterator[Any]:
        flat = make(on_host).reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            with np.errstate(over="ignore"):
                block = flat[start : start + _BLOCK].astype(dtype, copy=False)
            if dtype == np.float16 and flat.dtype != dtype and not np.isfinite(block).all():
                raise InputError("values are beyond float16's range: save in bfloat16 or float32")
            yield np.ascontiguousarray(block).view(np.uint8).data

    return TensorToWrite(_NAME_OF_DTYPE[dtype], shape, math.prod(shape) * dtype.itemsize, blocks)


def on_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _bits(type: str) -> int:
    """Returns the number of bits of a number of this safetensors type."""
    return 8 if type == "BOOL" else int(re.findall("[0-9]+", type)[0])


def stored_tensor(tensor: StoredTensor) -> TensorToWrite:
    """Yields a tensor of another file, byte for byte."""
    num_bytes = math.prod(tensor.shape) * _bits(tensor.type) // 8

    def blocks() -> Iterator[Any]:
        with open(tensor.file, "rb") as file:
            file.seek(tensor.start)
            for start in range(0, num_bytes, _BLOCK):
                yield file.read(min(_BLOCK, num_bytes - start))

    return TensorToWrite(tensor.type, tensor.shape, num_bytes, blocks)


def write_whole(path: Path, write: Callable[[Path | None], None]) -> None:
    """Writes a directory next to the path, and puts it in its place once it is whole. write: gets the
    directory. None: another process than the first, which takes part in gathering only.
    """
    temporary, old = (path.with_name(f"{path.name}.{end}") for end in ("saving", "old"))
    is_first = jax.process_index() == 0
    error: Exception | None = None
    try:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        write(temporary if is_first else None)
    except (OSError, InputError) as caught:
        error = caught
    if jax.process_count() > 1 and multihost_utils.process_allgather(np.array(error is not None)).any():
        error = error or InputError("the first process could not save the model")
    if error is not None:
        shutil.rmtree(temporary, ignore_errors=True)
        raise error if isinstance(error, InputError) else InputError(f"{path} cannot be written: {error}")
    if is_first:
        replaces = path.exists()
        try:
            if replaces:
                os.rename(path, old)
            os.rename(temporary, path)
        except OSError as caught:
            raise InputError(f"{path} cannot be replaced: {caught}; {temporary} is the new one") from caught
        if replaces:  # by its other name it is removed the next time too, if this is killed
            os.rename(old, temporary)
            shutil.rmtree(temporary, ignore_errors=True)


def write_checkpoint(
    tensors: Mapping[str, TensorToWrite],
    settings: Mapping[str, Any],
    files: Mapping[str, Path | bytes],
    limit: int,
    directory: Path | None,
) -> None:
    """Writes weights, config.json and other files.

    Args:
        tensors, settings: the weights and config.json.
        files: contents of other files by name, or paths from which they are copied.
        limit: the most bytes of a file of weights.
        directory: see `write_whole`.
    """
    shards = _shards(tensors, limit)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    where: dict[str, str] = {}
    errors: list[OSError] = []
    silent = None if directory else True  # None: on a terminal it is shown
    with tqdm(total=total, unit="B", unit_scale=True, desc="Saving", disable=silent, leave=False) as bar:
        for number, names in enumerate(shards, 1):
            file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            where |= dict.fromkeys(names, file)
            _write_shard(directory and directory / file, {name: tensors[name] for name in names}, bar, errors)
    if errors:
        raise errors[0]
    if directory is None:
        return
    texts: dict[str, Any] = {"config.json": settings}
    if len(shards) > 1:
        texts[INDEX] = dict(metadata=dict(total_size=total), weight_map=where)
    files = {**files, **{name: (json.dumps(text, indent=2) + "\n").encode() for name, text in texts.items()}}
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())


def _shards(tensors: Mapping[str, TensorToWrite], limit: int) -> list[list[str]]:
    """Returns the names by file. Each file has, in their order, as many as it may hold. Wide types are first,
    so that all are aligned.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.num_bytes
    return [sorted(names, key=lambda name: -_bits(tensors[name].type)) for names in shards]


def _write_shard(
    file: Path | None, tensors: Mapping[str, TensorToWrite], bar: Any, errors: list[OSError]
) -> None:
    """Writes header length, header and data. The library's own writer would hold all tensors once more.

    errors: a list that gets the error that stops the writing. Blocks are gathered all the same, which other
    processes wait for.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        header[name] = dict(dtype=tensor.type, shape=tensor.shape, data_offsets=[end, end + tensor.num_bytes])
        end += tensor.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with contextlib.ExitStack() as stack:

        def attempt(action: Callable[..., Any], *args: Any) -> Any:
            try:
                return None if file is None or errors else action(*args)
            except OSError as error:
                errors.append(error)

        out = attempt(lambda: stack.enter_context(open(file, "wb", buffering=0)))  # type: ignore[arg-type]

        def write(data: Any) -> None:
            left = memoryview(data)
            while left:  # an unbuffered file may take a part
                left = left[out.write(left) :]

        attempt(write, len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for block in tensor.blocks():
                attempt(write, block)
                bar.update(len(block))
        attempt(lambda: os.fsync(out.fileno()))
