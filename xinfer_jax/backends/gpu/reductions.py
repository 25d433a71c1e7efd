"""Reductions over the vocabulary for NVIDIA GPUs. Each pass makes many sums: there a launch and a read cost
more than the arithmetic.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ...modes import in_default_modes
from ...ops.operation import Call, match_varying_axes
from ...sharding import abstract_mesh_of

_TILE = 128  # numbers that are reduced first


@jax.custom_jvp
def logsumexp_in_one_pass(logits_BV: jax.Array) -> jax.Array:
    """Returns float32 [B]: `logsumexp` of each row, by a reduction of pairs: the largest logit, and the sum
    of the exponentials of logits relative to it. jax cannot differentiate such a reduction.
    """

    def finite(largest):
        return jnp.where(jnp.isfinite(largest), largest, 0)

    def add(a, b):
        largest = jnp.maximum(a[0], b[0])
        zero = finite(largest)
        return [largest, a[1] * jnp.exp(a[0] - zero) + b[1] * jnp.exp(b[0] - zero)]

    def reduce(pairs, axis):
        return lax.reduce(pairs, [jnp.float32(-jnp.inf), jnp.float32(0)], add, (axis,))

    logits_BIJ = _in_tiles(logits_BV, -jnp.inf)
    largest_B, sum_B = reduce(reduce([logits_BIJ, jnp.ones_like(logits_BIJ)], 2), 1)
    return finite(largest_B) + jnp.log(sum_B)


@logsumexp_in_one_pass.defjvp
@in_default_modes
def _logsumexp_jvp(primals, tangents):
    (logits_BV,) = primals
    return logsumexp_in_one_pass(logits_BV), (jax.nn.softmax(logits_BV, -1) * tangents[0]).sum(-1)


def threshold_form(call: Call) -> Callable | None:
    """Returns a form of `threshold`. Over a mesh there is none: XLA does not divide a reduction of several
    arrays.
    """
    return None if abstract_mesh_of(call.operands["order_BV"]) else threshold_by_digits


def threshold_by_digits(order_BV: jax.Array, weight_BV: jax.Array, least_B: jax.Array) -> jax.Array:
    """Returns, int32 [B], the largest threshold for which the weights (float32, at least 0) at or above it
    sum to at least `least`, or the smallest integer if there is none. 8 passes, each with 15 sums in one
    reduction, find 4 bits each.
    """
    order_BIJ = _in_tiles(order_BV, 0)
    weight_BIJ = _in_tiles(weight_BV, 0)

    def add_up(parts: list[jax.Array], axis: int) -> list[jax.Array]:
        zeros = [jnp.float32(0)] * len(parts)
        return lax.reduce(list(parts), zeros, lambda a, b: list(map(jnp.add, a, b)), (axis,))

    def search(i, low_B):
        step = 1 << (28 - 4 * i)
        above = [order_BIJ >= (low_B + digit * step)[:, None, None] for digit in range(1, 16)]
        sums = add_up(add_up([jnp.where(above_BIJ, weight_BIJ, 0) for above_BIJ in above], 2), 1)
        return low_B + step * sum((sum_B >= least_B).astype(jnp.int32) for sum_B in sums)

    lowest_B = jnp.full_like(order_BV[:, 0], jnp.iinfo(jnp.int32).min)
    return lax.fori_loop(0, 8, search, match_varying_axes(lowest_B, order_BV, weight_BV, least_B))


def _in_tiles(x_BV: jax.Array, padding: float) -> jax.Array:
    """Returns [B, I, J]: each row as I tiles of J numbers, to reduce tiles first. For a reduction of several
    arrays over a whole row XLA would write a padded copy of each on a GPU.
    """
    (B, V) = x_BV.shape
    return jnp.pad(x_BV, ((0, 0), (0, -V % _TILE)), constant_values=padding).reshape(B, -1, _TILE)
