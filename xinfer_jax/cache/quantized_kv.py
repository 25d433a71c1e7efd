"""Keys and values in 8 or 4 bits a number, with a step and an offset per head and position."""

import dataclasses
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp

from ..kernels_pallas import Levels
from ..kernels_pallas.key_layouts import from_levels, quantize
from .stored_kv import CacheDtype, StoredKV


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class QuantizedKV(StoredKV):
    """K or V of one layer, [B, K, S, H]: low + step * level."""

    # Levels, uint8 [B, K, S, H]; in 4 bits [B, K, S, H/2] with dimension h in the low half of a byte and
    # h + H/2 in the high half.
    values: jax.Array
    scale: jax.Array  # float16 [B, K, S, 2]: step and low
    bits: int = dataclasses.field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], self.values.shape[-1] * 8 // self.bits)

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def encode(self, *x_BKTH: jax.Array, first_B: jax.Array | None = None) -> Self:
        """Quantizes to nearest, between the smallest and the largest number of each head and position."""
        (x,) = x_BKTH
        return self.with_kernel_array(quantize(x, self.bits))

    def decode(self) -> jax.Array:
        return from_levels(self.values, self.scale, self.bits)

    def kernel_array(self) -> Levels:
        return Levels(self.values, self.scale)


def _empty(shape: tuple[int, ...], bits: int) -> QuantizedKV:
    *others, H = shape
    values = jnp.zeros((*others, H * bits // 8), jnp.uint8)
    return QuantizedKV(values, jnp.zeros((*others, 2), jnp.float16), bits)


def _cache_dtype(bits: int) -> CacheDtype:
    return CacheDtype(f"int{bits}", partial(_empty, bits=bits), lambda width: width * bits // 8 + 2 * 2)


INT8 = _cache_dtype(8)
INT4 = _cache_dtype(4)
