"""Forms of operations over a mesh of devices: each device computes its part."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..sharding import shard_map_model
from .largest import largest_k
from .operation import MODEL, abstract_mesh_of


def mesh_top_k_form(plain: Any, impl: str | None, operands: Any, static: dict[str, Any]) -> Callable | None:
    """A form of `top_k` where the numbers of a row are divided: each device finds candidates in its part."""
    mesh = abstract_mesh_of(operands)
    if mesh is None:
        return None
    count = static["count"]
    devices = mesh.shape[MODEL]

    def local_top_k(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, index = largest_k(x, min(count, x.shape[-1]))
        return values, index + lax.axis_index(MODEL) * x.shape[-1]

    def over_mesh(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if more := -x.shape[-1] % devices:  # padding comes after V, so ties go to real entries
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)], constant_values=-jnp.inf)
        parts = PartitionSpec(*(None,) * (x.ndim - 1), MODEL)
        values, index = shard_map_model(local_top_k, mesh, parts, (parts, parts))(x)
        largest, which = lax.top_k(values, count)
        return largest, jnp.take_along_axis(index, which, -1)

    return over_mesh
