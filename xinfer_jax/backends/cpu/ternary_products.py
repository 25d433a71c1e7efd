"""Products for CPUs with ternary weights.

A row's activations become eight bit planes, one for each bit of an int8 number. A sum of products is then a
count of common bits of two planes: an `and`, a population count and an addition per 32 weights and pair of
planes, at up to twice the speed of int4 and int8. A few rows are multiplied one by one. More rows take int8
tiles: words are split into bytes and these masked (masking words takes four times as long), then XLA
multiplies in int8, with half the work of int8 weights: one int8 row per token.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...ops.forms import always
from ...ops.product import dot
from ...weights.ternary import WORD, unpack_ternary
from . import product_table
from .cpu_products import row_by_row, tiled_product

_RUN = 4  # words of one sum


@always
def ternary_form(x_MI: jax.Array, values_W2O: jax.Array) -> jax.Array:
    """Returns a form of `ternary_sums`."""
    rows, inputs = x_MI.shape
    if product_table.fastest_form("ternary", rows, values_W2O.shape[-1], inputs) == product_table.ROWS:
        return row_by_row(lambda x_I: _row(x_I, values_W2O), x_MI)

    def multiply_tile(first: jax.Array, size: int, values_W2O: jax.Array) -> jax.Array:  # [M, size]
        tile = lax.dynamic_slice_in_dim(values_W2O, first, size, 2)
        return dot(x_MI, unpack_ternary(tile, inputs), 0, jnp.int32).astype(jnp.float32)

    start_MI = x_MI.astype(jnp.float32)
    return tiled_product(multiply_tile, start_MI, values_W2O.shape[-1], 4 * inputs, values_W2O)


def _row(x_I: jax.Array, values_W2O: jax.Array) -> jax.Array:
    """Returns one row's product, float32 [O]. Inputs are C runs of words."""
    words, _, outputs = values_W2O.shape
    run = math.gcd(words, _RUN)
    x_W32 = jnp.pad(x_I.astype(jnp.int32), (0, -x_I.size % WORD)).reshape(-1, WORD)
    bits_W832 = (x_W32[:, None] >> np.arange(8)[:, None]) & 1
    # A dot, which XLA does not fuse: fused, the bit planes would be computed for every output.
    places = (1 << np.arange(WORD, dtype=np.uint32)).view(np.int32)
    planes_W8 = dot(bits_W832, jnp.asarray(places), 0, jnp.int32)
    planes_W8, values_W2O = lax.optimization_barrier((planes_W8, values_W2O))
    planes_CR8 = planes_W8.reshape(-1, run, 8)
    plus_CRO, minus_CRO = (values_W2O.reshape(-1, run, 2, outputs)[:, :, sign] for sign in (0, 1))
    sum_CRO: Any = 0
    for bit in range(7, -1, -1):  # the sign bit counts negative
        x_CR1 = planes_CR8[..., bit, None]
        common = lax.population_count(plus_CRO & x_CR1) - lax.population_count(minus_CRO & x_CR1)
        sum_CRO = -common if bit == 7 else sum_CRO + sum_CRO + common
    sum_CO = lax.reduce(sum_CRO, np.int32(0), lax.add, (1,)).astype(jnp.float32)
    # A dot with ones: XLA would fuse a sum over runs into the loop, which then has no vector instructions.
    return dot(jnp.ones(len(sum_CO), jnp.float32), sum_CO, 0)
