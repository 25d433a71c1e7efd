"""The KV cache of a model: a layer cache for each layer, and the length of each row."""

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from ..annotations import Dtype
from ..checks import array_module
from ..config.model_config import ModelConfig, check_config
from ..config.unsupported import check_causal
from ..errors import ContextLengthError, InputError, ShortRepr
from ..memory_plan import MemoryPlan
from ..modes import in_default_modes
from ..old_names import OldAttribute, renamed_arguments
from .contiguous import Contiguous
from .layer_cache import LayerCache
from .stored_kv import Stored, resolve_cache_dtype

if TYPE_CHECKING:
    from .paged import RoutePages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class KVCache(ShortRepr):
    """Keys and values of every layer, and how much of each row is filled.

    Attributes:
        layers: a `LayerCache` for each mixer that has its own, in order.
        length_B: int32: tokens cached in each row; the next one has this position.
        overflow_B: bool: tokens beyond the capacity were dropped, or a layer no longer has what a truncated
            row needs.
        reached_B: int32: the longest each row has been; None without rings and states.
        longest_B: int32: tokens that each row may come to have, which decide on longrope's factors; None:
            they are fixed.
        routed_experts: `RoutePages` with the experts that the tokens used; None: they are not recorded.
    """

    layers: tuple[LayerCache, ...]
    length_B: jax.Array
    overflow_B: jax.Array
    reached_B: jax.Array | None
    longest_B: jax.Array | None = dataclasses.field(default=None, repr=False)
    routed_experts: "RoutePages | None" = dataclasses.field(default=None, repr=False)
    routes = OldAttribute("routed_experts")

    @property
    def kv_layers(self) -> tuple[Contiguous, ...]:
        """The layers with keys and values."""
        return tuple(cast(Contiguous, layer) for layer in self.layers if layer.has_keys)

    @property
    def k(self) -> tuple[Stored, ...]:
        """The keys of each layer that has some; in caches side by side (TPUs) its values too."""
        return tuple(layer.k for layer in self.kv_layers)

    @property
    def v(self) -> tuple[Stored | None, ...]:
        """The values of each layer; None where `k` has them."""
        return tuple(layer.v for layer in self.kv_layers)

    @property
    def dtype(self) -> str:
        """The dtype argument of `init_cache`, as a name."""
        return next((layer.dtype_name for layer in self.kv_layers), "float32")

    @property
    def fits(self) -> tuple[tuple, ...]:
        """Of each layer the key heads and head_dim, or the shapes of its state, of models that can use it."""
        return tuple(layer.fits for layer in self.layers)

    @property
    def capacity(self) -> int:
        """The most tokens that a row can hold."""
        return self.layers[0].capacity

    @property
    def most_at_once(self) -> int:
        """The most tokens that one call may append to a row; with a ring fewer than the capacity."""
        return min(layer.most_at_once for layer in self.layers)

    def truncate(self, length_B: ArrayLike) -> "KVCache":
        """Returns the cache with shorter rows: the next tokens overwrite what comes after. Both caches share
        their keys and values.

        Outside a trace it waits for the device if a layer is a ring or has a state. Under your jit a negative
        length means 0.

        Args:
            length_B: tokens that each row keeps, int [B], or one number for all rows. A longer length changes
                nothing.

        Raises:
            InputError: the lengths are not whole numbers of at least 0, one or one per row; or a ring has
                overwritten keys that a row of that length needs (under your jit: flagged in `overflow_B`).
        """
        from .truncation import truncate  # optional: truncated rows

        return truncate(self, length_B)

    def repeat_rows(self, n: int) -> "KVCache":
        """Returns the cache with each row n times in succession, for several answers to a prompt."""
        from .truncation import repeat_rows  # optional: truncated rows

        return repeat_rows(self, n)


@renamed_arguments(batch="rows")
@in_default_modes
def init_cache(
    config: ModelConfig,
    rows: int = 1,
    capacity: int = 256,
    dtype: Dtype | None = None,
    mesh: Mesh | None = None,
) -> KVCache:
    """An empty cache. A sliding-window layer keeps window + `RING_SLACK` - 1 slots, rounded up, if that is
    less than the capacity.

    Args:
        config: of the model.
        rows: B, the number of sequences (elsewhere: batch_size).
        capacity: tokens that each row can hold; S is the capacity rounded up to a multiple of 8, or of 128 in
            a process with a TPU.
        dtype: of K and V: a float type, or a name in the table of cache dtypes (`plugins.TABLE`), such as
            "int8"; None: float32 on CPU, bfloat16 on GPU and TPU.
        mesh: keys and values are sharded over its axis "model" by key heads, as the parameters are, and by
            rows over "data" if it has that axis.

    Raises:
        InputError: rows or capacity below 1; a model without caches; too little memory; or, with rope type
            `dynamic` or `longrope`, a capacity above the original maximum.
    """
    check_config(config)
    check_causal(config, "a KV cache")
    if rows < 1 or capacity < 1:
        raise InputError(
            f"a cache needs rows and capacity of at least 1, got rows {rows} and capacity {capacity}"
        )
    if not config.cached_mixers:
        raise InputError("no layer of this model has a cache: call forward without one")
    if config.rope.rope_type == "dynamic" and capacity > config.max_position_embeddings:
        raise InputError(
            f"rope type 'dynamic' changes its frequencies beyond {config.max_position_embeddings} tokens,"
            f" and cached keys would keep the old ones: a cache of capacity {capacity} is not supported,"
            " shorten the prompt or generate fewer tokens"
        )
    limit = config.rope.switches_at
    if limit is not None and capacity > limit:
        raise InputError(
            f"rope type 'longrope' changes its factors beyond {limit} tokens, and cached keys would keep the"
            f" old ones: for a cache of capacity {capacity}, fix them by with_fixed_rope, as generate does"
        )
    fraction = 1.0  # of keys and values, in one memory
    replicated = None
    if mesh is not None:
        from ..sharding import cache_mesh  # optional: meshes

        mesh, fraction, replicated = cache_mesh(mesh)
    dtype = resolve_cache_dtype(dtype)
    xp = array_module(rows)
    if xp is np:  # else the size is not known
        plan = MemoryPlan(dict(cache=cache_bytes(config, rows, capacity, dtype)), fraction)
        plan.check("ask for less capacity, fewer rows, or a smaller cache dtype")
    layers = empty_layers(config, rows, capacity, dtype, mesh)
    has_limits = any(layer.limits for layer in layers)
    counts = (xp.zeros(rows, kind) for kind in (np.int32, bool, np.int32))
    length_B, overflow_B, reached_B = jax.device_put(tuple(counts), replicated)  # nothing to compile
    return KVCache(layers, length_B, overflow_B, reached_B if has_limits else None)


