"""The KV cache: of every layer one of the kinds of `kinds.py`, and how long each row is."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from ..brief import Brief
from ..config.model_config import ModelConfig
from ..errors import InputError, shown
from ..memory import check_memory
from ..sharding import SAME, check_context, share
from ..weights.layout import checked_mesh
from ..weights.params import resolve_dtype
from .kinds import Contiguous, Ring, slots_of
from .quantized import KV_BITS, QuantizedKV, empty, over_heads, vector_bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class KVCache(Brief):
    """Keys and values of every layer, and how much of each row is filled."""

    layers: tuple[Contiguous, ...]  # L times one of the kinds
    length_B: jax.Array  # int32: tokens held by each row; the next one has this position
    # Bool: a write past the capacity was dropped, or a row was cut to less than its layers remember.
    overflow_B: jax.Array
    reached_B: jax.Array | None  # int32: the longest each row has been; None where no layer forgets

    @property
    def k(self) -> tuple[jax.Array | QuantizedKV, ...]:
        return tuple(layer.k for layer in self.layers)

    @property
    def v(self) -> tuple[jax.Array | QuantizedKV, ...]:
        return tuple(layer.v for layer in self.layers)

    @property
    def dtype(self) -> str:
        """As `init_cache` was given it."""
        k = self.layers[0].k
        return k.name if isinstance(k, QuantizedKV) else k.dtype.name

    @property
    def fits(self) -> tuple[int, int, int]:
        """Layers, key heads and head width of the models that it is for."""
        return len(self.layers), self.k[0].shape[1], self.k[0].shape[3]

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold."""
        return self.layers[0].capacity

    @property
    def most_at_once(self) -> int:
        """Tokens that one call may append to a row: the capacity, or what the shortest ring takes."""
        return min(layer.most_at_once for layer in self.layers)


