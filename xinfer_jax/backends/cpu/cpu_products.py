"""x @ matrix.T, on CPU at memory speed. M rows (a batch's tokens), I inputs, O outputs.

The form of a product depends on the CPU, the shapes and the number of rows only (`product_table`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...ops.forms import always
from ...ops.operation import Call, match_varying_axes
from ...ops.product import dot
from ...weights.fp8_weight import Fp8Weight
from ...weights.int8_weight import Int8Weight
from ...weights.quantized_weight import quantize_activations
from . import product_table
from .product_table import MATRIX_FIRST, TILES, X_FIRST

_MIN_OUTPUTS = 8  # of a float product on CPU
_FEW_ROWS = 64  # up to this number of rows tiles are the left operand
_TILE_BYTES = 2 << 20  # of float32 that a narrow matrix is converted to at a time, as the left operand
_RIGHT_TILE_BYTES = 8 << 20  # as the right one


def float_form(call: Call) -> Callable:
    """Returns a form of `float_product`."""
    matrix_OI = call.operands["matrix"]
    rows = len(call.operands["x"])
    product = _FLOAT_FORMS[product_table.fastest_form(matrix_OI.dtype.name, rows, *matrix_OI.shape)]
    return lambda x, matrix: product(x, pad_outputs(matrix))[:, : len(matrix)]


def pad_outputs(matrix_OI: jax.Array) -> jax.Array:
    """Returns the matrix with outputs of zeros if it has few. A CPU would multiply by one output as by a
    vector: the order of a row's sum would depend on the number of rows and on the row's place.
    """
    missing = _MIN_OUTPUTS - len(matrix_OI)
    return jnp.pad(matrix_OI, ((0, missing), (0, 0))) if missing > 0 else matrix_OI


def matrix_lhs_dot(x_MI: jax.Array, matrix_OI: jax.Array, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Returns x @ matrix.T as (matrix @ x.T).T. Without the barrier XLA would swap the operands again."""
    return lax.optimization_barrier(dot(matrix_OI, x_MI, dtype=dtype)).T


def int8_activation_product(x_MI: jax.Array, values_OI: jax.Array, axis_name: str | None = None) -> jax.Array:
    """Returns x, quantized to int8, times int8 values, float32 [M, O]. Sums of int8 are exact, so other rows
    change no bit of a row. axis_name: see `quantize_activations`.
    """
    int8_MI, factor_M1 = quantize_activations(x_MI, axis_name)
    rows = len(x_MI)
    form = product_table.fastest_form("int8 activations", rows, *values_OI.shape)
    if form == TILES:
        return upcast_product(int8_MI, values_OI) / factor_M1
    # A single row takes twenty times as long as two.
    sums_MO = INT8_DOTS[form](_at_least_two(int8_MI), values_OI, dtype=jnp.int32)[:rows]
    return sums_MO.astype(jnp.float32) / factor_M1


def _at_least_two(x_MI: jax.Array) -> jax.Array:
    """Returns x, a single row with one of zeros."""
    return jnp.pad(x_MI, ((0, 1), (0, 0))) if len(x_MI) == 1 else x_MI


def _x_first(x_MI: jax.Array, matrix_OI: jax.Array) -> jax.Array:
    if matrix_OI.dtype == jnp.float32:
        return dot(x_MI, matrix_OI)
    # XLA's bfloat16 product is fast from two rows on. Results of `matrix_lhs_dot` are transposed: XLA would
    # fuse the transpose into this product, and has no fast bfloat16 product with such an operand.
    x = lax.optimization_barrier(_at_least_two(x_MI.astype(matrix_OI.dtype)))
    return dot(x, matrix_OI)[: len(x_MI)]


def _matrix_first(x_MI: jax.Array, matrix_OI: jax.Array) -> jax.Array:
    return matrix_lhs_dot(_at_least_two(x_MI.astype(matrix_OI.dtype)), matrix_OI)[: len(x_MI)]


def upcast_product(x_MI: jax.Array, matrix_OI: jax.Array) -> jax.Array:
    """Multiplies in float32, a tile of outputs at a time."""
    x_MI = x_MI.astype(jnp.float32)
    outputs_first = len(x_MI) <= _FEW_ROWS

    def multiply_tile(first: jax.Array, size: int, matrix_OI: jax.Array) -> jax.Array:
        tile = lax.dynamic_slice_in_dim(matrix_OI, first, size, 0).astype(jnp.float32)
        return dot(tile, x_MI) if outputs_first else dot(x_MI, tile)

    width = 4 * matrix_OI.shape[1]
    return tiled_product(multiply_tile, x_MI, len(matrix_OI), width, matrix_OI, outputs_first=outputs_first)


