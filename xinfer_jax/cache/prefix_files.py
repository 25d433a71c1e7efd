"""Prefixes in safetensors files: the used keys and values, and the data of a draft head. The metadata has
their tokens and model.
"""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from .draft_prefix import DraftPrefix, FeatureRows
from .fingerprint import fingerprint, head_fingerprint
from .kv_cache import KVCache, init_cache
from .prefix import Prefix
from .stored_kv import quantized_dtype

if TYPE_CHECKING:
    from ..draft_heads.draft import Draft

_FORMAT = 6  # earlier ones have a fingerprint of another config
_OF_HEAD = "draft."  # names of the tensors of a draft head; metadata["draft"] describes them
_FEATURES = "draft.features"
_FLOATS = ("float32", "bfloat16", "float16")


@in_default_modes
def save_prefix(params: Params, config: ModelConfig, prefix: Prefix, path: str | Path) -> None:
    """Writes a prefix to a safetensors file: tokens, keys, values and the fingerprint of the model.

    For example, you can compute a long system prompt once, and load its prefix in later processes.

    Args:
        params: the parameter tree of the model that computed the prefix.
        config: the config of this model.
        prefix: a `Prefix`, from `generate` with `keep_prefix=True`. If a draft head drafted in that call, the
            file has the head's data too.
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
    tokens = [list(map(int, row)) for row in prefix.tokens]
    settings, tensors = _cache_to_file(prefix.cache, tokens)
    if prefix.draft is not None:
        settings["draft"], of_head = _draft_to_file(prefix.draft, tokens)
        tensors |= of_head
    about = json.dumps(dict(format=_FORMAT, tokens=tokens, factors=prefix.factors) | settings)
    try:
        save_file(tensors, path, metadata={"xinfer_jax": about, "model": fingerprint(params, config)})
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be written: {error}") from error


@in_default_modes
def load_prefix(
    params: Params,
    config: ModelConfig,
    path: str | Path,
    capacity: int | None = None,
    draft: "Draft | Literal['mtp'] | None" = None,
) -> Prefix:
    """Reads a prefix from a file that `save_prefix` wrote, for `GenerateOptions(prefix=…)`.

    Args:
        params: the parameter tree of the model that computed the prefix.
        config: the config of this model.
        path: the file.
        capacity: the most tokens that a row of the cache can hold, at most the context length. None takes the
            saved capacity.
        draft: the draft head of your calls with the prefix: "mtp" for the head of the model, or a `Draft`.
            None leaves out the data of a draft head.

    Returns:
        A `Prefix`.

    Raises:
        InputError: the file does not exist or is damaged, an older version or another model wrote it, or the
            prefix exceeds the capacity.
        InputError: the file has no data of this draft head.
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
            capacity = capacity or min(saved["capacity"], config.context_length)
            cache = _cache_from_file(path, file, config, saved, capacity)
            of_head = None
            if draft is not None:
                of_head = _draft_from_file(path, file, draft, (params, config), saved, capacity)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    return Prefix(saved["tokens"], cache, fingerprint(params, config), factors, of_head)


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
    _check_settings(path, saved, config)
    same_model = metadata.get("model") == fingerprint(params, config)
    if not same_model or tuple(saved["factors"]) not in _factors(config):
        raise InputError(f"{path} was saved with another model: load that one, or prefill again")
    return saved


def _check_settings(path: Any, saved: dict[str, Any], config: ModelConfig) -> None:
    """Raises InputError if the metadata of a file is damaged."""
    tokens: Any = saved.get("tokens")
    last = config.vocab_size - 1
    is_tokens = isinstance(tokens, list) and all(_are_integers(row, 0, last) for row in tokens)
    lengths = list(map(len, tokens)) if is_tokens else []
    valid = dict(tokens=max(lengths, default=0) > 0) | _valid_settings(saved, lengths)
    valid["factors"] = isinstance(saved.get("factors"), list)
    of_head = saved.get("draft")
    if of_head is not None:
        valid["draft"] = isinstance(of_head, dict) and isinstance(of_head.get("model"), str)
        valid["draft"] = valid["draft"] and of_head.get("features") in _FLOATS
        has_cache = valid["draft"] and "dtype" in of_head
        if has_cache:
            valid["draft"] = all(_valid_settings(of_head, [0 for _ in lengths]).values())
    if damaged := [name for name, is_valid in valid.items() if not is_valid]:
        name = damaged[0]
        raise InputError(f"{path} is damaged, its {name} cannot be {saved.get(name)!r:.60}: save it again")


