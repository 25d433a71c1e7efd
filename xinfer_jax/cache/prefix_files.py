"""Prefixes in safetensors files: the used keys and values, and the data of a draft head. The metadata has
their tokens and model.
"""

import dataclasses
import json
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
from .fingerprint import draft_fingerprint, fingerprint
from .prefix import Prefix
from .prefix_tensors import (
    FEATURES,
    OF_HEAD,
    array_from_file,
    array_to_file,
    cache_from_file,
    cache_to_file,
    num_used,
)
from .stored_kv import quantized_dtype

if TYPE_CHECKING:
    from ..draft_heads.draft import Draft

_FORMAT = 6  # earlier ones have a fingerprint of another config
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
    settings, tensors = cache_to_file(prefix.cache, tokens)
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
            cache = cache_from_file(path, file, config, saved, capacity)
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


def _draft_to_file(draft: DraftPrefix, tokens: list[list[int]]) -> tuple[dict, dict]:
    """Returns the settings and the tensors of the data of a draft head."""
    features = np.asarray(draft.features.features_BSX)[:, : num_used(tokens, None)]
    settings: dict = dict(model=draft.model, features=features.dtype.name)
    tensors = {FEATURES: array_to_file(features, len(tokens))}
    if draft.cache is None:
        return settings, tensors
    of_cache, cached = cache_to_file(draft.cache, _cut(tokens, draft.cache.capacity), OF_HEAD)
    return settings | of_cache, tensors | cached


def _cut(tokens: list[list[int]], capacity: int) -> list[list[int]]:
    """Returns the tokens that fit the cache of a head, whose context may be shorter than the target's."""
    return [row[:capacity] for row in tokens]


def _draft_from_file(
    path: str | Path, file: Any, draft: Any, model: tuple, saved: dict[str, Any], capacity: int
) -> DraftPrefix:
    """Returns the data of a draft head. model: the parameters and the config of its target."""
    from ..generation.head_prefill import bound_head  # optional: draft heads

    params, config = model
    head, own = bound_head(draft, params, config, 1)
    name = draft_fingerprint(head, own)
    of_head = saved.get("draft")
    if of_head is None or of_head["model"] != name or head.has_cache != ("dtype" in of_head):
        raise InputError(
            f"{path} has no data of this draft head: save a prefix of a call with the same draft, or leave"
            " out draft"
        )
    cache = None
    if head.has_cache:
        settings = of_head | dict(tokens=_cut(saved["tokens"], of_head["capacity"]))
        cache = cache_from_file(
            path, file, head.config, settings, min(capacity, head.config.context_length), OF_HEAD
        )
    used = num_used(saved["tokens"], None)
    shape = len(saved["tokens"]), used, head.feature_size
    like = jax.ShapeDtypeStruct(shape, jnp.dtype(of_head["features"]))
    used_BSX = array_from_file(path, file, FEATURES, like)
    features_BSX = jnp.pad(used_BSX, ((0, 0), (0, capacity - used), (0, 0)))
    return DraftPrefix(name, cache, FeatureRows(features_BSX))


def _factors(config: ModelConfig) -> tuple[tuple[float, ...], ...]:
    """Returns the longrope factors that a prefix of this model can have, or () for other models."""
    return config.rope.short_factor, config.rope.long_factor


def _are_integers(values: Any, least: int, most: int | None) -> bool:
    """Returns True if the value is a list of integers within these limits."""
    return isinstance(values, list) and all(
        type(x) is int and least <= x and (most is None or x <= most) for x in values
    )
