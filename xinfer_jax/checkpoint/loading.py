"""A checkpoint directory in, a model out: safetensors, one file or shards, one mapped tensor at a time."""

import dataclasses
import math
import time
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (numpy learns bfloat16 from it)
import numpy as np
from safetensors import SafetensorError, safe_open

from ..brief import mib
from ..config.model_config import ModelConfig, from_hf
from ..errors import InputError, few
from ..sampling.generation_config import check_generation_config
from ..stats import LoadStats
from ..weights.params import (
    Params,
    ParamSpec,
    check_quantize,
    check_weights,
    param_specs,
    resolve_dtype,
    tree_bytes,
)
from ..weights.quantized import check_method, is_quantized, quantized_leaf
from .files import checkpoint_dir, is_there, read_json
from .own_format import OwnFormat, Part
from .quantized_formats import FileFormat, read_format
from .tokenizer import Tokenizer, eos_ids

BUNDLED = Path(__file__).parents[1] / "assets"  # the small trained checkpoint that comes with the library
_TIED = ("model.embed_tokens.weight", "lm_head.weight")  # names of a matrix that is both
_FLOATS = {"F32", "F16", "BF16"}
_NOT_WEIGHTS = "rotary_emb.inv_freq"  # tables that old Llama checkpoints carry along


@dataclasses.dataclass(frozen=True, repr=False)
class Model:
    """What `load_model` gives.

    Attributes:
        params: the parameter tree: nested dicts and tuples of arrays, or of quantized leaves.
        config: its shape and settings, with the checkpoint's EOS ids; static under `jit`.
        tokenizer: text to ids and back; None where the checkpoint has no tokenizer.json.
        generation_config: generation_config.json, empty if there is none; for `SamplingConfig.from_hf`.
        load_stats: what loading cost.
    """

    params: Params
    config: ModelConfig
    tokenizer: Tokenizer | None
    generation_config: dict[str, Any]
    load_stats: LoadStats

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params, is_leaf=is_quantized)
        count, stats, config = sum(math.prod(leaf.shape) for leaf in leaves), self.load_stats, self.config
        return (
            f"Model({config.model_type}, {count / 1e6:.4g} M parameters in {stats.dtype},"
            f" {mib(stats.weight_bytes)}, vocabulary {config.vocab_size}, context {config.context_length},"
            f" {'tokenizer' if self.tokenizer else 'no tokenizer'})"
        )


def load_model(
    path_or_repo_id: str | Path | None = None, dtype: Any = None, quantize: str | None = None
) -> Model:
    """Loads a Hugging Face checkpoint.

    Args:
        path_or_repo_id: directory with config.json and safetensors (and tokenizer.json, if text is wanted),
            or a hub name owner/name; None: the bundled checkpoint. Quantized ones stay as they are stored.
        dtype: float32, bfloat16 or float16, whatever the checkpoint's; None: float32 on CPU, else bfloat16.
        quantize: None, or "int8" or "int4": the matrices in fewer bytes, rounded to nearest while loading.

    Raises:
        InputError: files missing, unreadable or not fitting the config, every tensor at fault named.
    """
    start = time.perf_counter()
    dtype = resolve_dtype(dtype)
    check_method(quantize)
    path = BUNDLED if path_or_repo_id is None else checkpoint_dir(path_or_repo_id)
    settings = read_json(path / "config.json")
    if settings is None:
        raise InputError(f"{path} holds no config.json: give the directory of a Hugging Face checkpoint")
    config, stored = from_hf(settings), read_format(settings, path)
    if stored and quantize:
        raise InputError(
            f"{path} is already quantized ({stored.method}), and quantize={quantize!r} is asked for: load it"
            " without quantize"
        )
    check_quantize(config, stored.method if stored else quantize)
    tokenizer = Tokenizer.from_dir(path) if is_there(path / "tokenizer.json") else None
    generation = read_json(path / "generation_config.json") or {}
    check_generation_config(generation, config.vocab_size)
    ends = tokenizer.eos_token_ids if tokenizer else eos_ids(generation, settings)
    possible = tuple(i for i in ends if 0 <= i < config.vocab_size)
    config = dataclasses.replace(config, eos_token_ids=possible)
    params = load_params(path, config, dtype, quantize, stored)
    kind = stored.method if stored else quantize or jnp.dtype(dtype).name
    stats = LoadStats(time.perf_counter() - start, tree_bytes(params), kind)
    return Model(params, config, tokenizer, generation, stats)


def load_params(
    path: Path, config: ModelConfig, dtype: Any, quantize: str | None, stored: FileFormat | OwnFormat | None
) -> Params:
    """The parameter tree from a directory's safetensors; peak memory is that in `dtype` and one tensor."""
    tensors = _open_tensors(path)
    specs, tree = _specs(path, config, tensors)
    parts = [stored.parts(spec.hf_name, spec.shape, tensors) if stored else {} for spec in specs]
    wanted: dict[str, Part] = {}
    for spec, part in zip(specs, parts, strict=True):
        wanted |= part or {name: (shape, _FLOATS) for name, shape in spec.stored(tensors).items()}
    spare = {_TIED[1]} if config.tie_word_embeddings else set()
    spare |= {t for t in tensors if t.endswith(_NOT_WEIGHTS) or stored and stored.spare(t, tensors)}
    _check_tensors(path, tensors, wanted, spare)
    check_weights(specs, dtype, stored.method if stored else quantize)
    _check_tied(path, config, tensors)

    def leaf(spec: ParamSpec, part: dict[str, Part]) -> Any:
        if stored and part:
            return jax.device_put(stored.leaf(spec.hf_name, spec.shape, tensors))
        tensor = spec.read(tensors)
        if quantize is None or tensor.ndim == 1:
            return _array(spec.hf_name, tensor, dtype)
        return quantized_leaf(tensor, spec.hf_name, quantize)

    return jax.tree.unflatten(tree, map(leaf, specs, parts))


