"""A function of the rows of a batch, computed for some rows after the others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from ..ops.operation import match_varying_axes


def in_row_groups(function: Callable, size: int, *rows: Any) -> Any:
    """Runs `function` on groups of `size` rows, one group after the other, so that its temporaries stay
    small. It runs on all rows at once if there are no more, or if a mesh may divide them. Groups are of equal
    size: the last one may repeat rows of the one before.

    Args:
        function: a function from pytrees of arrays with rows in front to such a pytree. It may make several
            rows of each.
        size: the number of rows of a group.
        rows: the operands.
    """
    B = len(rows[0])
    mesh = jax.typeof(rows[0]).sharding.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    may_divide = any(kind != AxisType.Manual and mesh.shape[axis] > 1 for axis, kind in kinds)
    if B <= size or may_divide:
        return function(*rows)

    rows = jax.tree.map(jnp.asarray, rows)

    def group(i: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first(i), size), rows)

    def first(i: Any) -> Any:
        return jnp.minimum(i * size, B - size)

    def zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros((B * shape.shape[0] // size, *shape.shape[1:]), shape.dtype)

    def body(i: Any, out: Any) -> Any:
        def put(all_rows: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(all_rows, new, first(i) * (len(new) // size), 0)

        return jax.tree.map(put, out, function(*group(i)))

    empty = jax.tree.map(zeros, jax.eval_shape(lambda: function(*group(0))))
    return lax.fori_loop(0, -(-B // size), body, match_varying_axes(empty, rows))
