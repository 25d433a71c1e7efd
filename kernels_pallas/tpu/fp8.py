"""Products of few rows with matrices in FP8 (E4M3), for `matrices`.

Chips before TPU7x convert a type of 8 bits whose exponents are larger by 4: numbers are a 16th, and -0 is NaN
there. A matrix unit sums up 256 inputs from v6e on, where a block with a scale has 128. So x has its rows
twice: with the even blocks, and with the odd ones. That costs nothing up to 16 rows, and loses nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..reference_products import FP8_BLOCK
from .parts import dot, has_bfloat16_vectors, has_e4m3, pieces

_STEP = 2048  # inputs of a step of a loop


def blocks_at_once() -> int:
    """Blocks of an output that are multiplied at once: as many inputs as a matrix unit sums up."""
    return 2 if has_bfloat16_vectors() else 1


def rows_of_blocks(x_RI: jax.Array) -> jax.Array:
    """R rows for each of the blocks that are multiplied at once: x with zeros for the others."""
    count = blocks_at_once()
    if count == 1:
        return x_RI
    block = lax.rem(lax.div(lax.broadcasted_iota(jnp.int32, x_RI.shape, 1), FP8_BLOCK), count)
    return jnp.concatenate([jnp.where(block == i, x_RI, 0) for i in range(count)])


def column_of(row_1Q: jax.Array) -> jax.Array:
    """[Q, 1] of [1, Q]."""
    row, column = (lax.broadcasted_iota(jnp.int32, row_1Q.shape[1:] * 2, axis) for axis in (0, 1))
    return jnp.where(row == column, row_1Q, 0).sum(1, keepdims=True)


def store_scales(read: Callable[[int], jax.Array], outputs: int, memory: Any) -> None:
    """Stores the scale of each block of inputs [Q] for each output. read: of a block of outputs [Q, 1]."""
    for i, first in enumerate(range(0, outputs, FP8_BLOCK)):
        scale_Q1 = read(i)
        shape = len(scale_Q1), min(FP8_BLOCK, outputs - first)
        memory[: shape[0], first : first + shape[1]] = jnp.broadcast_to(scale_Q1, shape)


def multiply(x: Any, values: Any, rows: int, axis: int, scales: Any) -> jax.Array:
    """x · matrixᵀ, float32 [R, O].

    Args:
        x: reference to `rows_of_blocks`; without scales of blocks to x.
        values: to a matrix.
        rows: R.
        axis: of the matrix, that of inputs.
        scales: what `store_scales` stored; None: there are no blocks.
    """
    inputs = values.shape[axis]
    looped = inputs // _STEP * _STEP
    sums = []
    for outputs in pieces(values.shape[1 - axis]):
        y_RO = jnp.zeros((rows, outputs.stop - outputs.start), jnp.float32)
        of_outputs = None if scales is None else scales.at[:, outputs]
        part = values.at[:, outputs] if axis == 0 else values.at[outputs]
        add = partial(_add, x, part, axis, of_outputs)
        y_RO = lax.fori_loop(0, looped // _STEP, lambda i, y, add=add: add(i * _STEP, _STEP, y), y_RO)
        sums.append(add(looped, inputs - looped, y_RO))
    y_RO = jnp.concatenate(sums, 1)
    return y_RO if has_e4m3() else 16 * y_RO


def _add(x: Any, values: Any, axis: int, scales: Any, first: Any, size: int, y_RO: jax.Array) -> jax.Array:  # noqa: PLR0913
    """Adds the products of some inputs, from the first on."""
    R = len(y_RO)
    depth = FP8_BLOCK * blocks_at_once()
    for start in range(0, size, depth):
        width = min(depth, size - start)
        columns = pl.ds(pl.multiple_of(first + start, FP8_BLOCK), width)
        products = dot(x[:, columns], _numbers(values[columns] if axis == 0 else values[:, columns]), axis)
        if scales is None:
            y_RO += products
            continue
        for i in range(pl.cdiv(width, FP8_BLOCK)):
            scale_1O = scales[pl.ds(lax.div(first + start, FP8_BLOCK) + i, 1)]
            y_RO += products[i * R : (i + 1) * R] * scale_1O
    return y_RO


def _numbers(values: jax.Array) -> jax.Array:
    """bfloat16 numbers, without `has_e4m3` a 16th; of NaN any."""
    if has_e4m3():
        return values.astype(jnp.bfloat16)
    numbers = lax.bitcast_convert_type(values, jnp.float8_e4m3b11fnuz).astype(jnp.bfloat16)
    return jnp.where(numbers == numbers, numbers, 0)
