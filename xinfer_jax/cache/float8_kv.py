"""Keys and values in 8-bit floats (E4M3), with a factor per head and position."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from .stored_kv import CacheDtype, StoredKV

_DTYPE = jnp.float8_e4m3fn
_LARGEST = 448.0  # of the dtype, which has no infinity: the cast makes NaN of 470


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Float8KV(StoredKV):
    """K or V of one layer: values times scale. Attention reads them as float32, so its weights are never
    rounded to this dtype.
    """

    values: jax.Array  # float8_e4m3fn [B, K, S, H]
    scale: jax.Array  # float16 [B, K, S, 1]: the largest number divided by 448

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def name(self) -> str:
        return self.dtype.name

    def encode(self, *x_BKTH: jax.Array, first_B: jax.Array | None = None) -> Self:
        (x,) = (x.astype(jnp.float32) for x in x_BKTH)
        scale = jnp.max(jnp.abs(x), -1, keepdims=True) / _LARGEST
        scale = jnp.maximum(scale, jnp.finfo(jnp.float16).smallest_normal).astype(jnp.float16)
        # By the float16 number that is stored: its rounding may have made it too small.
        values = jnp.clip(x / scale.astype(jnp.float32), -_LARGEST, _LARGEST).astype(_DTYPE)
        return dataclasses.replace(self, values=values, scale=scale)

    def decode(self) -> jax.Array:
        return self.values.astype(jnp.float32) * self.scale.astype(jnp.float32)


def _empty(shape: tuple[int, ...]) -> Float8KV:
    return Float8KV(jnp.zeros(shape, _DTYPE), jnp.zeros((*shape[:-1], 1), jnp.float16))


FLOAT8_E4M3FN = CacheDtype(
    "float8_e4m3fn", _empty, lambda width: width + 2, kernel_obstacle="keys in float8_e4m3fn"
)
