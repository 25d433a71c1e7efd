"""Arrays over a mesh of devices: logical axes to mesh axes, and functions that run on each device's
shards.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .checks import check_integer
from .errors import InputError

MODEL = "model"  # the axis of a mesh over which one model is divided
# The mesh axis of each logical axis of parameters, caches and states; None: not divided.
RULES: Mapping[str, str | None] = dict(
    vocab=MODEL, heads=MODEL, kv_heads=MODEL, linear_heads=MODEL, mlp=MODEL, experts=MODEL, embed=None,
    rows=None,
)  # fmt: skip
REPLICATED = PartitionSpec()
_MOST_SORTED = 4096  # numbers that a GPU sorts in one kernel
_MOST_BUILT_IN = 16  # XLA has a kernel for so few largest numbers


def abstract_mesh_of(tree: Any) -> Any:
    """Returns the abstract mesh whose axis "model" divides the arrays, from their types, also under `jit`.

    None: one device, no such axis, or inside a `shard_map` over it.
    """
    leaves = jax.tree.leaves(tree)
    mesh = jax.typeof(leaves[0]).sharding.mesh if leaves else None
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True)) if mesh else {}
    return mesh if kinds.get(MODEL) == AxisType.Auto else None


def concrete_mesh_of(tree: Any) -> Mesh | None:
    """Returns the mesh of devices whose axis "model" divides the arrays, outside a trace; None: there is
    none.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)[:1]]
    meshes = (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh) and MODEL in mesh.shape), None)


def partition_spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Any, rules: Mapping[str, str | None] = RULES
) -> PartitionSpec:
    """Returns the `PartitionSpec` of an array with these logical axes.

    Args:
        axes: logical axes; None: not divided.
        shape: of the array.
        mesh: to check axes and sizes with; None: no check.
        rules: the mesh axis of each logical axis.

    Raises:
        InputError: a size that the devices do not divide, a mesh axis that is used twice or does not exist.
    """
    mesh_axes = [rules[axis] if axis else None for axis in axes]
    for axis, mesh_axis, size in zip(axes, mesh_axes, shape, strict=True):
        if mesh_axis is None or mesh is None:
            continue
        if mesh_axis not in mesh.shape:
            raise InputError(
                f"{axis} needs a mesh axis {mesh_axis!r}, and the mesh has {list(mesh.axis_names)}"
            )
        if mesh_axes.count(mesh_axis) > 1:
            raise InputError(f"{list(axes)} would use {mesh_axes}: {mesh_axis!r} can be used once")
        check_divisible(str(axis), size, mesh.shape[mesh_axis], along=mesh_axis)
    return PartitionSpec(*mesh_axes)


def check_divisible(
    axis: str, size: int, devices: int, along: str = MODEL, remedy: str = "choose a number that does"
) -> None:
    """Raises InputError where a number of devices does not divide the size of a logical axis."""
    if size % devices:
        raise InputError(
            f"{axis} has {size}, which {devices} devices along {along!r} do not divide: {remedy}"
        )


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Returns the mesh with Auto axes, for which the compiler chooses shardings."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def memory_fraction(mesh: Mesh | None) -> float:
    """Returns the fraction of arrays divided along "model" that is in one memory: that of a device, or on CPU
    that of all devices of this process.
    """
    if mesh is None:
        return 1
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    count = len(local) if local and local[0].platform == "cpu" else 1
    return count / mesh.shape[MODEL]


def device_groups(number: int, own: Sequence[jax.Device] | None = None) -> list[list[jax.Device]]:
    """Returns the devices of each engine.

    Args:
        number: of engines.
        own: devices of the first engine; the others get as many.

    Raises:
        InputError: there are too few devices.
    """
    own = own or jax.local_devices()[:1]
    candidates = jax.local_devices(backend=own[0].platform)
    rest = [device for device in candidates if device not in own]
    size = len(own)
    need = check_integer("data_parallel", number, 1) * size
    have = len(rest) + size
    if need > have:
        raise InputError(
            f"data_parallel={number} needs {need} devices, and there are {have}: give {have // size} at most;"
            f" XLA_FLAGS=--xla_force_host_platform_device_count={need} makes so many of a CPU"
        )
    return [list(own), *(rest[at : at + size] for at in range(0, need - size, size))]


def check_mesh_context() -> None:
    """Raises InputError under `jax.set_mesh` of a mesh with Explicit axes; for models over a mesh."""
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        raise InputError(
            "a model over a mesh does not run under jax.set_mesh of one with Explicit axes: make that with"
            " axis_types=(jax.sharding.AxisType.Auto,) * its axes, or leave jax.set_mesh out"
        )


def shard_map_model(function: Callable, mesh: Any, in_specs: Any, out_specs: Any) -> Callable:
    """Returns a `shard_map` of the function over axis "model"; other mesh axes stay automatic."""
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={MODEL})
    )


def sharded_top_k(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns `lax.top_k` of [..., V]. Where V is divided over devices, each finds candidates in its part
    first. NVIDIA GPUs find the groups of the candidates first.
    """
    mesh = abstract_mesh_of(x)
    if mesh is None:
        return _top_k(x, count)
    if more := -x.shape[-1] % mesh.shape[MODEL]:  # padding comes after V, so ties go to real entries
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)], constant_values=-jnp.inf)

    def local_top_k(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, index = _top_k(x, min(count, x.shape[-1]))
        return values, index + lax.axis_index(MODEL) * x.shape[-1]

    parts = PartitionSpec(*(None,) * (x.ndim - 1), MODEL)
    values, index = shard_map_model(local_top_k, mesh, parts, (parts, parts))(x)
    largest, which = lax.top_k(values, count)
    return largest, jnp.take_along_axis(index, which, -1)


def _top_k(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    def ungrouped(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, index = lax.top_k(x, count)
        return values, index

    if x.shape[-1] <= _MOST_SORTED or count <= _MOST_BUILT_IN:
        return ungrouped(x)
    return lax.platform_dependent(x, cuda=partial(_grouped_top_k, count=count), default=ungrouped)


def _grouped_top_k(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k`, which for CUDA sorts everything in 28 kernels, by two sorts of a few thousand numbers: the
    largest numbers are in the groups with the largest maxima. So x is read once.
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
    """`lax.top_k` of numbers in groups.

    Args:
        largest: [..., groups], the largest number of each group.
        take: gives the numbers at indices, int32 [..., I].
        group: numbers of a group.
        size: numbers of a row; the last group may have fewer.
        count: results of a row.
    """
    _, which = lax.top_k(largest, min(count, largest.shape[-1]))
    which = jnp.sort(which, -1)  # so that the lowest index of equal numbers is first
    index = (which[..., None] * group + jnp.arange(group)).reshape(*largest.shape[:-1], -1)
    inside = take(jnp.minimum(index, size - 1))
    values, at = lax.top_k(jnp.where(index < size, inside, -jnp.inf), count)
    return values, jnp.take_along_axis(index, at, -1)
