"""The largest numbers of each row by two sorts of a few thousand numbers, for NVIDIA GPUs."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ...ops.operation import Call

_MOST_SORTED = 4096  # numbers that a GPU sorts in one kernel
_MOST_BUILT_IN = 16  # XLA has a kernel for so few largest numbers


def gpu_top_k_form(call: Call) -> Callable | None:
    """Returns a form of `top_k`. None: XLA has a kernel."""
    count = call.static["count"]
    if call.operands["x"].shape[-1] <= _MOST_SORTED or count <= _MOST_BUILT_IN:
        return None
    return partial(_grouped_top_k, count=count)


def _grouped_top_k(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Computes `lax.top_k`, which for CUDA sorts everything in 28 kernels: the largest numbers are in the
    groups with the largest maxima. So x is read once.
    """
    size = x.shape[-1]
    group = math.isqrt(size // count) + 1  # as many groups as numbers in `count` of them
    groups = -(-size // group)
    more = [(0, 0)] * (x.ndim - 1) + [(0, groups * group - size)]
    padded = jnp.pad(x, more, constant_values=-jnp.inf).reshape(*x.shape[:-1], groups, group)
    take = partial(jnp.take_along_axis, x, axis=-1)
    return top_k_of_groups(jnp.max(padded, -1), take, group, size, count)


def top_k_of_groups(
    largest: jax.Array, take: Callable[[jax.Array], jax.Array], group: int, size: int, count: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the `top_k` of numbers in groups.

    Args:
        largest: [..., groups], the largest number of each group.
        take: a function that returns the numbers at indices, int32 [..., I].
        group: the number of numbers in a group.
        size: the number of numbers in a row. The last group may have fewer.
        count: the number of results of a row.
    """
    _, which = lax.top_k(largest, min(count, largest.shape[-1]))
    which = jnp.sort(which, -1)  # so that the lowest index of equal numbers is first
    index = (which[..., None] * group + jnp.arange(group)).reshape(*largest.shape[:-1], -1)
    inside = take(jnp.minimum(index, size - 1))
    values, at = lax.top_k(jnp.where(index < size, inside, -jnp.inf), count)
    return values, jnp.take_along_axis(index, at, -1)
