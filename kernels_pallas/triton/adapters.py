"""Low-rank adapters of rows (LoRA) in the product kernel for Triton: XLA multiplies x by the first matrices,
and the kernel the result by the second ones.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from ..reference_products import Matrix
from .parts import Range, dot, load_tile, tile_size


class _Inner(NamedTuple):
    """The second matrices of adapters, and the products with the first ones, before the norm's factor."""

    inner_MR: Any
    b_NOR: Any
    adapter_M: Any


def with_inner(matrix: Matrix, x_MI, norm_I, offset: float) -> Any:
    """Returns the matrix with `_Inner` of its adapters. XLA reads the rows' matrices within a sum of products
    of numbers. For a batched product it would gather them in memory.
    """
    if matrix.adapters is None:
        return matrix
    a_NRI = matrix.adapters.a_NRI
    b_NOR = matrix.adapters.b_NOR
    adapter_M = matrix.adapters.adapter_M
    a_MRI = a_NRI[: max(1, len(a_NRI) - 1)].at[adapter_M].get(mode="clip").astype(jnp.float32)
    x32_MI = x_MI.astype(jnp.float32)
    if norm_I is not None:
        x32_MI *= offset + norm_I.astype(jnp.float32)
    inner_MR = (x32_MI[:, None] * a_MRI).sum(-1) * matrix.adapters.scale
    return matrix._replace(adapters=_Inner(inner_MR.astype(b_NOR.dtype), b_NOR, adapter_M))


def add_adapters(y_MO, adapters, row, out, count):
    """Returns y plus the products with the adapters of the first `count` rows. Each adapter is read once, for
    all of its rows. No other row takes its numbers, which may be NaN.
    """
    R = adapters.b_NOR.shape[2]
    rank = Range.of(row.slice.start, tile_size(R), R)  # rows are one block, so both start at 0
    inner_MR = load_tile(adapters.inner_MR, row, rank)
    adapter_M = load_tile(adapters.adapter_M, row)
    number_M = jnp.arange(row.slice.size)

    def add_one(m, y_MO):
        adapter = pltriton.load(adapters.adapter_M.at[m])
        own_M = adapter_M == adapter
        first = jnp.min(jnp.where(own_M, number_M, row.slice.size))

        def add(y_MO):
            b_OR = load_tile(adapters.b_NOR, adapter, out, rank)
            return jnp.where(own_M[:, None], y_MO + dot(inner_MR, b_OR.T), y_MO)

        is_first = (first == m) & (adapter >= 0)
        return lax.cond(is_first, add, lambda y_MO: y_MO, y_MO)

    return lax.fori_loop(0, count, add_one, y_MO)
