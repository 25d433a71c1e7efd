"""The KV cache: fixed capacity, one K and one V array per layer. The only code that knows the layout.

Layout [B, K, S, H]: the keys of one row and one head lie together, so a block of slots is one matrix for the
attention product, with the batch axes (B, K) in front and nothing to transpose. Position p of a row lies in
slot p % S. S is the capacity rounded up (those slots stay empty), or less than the capacity in a layer with a
sliding window: a ring, where a new token takes the place of one that no query will see any more.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..brief import Brief
from ..config.model_config import ModelConfig
from ..errors import InputError, shown
from ..memory import check_memory
from ..weights.params import resolve_dtype
from .quantized import KV_BITS, QuantizedKV, by_slot, empty, quantize, vector_bytes

# Tokens appended to a ring at once; as many beyond the window are kept, so none is overwritten that is yet to
# be seen.
LARGEST_CALL = 512
_RING_MULTIPLE = 64  # slots of a ring: blocks of keys stay aligned
_MULTIPLE = 8  # of slots: what the bulk copies of Hopper's kernels take; others they would pad in every step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class KVCache(Brief):
    """Keys and values of every layer, and how much of each row is filled."""

    k: tuple[jax.Array | QuantizedKV, ...]  # L times [B, K, S, H]; S differs between layers
    v: tuple[jax.Array | QuantizedKV, ...]  # L times [B, K, S, H]
    length_B: jax.Array  # int32: tokens held by each row; the next one has this position
    # Bool: a write past the capacity was dropped, or a ring was truncated further than it remembers.
    overflow_B: jax.Array
    reached_B: jax.Array | None  # int32: the longest each row has been; None where no layer is a ring
    capacity: int = dataclasses.field(metadata=dict(static=True))  # tokens that a row can hold
    # Per layer: its sliding window where it is a ring, else None.
    windows: tuple[int | None, ...] = dataclasses.field(metadata=dict(static=True))

    @property
    def dtype(self) -> str:
        """As `init_cache` was given it."""
        return self.k[0].name if isinstance(self.k[0], QuantizedKV) else self.k[0].dtype.name

    def is_ring(self, layer: int) -> bool:
        return self.k[layer].shape[2] < self.capacity

    def has_spare(self, layer: int) -> bool:
        """Whether the capacity was rounded up: slots past it stay empty."""
        return self.k[layer].shape[2] > self.capacity


def init_cache(config: ModelConfig, batch: int = 1, capacity: int = 256, dtype: Any = None) -> KVCache:
    """An empty cache. A layer with a sliding window keeps window + `LARGEST_CALL` - 1 slots, rounded up, if
    that is less than the capacity.

    Args:
        config: the model.
        batch: rows (B).
        capacity: tokens each row can hold; S is that, rounded up to a multiple of 8.
        dtype: of K and V, or "int8", "int4" or "gear" (see kv.py); None: float32 on CPU, bfloat16 on GPU and
            TPU.

    Raises:
        InputError: batch or capacity below 1; more than the memory there is; or, with rope type `dynamic` or
            `longrope`, a capacity above the original maximum.
    """
    if batch < 1 or capacity < 1:
        raise InputError(
            f"a cache needs batch and capacity of at least 1, got batch {batch} and capacity {capacity}"
        )
    if config.rope.rope_type == "dynamic" and capacity > config.max_position_embeddings:
        raise InputError(
            f"rope type 'dynamic' changes its frequencies beyond {config.max_position_embeddings} tokens, so"
            f" cached keys would no longer fit: a cache of capacity {capacity} is not supported, shorten the"
            " prompt or generate fewer tokens"
        )
    limit = config.rope.switches_at
    if limit is not None and capacity > limit:
        raise InputError(
            f"rope type 'longrope' changes its factors beyond {limit} tokens, so cached keys would no longer"
            f" fit: for a cache of capacity {capacity}, fix them by with_fixed_rope, as generate does"
        )
    quantized = isinstance(dtype, str) and dtype in KV_BITS
    dtype = dtype if quantized else resolve_dtype(dtype)
    check_memory(
        cache_bytes(config, batch, capacity, dtype),
        f"keys and values of {batch} rows of {capacity} tokens",
        "ask for less capacity, fewer rows, or a smaller cache dtype",
    )

    def layer(window: int | None) -> jax.Array | QuantizedKV:
        shape = (batch, config.num_key_value_heads, _slots(window, capacity), config.head_dim)
        return empty(shape, dtype) if quantized else jnp.zeros(shape, dtype)

    k, v = (tuple(layer(window) for window in config.layer_windows) for _ in "kv")
    windows = tuple(window if is_ring(window, capacity) else None for window in config.layer_windows)
    zeros_B = jnp.zeros(batch, jnp.int32)
    return KVCache(
        k,
        v,
        zeros_B,
        jnp.zeros(batch, bool),
        jnp.zeros(batch, jnp.int32) if any(windows) else None,
        capacity,
        windows,
    )


def cache_bytes(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> int:
    """Bytes of the keys and values that `init_cache` makes; dtype: a float type or a name in `KV_BITS`."""
    slots = sum(_slots(window, capacity) for window in config.layer_windows)
    return 2 * batch * config.num_key_value_heads * slots * vector_bytes(config.head_dim, dtype)


def _slots(window: int | None, capacity: int) -> int:
    """S of a layer with that sliding window; fewer than the capacity: it is a ring."""
    all_slots = -(-capacity // _MULTIPLE) * _MULTIPLE
    if window is None:
        return all_slots
    return min(all_slots, -(-(window + LARGEST_CALL - 1) // _RING_MULTIPLE) * _RING_MULTIPLE)


def is_ring(window: int | None, capacity: int) -> bool:
    """Whether a layer with that sliding window keeps a ring in a cache of that capacity."""
    return _slots(window, capacity) < capacity


def append(
    cache: KVCache, layer: int, k_BTKH: jax.Array, v_BTKH: jax.Array, num_tokens_B: jax.Array
) -> KVCache:
    """Writes the first num_tokens_B[b] of T new keys and values of one layer behind the row's length;
    `advance` then counts them.

    Padding is never written; what lies past the capacity is dropped (and flagged by `advance`).

    Raises:
        InputError: T is above the capacity, or above what a ring can take at once.
    """
    T = k_BTKH.shape[1]
    if T > cache.capacity:
        raise InputError(
            f"{T} tokens in one call exceed the cache's capacity {cache.capacity}: raise capacity"
        )
    write = _write if cache.length_B.shape[0] > 1 else _write_single
    if cache.has_spare(layer):
        num_tokens_B = jnp.minimum(num_tokens_B, cache.capacity - cache.length_B)
    if cache.is_ring(layer):
        write = partial(_write_ring, cache.capacity)
        window: Any = cache.windows[layer]  # every ring has one
        if T > (most := cache.k[layer].shape[2] - window + 1):
            raise InputError(
                f"{T} tokens in one call exceed the {most} that a layer with a sliding window takes at once:"
                " use prefill"
            )
    k, v = (
        (
            *old[:layer],
            _stored(write, old[layer], jnp.swapaxes(new, 1, 2), cache.length_B, num_tokens_B),
            *old[layer + 1 :],
        )
        for old, new in ((cache.k, k_BTKH), (cache.v, v_BTKH))
    )
    return dataclasses.replace(cache, k=k, v=v)


def advance(cache: KVCache, num_tokens_B: jax.Array) -> KVCache:
    """Counts num_tokens_B tokens per row as held, once every layer has appended them."""
    length_B = cache.length_B + num_tokens_B
    overflow_B = cache.overflow_B | (length_B > cache.capacity)
    length_B = jnp.minimum(length_B, cache.capacity)
    reached_B = None if cache.reached_B is None else jnp.maximum(cache.reached_B, length_B)
    return dataclasses.replace(cache, length_B=length_B, overflow_B=overflow_B, reached_B=reached_B)


def held(cache: KVCache, layer: int, num_tokens_B: jax.Array) -> jax.Array:
    """int32 [B]: the length below which a layer's slots count once num_tokens_B more are appended."""
    length_B = cache.length_B + num_tokens_B
    return jnp.minimum(length_B, cache.capacity) if cache.has_spare(layer) else length_B


