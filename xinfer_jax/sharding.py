"""Arrays over a mesh of devices: which axis of an array lies along which axis of the mesh, and functions of
which every device does its part.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .checks import whole
from .errors import InputError

MODEL = "model"  # the axis of a mesh over which one model is divided
# Logical axes of parameters, caches and states, and the axis of the mesh along which each lies.
RULES: Mapping[str, str | None] = dict(
    vocab=MODEL, heads=MODEL, kv_heads=MODEL, mlp=MODEL, experts=MODEL, embed=None, rows=None
)
SAME = PartitionSpec()  # on every device


def mesh_of(tree: Any) -> Any:
    """The mesh over whose axis "model" arrays lie, as their types say it, also under `jit`; None: one device,
    no such axis, or inside a `shard_map` over it.
    """
    leaves = jax.tree.leaves(tree)
    mesh = jax.typeof(leaves[0]).sharding.mesh if leaves else None
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True)) if mesh else {}
    return mesh if kinds.get(MODEL) == AxisType.Auto else None


def lies_over(tree: Any) -> Mesh | None:
    """The mesh of devices over whose axis "model" arrays lie; outside a trace."""
    places = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)[:1]]
    meshes = (place.mesh for place in places if isinstance(place, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh) and MODEL in mesh.shape), None)


def spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Any, rules: Mapping[str, str | None] = RULES
) -> PartitionSpec:
    """How an array with these logical axes is divided. mesh: None: any.

    Raises:
        InputError: a size that the devices do not divide, an axis of the mesh twice or not there.
    """
    places = [rules[axis] if axis else None for axis in axes]
    for axis, place, size in zip(axes, places, shape, strict=True):
        if place is None or mesh is None:
            continue
        if place not in mesh.shape:
            raise InputError(f"{axis} is to lie along {place!r}, and the mesh has {list(mesh.axis_names)}")
        if places.count(place) > 1:
            raise InputError(f"{list(axes)} are to lie along {places}: {place!r} can be used once")
        if size % mesh.shape[place]:
            raise InputError(
                f"{axis} has {size}, which {mesh.shape[place]} devices along {place!r} do not divide: choose"
                " a number that does"
            )
    return PartitionSpec(*places)


def on_devices(mesh: Mesh) -> Mesh:
    """The mesh with axes whose layouts the compiler completes (Auto), whatever they were."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def share(mesh: Mesh | None) -> float:
    """Of what is divided along "model" the part that counts against one memory: a device's, or on CPUs that
    of all devices of this process.
    """
    if mesh is None:
        return 1
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    count = len(here) if here and here[0].platform == "cpu" else 1
    return count / mesh.shape[MODEL]


def device_groups(number: int, own: Sequence[jax.Device] | None = None) -> list[list[jax.Device]]:
    """Devices of so many engines; own: those of the first, and each of the others gets as many.

    Raises:
        InputError: there are not so many.
    """
    own = own or jax.local_devices()[:1]
    alike = jax.local_devices(backend=own[0].platform)
    rest = [device for device in alike if device not in own]
    size = len(own)
    need = whole("data_parallel", number, 1) * size
    have = len(rest) + size
    if need > have:
        raise InputError(
            f"data_parallel={number} takes {need} devices, and there are {have}: ask for"
            f" {have // size} at most; XLA_FLAGS=--xla_force_host_platform_device_count={need} makes so many"
            " of a CPU"
        )
    return [list(own), *(rest[at : at + size] for at in range(0, need - size, size))]


def check_context() -> None:
    """Raises InputError under `jax.set_mesh` of a mesh with Explicit axes, where a model lies over one."""
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        raise InputError(
            "a model over a mesh does not run under jax.set_mesh of one with Explicit axes: make that with"
            " axis_types=(jax.sharding.AxisType.Auto,) * its axes, or leave jax.set_mesh out"
        )


def each(function: Callable, mesh: Any, in_specs: Any, out_specs: Any) -> Callable:
    """The function, done by every device along "model" with its parts of the arrays; other axes stay as they
    are.
    """
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={MODEL})
    )


def top_k(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` of [..., V]; where devices have parts of V, of what each finds in its own."""
    mesh = mesh_of(x)
    if mesh is None:
        return lax.top_k(x, count)
    if more := -x.shape[-1] % mesh.shape[MODEL]:  # the last of equal numbers: none of them is among V
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)], constant_values=-jnp.inf)

    def own(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        found, at = lax.top_k(x, min(count, x.shape[-1]))
        return found, at + lax.axis_index(MODEL) * x.shape[-1]

    parts = PartitionSpec(*(None,) * (x.ndim - 1), MODEL)
    found, at = each(own, mesh, parts, (parts, parts))(x)
    most, which = lax.top_k(found, count)
    return most, jnp.take_along_axis(at, which, -1)
