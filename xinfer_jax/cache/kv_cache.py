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
    """The KV cache: keys and values of every layer, and the filled length of each row. It is a pytree.

    `init_cache` returns an empty one. `prefill`, `decode_step` and `forward` return it with their tokens
    appended.

    Attributes:
        layers: a `LayerCache` for each mixer that has its own cache, in order.
        length_B: int32: the number of tokens in each row. It is the position of the next token.
        overflow_B: bool: tokens beyond the capacity were dropped, or a layer has lost keys that a truncated
            row needs.
        reached_B: int32: the largest length that each row has had. None: no layer is a ring or has a state.
        longest_B: int32: the length that each row may reach, which decides on the factors of longrope. None:
            the factors are fixed.
        routed_experts: a `RoutePages` with the experts that the tokens used. None: they are not recorded.
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
        """The keys of each layer that has keys. If a cache stores keys and values side by side (TPUs), `k`
        has both.
        """
        return tuple(layer.k for layer in self.kv_layers)

    @property
    def v(self) -> tuple[Stored | None, ...]:
        """The values of each layer. An entry is None if `k` has the values."""
        return tuple(layer.v for layer in self.kv_layers)

    @property
    def dtype(self) -> str:
        """The name of the `dtype` that `init_cache` got."""
        return next((layer.dtype_name for layer in self.kv_layers), "float32")

    @property
    def fits(self) -> tuple[tuple, ...]:
        """The shapes that a model needs to use this cache.

        Each layer has an entry with its key heads and head_dim, or with its state.
        """
        return tuple(layer.fits for layer in self.layers)

    @property
    def capacity(self) -> int:
        """The most tokens that a row can hold."""
        return self.layers[0].capacity

    @property
    def most_at_once(self) -> int:
        """The most tokens that one call can append to a row. With a ring it is less than the capacity."""
        return min(layer.most_at_once for layer in self.layers)

    def truncate(self, length_B: ArrayLike) -> "KVCache":
        """Returns the cache with shorter rows. The next tokens overwrite the rest.

        Both caches share their keys and values. Outside a trace the call waits for the device if a layer is a
        ring or has a state. Under your `jit`, a negative length means 0.

        Args:
            length_B: the number of tokens that each row keeps: int [B], or one number for all rows. A length
                above the present one changes nothing.

        Raises:
            InputError: the lengths are not integers of at least 0.
            InputError: there is not one length, or one per row.
            InputError: a ring has overwritten keys that a row of that length needs. Under your `jit` this is
                flagged in `overflow_B` instead.
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
    """Returns an empty KV cache for a model.

    The cache of a sliding-window layer has window + `RING_SLACK` - 1 slots, rounded up, if that is less than
    the capacity.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> cache = xj.init_cache(model.config, rows=2, capacity=64, dtype="bfloat16")
        >>> cache.capacity, cache.length_B.tolist()
        (64, [0, 0])

    Args:
        config: the config of the model.
        rows: the number B of sequences (other libraries: batch_size).
        capacity: the most tokens that each row can hold. The number S of slots is the capacity rounded up to
            a multiple of 8, or to a multiple of 128 in a process with a TPU.
        dtype: the dtype of keys and values: a float type, or the name of a cache dtype, for example "int8"
            (`plugins.TABLE` lists them). None takes float32 on a CPU, and bfloat16 on a GPU or TPU.
        mesh: a mesh. Keys and values are sharded over its axis "model" by key heads, like the parameters, and
            over its axis "data" by rows, if it has that axis. None does not shard them.

    Raises:
        InputError: `rows` or `capacity` are below 1.
        InputError: the model has no cache.
        InputError: there is too little memory.
        InputError: the rope type is `dynamic` or `longrope`, and the capacity exceeds the original maximum.
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
