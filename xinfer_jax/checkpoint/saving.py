"""`save_model`: a checkpoint directory that this library and transformers open."""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm  # type: ignore[import-untyped]

from ..config.model_config import ModelConfig
from ..errors import InputError, format_names, format_value
from ..families.reading import from_hf
from ..families.tensors import specs_and_leaves, tensors_of
from ..families.unread import text_name, unused_names
from ..families.writing import to_hf
from ..weights.params import Params, resolve_dtype
from ..weights.quantized_weight import is_quantized
from .files import INDEX, TEXT_FILES, WEIGHTS, checkpoint_dir, read_json
from .own_format import quantization_config, quantized_tensors
from .tensors import DTYPES, StoredTensor, open_tensors
from .text_tensors import other_tensors
from .tokenizer import Tokenizer

_NAME_OF_DTYPE = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
_TIED = ("model.embed_tokens.weight", "lm_head.weight")
_NORM = "model.norm.weight"  # a tensor of every family
_BLOCK = 1 << 23  # bytes that are converted and written at a time


class _Tensor(NamedTuple):
    """A tensor to write."""

    type: str  # its safetensors name
    shape: tuple[int, ...]
    num_bytes: int
    blocks: Callable[[], Any]  # its bytes, block by block


def save_model(
    path: str | Path,
    params: Params,
    config: ModelConfig,
    *,
    tokenizer: Tokenizer | None = None,
    like: str | Path | None = None,
    max_shard_bytes: int = 5 << 30,
    dtype: Any = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint directory: `load_model` and transformers' `AutoModelForCausalLM` open it.

    The directory appears when it is whole. One tensor at a time is on the host beside the parameters.
    Over several processes each calls this, and process 0 writes.

    Args:
        path: the directory.
        params: of the model. Matrices in int8, int4 and ternary are written as they are, which only this
            library reads.
        config: of the model, as `load_model` or `from_hf` returns it.
        tokenizer: whose files are written.
        like: a checkpoint of this config, also one that sees images, or `path` itself: names and config.json
            are as there, and tensors and small files that this library does not read are copied from it.
        max_shard_bytes: of a file, where no single tensor is larger.
        dtype: of floats: float32, bfloat16 or float16; None: as they are.
        overwrite: a checkpoint at `path` is replaced. It is PATH.old while the new one takes its place.

    Raises:
        InputError: the parameters do not fit the config, or the config not `like`; quantized experts;
            `path` exists, or cannot be written.
    """
    path = Path(path)
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise InputError(
            f"max_shard_bytes must be a whole number from 1 on, got {format_value(max_shard_bytes)}"
        )
    _check_target(path, overwrite)
    dtype = None if dtype is None else np.dtype(resolve_dtype(dtype))
    source = None if like is None else checkpoint_dir(like)
    kept = {} if source is None else open_tensors(source)
    settings = (
        to_hf(dataclasses.replace(config, rotated=False))
        if source is None
        else _settings_like(source, config)
    )
    tensors = _tensors(params, config, dtype, kept)
    floats = {tensor.type for tensor in tensors.values()} & {"F32", "F16", "BF16"}
    name = next((np.dtype(DTYPES[type]).name for type in ("F32", "BF16", "F16") if type in floats), None)
    _set_dtype(settings, name)
    quantization = quantization_config(jax.tree.leaves(params, is_leaf=is_quantized), config.rotated)
    settings |= {"quantization_config": quantization} if quantization else {}
    files = _text_files(source, tokenizer, config)
    _write_whole(path, lambda directory: _write(directory, tensors, settings, files, max_shard_bytes))


def _check_target(path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path) or path.is_dir() and not any(path.iterdir()):
        return
    if not overwrite:
        raise InputError(f"{path} exists: give another directory, or overwrite=True")
    if not (path / "config.json").is_file():
        raise InputError(
            f"{path} holds no config.json, so it is no checkpoint to overwrite: give another directory"
        )


def _settings_like(source: Path, config: ModelConfig) -> dict[str, Any]:
    """config.json of another checkpoint with this config, without how it was quantized."""
    settings = read_json(source / "config.json")
    if settings is None:
        raise InputError(f"like: {source} holds no config.json")
    if "quantization_config" in settings:
        raise InputError(f"like: {source} is quantized: leave it out, or give the float checkpoint")
    other = from_hf(settings)
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), getattr(other, field.name)
        if field.compare and field.name != "rotated" and ours != theirs:
            raise InputError(
                f"like: {field.name} is {format_value(theirs)} in {source}, and {format_value(ours)} here"
            )
    return settings


def _set_dtype(settings: dict[str, Any], dtype: str | None) -> None:
    """Sets the dtype of a model and of its text part, by its newer name."""
    for part in (settings, settings.get("text_config")):
        if isinstance(part, dict):
            part.pop("torch_dtype", None)
            part["dtype"] = dtype


def _text_files(source: Path | None, tokenizer: Tokenizer | None, config: ModelConfig) -> dict[str, bytes]:
    """The small files beside the weights, by name: of another checkpoint, then of the tokenizer."""
    ends = [*(tokenizer.eos_token_ids if tokenizer else config.eos_token_ids)]
    files = {"generation_config.json": json.dumps({"eos_token_id": ends}).encode()} if ends else {}
    for directory in filter(None, (source, tokenizer and tokenizer.directory)):
        for file in (
            file for pattern in TEXT_FILES for file in Path(directory).glob(pattern) if file.is_file()
        ):
            files[str(file.relative_to(directory))] = file.read_bytes()
    if tokenizer and not tokenizer.directory:
        files |= {name: text.encode() for name, text in tokenizer.files().items()}
    return files


def _tensors(
    params: Params, config: ModelConfig, dtype: Any, kept: Mapping[str, StoredTensor]
) -> dict[str, _Tensor]:
    """The tensors to write, by name. kept: those of the checkpoint that they are named after."""
    original = {text_name(name) or name: name for name in kept}
    specs, leaves = specs_and_leaves(params, config)
    is_float = [not is_quantized(leaf) for leaf in leaves]
    floats = tensors_of(compress(specs, is_float), compress(leaves, is_float), original if kept else None)
    tensors = {
        name: _of_leaves(tensor.shape, dtype or tensor.leaves[0].dtype, tensor.make)
        for name, tensor in floats.items()
    }
    replaced = {*tensors, *(name for spec in specs for name in spec.tensor_shapes(original))}
    for spec, leaf in zip(specs, leaves, strict=True):
        if is_quantized(leaf):
            for name, array in quantized_tensors(spec, leaf).items():
                tensors[name] = _of_leaves(array.shape, array.dtype, partial(_convert, array))
    if config.tie_word_embeddings and _TIED[1] in original:
        tensors |= {
            _TIED[1] + name.removeprefix(_TIED[0]): x
            for name, x in tensors.items()
            if name.startswith(_TIED[0])
        }
        tensors = {
            name: x for name, x in tensors.items() if _TIED[0] in original or not name.startswith(_TIED[0])
        }
        replaced.add(_TIED[1])
    copied = {name: tensor for name, tensor in kept.items() if (text_name(name) or name) not in replaced}
    lost = {text for name in copied if (text := text_name(name))} - unused_names(config, original)
    if lost := lost - other_tensors(lost):
        raise InputError(f"like: it has tensors that the model lacks: {format_names(sorted(lost))}")
    named = {_name_like(original, name): tensor for name, tensor in tensors.items()}
    return named | {name: _stored(tensor) for name, tensor in copied.items()}


def _name_like(original: Mapping[str, str], name: str) -> str:
    """The name of a text model's tensor in a checkpoint. original: its names by those of the text model."""
    within = "model." if name.startswith("model.") else ""
    known = _NORM if within else _TIED[1]
    prefix = original.get(known, known).removesuffix(known.removeprefix(within))
    return original.get(name) or prefix + name.removeprefix(within)


def _convert(array: Any, convert: Callable[[Any], Any]) -> Any:
    return convert(array)


def _of_leaves(shape: tuple[int, ...], dtype: Any, make: Callable[[Callable[[Any], Any]], Any]) -> _Tensor:
    dtype = np.dtype(dtype)

    def blocks() -> Iterator[Any]:
        flat = make(_on_host).reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            with np.errstate(over="ignore"):
                block = flat[start : start + _BLOCK].astype(dtype, copy=False)
            if dtype == np.float16 and flat.dtype != dtype and not np.isfinite(block).all():
                raise InputError("values are beyond float16's range: save in bfloat16 or float32")
            yield np.ascontiguousarray(block).view(np.uint8).data

    return _Tensor(_NAME_OF_DTYPE[dtype], shape, math.prod(shape) * dtype.itemsize, blocks)


def _on_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _bits(type: str) -> int:
    """Of a number of this safetensors type."""
    return 8 if type == "BOOL" else int(re.findall("[0-9]+", type)[0])


def _stored(tensor: StoredTensor) -> _Tensor:
    """A tensor of another file, byte for byte."""
    num_bytes = math.prod(tensor.shape) * _bits(tensor.type) // 8

    def blocks() -> Iterator[Any]:
        with open(tensor.file, "rb") as file:
            file.seek(tensor.start)
            for start in range(0, num_bytes, _BLOCK):
                yield file.read(min(_BLOCK, num_bytes - start))

    return _Tensor(tensor.type, tensor.shape, num_bytes, blocks)


def _write_whole(path: Path, write: Callable[[Path | None], None]) -> None:
    """Writes a directory beside the path, and puts it in its place once it is whole."""
    temporary, old = (path.with_name(f"{path.name}.{end}") for end in ("saving", "old"))
    failed: Exception | None = None
    try:
        if jax.process_index() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        write(temporary if jax.process_index() == 0 else None)
    except (OSError, InputError) as error:
        failed = error
    if jax.process_count() > 1:  # also a barrier
        failures = multihost_utils.process_allgather(np.array(failed is not None))
        failed = failed or (
            InputError("another process could not save the model") if failures.any() else None
        )
    if failed is not None:
        shutil.rmtree(temporary, ignore_errors=True)
        raise failed if isinstance(failed, InputError) else InputError(f"{path} cannot be written: {failed}")
    if jax.process_index() == 0:
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(path, old)
        os.rename(temporary, path)
        shutil.rmtree(old, ignore_errors=True)


def _write(
    directory: Path | None,
    tensors: Mapping[str, _Tensor],
    settings: Mapping[str, Any],
    files: Mapping[str, Any],
    limit: int,
) -> None:
    """Writes the files. directory: None: this process only takes part in gathering what it holds."""
    shards = _shards(tensors, limit)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    shown = None if directory else True  # None: on terminals
    where: dict[str, str] = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc="Saving", disable=shown, leave=False) as bar:
        for number, names in enumerate(shards, 1):
            file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            where |= dict.fromkeys(names, file)
            _write_shard(directory and directory / file, {name: tensors[name] for name in names}, bar)
    if directory is None:
        return
    if len(shards) > 1:
        index = dict(metadata=dict(total_size=total), weight_map=where)
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)


def _shards(tensors: Mapping[str, _Tensor], limit: int) -> list[list[str]]:
    """Names by file, as many in their order as it may hold; wide types first, so that all are aligned."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.num_bytes
    return [sorted(names, key=lambda name: -_bits(tensors[name].type)) for names in shards]


def _write_shard(file: Path | None, tensors: Mapping[str, _Tensor], bar: Any) -> None:
    """Header length, header and data. The library's own writer would hold all tensors once more."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        header[name] = dict(dtype=tensor.type, shape=tensor.shape, data_offsets=[end, end + tensor.num_bytes])
        end += tensor.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") if file else contextlib.nullcontext() as out:
        if out:
            out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for block in tensor.blocks():
                if out:
                    out.write(block)
                bar.update(len(block))
        if out:
            out.flush()
            os.fsync(out.fileno())
