"""x @ matrix.T, on CPU at memory speed. M rows (a batch's tokens), I inputs, O outputs.

The form of a product depends only on the CPU and on the number of rows; `weights/__init__` says why.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..operation import match_varying_axes
from ..product import dot
from .cpu_features import fast_matmul_types, int8_matmul_is_fast

_FEW_ROWS = 64  # up to this number of rows a product may be faster with the matrix as left operand
_FEW_INT8_ROWS = 8  # the same in int8
_FEW_OUTPUTS = 8192  # the same in int8 without matrix units
_MIN_OUTPUTS = 8  # of a float product on CPU
_MIN_ROW_MAX = 1e-5  # avoids a division by 0 in rows of zeros
_MAX_INT8_ROWS = 32  # more rows convert int8 to float32 where the CPU has no fast int8 product
_TILE_BYTES = 8 << 20  # of float32 that a narrow matrix is converted to at a time


def cpu_float_form(plain: Any, impl: str | None, operands: Any, static: Any) -> Callable:
    """A form of `float_product`."""
    forms = {jnp.dtype("float32"): _float32_product, jnp.dtype("bfloat16"): _bfloat16_product}
    form = forms.get(operands[1].dtype, upcast_product)
    return lambda x_MI, matrix_OI: form(x_MI, pad_outputs(matrix_OI))[:, : len(matrix_OI)]


def pad_outputs(matrix_OI: jax.Array) -> jax.Array:
    """The matrix with outputs of zeros where it has few. A CPU would multiply by one output as by a vector:
    the order of a row's sum would depend on how many rows there are and on which one it is.
    """
    missing = _MIN_OUTPUTS - len(matrix_OI)
    return jnp.pad(matrix_OI, ((0, missing), (0, 0))) if missing > 0 else matrix_OI


def matrix_lhs_dot(x_MI: jax.Array, matrix_OI: jax.Array, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Returns x @ matrix.T as (matrix @ x.T).T. Without the barrier XLA would swap the operands again."""
    return lax.optimization_barrier(dot(matrix_OI, x_MI, dtype=dtype)).T


