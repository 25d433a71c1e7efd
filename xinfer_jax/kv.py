"""Keys and values in fewer bytes: 8 or 4 bits a number, with a step and an offset per head and position."""

import dataclasses

import jax
import jax.numpy as jnp

KV_BITS = {"int8": 8, "int4": 4}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedKV:
    """K or V of one layer, [B, K, S, H]: low + step * level. Every field has its slots on axis 2: it is written and cut like an array."""

    values: jax.Array  # uint8 [B, K, S, H]; with 4 bits [B, K, S, H/2], dimension h in the low half of a byte and h + H/2 in the high one
    scale: jax.Array  # float16 [B, K, S, 2]: step and low
    bits: int = dataclasses.field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], self.values.shape[-1] * 8 // self.bits)

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype


def empty(shape: tuple[int, ...], bits: int) -> QuantizedKV:
    """Zeros: shape [B, K, S, H]."""
    return QuantizedKV(jnp.zeros((*shape[:-1], shape[-1] * bits // 8), jnp.uint8), jnp.zeros((*shape[:-1], 2), jnp.float16), bits)


def quantize(x_BKTH: jax.Array, bits: int) -> QuantizedKV:
    """Rounds to nearest between the least and the largest number of each head and position."""
    x, most = x_BKTH.astype(jnp.float32), 2**bits - 1
    low, high = jnp.min(x, -1, keepdims=True), jnp.max(x, -1, keepdims=True)
    step = jnp.maximum((high - low) / most, jnp.finfo(jnp.float16).smallest_normal)
    scale = jnp.concatenate([step, low], -1).astype(jnp.float16)
    step, low = jnp.split(scale.astype(jnp.float32), 2, -1)  # as they are stored: levels make up for their rounding
    level = jnp.clip(jnp.round((x - low) / step), 0, most).astype(jnp.uint8)
    if bits == 4:
        first, second = jnp.split(level, 2, -1)
        level = first | (second << 4)
    return QuantizedKV(level, scale, bits)


def widen(x: jax.Array | QuantizedKV) -> jax.Array:
    """The numbers, float32 where they were rounded; an array as it is."""
    if not isinstance(x, QuantizedKV):
        return x
    level = x.values if x.bits == 8 else jnp.concatenate([x.values & 15, x.values >> 4], -1)
    step, low = jnp.split(x.scale.astype(jnp.float32), 2, -1)
    return low + step * level.astype(jnp.float32)