def _open_tensors(path: Path) -> dict[str, Any]:
    """For every tensor the open safetensors that hold it: the single file, or shards that the index names."""
    placed: dict[str, str] = {}
    if is_there(path / "model.safetensors"):
        names = ["model.safetensors"]
    elif (index := read_json(path / "model.safetensors.index.json")) is not None:
        names, placed = _shard_names(path, index), index["weight_map"]
    else:
        raise InputError(
            f"{path} holds neither model.safetensors nor model.safetensors.index.json: only safetensors"
            " weights are read"
        )
    held: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            file = safe_open(path / name, "numpy")
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path / name} is truncated or no safetensors file: {error}") from error
        held[name] = dict.fromkeys(file.keys(), file)
    for tensor, name in placed.items():
        if tensor not in held[name]:
            raise InputError(f"{path}: the index says that {name} holds {tensor}, but it does not")
    tensors = dict(chain.from_iterable(part.items() for part in held.values()))
    if len(tensors) < sum(map(len, held.values())):
        raise InputError(f"{path}: two shards hold the same tensor; fetch the checkpoint again")
    return tensors


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


def _specs(path: Path, config: ModelConfig, tensors: dict[str, Any]) -> tuple[list[ParamSpec], Any]:
    """All specs, named as in the files, and their tree; InputError where they far outnumber the tensors."""
    if config.num_hidden_layers > len(tensors):
        raise InputError(
            f"{path}: num_hidden_layers is {config.num_hidden_layers} in config.json, and the files hold only"
            f" {len(tensors)} tensors: these weights are not of this config"
        )
    specs, tree = jax.tree.flatten(param_specs(config))
    specs = [dataclasses.replace(spec, hf_name=_stored_name(spec, config, tensors)) for spec in specs]
    asked = sum(spec.shape[0] for spec in specs if "{}" in spec.hf_name and spec.fused_name not in tensors)
    if asked > 2 * len(tensors):
        raise InputError(
            f"{path}: config.json asks for {asked} tensors of experts, and the files hold only {len(tensors)}"
            " tensors: these weights are not of this config"
        )
    return specs, tree


def _stored_name(spec: ParamSpec, config: ModelConfig, tensors: dict[str, Any]) -> str:
    """The matrix that a tied model shares may be stored under either of its names."""
    embedding, head = _TIED
    tied = config.tie_word_embeddings and spec.hf_name == embedding
    return head if tied and embedding not in tensors and head in tensors else spec.hf_name


def _check_tensors(path: Path, tensors: dict[str, Any], wanted: dict[str, Part], spare: set[str]) -> None:
    """Raises one InputError: the first missing, unexpected or unfitting tensors by name, the rest counted."""
    faults = [f"missing {name} {list(shape)}" for name, (shape, _) in wanted.items() if name not in tensors]
    faults += [f"unexpected {name}" for name in sorted(tensors.keys() - wanted.keys() - spare)]
    for name in tensors.keys() & wanted.keys():
        held, (shape, types) = tensors[name].get_slice(name), wanted[name]
        if tuple(held.get_shape()) != shape:
            faults.append(f"{name} has shape {held.get_shape()}, the config asks for {list(shape)}")
        elif held.get_dtype() not in types:
            read = f"{', '.join(sorted(types))} {'are' if len(types) > 1 else 'is'} read"
            faults.append(f"{name} has type {held.get_dtype()}, only {read}")
    if faults:
        raise InputError(f"{path}: the weights do not fit config.json: {few(sorted(faults), 2)}")


def _check_tied(path: Path, config: ModelConfig, tensors: dict[str, Any]) -> None:
    """Raises InputError where a tied model's one matrix is stored twice, and not alike."""
    if config.tie_word_embeddings and all(name in tensors for name in _TIED):
        if not np.array_equal(*(tensors[name].get_tensor(name) for name in _TIED)):
            raise InputError(
                f"{path}: the weights do not fit config.json: tie_word_embeddings is true, but {_TIED[1]}"
                f" differs from {_TIED[0]}"
            )


def _array(name: str, tensor: np.ndarray, dtype: Any) -> jax.Array:
    """A device array of a memory-mapped tensor. On CPU, memory aligned to 64 bytes is taken over as it is."""
    raw = np.empty(tensor.size * jnp.dtype(dtype).itemsize + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    aligned = raw[offset : offset + raw.size - 64].view(dtype).reshape(tensor.shape)
    with np.errstate(over="ignore"):
        np.copyto(aligned, tensor, casting="unsafe")
    if dtype == jnp.float16 and tensor.dtype != np.float16 and not np.isfinite(aligned).all():
        raise InputError(f"{name} holds values beyond float16's range: use dtype bfloat16 or float32")
    return jax.device_put(aligned)