def read(cache: KVCache, layer: int) -> tuple[jax.Array | QuantizedKV, jax.Array | QuantizedKV]:
    """K and V of one layer, [B, K, S, H] (perhaps quantized), position p in slot p % S; at or past the row's
    length they are undefined.
    """
    return cache.k[layer], cache.v[layer]


def truncate(cache: KVCache, length_B: ArrayLike) -> KVCache:
    """Forgets what lies at or past a length: what is appended next takes its place.

    Outside a trace it waits for the device. Under a caller's jit a negative length means 0.

    Args:
        cache: stays as it is; the result shares its keys and values.
        length_B: tokens that each row keeps, int [B], or one number for all; more than it holds changes
            nothing.

    Raises:
        InputError: no whole number of at least 0, or neither one nor one per row; a ring has overwritten what
            a row of that length sees (under a caller's jit: flagged in `overflow_B`).
    """
    if not isinstance(cache, KVCache):
        raise InputError(f"cache must be a KVCache, as init_cache gives, got {shown(cache)}")
    new_B = _shorter(cache, length_B)
    if cache.reached_B is None:
        return dataclasses.replace(cache, length_B=new_B)
    remembers_B = remembered(cache, new_B)
    if not isinstance(remembers_B, jax.core.Tracer) and not np.all(remembers_B):
        b, least = int(np.argmin(remembers_B)), min(slots - window + 1 for slots, window in _rings(cache))
        raise InputError(
            f"row {b} cannot go back from {cache.reached_B[b]} to {new_B[b]} tokens: its layers with a"
            f" sliding window remember what it takes to go back {least}; start again from 0"
        )
    return dataclasses.replace(
        cache,
        length_B=new_B,
        overflow_B=cache.overflow_B | ~remembers_B,
        reached_B=jnp.where(new_B == 0, 0, cache.reached_B),  # a row that starts again sees nothing of before
    )


