"""RoPE for longer contexts than a model was first trained for: a function for each `RopeConfig.rope_type`.

Each takes the `RopeConfig`, the angles per position of pairs (float32 [P]), the model's context length, and
each row's length after the call. It returns the angles per position, and the factor on cos and sin.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config.rope import RopeConfig
from ..weights.layers import rope_powers

Scaled = tuple[Any, float]


def linear_rope(rope: RopeConfig, inverse_P: np.ndarray, original: int, length_B: jax.Array) -> Scaled:
    """Stretches all wavelengths by `factor`."""
    return inverse_P / np.float32(rope.factor), 1.0


def proportional_rope(rope: RopeConfig, inverse_P: np.ndarray, original: int, length_B: jax.Array) -> Scaled:
    """Returns the frequencies of Gemma 4: the frequencies of the whole head, divided by `factor`, and 0
    beyond the part that rotates.
    """
    part = int(rope.partial_rotary_factor * len(inverse_P))
    pair_P = np.arange(len(inverse_P))
    return np.where(pair_P < part, inverse_P / np.float32(rope.factor), np.float32(0)), 1.0


def dynamic_rope(rope: RopeConfig, inverse_P: np.ndarray, original: int, length_B: jax.Array) -> Scaled:
    """Returns theta * stretch ** (H / (H - 2)) in rows beyond the original length. The stretch outside the
    power is more exact.
    """
    width = 2 * len(inverse_P)
    stretch_B = rope.factor * jnp.maximum(length_B, original) / original - (rope.factor - 1)
    power_P = -np.arange(0, width, 2, dtype=np.float32) / (width - 2)
    return (inverse_P * stretch_B[:, None] ** power_P)[:, None], 1.0  # [B, 1, P]


def longrope(rope: RopeConfig, inverse_P: np.ndarray, original: int, length_B: jax.Array) -> Scaled:
    """Divides each frequency by a number, with another divisor in rows beyond the original length (Ding et
    al. 2024).
    """
    powers = rope_powers(rope, 2 * len(inverse_P))
    short, long = (np.array(factor, np.float32) for factor in (rope.short_factor, rope.long_factor))
    inverse: Any = np.float32(1.0) / (short * powers)
    if rope.switches_at is not None:
        is_long = (length_B > rope.switches_at)[:, None, None]
        inverse = jnp.where(is_long, np.float32(1.0) / (long * powers), inverse)  # [B, 1, P]
    if rope.attention_factor is not None:
        return inverse, rope.attention_factor
    if rope.factor <= 1:
        return inverse, 1.0
    stretch = math.log(rope.factor) / math.log(rope.original_max_position_embeddings)
    return inverse, math.sqrt(1 + stretch)


def llama3_rope(rope: RopeConfig, inverse_P: np.ndarray, original: int, length_B: jax.Array) -> Scaled:
    """Returns the frequencies of Llama 3.1: long wavelengths are stretched by `factor`, short ones are kept,
    and the ones between are interpolated.
    """
    # Full rotations within the original context.
    rotations = rope.original_max_position_embeddings * inverse_P / np.float32(2 * math.pi)
    low = rope.low_freq_factor
    smooth = np.clip((rotations - low) / (rope.high_freq_factor - low), 0, 1)
    return ((1 - smooth) * inverse_P / rope.factor + smooth * inverse_P).astype(np.float32), 1.0


def yarn_rope(rope: RopeConfig, inverse_P: np.ndarray, original: int, length_B: jax.Array) -> Scaled:
    """Returns the frequencies of YaRN (Peng et al. 2023): a ramp over the pairs between extrapolation and
    interpolation by `factor`.
    """
    width = 2 * len(inverse_P)

    def pair_with(rotations: float) -> float:
        ratio = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(rope.rope_theta))

    low = pair_with(rope.beta_fast)
    high = pair_with(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, width - 1)
    ramp = np.clip((np.arange(len(inverse_P), dtype=np.float32) - low) / ((high - low) or 0.001), 0, 1)
    inverse_P = inverse_P / rope.factor * ramp + inverse_P * (1 - ramp)
    return inverse_P.astype(np.float32), _yarn_factor(rope)


def _yarn_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    stretch = math.log(rope.factor)
    if rope.mscale and rope.mscale_all_dim:
        return (0.1 * rope.mscale * stretch + 1.0) / (0.1 * rope.mscale_all_dim * stretch + 1.0)
    return 0.1 * stretch + 1.0