def quantize_activations(x_MI: jax.Array, axis_name: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns rows as int8 and the factors that they were multiplied by, float32 [M, 1], as transformers does
    for BitNet. axis_name: an axis of a mesh along which I is divided; None: it is not.
    """
    x_MI = x_MI.astype(jnp.float32)
    max_M1 = jnp.abs(x_MI).max(1, keepdims=True)
    max_M1 = max_M1 if axis_name is None else lax.pmax(max_M1, axis_name)
    factor_M1 = 127 / jnp.maximum(max_M1, _MIN_ROW_MAX)
    return jnp.round(x_MI * factor_M1).astype(jnp.int8), factor_M1


def int8_activation_product(
    x_MI: jax.Array,
    values_OI: jax.Array,
    int8_dot: Callable[..., jax.Array] | None = None,
    axis_name: str | None = None,
) -> jax.Array:
    """Returns x, quantized to int8, times int8 values, float32 [M, O]. Sums are exact, so other rows change
    no bit of a row. int8_dot: None: of `choose_int8_dot`; axis_name: as in `quantize_activations`.
    """
    int8_MI, factor_M1 = quantize_activations(x_MI, axis_name)
    rows = len(x_MI)
    if rows == 1:  # a single row takes twenty times as long as two
        int8_MI = jnp.pad(int8_MI, ((0, 1), (0, 0)))
    int8_dot = int8_dot or choose_int8_dot(rows, len(values_OI))
    sums_MO = int8_dot(int8_MI, values_OI, dtype=jnp.int32)[:rows]
    return sums_MO.astype(jnp.float32) / factor_M1


def _float32_product(x_MI: jax.Array, matrix_OI: jax.Array) -> jax.Array:
    return matrix_lhs_dot(x_MI, matrix_OI) if 1 < len(x_MI) <= _FEW_ROWS else dot(x_MI, matrix_OI)


def choose_int8_dot(rows: int, outputs: int) -> Callable[..., jax.Array]:
    """Returns the faster of `matrix_lhs_dot` and `dot` for an int8 matrix and this number of rows."""
    if "int8" not in fast_matmul_types():
        return matrix_lhs_dot if 1 < rows <= _FEW_INT8_ROWS else dot
    # On jax 0.12 without matrix units wide outputs are far slower with the matrix as left operand.
    few_outputs = "amx" in fast_matmul_types() or outputs <= _FEW_OUTPUTS
    return matrix_lhs_dot if rows <= _FEW_INT8_ROWS and few_outputs else dot


def upcasts_int8(rows: int) -> bool:
    """Whether, for this number of rows, `upcast_product` is faster than int8 with split activations."""
    return rows > _MAX_INT8_ROWS and not int8_matmul_is_fast()


def _bfloat16_product(x_MI: jax.Array, matrix_OI: jax.Array) -> jax.Array:
    """XLA's bfloat16 product is fast from two rows on; a single row would take ten times as long."""
    rows = len(x_MI)
    (outputs, inputs) = matrix_OI.shape
    fast_types = fast_matmul_types()
    if rows > _FEW_ROWS and "bfloat16" not in fast_types:
        return upcast_product(x_MI, matrix_OI)
    matrix_lhs = "amx" in fast_types or (outputs < inputs if "bfloat16" in fast_types else rows > 1)
    x_MI = x_MI.astype(jnp.bfloat16)
    x_MI = jnp.pad(x_MI, ((0, 1), (0, 0))) if rows == 1 else x_MI
    if matrix_lhs and rows <= _FEW_ROWS:
        return matrix_lhs_dot(x_MI, matrix_OI)[:rows]
    # Results of `matrix_lhs_dot` are transposed. XLA would fuse the transpose into this product, and has no
    # fast bfloat16 product with such an operand.
    return dot(lax.optimization_barrier(x_MI), matrix_OI)[:rows]


def upcast_product(x_MI: jax.Array, matrix_OI: jax.Array) -> jax.Array:
    """Multiplies in float32 what the CPU has no fast product for: float16, and other types on some CPUs."""
    x_MI = x_MI.astype(jnp.float32)

    def multiply_tile(first: jax.Array, size: int, matrix_OI: jax.Array) -> jax.Array:  # [M, size]
        return dot(x_MI, lax.dynamic_slice_in_dim(matrix_OI, first, size, 0).astype(jnp.float32))

    return tiled_product(multiply_tile, x_MI, len(matrix_OI), 4 * matrix_OI.shape[1], matrix_OI)


def tiled_product(
    multiply_tile: Callable[..., jax.Array], x_MI: jax.Array, outputs: int, width: int, *narrow: Any
) -> jax.Array:
    """Converts the matrix to float32 and multiplies by it a tile of outputs at a time. For CPUs.

    XLA would convert the whole operand of a 16-bit dot or slice, and hoist that out of the decode loop: a
    float32 copy of all weights. The barrier makes the tile depend on the loop counter, so nothing can be
    hoisted. The loop's initial value depends on x, or XLA would fill the buffers of all layers first. The two
    negations cancel: an update fused with a negation is compiled once for all layers, a bare one for each.

    Args:
        multiply_tile: (first output, number of outputs, *narrow) -> float32 [M, number of outputs].
        width: bytes of an output's weights as float32.
        narrow: the arrays of the matrix, or trees of them.
    """
    tiles = max(2, -(-outputs * width // _TILE_BYTES))  # all of one size: the last two may overlap
    tile = min(-(-outputs // 2), -(-outputs // tiles // 16) * 16)

    def body(i, y_MO):  # slice and update both shift the last tile back inside the array, to the same outputs
        *tied, i = lax.optimization_barrier((*narrow, i))
        return lax.dynamic_update_slice_in_dim(y_MO, -multiply_tile(i * tile, tile, *tied), i * tile, 1)

    start = match_varying_axes(jnp.broadcast_to(x_MI[:, :1], (len(x_MI), outputs)), x_MI, *narrow)
    return -lax.fori_loop(0, -(-outputs // tile), body, start)


def embedding_form(plain: Any, impl: str | None, operands: Any, static: Any) -> Callable | None:
    """A form of `embedding`, which converts only the rows that it takes; None: of a float32 table."""
    return None if operands[1].dtype == jnp.float32 else _embed_row_by_row


def _embed_row_by_row(token: jax.Array, table: jax.Array) -> jax.Array:  # [..., D]
    ids = token.reshape(-1)

    # The barrier keeps the conversion inside the loop, as in `tiled_product`. It includes the ids, since XLA
    # unrolls the loop of a single token.
    def row(i: jax.Array) -> jax.Array:  # [D]
        tied, at = lax.optimization_barrier((table, ids[i]))
        return lax.dynamic_index_in_dim(tied, at, 0, keepdims=False).astype(jnp.float32)

    return lax.map(row, jnp.arange(ids.size)).reshape(*token.shape, -1).astype(table.dtype)