def _shorter(cache: KVCache, length_B: Any) -> jax.Array:
    """int32 [B]: each row's length, at most length_B."""
    traced, B = isinstance(length_B, jax.core.Tracer), len(cache.length_B)
    given_B = length_B if traced else np.asarray(length_B)
    whole = jnp.issubdtype(given_B.dtype, jnp.integer) and given_B.shape in ((), (B,))
    if not whole or (not traced and given_B.min() < 0):
        raise InputError(
            f"truncate needs lengths of at least 0, one for all {B} rows or one for each, got {length_B}"
        )
    # Before it is made int32: a length beyond would wrap.
    given_B = given_B if traced else np.minimum(given_B, cache.capacity).astype(np.int32)
    return jnp.clip(given_B, 0, cache.length_B).astype(jnp.int32)


def remembered(cache: KVCache, length_B: Any) -> Any:
    """bool [B]: whether rows cut to length_B still hold all that their next tokens see; only a ring
    forgets.
    """
    if cache.reached_B is None:
        return np.ones(len(cache.length_B), bool)
    holds_B: Any = True
    for slots, window in _rings(cache):
        holds_B &= jnp.maximum(length_B - window + 1, 0) >= cache.reached_B - slots
    return (length_B == 0) | holds_B


def _rings(cache: KVCache) -> set[tuple[int, int]]:
    """Slots and window of every layer that is a ring."""
    return {(k.shape[2], window) for k, window in zip(cache.k, cache.windows, strict=True) if window}


