"""How a layer stores its keys and values: in two arrays, or on TPUs side by side in one.

A layer cache has a pair (k, v). Each is an array or `QuantizedKV`; or k is a `SideBySideKV`, which has both,
and v is None. The functions here take any of these, so layer caches need not know which they have.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import kernels_pallas
from kernels_pallas import Levels
from kernels_pallas.key_layouts import (
    SideBySide,
    dequantize,
    join,
    pack_scale,
    quantize,
    separate,
    unpack_scale,
)

from ..formatting import ShortRepr
from .quantized_kv import KV_BITS, QuantizedKV, dequantize_kv, empty_kv, quantize_kv, vector_bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class SideBySideKV(ShortRepr):
    """K and V of one layer in one array, as the `SideBySide` of kernels."""

    values: jax.Array  # [B, K, S, 2H]: keys, then values; float numbers or uint8 levels
    scale: jax.Array | None  # float32, of levels: as `SideBySide.scale`

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, K, S, H] of the keys."""
        return (*self.values.shape[:-1], self.values.shape[-1] // 2)

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype

    @property
    def name(self) -> str:
        return self.dtype.name if self.scale is None else "int8"


Stored = jax.Array | QuantizedKV | SideBySideKV


def stores_side_by_side(dtype: Any) -> bool:
    """Whether new caches of this process store keys and values side by side: on TPUs, in a float type or
    "int8". No TPU kernel reads the other formats.

    Like the choice of kernels, this is a property of the process, not of the device of a call.
    """
    return dtype not in ("int4", "gear") and kernels_pallas.device_impl().impl == "tpu"


def empty_pair(shape: tuple[int, ...], dtype: Any, side_by_side: bool) -> tuple[Any, Any]:
    """Keys and values that are zeros. shape: [B, K, S, H]; dtype: a name in `KV_BITS`, or a float type."""
    if not side_by_side:
        return empty_kv(shape, dtype), empty_kv(shape, dtype)
    (B, K, S, H) = shape
    if dtype == "int8":
        return SideBySideKV(jnp.zeros((B, K, S, 2 * H), jnp.uint8), pack_scale(jnp.zeros((B, K, S, 4)))), None
    return SideBySideKV(jnp.zeros((B, K, S, 2 * H), dtype), None), None


def pair_bytes(width: int, dtype: Any) -> int:
    """Bytes of one key and its value in a new cache of this process. dtype: as in `empty_pair`."""
    if dtype == "int8" and stores_side_by_side(dtype):
        return 2 * width + 4 * 4
    return 2 * vector_bytes(width, dtype)


def dtype_name(x: Stored) -> str:
    """The dtype argument of `init_cache`, as a name."""
    return x.name if isinstance(x, QuantizedKV | SideBySideKV) else x.dtype.name


def is_quantized_kv(x: Stored) -> bool:
    """Whether it has levels of 8 or 4 bits."""
    return dtype_name(x) in KV_BITS


def map_slots(function: Callable, x: Any, *others: Any) -> Any:
    """Applies a function to each array of x, and of others like it, that has slots; the function has them on
    axis 2. The basis is x's. None stays None.
    """
    if x is None:
        return None
    if isinstance(x, SideBySideKV):
        values = function(*(y.values for y in (x, *others)))
        if x.scale is None:
            return SideBySideKV(values, None)
        return SideBySideKV(values, pack_scale(function(*(unpack_scale(y.scale) for y in (x, *others)))))
    if not isinstance(x, QuantizedKV):
        return function(x, *others)
    parts = {name: function(*(getattr(y, name) for y in (x, *others))) for name in ("values", "scale")}
    return dataclasses.replace(x, **parts)


def slice_slots(x: Stored, at: Any, width: int, row: Any) -> Any:
    """`width` slots from slot `at` on, of one row; row None: of all rows."""
    first, rows = (0, x.shape[0]) if row is None else (row, 1)

    def cut(y: jax.Array, at: Any, width: int) -> jax.Array:
        return lax.dynamic_slice(y, (first, 0, at, 0), (rows, y.shape[1], width, y.shape[3]))

    y = map_slots(partial(cut, at=at, width=width), x)
    if isinstance(y, QuantizedKV) and y.basis is not None:
        y = dataclasses.replace(y, basis=cut(y.basis, 0, y.basis.shape[2]))
    return y


def append_pair(  # noqa: PLR0913
    k: Stored, v: Any, new: tuple[Any, Any], start_B: jax.Array, num_tokens_B: jax.Array, write: Callable
) -> tuple[Any, Any]:
    """The pair with new keys and values.

    Args:
        k, v: the stored pair.
        new: keys and values [B, T, K, H].
        start_B, num_tokens_B: the position of the first of T tokens, and how many are real.
        write: writes [B, K, T, X] into an array of slots; called with both and the two above.
    """

    def append(old: Stored, *new_BTKH: jax.Array) -> Any:
        parts = [jnp.swapaxes(x, 1, 2) for x in new_BTKH]
        if isinstance(old, SideBySideKV):
            pair: Any = [quantize(x, 8) for x in parts] if is_quantized_kv(old) else parts
            encoded: Any = SideBySideKV(*join(*pair))
        elif isinstance(old, QuantizedKV):
            encoded = quantize_kv(parts[0], old, jnp.where(start_B == 0, num_tokens_B, 0))
        else:
            (encoded,) = parts
        return map_slots(lambda x, y: write(y, x.astype(y.dtype), start_B, num_tokens_B), encoded, old)

    return (append(k, *new), None) if v is None else (append(k, new[0]), append(v, new[1]))


def read_pair(k: Stored, v: Any, cut: Callable) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, K, S, H] of what `cut` takes of a stored array, dequantized."""
    if not isinstance(k, SideBySideKV):
        return dequantize_kv(cut(k)), dequantize_kv(cut(v))
    pair: tuple[Any, Any] = separate(kernel_array(cut(k)))
    if not is_quantized_kv(k):
        return pair
    of_k, of_v = (dequantize(x, k.shape[-1]) for x in pair)
    return of_k, of_v


def separate_pair(k: Stored, v: Any) -> tuple[Any, Any]:
    """The pair in two arrays or `QuantizedKV`, as other devices store it."""
    if not isinstance(k, SideBySideKV):
        return k, v
    pair: tuple[Any, Any] = separate(kernel_array(k))
    if not is_quantized_kv(k):
        return pair
    # The scale was rounded to float16 before it was stored.
    of_k, of_v = (QuantizedKV(x.values, x.scale.astype(jnp.float16), None, 8) for x in pair)
    return of_k, of_v


def join_pair(k: Any, v: Any, like: Stored) -> tuple[Any, Any]:
    """The pair of what `separate_pair` returned, as `like` is stored."""
    if not isinstance(like, SideBySideKV):
        return k, v
    return SideBySideKV(*join(kernel_array(k), kernel_array(v))), None


def kernel_array(x: Any) -> Any:
    """Keys or values, or both, as kernels read them; None in GEAR's format, which no kernel reads."""
    if isinstance(x, SideBySideKV):
        return SideBySide(x.values, x.scale)
    if not isinstance(x, QuantizedKV):
        return x
    return Levels(x.values, x.scale) if x.basis is None else None


def with_kernel_array(x: Any, array: Any) -> Any:
    """What has this array as its `kernel_array`."""
    if isinstance(x, SideBySideKV):
        return SideBySideKV(*array)
    if not isinstance(x, QuantizedKV):
        return array
    return dataclasses.replace(x, values=array.values, scale=array.scale)
