"""Parts that TPU kernels share: their calls, products, RoPE of vectors whose numbers are in lanes, and levels
of 8 bits, the same as `key_layouts.to_levels` without numbers of type float16.
"""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..dispatch import device_impl
from ..key_layouts import LANES

Factors = tuple[jax.Array, jax.Array, jax.Array]  # float32 [R or 1, W]
_PIECE = 512  # outputs of a product that are computed at once: of more, registers would be spilled
_TOP = 255
_SMALLEST = 2.0**-14  # normal float16
_LARGEST = 65504.0


def emulator(interpret: bool) -> Any:
    """Returns the `interpret` of a `pallas_call`: an emulator that raises if accesses to memory race, or
    none.
    """
    return pltpu.InterpretParams(detect_races=True) if interpret else False


def has_bfloat16_vectors() -> bool:
    """Returns True if this process's TPUs compute with vectors of bfloat16 numbers. They do from v6e on."""
    return re.search(r"v[2-5]", device_impl().reason) is None


def has_e4m3() -> bool:
    """Returns True if this process's TPUs convert numbers in FP8 as checkpoints have them. They do from TPU7x
    on.
    """
    return "TPU7" in device_impl().reason


def has_large_vmem() -> bool:
    """Returns True if this process's TPUs have 128 MiB of VMEM, as v5e and v6e do. v5p and TPU7x have 64
    MiB.
    """
    return re.search("v5 lite|v5e|v6", device_impl().reason) is not None


def keep_in_hbm(arrays: Any, interpret: bool) -> Any:
    """Returns operands that XLA does not copy to on-chip memory before the call, as it may with small ones.
    The emulator has no such memory.
    """
    if interpret:
        return arrays
    return jax.tree.map(partial(pltpu.with_memory_space_constraint, memory_space=pltpu.HBM), arrays)


def dot(a: jax.Array, b: jax.Array, axis: int, dtype: Any = jnp.float32) -> jax.Array:
    """Contracts the last axis of a with an axis of b. float32 operands are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=dtype)


def pieces(outputs: int) -> list[slice]:
    """Returns the outputs that are computed at once. A rest of less than 128 is in the last piece."""
    size = LANES * pl.cdiv(outputs, LANES * pl.cdiv(outputs, _PIECE))
    starts = range(0, max(1, outputs - LANES + 1), size)
    return [slice(first, first + size if first < starts[-1] else outputs) for first in starts]


def as_row(ref: Any) -> jax.Array:
    """Returns float32 [1, size] of an array of one axis."""
    return ref[...].astype(jnp.float32).reshape(1, -1)


def rows_after_norm(x_ref: Any, norm_ref: Any, eps: float, offset: float) -> jax.Array:
    """Returns x after the RMS norm of its rows, float32 [M, I], or x itself without a weight of the norm."""
    x_MI = x_ref[...].astype(jnp.float32)
    if norm_ref is None:
        return x_MI
    x_MI *= lax.rsqrt(jnp.mean(jnp.square(x_MI), -1, keepdims=True) + eps)
    return x_MI * (offset + as_row(norm_ref))


def rotation_factors(cos_RP: jax.Array, sin_RP: jax.Array, width: int) -> Factors:
    """Returns factors for `rotate_lanes` of these angles, for heads of that width. W: the width, or 128 lanes
    with as many heads as they hold.
    """
    zeros = jnp.zeros_like(cos_RP)
    rest = jnp.zeros((len(cos_RP), width - 2 * cos_RP.shape[1]), jnp.float32)

    def lanes(*parts: jax.Array) -> jax.Array:
        head = [part for part in parts if part.shape[1]]
        return jnp.concatenate(head * pl.cdiv(LANES, width), -1)

    same = lanes(cos_RP, cos_RP, rest + 1)
    return same, lanes(-sin_RP, zeros, rest), lanes(zeros, sin_RP, rest)


def rotate_lanes(x_RW: jax.Array, factors: Factors, pairs: int) -> jax.Array:
    """Returns float32 vectors with their pairs (i, i + P) rotated."""
    same, up, down = factors
    rotated = x_RW * same + pltpu.roll(x_RW, x_RW.shape[1] - pairs, 1) * up
    return rotated + pltpu.roll(x_RW, pairs, 1) * down


def to_levels(vectors: list[jax.Array], width: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns levels, int32, of keys and values, and [R, 1] each: step and low of keys, then of values.
    vectors: float32 [R, H] each, or one [R, 2H] with both.
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
    """Returns float32 x rounded to a number that float16 has: nearest, half to even."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    rounded = lax.bitcast_convert_type(bits, jnp.float32)
    rounded = jnp.where(jnp.abs(rounded) > _LARGEST, jnp.where(x < 0, -jnp.inf, jnp.inf), rounded)
    return jnp.where(jnp.abs(x) < _SMALLEST, jnp.round(x * 2.0**24) * 2.0**-24, rounded)
