"""Keys and values of a layer side by side in one array, as TPUs store them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from .. import kernels_pallas
from ..kernels_pallas.key_layouts import (
    SideBySide,
    dequantize,
    join,
    pack_scale,
    quantize,
    separate,
    unpack_scale,
)
from .quantized_kv import QuantizedKV
from .stored_kv import StoredKV, quantized_dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class SideBySideKV(StoredKV):
    """K and V of one layer in one array, as the `SideBySide` of kernels."""

    values: jax.Array  # [B, K, S, 2H]: keys, then values; float numbers or uint8 levels
    scale: jax.Array | None  # float32, of levels: as `SideBySide.scale`

    @classmethod
    def serves(cls, dtype: Any) -> bool:
        """Returns True if new caches of this process store keys and values side by side. This holds on TPUs,
        in a float type or "int8": no TPU kernel reads the other formats. Like the choice of kernels, the
        result does not depend on the device of a call.
        """
        if not _is_int8(dtype) and quantized_dtype(dtype) is not None:
            return False
        return kernels_pallas.device_impl().impl == "tpu"

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any) -> Self:
        """Returns zeros. shape: [B, K, S, H] of the keys."""
        (B, K, S, H) = shape
        if _is_int8(dtype):
            return cls(jnp.zeros((B, K, S, 2 * H), jnp.uint8), pack_scale(jnp.zeros((B, K, S, 4))))
        return cls(jnp.zeros((B, K, S, 2 * H), dtype), None)

    @staticmethod
    def pair_bytes(width: int, dtype: Any) -> int:
        """Returns the bytes of one key and its value."""
        if _is_int8(dtype):
            return 2 * width + 4 * 4
        return 2 * width * jnp.dtype(dtype).itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, K, S, H] of the keys."""
        return (*self.values.shape[:-1], self.values.shape[-1] // 2)

    @property
    def name(self) -> str:
        return self.dtype.name if self.scale is None else "int8"

    def map_slots(self, function: Callable, *others: Self) -> Self:
        values = function(*(y.values for y in (self, *others)))
        if self.scale is None:
            return dataclasses.replace(self, values=values)
        scales: Any = (y.scale for y in (self, *others))
        scale = pack_scale(function(*map(unpack_scale, scales)))
        return dataclasses.replace(self, values=values, scale=scale)

    def encode(self, *x_BKTH: jax.Array, first_B: jax.Array | None = None) -> Self:
        pair: Any = x_BKTH if self.scale is None else [quantize(x, 8) for x in x_BKTH]
        return self.with_kernel_array(join(*pair))

    def decode(self) -> tuple[jax.Array, jax.Array]:
        pair: Any = separate(self.kernel_array())
        if self.scale is None:
            return pair
        of_k, of_v = (dequantize(x, self.shape[-1]) for x in pair)
        return of_k, of_v

    def kernel_array(self) -> SideBySide:
        return SideBySide(self.values, self.scale)

    def separate(self) -> tuple[Any, Any]:
        pair: Any = separate(self.kernel_array())
        if self.scale is None:
            return pair
        # The scale was rounded to float16 before it was stored.
        of_k, of_v = (QuantizedKV(x.values, x.scale.astype(jnp.float16), 8) for x in pair)
        return of_k, of_v

    def join(self, k: Any, v: Any) -> Self:
        pair = (k, v) if self.scale is None else (k.kernel_array(), v.kernel_array())
        return self.with_kernel_array(join(*pair))


def _is_int8(dtype: Any) -> bool:
    return isinstance(dtype, str) and dtype == "int8"