def empty_layers(
    config: ModelConfig, batch: int, capacity: int, dtype: Any, mesh: Mesh | None = None
) -> tuple[LayerCache, ...]:
    """Returns the empty cache of each mixer that has its own. dtype: the dtype of keys and values, as in
    `cache_dtype_of`.
    """
    return tuple(mixer.empty_cache(batch, capacity, dtype, mesh) for mixer in config.cached_mixers)


def cache_bytes(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> int:
    """Returns the bytes of the layers that `init_cache` makes. dtype: the dtype of keys and values, as in
    `cache_dtype_of`.
    """
    return batch * sum(mixer.row_bytes(capacity, dtype) for mixer in config.cached_mixers)


def state_bytes(config: ModelConfig) -> int:
    """Returns the bytes of one row in the layers that have a state of fixed size, without draft slots."""
    return sum(mixer.row_bytes(0, None) for mixer in config.cached_mixers if not mixer.has_keys)


def check_append(cache: KVCache, tokens: int) -> None:
    """Raises InputError if one call cannot append this number of tokens to a row."""
    if tokens > cache.capacity:
        raise ContextLengthError(
            f"{tokens} tokens in one call exceed the cache's capacity {cache.capacity}: raise capacity"
        )
    if tokens > cache.most_at_once:
        raise InputError(
            f"{tokens} tokens in one call exceed the {cache.most_at_once} that the ring of a sliding-window"
            " layer can take: use prefill"
        )


def update_layers(
    cache: KVCache, layers: tuple[LayerCache, ...], num_tokens_B: jax.Array, routes_BTLU: Any = None
) -> KVCache:
    """Returns the cache with these layers, to which num_tokens_B tokens per row have been appended, and with
    the tokens' routes if it records them.
    """
    recorded = cache.routed_experts and cache.routed_experts.record(routes_BTLU, cache.length_B, num_tokens_B)
    cache = increase_length(cache, num_tokens_B, cache.capacity)
    return dataclasses.replace(cache, layers=layers, routed_experts=recorded)


def increase_length(cache: KVCache, num_tokens_B: jax.Array, capacity: int) -> KVCache:
    """Returns the cache with num_tokens_B added to the lengths of its rows. Its layers stay as they are."""
    length_B = cache.length_B + num_tokens_B
    overflow_B = cache.overflow_B | (length_B > capacity)
    length_B = jnp.minimum(length_B, capacity)
    reached_B = None if cache.reached_B is None else jnp.maximum(cache.reached_B, length_B)
    return dataclasses.replace(cache, length_B=length_B, overflow_B=overflow_B, reached_B=reached_B)


def without_layers(cache: KVCache) -> KVCache:
    """Returns the cache without its layers and routes: only the lengths of its rows."""
    return dataclasses.replace(cache, layers=(), routed_experts=None)


def expected_fits(config: ModelConfig) -> tuple[tuple, ...]:
    """Returns `KVCache.fits` of the caches that the model can use."""
    return tuple(mixer.fits for mixer in config.cached_mixers)


def describe_fits(fits: tuple[tuple, ...]) -> str:
    """Returns the layers of `KVCache.fits` in words, for errors."""
    parts = [f"{len(fits)} layers"]
    for layer in dict.fromkeys(fits):
        of_state = isinstance(layer[0], tuple)
        parts.append(f"states of {layer[-1]}" if of_state else f"{layer[0]} key heads of width {layer[1]}")
    return ", ".join(parts)


def reorder(cache: KVCache, index_B: jax.Array) -> KVCache:
    """Returns the cache whose row b is row index_B[b], for beams, and for answers that share a prompt."""
    rows = jax.tree.map(lambda x_B: x_B[index_B], without_layers(cache))
    return dataclasses.replace(rows, layers=tuple(layer.reorder(index_B) for layer in cache.layers))


def reorder_tail(cache: KVCache, index_B: jax.Array, first: jax.Array, count: int) -> KVCache:
    """Returns the same as `reorder`, if row b is as long as row index_B[b] and differs from it only at
    positions first … first + count - 1.
    """
    reached_B = None if cache.reached_B is None else cache.reached_B[index_B]
    layers = tuple(layer.reorder_tail(index_B, first, count) for layer in cache.layers)
    return dataclasses.replace(cache, layers=layers, reached_B=reached_B)