def init_cache(
    config: ModelConfig, batch: int = 1, capacity: int = 256, dtype: Any = None, mesh: Mesh | None = None
) -> KVCache:
    """An empty cache. A sliding layer keeps window + `RING_SLACK` - 1 slots, rounded up, if that is less.

    Args:
        config, batch: the model, and rows (B).
        capacity: tokens each row can hold; S is that, rounded up to a multiple of 8.
        dtype: of K and V, or "int8", "int4" or "gear"; None: float32 on CPU, bfloat16 on GPU and TPU.
        mesh: over whose axis "model" it lies, by key heads, as the parameters do.

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
    if mesh is not None:
        check_context()
        mesh = checked_mesh(mesh)
    dtype = dtype if isinstance(dtype, str) and dtype in KV_BITS else resolve_dtype(dtype)
    what = f"keys and values of {batch} rows of {capacity} tokens"
    remedy = "ask for less capacity, fewer rows, or a smaller cache dtype"
    check_memory(int(share(mesh) * cache_bytes(config, batch, capacity, dtype)), what, remedy)
    layers = empty_layers(config, batch, capacity, dtype, mesh)
    forgets = any(isinstance(layer, Ring) for layer in layers)
    counts = (np.zeros(batch, kind) for kind in (np.int32, bool, np.int32))
    place = mesh and NamedSharding(mesh, SAME)
    length_B, overflow_B, reached_B = jax.device_put(tuple(counts), place)  # nothing to compile
    return KVCache(layers, length_B, overflow_B, reached_B if forgets else None)


def empty_layers(
    config: ModelConfig, batch: int, capacity: int, dtype: Any, mesh: Mesh | None = None
) -> tuple[Contiguous, ...]:
    """What `init_cache` makes for each layer; dtype: a float type or a name in `KV_BITS`."""
    K = config.num_key_value_heads
    H = config.head_dim
    return tuple(
        _empty_layer((batch, K, slots_of(window, capacity), H), window, capacity, dtype, mesh)
        for window in config.layer_windows
    )


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _empty_layer(
    shape: tuple[int, ...], window: int | None, capacity: int, dtype: Any, mesh: Any
) -> Contiguous:
    k, v = over_heads(tuple(empty(shape, dtype) for _ in "kv"), mesh)
    return (Ring if shape[2] < capacity else Contiguous)(k, v, window, capacity)


def cache_bytes(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> int:
    """Bytes of the keys and values that `init_cache` makes; dtype: a float type or a name in `KV_BITS`."""
    slots = sum(slots_of(window, capacity) for window in config.layer_windows)
    return 2 * batch * config.num_key_value_heads * slots * vector_bytes(config.head_dim, dtype)


def check_call(cache: KVCache, tokens: int) -> None:
    """Raises InputError where one call cannot append so many tokens to a row."""
    if tokens > cache.capacity:
        raise InputError(
            f"{tokens} tokens in one call exceed the cache's capacity {cache.capacity}: raise capacity"
        )
    if tokens > cache.most_at_once:
        raise InputError(
            f"{tokens} tokens in one call exceed the {cache.most_at_once} that a layer with a sliding window"
            " takes at once: use prefill"
        )


def advance(cache: KVCache, layers: tuple[Contiguous, ...], num_tokens_B: jax.Array) -> KVCache:
    """The cache with layers that have appended num_tokens_B more tokens per row."""
    return dataclasses.replace(counted(cache, num_tokens_B, cache.capacity), layers=layers)


def counted(cache: KVCache, num_tokens_B: jax.Array, capacity: int) -> KVCache:
    """Counts num_tokens_B more tokens per row as held."""
    length_B = cache.length_B + num_tokens_B
    overflow_B = cache.overflow_B | (length_B > capacity)
    length_B = jnp.minimum(length_B, capacity)
    reached_B = None if cache.reached_B is None else jnp.maximum(cache.reached_B, length_B)
    return KVCache(cache.layers, length_B, overflow_B, reached_B)


def without_layers(cache: KVCache) -> KVCache:
    """Only how much of each row is filled."""
    return dataclasses.replace(cache, layers=())


def truncate(cache: KVCache, length_B: ArrayLike) -> KVCache:
    """Forgets what lies at or past a length: what is appended next takes its place.

    Outside a trace it waits for the device. Under a caller's jit a negative length means 0.

    Args:
        cache: stays as it is; the result shares its keys and values.
        length_B: tokens that each row keeps, int [B], or one number for all; more changes nothing.

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
        b = int(np.argmin(remembers_B))
        raise InputError(
            f"row {b} cannot go back from {cache.reached_B[b]} to {new_B[b]} tokens: its layers with a"
            f" sliding window remember what it takes to go back {cache.most_at_once}; start again from 0"
        )
    reached_B = jnp.where(new_B == 0, 0, cache.reached_B)  # a row that starts again sees nothing of before
    return KVCache(cache.layers, new_B, cache.overflow_B | ~remembers_B, reached_B)


def _shorter(cache: KVCache, length_B: Any) -> jax.Array:
    """int32 [B]: each row's length, at most length_B."""
    traced = isinstance(length_B, jax.core.Tracer)
    B = len(cache.length_B)
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
    """bool [B]: whether rows cut to length_B hold all that their next tokens see; only a ring forgets."""
    if cache.reached_B is None:
        return np.ones(len(cache.length_B), bool)
    holds_B: Any = True
    for layer in {(layer.slots, layer.window): layer for layer in cache.layers}.values():  # one of each
        holds_B &= layer.remembers(length_B, cache.reached_B)
    return (length_B == 0) | holds_B


def reorder(cache: KVCache, index_B: jax.Array) -> KVCache:
    """Row b of the result is row index_B[b]: beams and answers that share a prompt."""
    rows = jax.tree.map(lambda x_B: x_B[index_B], (cache.length_B, cache.overflow_B, cache.reached_B))
    return KVCache(tuple(layer.reorder(index_B) for layer in cache.layers), *rows)


def reorder_tail(cache: KVCache, index_B: jax.Array, first: jax.Array, count: int) -> KVCache:
    """`reorder` for rows as long as row index_B[b] and like it but at positions first … first + count - 1."""
    reached_B = None if cache.reached_B is None else cache.reached_B[index_B]
    layers = tuple(layer.reorder_tail(index_B, first, count) for layer in cache.layers)
    return dataclasses.replace(cache, layers=layers, reached_B=reached_B)
