"""Products for TPUs: of a single row, of matrices in groups, of rows that a norm or an activation makes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...kernels_pallas.reference_products import FEW_ROWS
from ...ops.forms import by_name
from ...ops.operation import Call
from ...ops.product import dot, float_precision
from ...weights.grouped_weight import GroupedWeight, split_groups

_FEW_TPU_ROWS = 64  # up to this number of rows a TPU multiplies by levels


def apart_form(call: Call) -> Callable | None:
    """Returns a form of `apart`: XLA would compute a norm or an activation again for each tile of the
    products that read it: 1,024 rows of 7B's gate take 249 us on a v6e instead of 176. None: there are few
    rows.
    """
    x = call.operands["x"]
    return by_name(lax.optimization_barrier, "x") if x.size > FEW_ROWS * x.shape[-1] else None


def row_form(call: Call) -> Callable | None:
    """Returns a form of products of a single row. None: there are more. TPUs multiply a single row on their
    vector units. Eight rows, a tile of their matrix units, take a third of the time or less.
    """
    return _padded(call.plain) if len(call.operands["x"]) == 1 else None


def tpu_grouped_form(call: Call) -> Callable | None:
    """Returns a form of `grouped_product`. None: there are int8 activations and several rows."""
    if call.operands["matrix"].int8_activations:
        return row_form(call)
    return _padded(tpu_grouped_product) if len(call.operands["x"]) == 1 else tpu_grouped_product


def _padded(product: Callable) -> Callable:
    return lambda x, matrix: product(x=jnp.pad(x, ((0, 7), (0, 0))), matrix=matrix)[:1]


def tpu_grouped_product(x: jax.Array, matrix: GroupedWeight) -> jax.Array:
    """Returns x @ dequantize(matrix).T, float32 [M, O], on TPUs: by halves (H) of packed bytes, so nothing is
    interleaved or transposed.

    Few rows are multiplied with the levels of each group, which are exact in bfloat16, and the results by the
    scale. For more rows the matrix is dequantized.
    """
    # The barrier makes weights depend on x, or XLA would convert all of them before the decode loop.
    x_MI, weight = lax.optimization_barrier((x, matrix))
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
            precision = float_precision(x_MI.dtype)
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