_FLOAT_FORMS = {X_FIRST: _x_first, MATRIX_FIRST: _matrix_first, TILES: upcast_product}
INT8_DOTS: dict[str, Callable[..., jax.Array]] = {X_FIRST: dot, MATRIX_FIRST: matrix_lhs_dot}


def row_by_row(product: Callable[[jax.Array], jax.Array], x_MI: jax.Array) -> jax.Array:
    """Returns product(x_I) of each row, [M, O], one after the other."""
    return product(x_MI[0])[None] if len(x_MI) == 1 else lax.map(product, x_MI)


def tiled_product(
    multiply_tile: Callable[..., jax.Array],
    x_MI: jax.Array,
    outputs: int,
    width: int,
    *narrow: Any,
    outputs_first: bool = False,
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
        outputs_first: multiply_tile returns [number of outputs, M].
    """
    tile_bytes = _TILE_BYTES if outputs_first else _RIGHT_TILE_BYTES
    tiles = max(2, -(-outputs * width // tile_bytes))  # all of one size: the last two may overlap
    tile = min(-(-outputs // 2), -(-outputs // tiles // 16) * 16)
    axis = 0 if outputs_first else 1

    def body(i, y):  # slice and update both shift the last tile back inside the array, to the same outputs
        *tied, i = lax.optimization_barrier((*narrow, i))
        return lax.dynamic_update_slice_in_dim(y, -multiply_tile(i * tile, tile, *tied), i * tile, axis)

    start = jnp.broadcast_to(x_MI[:, :1], (len(x_MI), outputs))
    start = match_varying_axes(start.T if outputs_first else start, x_MI, *narrow)
    y = -lax.fori_loop(0, -(-outputs // tile), body, start)
    return y.T if outputs_first else y


@always
def int8_form(x: jax.Array, matrix: Int8Weight) -> jax.Array:
    """Returns a form of `int8_product`."""
    x_MI = matrix.rotated_inputs(x)
    if matrix.int8_activations:
        return int8_activation_product(x_MI, matrix.values, matrix.axis_name) * matrix.scale
    form = product_table.fastest_form("int8", len(x_MI), *matrix.shape)
    if form == TILES:
        return upcast_product(x_MI, matrix.values) * matrix.scale
    # Activations as the sum of two int8 numbers.
    x_MI = x_MI.astype(jnp.float32)
    max_M = jnp.abs(x_MI).max(1)
    step_M1 = jnp.where(max_M == 0, 1, max_M)[:, None] / 127
    exact_MI = x_MI / step_M1
    high_MI = jnp.round(exact_MI)
    low_MI = jnp.round((exact_MI - high_MI) * 254)
    split = jnp.concatenate([high_MI, low_MI]).astype(jnp.int8)
    sums_SO = INT8_DOTS[form](split, matrix.values, dtype=jnp.int32)
    high_MO, low_MO = jnp.split(sums_SO.astype(jnp.float32), 2)
    return (high_MO + low_MO / 254) * step_M1 * matrix.scale


@always
def fp8_form(x: jax.Array, matrix: Fp8Weight) -> jax.Array:
    """Returns a form of `fp8_product`."""
    x_MI = x.astype(jnp.float32)

    def multiply_tile(first: jax.Array, size: int, matrix: Fp8Weight) -> jax.Array:  # [M, size]
        start = jnp.clip(first, 0, matrix.shape[0] - size)
        return dot(x_MI, matrix.rows(start + jnp.arange(size)))

    return tiled_product(multiply_tile, x_MI, matrix.shape[0], 4 * matrix.shape[1], matrix)


def embedding_form(call: Call) -> Callable | None:
    """Returns a form of `embedding`, which converts only the rows that it takes. None: the table is float32
    or int8.
    """
    return None if call.operands["table"].dtype in (jnp.float32, jnp.int8) else _embed_row_by_row


def _embed_row_by_row(token: jax.Array, table: jax.Array) -> jax.Array:  # [..., D]
    ids = token.reshape(-1)

    # The barrier keeps the conversion inside the loop, as in `tiled_product`. It includes the ids, since XLA
    # unrolls the loop of a single token.
    def row(i: jax.Array) -> jax.Array:  # [D]
        tied, at = lax.optimization_barrier((table, ids[i]))
        return lax.dynamic_index_in_dim(tied, at, 0, keepdims=False).astype(jnp.float32)

    return lax.map(row, jnp.arange(ids.size)).reshape(*token.shape, -1).astype(table.dtype)
