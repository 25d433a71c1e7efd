"""`KVCache.truncate` and `KVCache.repeat_rows`. Rows go back to fewer tokens, if their layers still have the
keys and states that the next tokens need, and several rows continue one.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..checks import check_integer
from ..errors import InputError
from ..modes import in_default_modes
from .kv_cache import KVCache, reorder


@in_default_modes
def truncate(cache: KVCache, length_B: ArrayLike) -> KVCache:
    """Runs `KVCache.truncate`."""
    new_B = _shorter(cache, length_B)
    if cache.reached_B is None:
        return dataclasses.replace(cache, length_B=new_B)
    possible_B = can_truncate(cache, new_B)
    if not isinstance(possible_B, jax.core.Tracer) and not np.all(possible_B):
        b = int(np.argmin(possible_B))
        limited = (layer for layer in cache.layers if layer.limits)
        limit = min(limited, key=lambda layer: layer.most_at_once).describe_limits()
        raise InputError(
            f"row {b} cannot go back from {cache.reached_B[b]} to {new_B[b]} tokens: {limit};"
            " truncate it to 0 and prefill again"
        )
    reached_B = jnp.where(new_B == 0, 0, cache.reached_B)  # an empty row needs no old keys
    overflow_B = cache.overflow_B | ~possible_B
    return dataclasses.replace(cache, length_B=new_B, overflow_B=overflow_B, reached_B=reached_B)


@in_default_modes
def repeat_rows(cache: KVCache, n: int) -> KVCache:
    """Runs `KVCache.repeat_rows`."""
    n = check_integer("n", n, 1)
    return reorder(cache, jnp.repeat(jnp.arange(len(cache.length_B)), n))


def _shorter(cache: KVCache, length_B: Any) -> jax.Array:
    """Returns int32 [B]: each row's length, at most length_B."""
    traced = isinstance(length_B, jax.core.Tracer)
    B = len(cache.length_B)
    wanted_B = length_B if traced else np.asarray(length_B)
    valid = jnp.issubdtype(wanted_B.dtype, jnp.integer) and wanted_B.shape in ((), (B,))
    if not valid or (not traced and wanted_B.min() < 0):
        raise InputError(
            f"truncate needs lengths of at least 0, one for all {B} rows or one for each, got {length_B}"
        )
    # Before the cast to int32, where a larger number would wrap.
    wanted_B = wanted_B if traced else np.minimum(wanted_B, cache.capacity).astype(np.int32)
    return jnp.clip(wanted_B, 0, cache.length_B).astype(jnp.int32)


def can_truncate(cache: KVCache, length_B: Any) -> Any:
    """Returns bool [B]: True if a row truncated to length_B still has all that its next tokens need."""
    if cache.reached_B is None:
        return np.ones(len(cache.length_B), bool)
    possible_B: Any = True
    for layer in {layer.limits: layer for layer in cache.layers}.values():  # one of each
        possible_B &= layer.can_truncate(length_B, cache.reached_B)
    return (length_B == 0) | possible_B
