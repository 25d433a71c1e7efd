"""Levels of 8 bits in a kernel, the same as `key_layouts.to_levels`, without numbers of type float16."""

import jax
import jax.numpy as jnp
from jax import lax

_TOP = 255
_SMALLEST = 2.0**-14  # normal float16
_LARGEST = 65504.0


def to_levels(vectors: list[jax.Array], width: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """Levels, int32, of keys and values: float32 [R, H] each, or one [R, 2H] of both; and [R, 1] each: step
    and low of keys, then of values.
    """
    levels: list[jax.Array] = []
    numbers: list[jax.Array] = []
    for x in vectors:
        is_key = lax.broadcasted_iota(jnp.int32, x.shape, 1) < width
        parts = [is_key, ~is_key] if x.shape[1] > width else [is_key]
        found = [_between(x, part) for part in parts]
        levels.append(found[0][0] if len(found) == 1 else jnp.where(is_key, found[0][0], found[1][0]))
        numbers += [number for _, *scale in found for number in scale]
    return levels, numbers


def _between(x: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    low = jnp.where(part, x, jnp.inf).min(-1, keepdims=True)
    high = jnp.where(part, x, -jnp.inf).max(-1, keepdims=True)
    step = round_to_float16(jnp.maximum((high - low) / _TOP, _SMALLEST))
    low = round_to_float16(low)
    return jnp.clip(jnp.round((x - low) / step), 0, _TOP).astype(jnp.int32), step, low


def round_to_float16(x: jax.Array) -> jax.Array:
    """float32 x rounded to a number that float16 has: nearest, half to even."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    rounded = lax.bitcast_convert_type(bits, jnp.float32)
    rounded = jnp.where(jnp.abs(rounded) > _LARGEST, jnp.where(x < 0, -jnp.inf, jnp.inf), rounded)
    return jnp.where(jnp.abs(x) < _SMALLEST, jnp.round(x * 2.0**24) * 2.0**-24, rounded)
