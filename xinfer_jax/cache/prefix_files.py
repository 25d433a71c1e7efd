"""Prefixes in safetensors files: the used keys and values. The metadata has their tokens and model."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save_file

from ..config.model_config import ModelConfig, check_config
from ..errors import InputError, format_value
from ..modes import in_default_modes
from ..old_names import check_order
from ..weights.params import Params
from .fingerprint import fingerprint
from .kv_cache import KVCache, init_cache
from .prefix import Prefix
from .stored_kv import quantized_dtype

_FORMAT = 6  # earlier ones have a fingerprint of another config


@in_default_modes
def save_prefix(params: Params, config: ModelConfig, prefix: Prefix, path: str | Path) -> None:
    """Writes a prefix to a safetensors file: tokens, keys, values and the fingerprint of the model.

    For example, you can compute a long system prompt once, and load its prefix in later processes.

    Args:
        params: the parameter tree of the model that computed the prefix.
        config: the config of this model.
        prefix: a `Prefix`, from `generate` with `keep_prefix=True`.
        path: the file to write.

    Raises:
        InputError: the file cannot be written, or another model computed the prefix.
    """
    check_order("save_prefix(params, config, prefix, path)", params, path)
    if not isinstance(prefix, Prefix):
        raise InputError(f"prefix must be the out.prefix of a call, got {format_value(prefix)}")
    prefix.check(params, config)
    if prefix.factors not in _factors(config):
        raise InputError(
            "the prefix does not say which longrope factors rotated its keys: give Prefix its factors"
        )
    cache = prefix.cache
    rows = len(prefix.tokens)
    reached = None if cache.reached_B is None else cache.reached_B.tolist()[:rows]
    tokens = [list(map(int, row)) for row in prefix.tokens]
    used = jax.tree.leaves(_used_arrays(cache, tokens, reached))
    leaves = (np.ascontiguousarray(leaf)[:rows] for leaf in used)
    tensors = {f"{i}": x.view(_file_dtype(x.dtype)) for i, x in enumerate(leaves)}
    shape = dict(dtype=cache.dtype, capacity=cache.capacity, reached=reached, factors=prefix.factors)
    about = json.dumps(dict(format=_FORMAT, tokens=tokens) | shape)
    try:
        save_file(tensors, path, metadata={"xinfer_jax": about, "model": fingerprint(params, config)})
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be written: {error}") from error


@in_default_modes
def load_prefix(params: Params, config: ModelConfig, path: str | Path, capacity: int | None = None) -> Prefix:
    """Reads a prefix from a file that `save_prefix` wrote, for `GenerateOptions(prefix=…)`.

    Args:
        params: the parameter tree of the model that computed the prefix.
        config: the config of this model.
        path: the file.
        capacity: the most tokens that a row of the cache can hold, at most the context length. None takes the
            saved capacity.

    Returns:
        A `Prefix`.

    Raises:
        InputError: the file does not exist or is damaged, an older version or another model wrote it, or the
            prefix exceeds the capacity.
    """
    check_order("load_prefix(params, config, path)", params, path)
    check_config(config)
    if capacity is not None and not _are_integers([capacity], 1, config.context_length):
        raise InputError(
            "capacity must be a whole number from 1 to the model's context limit"
            f" {config.context_length}, got {capacity!r}"
        )
    try:
        with safetensors.safe_open(path, "np") as file:
            saved = _metadata(path, file.metadata() or {}, params, config)
            factors = tuple(saved["factors"])
            fixed = dataclasses.replace(config.rope, short_factor=factors, long_factor=factors)
            config = dataclasses.replace(config, rope=fixed)
            # A file may ask for any capacity; no call can use more than the context limit.
            saved_capacity = min(saved["capacity"], config.context_length)
            new = partial(init_cache, config, len(saved["tokens"]), dtype=saved["dtype"])
            k, v = _tensors(path, file, jax.eval_shape(lambda: new(capacity=saved_capacity)), saved)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    capacity = saved_capacity if capacity is None else capacity
    used = _num_used(saved["tokens"], saved["reached"])
    if used > capacity:
        raise InputError(
            f"{path} needs slots for {used} tokens, more than the capacity {capacity}: raise capacity"
        )

    empty = jax.eval_shape(lambda: new(capacity=capacity))
    try:
        layers = tuple(layer.fill(*kv) for layer, *kv in zip(empty.layers, k, v, strict=True))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        raise InputError(f"{path} does not fit in memory with a capacity of {capacity}: lower it") from error
    length_B = jnp.array([len(row) for row in saved["tokens"]], jnp.int32)
    reached_B = None if empty.reached_B is None else jnp.array(saved["reached"] or length_B, jnp.int32)
    cache = KVCache(layers, length_B, jnp.zeros(len(length_B), bool), reached_B)
    return Prefix(saved["tokens"], cache, fingerprint(params, config), factors)


def _metadata(path: Any, metadata: dict[str, str], params: Params, config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata of a file, validated."""
    if "xinfer_jax" not in metadata:
        raise InputError(f"{path} is not a saved prefix: write one with save_prefix")
    try:
        saved = json.loads(metadata["xinfer_jax"])
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged, its metadata is not JSON ({error}): save it again") from error
    if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
        older = None, *range(2, _FORMAT)
        known = isinstance(saved, dict) and saved.get("format") in older and "tokens" in saved
        raise InputError(
            f"{path} was written by {'an older' if known else 'another'} version of xinfer_jax, in another"
            " format: prefill again and save it again"
        )
    tokens: Any = saved.get("tokens")
    capacity: Any = saved.get("capacity")
    reached: Any = saved.get("reached")
    dtype: Any = saved.get("dtype")
    last = config.vocab_size - 1
    is_tokens = isinstance(tokens, list) and all(_are_integers(row, 0, last) for row in tokens)
    lengths = list(map(len, tokens)) if is_tokens else []
    is_capacity = _are_integers([capacity], max(lengths, default=1), None)
    is_reached = _are_integers(reached, 0, capacity if is_capacity else None)
    is_reached = is_reached and len(reached) == len(lengths)
    is_reached = is_reached and all(n <= most for n, most in zip(lengths, reached, strict=True))
    valid = {
        "tokens": max(lengths, default=0) > 0,
        "capacity": is_capacity,
        "dtype": dtype in ("float32", "bfloat16", "float16") or quantized_dtype(dtype) is not None,
        "reached": "reached" in saved and reached is None or is_reached,
        "factors": isinstance(saved.get("factors"), list),
    }
    if damaged := [name for name, is_valid in valid.items() if not is_valid]:
        name = damaged[0]
        raise InputError(f"{path} is damaged, its {name} cannot be {saved.get(name)!r:.60}: save it again")
    same_model = metadata.get("model") == fingerprint(params, config)
    if not same_model or tuple(saved["factors"]) not in _factors(config):
        raise InputError(f"{path} was saved with another model: load that one, or prefill again")
    return saved


