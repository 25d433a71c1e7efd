"""Experts' matrices in MXFP4 (OCP Microscaling Formats 1.0), and their numbers as float32."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

GROUP = 32  # inputs that share a scale
_HALF = GROUP // 2  # bytes of a group of one output


class Mxfp4(NamedTuple):
    """Matrices [X, O, I] of numbers of 4 bits (E2M1) times powers of two.

    Attributes:
        values: uint8 [X, Q, 16, O]: input 2y of a group in the low half of byte y, and 2y + 1 in the high
            one. Or `values_for_tpu`.
        scale: uint8 [X, Q, O]: exponent + 127. 0 counts as 0. With `values_for_tpu` there may be more groups.
    """

    values: Any
    scale: Any


def dequantize_mxfp4(matrix: Any) -> jax.Array:
    """Returns matrices, exact: float32 [..., O, I]. matrix: `Mxfp4`, or an object that has its fields. The
    axis of experts may be absent.
    """
    values = matrix.values
    if is_for_tpu(matrix):
        values = values_from_tpu(values)
    (*experts, groups, _, outputs) = values.shape
    halves_QYO = [number(values, shift) for shift in (0, 4)]
    matrix_QY2O = jnp.stack(halves_QYO, -2) * power(matrix.scale)[..., :groups, None, None, :]
    return jnp.swapaxes(matrix_QY2O.reshape(*experts, groups * GROUP, outputs), -1, -2)


def is_for_tpu(matrix: Any) -> bool:
    """Returns True if numbers are in the order of `values_for_tpu`."""
    return matrix.values.ndim == matrix.scale.ndim


def values_for_tpu(values: Any) -> Any:
    """Returns numbers [..., Q, 16, O], of an even Q, in the order of TPU kernels: uint8 [..., 16 Q, O]. Two
    groups have 32 bytes: of the first a sign in bit 7 and a size in bits 3 to 1, of the second in bits 0 and
    6 to 4.
    """
    (*experts, groups, _, outputs) = values.shape
    pairs = values.reshape(*experts, groups // 2, 2, _HALF, outputs)
    (first, second) = (pairs[..., i, :, :] for i in range(2))
    even = (first & 8) << 4 | (first & 7) << 1 | (second & 8) >> 3 | (second & 7) << 4
    odd = first & 128 | first >> 3 & 14 | second >> 7 | second & 112
    return values.__array_namespace__().stack([even, odd], -2).reshape(*experts, groups * _HALF, outputs)


def values_from_tpu(values: Any) -> Any:
    """Returns the numbers [..., Q, 16, O] of `values_for_tpu`."""
    xp = values.__array_namespace__()
    (*experts, size, outputs) = values.shape
    bits = values.reshape(*experts, -1, GROUP, outputs)
    numbers = [bits >> 4 & 8 | bits >> 1 & 7, (bits & 1) << 3 | bits >> 4 & 7]
    numbers = xp.stack(numbers, -3).reshape(*experts, size // _HALF, _HALF, 2, outputs)
    return numbers[..., 0, :] | numbers[..., 1, :] << 4


def number(values: jax.Array, shift: int) -> jax.Array:
    """Returns the numbers in the low halves of bytes (shift 0) or in the high ones (4), float32. 0 and 0.5
    have no leading one: it is subtracted if that gives less.
    """
    bits = values.astype(jnp.int32) >> shift
    with_one = lax.bitcast_convert_type(((bits & 7) << 22) + (126 << 23), jnp.float32)
    magnitude = jnp.minimum(with_one, 2 * with_one - 1)
    return jnp.where((bits & 8) == 0, magnitude, -magnitude)


def power(scale: jax.Array) -> jax.Array:
    """Returns the powers of two of scales, float32."""
    return lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)


def even_inputs_first(x_MI: jax.Array) -> jax.Array:
    """Returns x with the even inputs of each group before the odd ones: the order of both halves of its
    bytes.
    """
    x_MQY2 = x_MI.reshape(len(x_MI), -1, _HALF, 2)
    return jnp.swapaxes(x_MQY2, 2, 3).reshape(x_MI.shape)


def place_in_group(input_I: jax.Array) -> jax.Array:
    """Returns the places to which `even_inputs_first` moves these inputs."""
    in_group_I = lax.rem(input_I, GROUP)
    return input_I - in_group_I + lax.rem(in_group_I, 2) * _HALF + lax.div(in_group_I, 2)
