"""Storage of the keys and values of a layer: cache dtypes, and the operations of layer caches on any of them.

A layer cache has a pair (k, v). Each is an array, or a `StoredKV`, whose kinds are plugged in by name. In
some caches k has both, and v is None. The functions here take any of these, so layer caches need not know
which one they have.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import ShortRepr
from ..registry import plugin
from ..weights.params import resolve_dtype


@dataclasses.dataclass(frozen=True, repr=False)
class StoredKV(ShortRepr):
    """Keys or values of one layer, or both, that are not one array of floats. A kind is a pytree, and has a
    `CacheDtype`.
    """

    values: Any  # [B, K, S, ...]
    scale: Any

    @property
    def name(self) -> str:
        """Its dtype, as `init_cache` takes it."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, K, S, H] of the keys or values."""
        raise NotImplementedError

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of `values`."""
        return self.values.dtype

    def map_slots(self, function: Callable, *others: Self) -> Self:
        """Runs `map_slots` of this kind."""
        parts = {name: function(*(getattr(y, name) for y in (self, *others))) for name in ("values", "scale")}
        return dataclasses.replace(self, **parts)

    def of_rows(self, cut: Callable) -> Self:
        """Applies `cut` to the arrays that belong to a row and have no slots. `cut` takes an array and its
        number of slots.
        """
        return self

    def encode(self, *x_BKTH: jax.Array, first_B: jax.Array | None = None) -> Self:
        """Returns new keys or values, or both, in this form, with T slots. first_B: the number of the T
        tokens that are the first of their row. None: none.
        """
        raise NotImplementedError

    def decode(self) -> Any:
        """Returns the numbers, float32 [B, K, S, H]. If it stores keys and values, it returns both."""
        raise NotImplementedError

    def kernel_array(self) -> Any:
        """Returns the array that kernels read. None: there are no kernels for this kind."""
        return None

    def with_kernel_array(self, array: Any) -> Self:
        """Returns the keys or values whose `kernel_array` is this array."""
        return dataclasses.replace(self, values=array.values, scale=array.scale)

    def separate(self) -> tuple[Any, Any]:
        """Returns keys and values separately, if it has both."""
        raise NotImplementedError

    def join(self, k: Any, v: Any) -> Self:
        """Joins the pair that `separate` returned, and returns it in this form."""
        raise NotImplementedError


Stored = jax.Array | StoredKV


class CacheDtype(NamedTuple):
    """A dtype of keys and values. Those that are no float type have a line in `plugins.TABLE`."""

    name: str
    empty: Callable[[tuple[int, ...]], Any]  # zeros [B, K, S, H]
    vector_bytes: Callable[[int], int]  # of one key or value of that width
    check_width: Callable[[int], None] = lambda width: None  # raises InputError
    chunk: int | None = None  # tokens that a prefill chunk must have; None: any number
    page_obstacle: str | None = None  # why pages cannot hold it
    kernel_obstacle: str | None = None  # why no kernel reads it


def quantized_dtype(dtype: Any) -> CacheDtype | None:
    """Returns the line of the table, or None for a float type."""
    return plugin("cache dtype", dtype) if isinstance(dtype, str) else None


def cache_dtype_of(dtype: Any) -> CacheDtype:
    """Returns a name in the table, or a float type."""
    if (found := quantized_dtype(dtype)) is not None:
        return found
    dtype = jnp.dtype(dtype)
    return CacheDtype(dtype.name, partial(jnp.zeros, dtype=dtype), lambda width: width * dtype.itemsize)


def resolve_cache_dtype(dtype: Any) -> Any:
    """Returns a name in the table, or the float type. None: the dtype of this device. Raises InputError for
    other dtypes.
    """
    return resolve_dtype(dtype) if quantized_dtype(dtype) is None else dtype


def check_head_dim(width: int, dtype: Any) -> None:
    """Raises InputError if that dtype, None for any float type, cannot store vectors of that width."""
    if (found := quantized_dtype(dtype)) is not None:
        found.check_width(width)


def stores_side_by_side(dtype: Any) -> bool:
    """Returns True if new caches of this process store keys and values side by side."""
    kind = plugin("cache form", "side by side")
    return kind is not None and kind.serves(dtype)


def empty_pair(shape: tuple[int, ...], dtype: Any, side_by_side: bool) -> tuple[Any, Any]:
    """Returns keys and values that are zeros, [B, K, S, H]."""
    if side_by_side:
        return plugin("cache form", "side by side").empty(shape, dtype), None
    empty = cache_dtype_of(dtype).empty
    return empty(shape), empty(shape)


def pair_bytes(width: int, dtype: Any) -> int:
    """Returns the bytes of one key and its value in a new cache of this process. dtype: see `empty_pair`."""
    if stores_side_by_side(dtype):
        return plugin("cache form", "side by side").pair_bytes(width, dtype)
    return 2 * cache_dtype_of(dtype).vector_bytes(width)


def dtype_name(x: Stored) -> str:
    """Returns the dtype argument of `init_cache`, as a name."""
    return x.name if isinstance(x, StoredKV) else x.dtype.name


def is_quantized_kv(x: Stored) -> bool:
    """Returns True if the keys or values have a dtype that is no float type."""
    return quantized_dtype(dtype_name(x)) is not None


def dequantize_kv(x: Stored) -> Any:
    """Returns float32 keys or values. An array is returned as it is."""
    return x.decode() if isinstance(x, StoredKV) else x


def map_slots(function: Callable, x: Any, *others: Any) -> Any:
    """Applies a function to each array of x that has slots, and of others like it. The function gets arrays
    with slots on axis 2. Arrays without slots stay the arrays of x. None stays None.
    """
    if x is None:
        return None
    return x.map_slots(function, *others) if isinstance(x, StoredKV) else function(x, *others)


def slice_slots(x: Stored, at: Any, width: int, row: Any) -> Any:
    """Returns `width` slots from slot `at` on, of one row. row: None: all rows."""
    first, rows = (0, x.shape[0]) if row is None else (row, 1)

    def cut(y: jax.Array, at: Any, width: int) -> jax.Array:
        start = (np.int32(i) if isinstance(i, int) else i.astype(np.int32) for i in (first, 0, at, 0))
        return lax.dynamic_slice(y, (*start,), (rows, y.shape[1], width, y.shape[3]))

    y = map_slots(partial(cut, at=at, width=width), x)
    return y.of_rows(lambda z: cut(z, 0, z.shape[2])) if isinstance(y, StoredKV) else y


def encode_new(old: Stored, *x_BTKH: jax.Array, start_B: jax.Array, num_tokens_B: jax.Array) -> Any:
    """Returns new keys or values, or both, as `old` is stored: num_tokens_B real ones from position start_B
    on.
    """
    parts = [jnp.swapaxes(x, 1, 2) for x in x_BTKH]
    if not isinstance(old, StoredKV):
        return parts[0]
    return old.encode(*parts, first_B=jnp.where(start_B == 0, num_tokens_B, 0))
