"""Where keys and values are, as attention kernels read them, and their quantized form."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

BIAS_STRIDE = 64  # positions of `KeyBias.near_KCH`


class Levels(NamedTuple):
    """Keys or values in 8 or 4 bits: low + step * level, with a step and a low per head and slot."""

    # uint8 [P, K, S, H]; in 4 bits [P, K, S, H/2]: h in the low half of a byte, h + H/2 in the high half.
    values: jax.Array
    scale: jax.Array  # [P, K, S, 2]: step and low


class KeyBias(NamedTuple):
    """A bias of keys that RoPE rotates: the key at position p has the bias of position p % 64, rotated by the
    angles of p // 64.
    """

    near_KCH: jax.Array  # float32; C: `BIAS_STRIDE` positions
    cos_RP: jax.Array  # float32; R: multiples of `BIAS_STRIDE`; P: pairs (i, i + P) of a head; the rest stays
    sin_RP: jax.Array

    def at(self, position_S: jax.Array) -> jax.Array:
        """float32 [K, S, H]: the bias at these positions."""
        pairs = self.cos_RP.shape[1]
        cos_SP, sin_SP = (x[position_S // BIAS_STRIDE] for x in (self.cos_RP, self.sin_RP))
        near_KSH = self.near_KCH[:, position_S % BIAS_STRIDE]
        a, b, rest = jnp.split(near_KSH, (pairs, 2 * pairs), axis=-1)
        return jnp.concatenate([a * cos_SP - b * sin_SP, b * cos_SP + a * sin_SP, rest], -1)


def dequantize(x: jax.Array | Levels, width: int) -> jax.Array:
    """float32 [P, K, S, H]. width: H."""
    if not isinstance(x, Levels):
        return x.astype(jnp.float32)
    level = x.values.astype(jnp.int32)
    if level.shape[-1] < width:
        level = jnp.concatenate([level & 15, level >> 4], -1)
    scale = x.scale.astype(jnp.float32)
    return scale[..., 1:2] + scale[..., :1] * level
