"""Products of few rows with matrices in FP8 (E4M3), for `matrices`.

Chips before TPU7x convert a type of 8 bits whose exponents are larger by 4: numbers are a 16th, and -0 is NaN
there. A matrix unit sums up 256 inputs from v6e on, but a block with a scale has 128. So x has its rows
twice: with the even blocks, and with the odd ones. That costs nothing up to 16 rows, and loses nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..reference_products import FP8_BLOCK
from .parts import dot, has_bfloat16_vectors, has_e4m3, pieces

_UNROLLED = 2**23  # numbers of a matrix that are multiplied without a loop, which takes long to compile
_STEP = 1024  # inputs of a step of the loop


def blocks_at_once() -> int:
    """Returns blocks of an output that are multiplied at once: as many inputs as a matrix unit sums up."""
    return 2 if has_bfloat16_vectors() else 1


def rows_of_blocks(x_RI: jax.Array) -> jax.Array:
    """Returns R rows for each of the blocks that are multiplied at once: x with zeros for the others."""
    count = blocks_at_once()
    block = lax.rem(lax.div(lax.broadcasted_iota(jnp.int32, x_RI.shape, 1), FP8_BLOCK), count)
    return jnp.concatenate([jnp.where(block == i, x_RI, 0) for i in range(count)])


def column_of(row_1Q: jax.Array) -> jax.Array:
    """Returns [Q, 1] of [1, Q]."""
    row, column = (lax.broadcasted_iota(jnp.int32, row_1Q.shape[1:] * 2, axis) for axis in (0, 1))
    return jnp.where(row == column, row_1Q, 0).sum(1, keepdims=True)


def multiply(x: Any, values: Any, rows: int, axis: int, scales: Any, read: Any) -> jax.Array:
    """Returns x · matrixᵀ, float32 [R, O]. x, values, scales: references to `rows_of_blocks` (without blocks
    to x), to a matrix whose inputs are that axis, and to memory for scales [Q, O] (None: there are no
    blocks). read: a function that reads the scales [Q, 1] of a block of outputs.
    """
    inputs = values.shape[axis]
    outputs = values.shape[1 - axis]
    for first in range(0, 0 if scales is None else outputs, FP8_BLOCK):
        scale_Q1 = read(first // FP8_BLOCK)
        Q = len(scale_Q1)
        scales[:Q, first : first + FP8_BLOCK] = jnp.broadcast_to(scale_Q1, (Q, FP8_BLOCK))
    depth = FP8_BLOCK * blocks_at_once()
    step = inputs if inputs * outputs <= _UNROLLED else _STEP
    sums = []
    for piece in pieces(outputs):

        def add(first: Any, size: int, y_RO: jax.Array, piece: slice = piece) -> jax.Array:
            """Adds the products of some inputs."""
            for start in range(0, size, depth):
                width = min(depth, size - start)
                columns = pl.ds(pl.multiple_of(first + start, FP8_BLOCK), width)
                matrix = _numbers(values[(columns, piece) if axis == 0 else (piece, columns)])
                products = dot(x[:, columns], matrix, axis)
                if scales is None:
                    y_RO += products
                    continue
                for i in range(pl.cdiv(width, FP8_BLOCK)):
                    scale_1O = scales[pl.ds(lax.div(first + start, FP8_BLOCK) + i, 1), :][:, piece]
                    y_RO += products[i * rows : (i + 1) * rows] * scale_1O
            return y_RO

        y_RO = jnp.zeros((rows, piece.stop - piece.start), jnp.float32)
        y_RO = lax.fori_loop(0, inputs // step, lambda i, y, add=add: add(i * step, step, y), y_RO)
        sums.append(add(inputs // step * step, inputs % step, y_RO))
    return jnp.concatenate(sums, 1) * (1 if has_e4m3() else 16)


def _numbers(values: jax.Array) -> jax.Array:
    """Returns bfloat16 numbers. Without `has_e4m3` they are a 16th. The result for NaN is any number."""
    if has_e4m3():
        return values.astype(jnp.bfloat16)
    numbers = lax.bitcast_convert_type(values, jnp.float8_e4m3b11fnuz).astype(jnp.bfloat16)
    return jnp.where(numbers == numbers, numbers, 0)
