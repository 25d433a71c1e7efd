"""x @ matrix.T with quantized matrices.

How CPU products in groups read the weights at memory speed:
- int4 is not unpacked. A byte is low + 16 high, the weights of inputs j and j + J/2, with activations x and
  y: low * x + high * y = low * (x - y/16) + byte * y/16. So activations are transformed once, and no weight
  is shifted. Zero points are subtracted from the result: each times the sum of its activations.
- A row times int4 is one loop nest that reads each byte once: the innermost loop sums a run of bytes of a
  group and is unrolled by LLVM; the loop over outputs is vectorized. Up to 8 rows are multiplied one by one.
- With more rows, a tile of outputs at a time is dequantized and multiplied.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..ops.cpu.cpu_products import (
    choose_int8_dot,
    int8_activation_product,
    pad_outputs,
    tiled_product,
    upcast_product,
    upcasts_int8,
)
from ..ops.product import dot
from ..ops.tpu.tpu_products import tpu_forms
from .mxfp4 import Mxfp4Weight, mxfp4_product
from .quantized_weights import GroupedWeight, Int8Weight, QuantizedWeight, dequantize, split_groups
from .ternary import TernaryWeight, ternary_product

_RUN = 16  # bytes of one sum: 8 are 15% slower; LLVM does not unroll 32, a tenth of the speed
_FEW_TPU_ROWS = 64  # up to this number of rows a TPU multiplies by levels
_ROW_BY_ROW = (
    8  # up to this number of rows, one row at a time is faster: 4 times at two rows, a fifth at eight
)


@jax.custom_jvp
def quantized_product(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Returns x @ dequantize(weight).T in float32, [..., I] -> [..., O].

    Gradients are those of this product, also where x is quantized first.
    """
    x_MI = x.reshape(-1, x.shape[-1])
    if isinstance(weight, TernaryWeight):
        return ternary_product(x_MI, weight).reshape(*x.shape[:-1], -1)
    products = {Int8Weight: _int8_product, Mxfp4Weight: mxfp4_product, GroupedWeight: _grouped_product}
    cpu = products[type(weight)]
    tpu = tpu_forms(tpu_grouped_product if isinstance(weight, GroupedWeight) else _plain_product, x_MI)
    y_MO = lax.platform_dependent(x_MI, weight, cpu=cpu, **tpu, default=_plain_product)
    return y_MO.reshape(*x.shape[:-1], -1)


@quantized_product.defjvp
def _quantized_product_jvp(primals, tangents):
    (x, weight) = primals
    (x_dot, weight_dot) = tangents

    def plain(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) @ dequantize(dataclasses.replace(weight, scale=scale)).T

    return quantized_product(x, weight), jax.jvp(plain, (x, weight.scale), (x_dot, weight_dot.scale))[1]


