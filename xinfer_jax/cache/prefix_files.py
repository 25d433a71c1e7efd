"""Prefixes in files, as safetensors: the keys and values in use, and in the metadata whose they are."""

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

from ..config.model_config import ModelConfig
from ..errors import InputError
from ..weights.params import Params
from .fingerprint import fingerprint
from .kv_cache import KVCache, init_cache
from .prefix import Prefix
from .quantized import KV_BITS

_FORMAT = 2  # the first had no number, and its mark did not identify the model
_ROUNDED_FORMAT = 3  # of keys that are kept rounded and would have a bias: without it
_DYNAMIC_FORMAT = 4  # the same with dynamic rope, of which 3 had it


def save_prefix(path: str | Path, prefix: Prefix, params: Params, config: ModelConfig) -> None:
    """Writes a prefix as safetensors: the keys and values of its tokens, and which model they are of.

    Raises:
        InputError: the file cannot be written; the prefix is another model's.
    """
    prefix.check(params, config)
    if prefix.factors not in _factors(config):
        raise InputError("which of longrope's factors the prefix has is not known: give Prefix its factors")
    cache = prefix.cache
    rows = len(prefix.tokens)
    reached = None if cache.reached_B is None else cache.reached_B.tolist()[:rows]
    tokens = [list(map(int, row)) for row in prefix.tokens]
    leaves = (np.ascontiguousarray(leaf)[:rows] for leaf in jax.tree.leaves(_in_use(cache, tokens, reached)))
    tensors = {f"{i}": x.view(np.uint16) if x.itemsize == 2 else x for i, x in enumerate(leaves)}
    kept = dict(
        format=_format(cache.dtype, params, config),
        tokens=tokens,
        dtype=cache.dtype,
        capacity=cache.capacity,
        reached=reached,
    )
    about = json.dumps(kept | dict(factors=prefix.factors))
    try:
        save_file(tensors, path, metadata={"xinfer_jax": about, "model": fingerprint(params, config)})
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be written: {error}") from error


def load_prefix(path: str | Path, params: Params, config: ModelConfig, capacity: int | None = None) -> Prefix:
    """Reads what `save_prefix` wrote.

    Args:
        path, params, config: the file, and the model that it must be of.
        capacity: of the cache, at most the model's context limit; None: as it was.

    Raises:
        InputError: no such file, a damaged one, an older version's, another model's, one beyond capacity.
    """
    if capacity is not None and not _whole([capacity], 1, config.context_length):
        raise InputError(
            "capacity must be a whole number from 1 to the model's context limit"
            f" {config.context_length}, got {capacity!r}"
        )
    try:
        with safetensors.safe_open(path, "np") as file:
            kept = _metadata(path, file.metadata() or {}, params, config)
            factors = tuple(kept["factors"])
            fixed = dataclasses.replace(config.rope, short_factor=factors, long_factor=factors)
            config = dataclasses.replace(config, rope=fixed)
            # A file may ask for any capacity, and no call can use more than the context limit.
            before = min(kept["capacity"], config.context_length)
            new = partial(init_cache, config, len(kept["tokens"]), dtype=kept["dtype"])
            k, v = _tensors(path, file, jax.eval_shape(lambda: new(capacity=before)), kept)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    capacity = before if capacity is None else capacity
    used = _used(kept["tokens"], kept["reached"])
    if used > capacity:
        raise InputError(
            f"{path} holds what {used} tokens left, more than the capacity {capacity}: raise capacity"
        )

    empty = jax.eval_shape(lambda: new(capacity=capacity))
    try:
        layers = tuple(layer.filled(*kv) for layer, *kv in zip(empty.layers, k, v, strict=True))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        raise InputError(f"{path} does not fit in memory with a capacity of {capacity}: lower it") from error
    length_B = jnp.array([len(row) for row in kept["tokens"]], jnp.int32)
    reached_B = None if empty.reached_B is None else jnp.array(kept["reached"] or length_B, jnp.int32)
    cache = KVCache(layers, length_B, jnp.zeros(len(length_B), bool), reached_B)
    return Prefix(kept["tokens"], cache, fingerprint(params, config), factors)