def reorder(cache: KVCache, index_B: jax.Array) -> KVCache:
    """Row b of the result is row index_B[b]: beams and answers that share a prompt."""
    return jax.tree.map(lambda leaf: leaf[index_B], cache)


def reorder_tail(cache: KVCache, index_B: jax.Array, first: jax.Array, count: int) -> KVCache:
    """`reorder` for rows whose length, and whose tokens outside positions first … first + count - 1, are
    those of row index_B[b] already.

    It moves that part only; one that would leave the cache is moved back, as `dynamic_slice` does, onto
    positions that agree anyway.
    """

    def move(leaf_BKSH: jax.Array) -> jax.Array:
        if leaf_BKSH.shape[2] < cache.capacity:  # a ring is short, and the part might run over its end
            return leaf_BKSH[index_B]
        tail = lax.dynamic_slice_in_dim(leaf_BKSH, first, min(count, cache.capacity), 2)
        return lax.dynamic_update_slice_in_dim(leaf_BKSH, tail[index_B], first, 2)

    reached_B = None if cache.reached_B is None else cache.reached_B[index_B]
    k, v = (tuple(by_slot(move, layer) for layer in layers) for layers in (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v, reached_B=reached_B)


def _stored(
    write: Any,
    old: jax.Array | QuantizedKV,
    new_BKTH: jax.Array,
    length_B: jax.Array,
    num_tokens_B: jax.Array,
) -> Any:
    if not isinstance(old, QuantizedKV):
        return write(old, new_BKTH.astype(old.dtype), length_B, num_tokens_B)
    new = quantize(new_BKTH, old, jnp.where(length_B == 0, num_tokens_B, 0))
    return by_slot(lambda new, old: write(old, new, length_B, num_tokens_B), new, old)


def _write_row(old_KSH: jax.Array, new_KTH: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    # dynamic_update_slice moves a slice that would leave the array; moving the new rows along keeps each at
    # its own slot.
    slots, tokens = old_KSH.shape[1], new_KTH.shape[1]
    at = jnp.minimum(start, slots - tokens)
    slot_T = (at + jnp.arange(tokens))[:, None]
    kept = lax.dynamic_slice_in_dim(old_KSH, at, tokens, 1)
    moved = new_KTH if tokens == 1 else jnp.roll(new_KTH, start - at, 1)
    written = jnp.where((slot_T >= start) & (slot_T < start + count), moved, kept)
    return lax.dynamic_update_slice_in_dim(old_KSH, written, at, 1)


def _write(
    old_BKSH: jax.Array, new_BKTH: jax.Array, length_B: jax.Array, num_tokens_B: jax.Array
) -> jax.Array:
    if new_BKTH.shape[2] > 1:
        return jax.vmap(_write_row)(old_BKSH, new_BKTH, length_B, num_tokens_B)
    slot_B = jnp.where(num_tokens_B > 0, length_B, old_BKSH.shape[2])
    return old_BKSH.at[jnp.arange(len(slot_B)), :, slot_B].set(new_BKTH[:, :, 0], mode="drop")


def _write_single(old: jax.Array, new: jax.Array, length_B: jax.Array, num_tokens_B: jax.Array) -> jax.Array:
    """One row needs no scatter."""
    return _write_row(old[0], new[0], length_B[0], num_tokens_B[0])[None]


def _write_ring(
    capacity: int, old_BKSH: jax.Array, new_BKTH: jax.Array, length_B: jax.Array, num_tokens_B: jax.Array
) -> jax.Array:
    slots, t_T = old_BKSH.shape[2], jnp.arange(new_BKTH.shape[2])
    position_BT = length_B[:, None] + t_T
    kept_BT = (t_T < num_tokens_B[:, None]) & (position_BT < capacity)
    slot_BT = jnp.where(kept_BT, position_BT % slots, slots)
    return old_BKSH.at[jnp.arange(len(old_BKSH))[:, None], :, slot_BT].set(
        jnp.swapaxes(new_BKTH, 1, 2), mode="drop"
    )