def _tensors(path: str | Path, file: Any, like: KVCache, saved: dict[str, Any]) -> Any:
    """Returns the saved arrays of a cache like this one, as `_used_arrays` returned them."""
    used_arrays = partial(_used_arrays, tokens=saved["tokens"], reached=saved["reached"])
    wanted, tree = jax.tree.flatten(jax.eval_shape(used_arrays, like))
    names = [f"{i}" for i in range(len(wanted))]
    if set(file.keys()) != set(names):
        raise InputError(
            f"{path} is damaged, it has other tensors than the {len(names)} of its cache: save it again"
        )
    arrays = []
    for name, x in zip(names, wanted, strict=True):
        stored = file.get_slice(name)
        dtype = _file_dtype(x.dtype)
        got = stored.get_dtype(), stored.get_shape()
        if got != (want := (f"{dtype.kind.upper()}{8 * dtype.itemsize}", list(x.shape))):
            raise InputError(f"{path} is damaged, its tensor {name} is {got}, expected {want}: save it again")
        array = file.get_tensor(name).view(x.dtype)
        if x.dtype != np.uint8 and not np.isfinite(array).all():
            raise InputError(f"{path} has numbers that are not finite: save it again")
        arrays.append(array)
    return jax.tree.unflatten(tree, arrays)


def _file_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype of an array in a file. Float types of one and two bytes are stored as unsigned
    integers with the same bits.
    """
    bits: Any = {1: np.uint8, 2: np.uint16}
    return np.dtype(bits.get(dtype.itemsize, dtype))


def _used_arrays(cache: KVCache, tokens: list[list[int]], reached: list[int] | None) -> list[Any]:
    """Returns the used keys of all layers, then the used values of all layers."""
    return [*zip(*(layer.used_arrays(_num_used(tokens, reached)) for layer in cache.layers), strict=True)]


def _num_used(tokens: list[list[int]], reached: list[int] | None) -> int:
    """Returns the most tokens that a row has or, with a ring, the most that a row has ever had."""
    return max(reached or map(len, tokens))


def _factors(config: ModelConfig) -> tuple[tuple[float, ...], ...]:
    """Returns the longrope factors that a prefix of this model can have, or () for other models."""
    return config.rope.short_factor, config.rope.long_factor


def _are_integers(values: Any, least: int, most: int | None) -> bool:
    """Returns True if the value is a list of integers within these limits."""
    return isinstance(values, list) and all(
        type(x) is int and least <= x and (most is None or x <= most) for x in values
    )