def _metadata(path: Any, metadata: dict[str, str], params: Params, config: ModelConfig) -> dict[str, Any]:
    """What a file says about itself, checked."""
    if "xinfer_jax" not in metadata:
        raise InputError(f"{path} is not a saved prefix: write one with save_prefix")
    try:
        kept = json.loads(metadata["xinfer_jax"])
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged, its metadata is no JSON ({error}): save it anew") from error
    if not isinstance(kept, dict) or kept.get("format") != _format(kept.get("dtype"), params, config):
        known = isinstance(kept, dict) and "format" not in kept and "tokens" in kept
        raise InputError(
            f"{path} was written by {'an older' if known else 'another'} version of xinfer_jax, which kept"
            " it differently: prefill again and save it anew"
        )
    given: list[Any] = [kept.get(name) for name in ("tokens", "capacity", "reached")]
    tokens, capacity, reached = given
    rows_fit = isinstance(tokens, list) and all(_whole(row, 0, config.vocab_size - 1) for row in tokens)
    lengths = list(map(len, tokens)) if rows_fit else []
    fits = {
        "tokens": max(lengths, default=0) > 0,
        "capacity": _whole([capacity], max(lengths, default=1), None),
        "dtype": kept.get("dtype") in (*KV_BITS, "float32", "bfloat16", "float16"),
        "reached": (reached is None and "reached" in kept)
        or (
            _whole(reached, 0, capacity)
            and len(reached) == len(lengths)
            and all(n <= most for n, most in zip(lengths, reached, strict=True))
        ),
        "factors": isinstance(kept.get("factors"), list),
    }
    for name in (name for name, fit in fits.items() if not fit):
        raise InputError(f"{path} is damaged, its {name} cannot be {kept.get(name)!r:.60}: save it anew")
    if metadata.get("model") != fingerprint(params, config) or tuple(kept["factors"]) not in _factors(config):
        raise InputError(f"{path} was saved with another model: load that one, or prefill again")
    return kept


def _format(dtype: Any, params: Params, config: ModelConfig) -> int:
    if dtype not in [*KV_BITS] or not any("bias" in layer["k"] for layer in params["layers"]):
        return _FORMAT
    return _DYNAMIC_FORMAT if config.rope.rope_type == "dynamic" else _ROUNDED_FORMAT


def _tensors(path: str | Path, file: Any, like: KVCache, kept: dict[str, Any]) -> Any:
    """What `_in_use` gave of a cache like this one, as it was saved."""
    in_use = partial(_in_use, tokens=kept["tokens"], reached=kept["reached"])
    wanted, tree = jax.tree.flatten(jax.eval_shape(in_use, like))
    stored = [np.dtype(np.uint16) if x.dtype.itemsize == 2 else x.dtype for x in wanted]
    names = [f"{i}" for i in range(len(wanted))]
    if set(file.keys()) != set(names):
        raise InputError(
            f"{path} is damaged, it has other tensors than the {len(names)} of its cache: save it anew"
        )
    arrays = []
    for name, x, dtype in zip(names, wanted, stored, strict=True):
        held = file.get_slice(name)
        got = held.get_dtype(), held.get_shape()
        if got != (want := (f"{dtype.kind.upper()}{8 * dtype.itemsize}", list(x.shape))):
            raise InputError(
                f"{path} is damaged, its tensor {name} is {got} where {want} belongs: save it anew"
            )
        array = file.get_tensor(name).view(x.dtype)
        if x.dtype != np.uint8 and not np.isfinite(array).all():
            raise InputError(f"{path} holds numbers that are not finite: save it anew")
        arrays.append(array)
    return jax.tree.unflatten(tree, arrays)


def _in_use(cache: KVCache, tokens: list[list[int]], reached: list[int] | None) -> list[Any]:
    """Of every layer the keys that rows have written, then of every layer the values."""
    return [*zip(*(layer.in_use(_used(tokens, reached)) for layer in cache.layers), strict=True)]


def _used(tokens: list[list[int]], reached: list[int] | None) -> int:
    """The most tokens that a row has, or where a layer forgets ever had."""
    return max(reached or map(len, tokens))


def _factors(config: ModelConfig) -> tuple[tuple[float, ...], ...]:
    """Those that a prefix of this model can have; () where there are none to choose from."""
    return config.rope.short_factor, config.rope.long_factor


def _whole(values: Any, least: int, most: int | None) -> bool:
    """Whether it is a list of whole numbers within these limits."""
    return isinstance(values, list) and all(
        type(x) is int and least <= x and (most is None or x <= most) for x in values
    )