def _plain_product(x_MI: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """On GPU and TPU: the matrix in the type of x; a scale per output is applied to the result."""
    if isinstance(weight, Int8Weight):
        return dot(x_MI, weight.values.astype(x_MI.dtype)) * weight.scale
    # The barrier makes weights depend on x, or XLA would dequantize all layers before the loop.
    x_MI, weight = lax.optimization_barrier((x_MI, weight))
    return dot(x_MI, dequantize(weight).astype(x_MI.dtype))


def tpu_grouped_product(x_MI: jax.Array, weight: GroupedWeight) -> jax.Array:
    """Returns x @ dequantize(weight).T, float32 [M, O], on TPUs: by halves (H) of packed bytes, so nothing is
    interleaved or transposed.

    Few rows are multiplied with the levels of each group, which are exact in bfloat16, and the results by the
    scale. For more rows the matrix is dequantized.
    """
    # The barrier makes weights depend on x, or XLA would convert all of them before the decode loop.
    x_MI, weight = lax.optimization_barrier((x_MI, weight))
    x_MI = x_MI if weight.order is None else x_MI[:, weight.order]
    Q, Y, _ = weight.values.shape
    M = len(x_MI)
    x_MQHY = split_groups(x_MI, weight.group, jnp).reshape(M, Q, -1, Y)
    scale_Q1O = weight.scale.astype(jnp.float32)[:, None]
    zero_Q1O = None if weight.zero is None else weight.zero.astype(jnp.float32)[:, None]
    packed = x_MQHY.shape[2] == 2
    y_MO: Any = 0
    for half in range(x_MQHY.shape[2]):
        levels_QYO = (weight.values >> 4 * half) & 15 if packed else weight.values
        levels_QYO = levels_QYO.astype(jnp.int32).astype(jnp.float32)
        x_QMY = jnp.swapaxes(x_MQHY[:, :, half], 0, 1)
        if M <= _FEW_TPU_ROWS:
            precision = lax.Precision.HIGHEST if x_MI.dtype == jnp.float32 else None
            levels_QYO = levels_QYO.astype(x_MI.dtype)
            y_QMO = lax.dot_general(x_QMY, levels_QYO, (((2,), (1,)), ((0,), (0,))), precision, jnp.float32)
            if zero_Q1O is not None:
                y_QMO -= x_QMY.astype(jnp.float32).sum(-1, keepdims=True) * zero_Q1O
            y_MO += (y_QMO * scale_Q1O).sum(0)
        else:
            levels_QYO = levels_QYO if zero_Q1O is None else levels_QYO - zero_Q1O
            matrix_IO = (levels_QYO * scale_Q1O).astype(x_MI.dtype).reshape(Q * Y, -1)
            y_MO += dot(x_MQHY[:, :, half].reshape(M, Q * Y), matrix_IO, 0)
    return y_MO


def _int8_product(x_MI: jax.Array, weight: Int8Weight) -> jax.Array:
    if weight.int8_activations:
        return int8_activation_product(x_MI, weight.values) * weight.scale
    if upcasts_int8(len(x_MI)):
        return upcast_product(x_MI, weight.values) * weight.scale
    x_MI = x_MI.astype(jnp.float32)
    max_M = jnp.abs(x_MI).max(1)
    step_M1 = jnp.where(max_M == 0, 1, max_M)[:, None] / 127
    exact_MI = x_MI / step_M1
    high_MI = jnp.round(exact_MI)
    low_MI = jnp.round((exact_MI - high_MI) * 254)
    split = jnp.concatenate([high_MI, low_MI]).astype(jnp.int8)
    int8_dot = choose_int8_dot(len(x_MI), len(weight.values))
    high_MO, low_MO = jnp.split(int8_dot(split, weight.values, dtype=jnp.int32).astype(jnp.float32), 2)
    return (high_MO + low_MO / 254) * step_M1 * weight.scale


def _grouped_product(x_MI: jax.Array, weight: GroupedWeight) -> jax.Array:
    x_MI = x_MI.astype(jnp.float32)
    if weight.order is not None:
        x_MI = x_MI[:, weight.order]
        weight = dataclasses.replace(weight, order=None)
    if len(x_MI) == 1:
        return _row(x_MI[0], weight)[None]
    if len(x_MI) <= _ROW_BY_ROW:
        return lax.map(lambda x_I: _row(x_I, weight), x_MI)

    def multiply_tile(first: jax.Array, size: int, weight: GroupedWeight) -> jax.Array:  # [M, size]
        tile = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size, x.ndim - 1), weight)
        return dot(x_MI, pad_outputs(dequantize(tile)))[:, :size]

    return tiled_product(multiply_tile, x_MI, weight.shape[0], 4 * weight.inputs, weight)


def _row(x_I: jax.Array, weight: GroupedWeight) -> jax.Array:
    """One row's product, [O]. A group is C runs of `run` bytes, and a byte has `halves` inputs."""
    Q, Y, outputs = weight.values.shape
    halves = weight.group // Y
    run = math.gcd(Y, _RUN)
    parts = split_groups(x_I[None], weight.group, jnp).reshape(Q, halves, -1, run).swapaxes(1, 2)
    # Factors of the levels and, last, of the zero points. They are computed by a dot, which XLA does not fuse
    # into the loop: there they would be computed for every output, and LLVM would not unroll it.
    mixed = np.kron([[1.0]] if halves == 1 else [[1, 0], [-1 / 16, 1 / 16]], np.eye(run))
    mixing = np.column_stack([mixed, np.ones(halves * run)]).astype(np.float32)
    factors = dot(parts.reshape(-1, halves * run), jnp.asarray(mixing), 0).reshape(Q, -1, halves * run + 1)
    # The barrier makes weights depend on x, or XLA would convert all of them before the decode loop.
    factors, values, scale, zero = lax.optimization_barrier(
        (factors, weight.values, weight.scale, weight.zero)
    )
    *factors_QCY, total_QC1 = jnp.split(factors, (run, 2 * run)[:halves], axis=-1)
    wide = values.reshape(Q, -1, run, outputs).astype(jnp.int32)  # 8-bit arithmetic is slower
    levels = (wide,) if halves == 1 else (wide & 15, wide)
    terms = [x[..., None] * y.astype(jnp.float32) for x, y in zip(factors_QCY, levels, strict=True)]
    # Not a + b: for plain sums XLA calls a library, which reads a float32 copy of all terms.
    sum_QCO = lax.reduce(sum(terms), np.float32(0), lambda a, b: -(-a - b), (2,))
    if zero is not None:
        sum_QCO -= total_QC1 * zero.astype(jnp.float32)[:, None]
    y_RO = (sum_QCO * scale.astype(jnp.float32)[:, None]).reshape(-1, outputs)
    # A dot with ones: XLA would fuse a sum over runs into the loop, which then has no vector instructions.
    return dot(jnp.ones(len(y_RO)), y_RO, 0)
