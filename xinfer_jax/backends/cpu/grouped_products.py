"""Products for CPUs with matrices in int8 or int4 in groups of inputs. They read the weights at memory speed.

- int4 is not unpacked. A byte is low + 16 high, the weights of inputs j and j + J/2, with activations x and
  y: low * x + high * y = low * (x - y/16) + byte * y/16. So activations are transformed once, and no weight
  is shifted. Zero points are subtracted from the result: each times the sum of its activations.
- A row times int4 is one loop nest that reads each byte once. The innermost loop sums a run of bytes of a
  group and is unrolled by LLVM. The loop over outputs is vectorized. A few rows are multiplied one by one.
- With more rows, a tile of outputs at a time is dequantized and multiplied.
- With int8 activations the scale of a group is an integer number of its output's steps, as in QServe (Lin et
  al. 2024). The levels times this number, rounded to int8, are a matrix in int8 with a scale per output, made
  in each product. A few rows keep their floats, and levels are not rounded.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...ops.forms import always
from ...ops.operation import match_varying_axes
from ...ops.product import dot
from ...weights.grouped_weight import STEP_BITS, GroupedWeight, split_groups
from ...weights.quantized_weight import quantize_activations
from . import product_table
from .cpu_products import pad_outputs, row_by_row, tiled_product

_RUN = 16  # bytes of one sum: 8 are 15% slower; LLVM does not unroll 32, a tenth of the speed
_INT8_NUMBERS = 8 << 20  # of a matrix in int8 at a time


@always
def cpu_grouped_form(x: jax.Array, matrix: GroupedWeight) -> jax.Array:
    """Returns a form of `grouped_product`."""
    x_MI = matrix.rotated_inputs(x).astype(jnp.float32)
    if matrix.order is not None:
        x_MI = x_MI[:, matrix.order]
    weight = dataclasses.replace(matrix, order=None, input_block=0)
    kind = "int4 activations" if matrix.int8_activations else "int4"
    form = product_table.fastest_form(kind, len(x_MI), *weight.shape)
    if form == product_table.ROWS:
        return row_by_row(lambda x_I: _row(x_I, weight), x_MI)
    if form == product_table.INT8:
        return _int8_product(x_MI, weight)

    def multiply_tile(first: jax.Array, size: int, weight: GroupedWeight) -> jax.Array:  # [M, size]
        tile = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size, x.ndim - 1), weight)
        return dot(x_MI, pad_outputs(tile.dequantize()))[:, :size]

    return tiled_product(multiply_tile, x_MI, weight.shape[0], 4 * weight.inputs, weight)


def _row(x_I: jax.Array, weight: GroupedWeight) -> jax.Array:
    """Returns one row's product, [O]. A group is C runs of `run` bytes, and a byte has `halves` inputs."""
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
    factors, weight = lax.optimization_barrier((factors, weight))
    *factors_QCY, total_QC1 = jnp.split(factors, (run, 2 * run)[:halves], axis=-1)
    wide = weight.values.reshape(Q, -1, run, outputs).astype(jnp.int32)  # 8-bit arithmetic is slower
    levels = (wide,) if halves == 1 else (wide & 15, wide)
    terms = [x[..., None] * y.astype(jnp.float32) for x, y in zip(factors_QCY, levels, strict=True)]
    # Not a + b: for plain sums XLA calls a library, which reads a float32 copy of all terms.
    sum_QCO = lax.reduce(sum(terms), np.float32(0), lambda a, b: -(-a - b), (2,))
    if weight.zero is not None:
        sum_QCO -= total_QC1 * weight.zero.astype(jnp.float32)[:, None]
    y_RO = (sum_QCO * weight.group_scale()[:, None]).reshape(-1, outputs)
    # A dot with ones: XLA would fuse a sum over runs into the loop, which then has no vector instructions.
    return dot(jnp.ones(len(y_RO), jnp.float32), y_RO, 0)


def _int8_product(x_MI: jax.Array, weight: GroupedWeight) -> jax.Array:
    """Returns the product of int8 activations and the matrix in int8, [M, O]. A large product takes some
    groups at a time. Sums of int8 are exact, so other rows change no bit of a row.
    """
    assert weight.step is not None
    Q, Y, outputs = weight.values.shape
    int8_MI, factor_M1 = quantize_activations(x_MI, weight.axis_name)
    x_HMI = split_groups(int8_MI, weight.group, jnp).reshape(-1, Q, 2, Y).transpose(2, 0, 1, 3)
    x_HMI = x_HMI.reshape(2, len(x_MI), -1)
    most = max(1, _INT8_NUMBERS // (2 * Y * outputs))
    size = next(size for size in range(min(Q, most), 0, -1) if Q % size == 0)
    # It depends on x, or XLA would convert the matrices of all layers first.
    rounding = (1 << STEP_BITS - 1) + (factor_M1[0, 0] < 0).astype(jnp.int16)

    def add_groups(i: jax.Array, y_MO: jax.Array) -> jax.Array:
        # Without the barriers XLA would convert all groups first, and transpose them.
        *arrays, i = lax.optimization_barrier((weight.values, weight.scale, weight.zero, i))
        values_QYO, *of_groups = (lax.dynamic_slice_in_dim(x, i * size, size) for x in arrays)
        steps_Q1O, zero_Q1O = (x.astype(jnp.int16)[:, None] for x in of_groups)
        x_HMJ = lax.dynamic_slice_in_dim(x_HMI, i * size * Y, size * Y, 2)
        for x_MJ, levels_QYO in zip(x_HMJ, (values_QYO & 15, values_QYO >> 4), strict=True):
            steps_QYO = (levels_QYO.astype(jnp.int16) - zero_Q1O) * steps_Q1O
            int8_QYO = ((steps_QYO + rounding) >> STEP_BITS).astype(jnp.int8)
            y_MO += dot(x_MJ, lax.optimization_barrier(int8_QYO.reshape(-1, outputs)), 0, jnp.int32)
        return y_MO

    start = match_varying_axes(jnp.zeros((len(x_MI), outputs), jnp.int32), int8_MI, weight)
    y_MO = lax.fori_loop(0, Q // size, add_groups, start)
    return y_MO.astype(jnp.float32) * (weight.step * (1 << STEP_BITS)) / factor_M1
