"""Keys and values as attention kernels read them: their quantized form, and RoPE."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

BIAS_STRIDE = 64  # positions of `KeyBias.near_KCH`
LANES = 128  # of a vector register of TPUs


class Levels(NamedTuple):
    """Keys or values in 8 or 4 bits: low + step * level, with a step and a low per head and slot."""

    # uint8 [P, K, S, H]; in 4 bits [P, K, S, H/2]: h in the low half of a byte, h + H/2 in the high half.
    values: jax.Array
    scale: jax.Array  # [P, K, S, 2]: step and low

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the levels."""
        return self.values.shape


class SideBySide(NamedTuple):
    """Keys and values of a head in one vector, keys first, as TPUs keep them: the last axis fills lanes in
    multiples of 128, so keys of width 64 alone would take twice their memory.
    """

    values: jax.Array  # [P, K, S, 2H], float numbers or uint8 levels
    # float32, of levels: step and low of keys, then of values. [P, K, 4, S], or [P, K, 2, 2S] where S is no
    # multiple of 128: an array with half-empty lanes XLA stores in another order of axes, and copies it
    # before and after kernels.
    scale: jax.Array | None = None

    @property
    def rank(self) -> int:
        """The width of values that are the first numbers of keys: 0, there are none."""
        return 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Latents:
    """Keys of latent attention (DeepSeek-V2, 2024): the first numbers of a key are its value, so each key is
    read once.
    """

    values: jax.Array  # [P, K, S, X]: the value, then numbers of the key alone, and on TPUs perhaps zeros
    rank: int = dataclasses.field(metadata=dict(static=True))  # C, the width of a value
    scale: ClassVar[None] = None  # as in `SideBySide`

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the keys."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the numbers."""
        return self.values.dtype


def join(k: Any, v: Any) -> SideBySide:
    """Returns keys and values [P, K, S, H] side by side: arrays, or `Levels` in 8 bits."""
    if not isinstance(k, Levels):
        return SideBySide(jnp.concatenate([k, v], -1))
    values, scale = (jnp.concatenate(parts, -1) for parts in zip(k, v, strict=True))
    return SideBySide(values, pack_scale(scale.astype(jnp.float32)))


def separate(kv: SideBySide) -> tuple[jax.Array | Levels, jax.Array | Levels]:
    """Returns keys and values, float numbers or `Levels` whose scale stays float32."""
    k, v = jnp.split(kv.values, 2, -1)
    if kv.scale is None:
        return k, v
    of_k, of_v = jnp.split(unpack_scale(kv.scale), 2, -1)
    return Levels(k, of_k), Levels(v, of_v)


def scale_rows(slots: int) -> int:
    """Returns the rows into which the four numbers of a slot are divided in `SideBySide.scale`."""
    return 4 if slots % LANES == 0 else 2


def pack_scale(scale_PKS4: jax.Array) -> jax.Array:
    """Returns the form of `SideBySide.scale`."""
    P, K, S, _ = scale_PKS4.shape
    return jnp.swapaxes(scale_PKS4, 2, 3).reshape(P, K, scale_rows(S), -1)


def unpack_scale(scale: jax.Array) -> jax.Array:
    """Returns [P, K, S, 4] of `SideBySide.scale`."""
    return jnp.swapaxes(scale.reshape(*scale.shape[:2], 4, -1), 2, 3)


class HeadNorms(NamedTuple):
    """RMS norms of the queries and keys of each head: x / sqrt(mean(x²) + eps), times offset + weight in
    float32. Without an offset (None) the norm is rounded to the dtype of x before it is multiplied by the
    weight.
    """

    q_H: jax.Array
    k_H: jax.Array
    eps: float
    offset: float | None


class KeyBias(NamedTuple):
    """A bias of keys that RoPE rotates: the key at position p has the bias of position p % 64, rotated by the
    angles of p // 64.
    """

    near_KCH: jax.Array  # float32; C: `BIAS_STRIDE` positions
    cos_RP: jax.Array  # float32; R: multiples of `BIAS_STRIDE`; P: pairs (i, i + P) of a head; the rest stays
    sin_RP: jax.Array

    def at(self, position_S: jax.Array) -> jax.Array:
        """Returns float32 [K, S, H]: the bias at these positions."""
        cos_SP, sin_SP = (x[position_S // BIAS_STRIDE] for x in (self.cos_RP, self.sin_RP))
        return rotate_pairs(self.near_KCH[:, position_S % BIAS_STRIDE], cos_SP, sin_SP)


def rotate_pairs(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns float32 x [..., H], whose pairs (i, i + P) are rotated by these angles [..., P]. The rest
    stays.
    """
    pairs = cos.shape[-1]
    a, b, rest = jnp.split(x, (pairs, 2 * pairs), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def to_levels(x: jax.Array, low: jax.Array, high: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Returns `Levels.values` and `Levels.scale` of float32 vectors [..., H] between low and high [...,
    1].
    """
    top = 2**bits - 1
    step = jnp.maximum((high - low) / top, jnp.finfo(jnp.float16).smallest_normal)
    scale = jnp.concatenate([step, low], -1).astype(jnp.float16)
    # Levels are computed from the float16 numbers that are stored, so they compensate for their rounding.
    step, low = jnp.split(scale.astype(jnp.float32), 2, -1)
    level = jnp.clip(jnp.round((x - low) / step), 0, top).astype(jnp.uint8)
    if bits == 4:
        first, second = jnp.split(level, 2, -1)
        level = first | (second << 4)
    return level, scale


def from_levels(values: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """Returns the float32 numbers of levels."""
    level = values if bits == 8 else jnp.concatenate([values & 15, values >> 4], -1)
    step, low = jnp.split(scale.astype(jnp.float32), 2, -1)
    return low + step * level.astype(jnp.float32)


def quantize(x: jax.Array, bits: int) -> Levels:
    """Returns vectors [..., H] in levels between the smallest and the largest number of each."""
    x = x.astype(jnp.float32)
    return Levels(*to_levels(x, x.min(-1, keepdims=True), x.max(-1, keepdims=True), bits))


def dequantize(x: jax.Array | Levels, width: int) -> jax.Array:
    """Returns float32 [P, K, S, H]. width: H."""
    if isinstance(x, Levels):
        return from_levels(x.values, x.scale, 8 * x.values.shape[-1] // width)
    return x.astype(jnp.float32)