def _valid_settings(saved: dict[str, Any], lengths: list[int]) -> dict[str, bool]:
    """Returns which settings of a cache are valid. lengths: of the rows."""
    capacity: Any = saved.get("capacity")
    reached: Any = saved.get("reached")
    dtype: Any = saved.get("dtype")
    is_capacity = _are_integers([capacity], max(lengths, default=1), None)
    is_reached = _are_integers(reached, 0, capacity if is_capacity else None)
    is_reached = is_reached and len(reached) == len(lengths)
    is_reached = is_reached and all(n <= most for n, most in zip(lengths, reached, strict=True))
    return dict(
        capacity=is_capacity,
        dtype=dtype in _FLOATS or quantized_dtype(dtype) is not None,
        reached="reached" in saved and reached is None or is_reached,
    )


def _cache_to_file(cache: KVCache, tokens: list[list[int]], name: str = "") -> tuple[dict, dict]:
    """Returns the settings and the tensors of a cache. name: the beginning of their names."""
    rows = len(tokens)
    reached = None if cache.reached_B is None else cache.reached_B.tolist()[:rows]
    used = jax.tree.leaves(_used_arrays(cache, tokens, reached))
    tensors = {f"{name}{i}": _to_file(x, rows) for i, x in enumerate(used)}
    return dict(dtype=cache.dtype, capacity=cache.capacity, reached=reached), tensors


def _to_file(array: Any, rows: int) -> np.ndarray:
    array = np.ascontiguousarray(array)[:rows]
    return array.view(_file_dtype(array.dtype))


def _draft_to_file(draft: DraftPrefix, tokens: list[list[int]]) -> tuple[dict, dict]:
    """Returns the settings and the tensors of the data of a draft head."""
    features = np.asarray(draft.features.features_BSX)[:, : _num_used(tokens, None)]
    settings: dict = dict(model=draft.model, features=features.dtype.name)
    tensors = {_FEATURES: _to_file(features, len(tokens))}
    if draft.cache is None:
        return settings, tensors
    of_cache, cached = _cache_to_file(draft.cache, _cut(tokens, draft.cache.capacity), _OF_HEAD)
    return settings | of_cache, tensors | cached


def _cut(tokens: list[list[int]], capacity: int) -> list[list[int]]:
    """Returns the tokens that fit the cache of a head, whose context may be shorter than the target's."""
    return [row[:capacity] for row in tokens]


def _cache_from_file(
    path: str | Path, file: Any, config: ModelConfig, saved: dict[str, Any], capacity: int, name: str = ""
) -> KVCache:
    """Returns the cache of a file. saved: its settings and the tokens. name: the beginning of the names of
    its tensors.
    """
    tokens = saved["tokens"]
    new = partial(init_cache, config, len(tokens), dtype=saved["dtype"])
    own_capacity = min(saved["capacity"], config.context_length)
    k, v = _tensors(path, file, jax.eval_shape(lambda: new(capacity=own_capacity)), saved, name)
    used = _num_used(tokens, saved["reached"])
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


def _draft_from_file(
    path: str | Path, file: Any, draft: Any, model: tuple, saved: dict[str, Any], capacity: int
) -> DraftPrefix:
    """Returns the data of a draft head. model: the parameters and the config of its target."""
    from ..generation.head_prefill import bound_head  # optional: draft heads

    head, params = bound_head(draft, *model, 1)
    name = head_fingerprint(head, params)
    of_head = saved.get("draft")
    if of_head is None or of_head["model"] != name or head.has_cache != ("dtype" in of_head):
        raise InputError(
            f"{path} has no data of this draft head: save a prefix of a call with the same draft, or leave"
            " out draft"
        )
    cache = None
    if head.has_cache:
        settings = of_head | dict(tokens=_cut(saved["tokens"], of_head["capacity"]))
        cache = _cache_from_file(
            path, file, head.config, settings, min(capacity, head.config.context_length), _OF_HEAD
        )
    used = _num_used(saved["tokens"], None)
    shape = len(saved["tokens"]), used, head.feature_size
    features_BSX = _array(path, file, _FEATURES, jax.ShapeDtypeStruct(shape, jnp.dtype(of_head["features"])))
    features_BSX = jnp.pad(features_BSX, ((0, 0), (0, capacity - used), (0, 0)))
    return DraftPrefix(name, cache, FeatureRows(features_BSX))


def _tensors(path: str | Path, file: Any, like: KVCache, saved: dict[str, Any], name: str) -> Any:
    """Returns the saved arrays of a cache like this one, as `_used_arrays` returned them."""
    used_arrays = partial(_used_arrays, tokens=saved["tokens"], reached=saved["reached"])
    wanted, tree = jax.tree.flatten(jax.eval_shape(used_arrays, like))
    names = [f"{name}{i}" for i in range(len(wanted))]
    found = {x for x in file.keys() if x.startswith(_OF_HEAD) == bool(name)} - {_FEATURES}
    if found != set(names):
        raise InputError(
            f"{path} is damaged, it has other tensors than the {len(names)} of its cache: save it again"
        )
    return jax.tree.unflatten(tree, [_array(path, file, *pair) for pair in zip(names, wanted, strict=True)])


def _array(path: str | Path, file: Any, name: str, like: Any) -> np.ndarray:
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
