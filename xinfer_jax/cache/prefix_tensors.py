"""The tensors of a cache in a file of a prefix, and their settings."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config.model_config import ModelConfig
from ..errors import InputError
from .kv_cache import KVCache, init_cache

# Names of the tensors of a draft head begin with it. metadata["draft"] describes them.
OF_HEAD = "draft."
FEATURES = "draft.features"


def cache_to_file(cache: KVCache, tokens: list[list[int]], name: str = "") -> tuple[dict, dict]:
    """Returns the settings and the tensors of a cache. name: the beginning of their names."""
    rows = len(tokens)
    reached = None if cache.reached_B is None else cache.reached_B.tolist()[:rows]
    used = jax.tree.leaves(_used_arrays(cache, tokens, reached))
    tensors = {f"{name}{i}": array_to_file(x, rows) for i, x in enumerate(used)}
    return dict(dtype=cache.dtype, capacity=cache.capacity, reached=reached), tensors


def array_to_file(array: Any, rows: int) -> np.ndarray:
    array = np.ascontiguousarray(array)[:rows]
    return array.view(_file_dtype(array.dtype))


def cache_from_file(
    path: str | Path, file: Any, config: ModelConfig, saved: dict[str, Any], capacity: int, name: str = ""
) -> KVCache:
    """Returns the cache of a file. saved: its settings and the tokens. name: the beginning of the names of
    its tensors.
    """
    tokens = saved["tokens"]
    new = partial(init_cache, config, len(tokens), dtype=saved["dtype"])
    own_capacity = min(saved["capacity"], config.context_length)
    k, v = _tensors(path, file, jax.eval_shape(lambda: new(capacity=own_capacity)), saved, name)
    used = num_used(tokens, saved["reached"])
    if used > capacity:
        raise InputError(
            f"{path} needs slots for {used} tokens, more than the capacity {capacity}: raise capacity"
        )

    empty = jax.eval_shape(lambda: new(capacity=capacity))
    try:
        layers = tuple(layer.fill(*kv) for layer, *kv in zip(empty.layers, k, v, strict=True))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        raise InputError(f"{path} does not fit in memory with a capacity of {capacity}: lower it") from error
    length_B = jnp.array([len(row) for row in tokens], jnp.int32)
    reached_B = None if empty.reached_B is None else jnp.array(saved["reached"] or length_B, jnp.int32)
    return KVCache(layers, length_B, jnp.zeros(len(length_B), bool), reached_B)


def _tensors(path: str | Path, file: Any, like: KVCache, saved: dict[str, Any], name: str) -> Any:
    """Returns the saved arrays of a cache like this one, as `_used_arrays` returned them."""
    used_arrays = partial(_used_arrays, tokens=saved["tokens"], reached=saved["reached"])
    wanted, tree = jax.tree.flatten(jax.eval_shape(used_arrays, like))
    names = [f"{name}{i}" for i in range(len(wanted))]
    found = {x for x in file.keys() if x.startswith(OF_HEAD) == bool(name)} - {FEATURES}
    if found != set(names):
        raise InputError(
            f"{path} is damaged, it has other tensors than the {len(names)} of its cache: save it again"
        )
    return jax.tree.unflatten(
        tree, [array_from_file(path, file, *pair) for pair in zip(names, wanted, strict=True)]
    )


def array_from_file(path: str | Path, file: Any, name: str, like: Any) -> np.ndarray:
    """Returns a tensor of a file, which must have the shape and dtype of another."""
    stored = file.get_slice(name)
    dtype = _file_dtype(like.dtype)
    got = stored.get_dtype(), stored.get_shape()
    if got != (want := (f"{dtype.kind.upper()}{8 * dtype.itemsize}", list(like.shape))):
        raise InputError(f"{path} is damaged, its tensor {name} is {got}, expected {want}: save it again")
    array = file.get_tensor(name).view(like.dtype)
    if like.dtype != np.uint8 and not np.isfinite(array).all():
        raise InputError(f"{path} has numbers that are not finite: save it again")
    return array


def _file_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype of an array in a file. Float types of one and two bytes are stored as unsigned
    integers with the same bits.
    """
    bits: Any = {1: np.uint8, 2: np.uint16}
    return np.dtype(bits.get(dtype.itemsize, dtype))


def _used_arrays(cache: KVCache, tokens: list[list[int]], reached: list[int] | None) -> list[Any]:
    """Returns the used keys of all layers, then the used values of all layers."""
    return [*zip(*(layer.used_arrays(num_used(tokens, reached)) for layer in cache.layers), strict=True)]


def num_used(tokens: list[list[int]], reached: list[int] | None) -> int:
    """Returns the most tokens that a row has or, with a ring, the most that a row has ever had."""
    return max(reached or map(len, tokens))
