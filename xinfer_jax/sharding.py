"""Arrays over a mesh of devices: logical axes to mesh axes, and functions that run on each device's
shards.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, get_abstract_mesh, reshard

from .checks import check_integer
from .errors import InputError

MODEL = "model"  # the axis of a mesh over which one model is divided
DATA = "data"  # the axis over which rows are divided

# The mesh axis of each logical axis of parameters, caches and states; None: not divided.
RULES: Mapping[str, str | None] = dict(
    vocab=MODEL, heads=MODEL, kv_heads=MODEL, linear_heads=MODEL, mlp=MODEL, experts=MODEL, embed=None,
    rows=None,
)  # fmt: skip
REPLICATED = PartitionSpec()


def abstract_mesh_of(tree: Any) -> Any:
    """Returns the abstract mesh whose axis "model" divides the arrays, from their types, also under `jit`.

    None: one device along it, no such axis, or inside a `shard_map` over it.
    """
    leaves = jax.tree.leaves(tree)
    mesh = jax.typeof(leaves[0]).sharding.mesh if leaves else None
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True)) if mesh else {}
    return mesh if mesh and kinds.get(MODEL) == AxisType.Auto and mesh.shape[MODEL] > 1 else None


def concrete_mesh_of(tree: Any) -> Mesh | None:
    """Returns the mesh of devices whose axis "model" divides the arrays, outside a trace. None: there is
    none.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)[:1]]
    meshes = (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh) and MODEL in mesh.shape), None)


def mesh_of_params(params: Any) -> tuple[Mesh | None, float]:
    """Returns `concrete_mesh_of` parameters, and its `memory_fraction`."""
    mesh = concrete_mesh_of(params)
    return mesh, memory_fraction(mesh)


def partition_spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Any, rules: Mapping[str, str | None] = RULES
) -> PartitionSpec:
    """Returns the `PartitionSpec` of an array with these logical axes, each divided by its mesh axis in
    `rules`. Raises InputError if the mesh does not fit the axes or sizes. mesh: None: there is no check.
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


def row_axis(mesh: Any, rows: int) -> str | None:
    """Returns the mesh axis over which this number of rows is divided, or None if they are not."""
    size = mesh.shape.get(DATA, 1)
    is_manual = size > 1 and mesh.axis_types[mesh.axis_names.index(DATA)] == AxisType.Manual
    return DATA if size > 1 and rows % size == 0 and not is_manual else None


def cache_specs(tree: Any, mesh: Any, rows: str | None = None) -> Any:
    """Returns the PartitionSpecs of a cache or of parts of it. All are sharded by rows, on axis 0, over this
    mesh axis. Arrays of at least three axes are also sharded by heads, on axis 1. Block tables have two axes.
    """
    rules = dict(RULES, rows=rows)

    def of(x: Any) -> PartitionSpec:
        axes = ("rows", "kv_heads", None, None)[: x.ndim] if x.ndim > 2 else ("rows",)
        return partition_spec(axes, x.shape[: len(axes)], mesh, rules)

    return jax.tree.map(of, tree)


def constrain_heads(tree: Any, mesh: Mesh, has_rows: bool) -> Any:
    """Returns the arrays with the sharding of `cache_specs`, in a traced function."""
    rows = row_axis(mesh, len(jax.tree.leaves(tree)[0])) if has_rows else None
    shardings = jax.tree.map(partial(NamedSharding, mesh), cache_specs(tree, mesh, rows))
    constrain = reshard if AxisType.Explicit in mesh.axis_types else lax.with_sharding_constraint
    return constrain(tree, shardings)


def check_divisible(
    axis: str, size: int, devices: int, along: str = MODEL, remedy: str = "choose a number that does"
) -> None:
    """Raises InputError if a number of devices does not divide the size of a logical axis."""
    if size % devices:
        raise InputError(
            f"{axis} has {size}, which {devices} devices along {along!r} do not divide: {remedy}"
        )


def check_mesh(mesh: Any, axis: str | None = MODEL) -> Mesh:
    """Returns the mesh with Auto axes, for which the compiler chooses shardings, but under `jax.set_mesh` of
    one with Explicit axes the mesh itself. Raises InputError unless it has the axis, if one is named.
    """
    if not isinstance(mesh, Mesh) or axis is not None and axis not in mesh.shape:
        given = list(mesh.axis_names) if isinstance(mesh, Mesh) else type(mesh).__name__
        raise InputError(
            f"mesh must be a jax.sharding.Mesh with an axis {MODEL!r}, as jax.make_mesh((4,), ({MODEL!r},))"
            f" makes it, got {given}"
        )
    return mesh if AxisType.Explicit in get_abstract_mesh().axis_types else _auto_mesh(mesh)


def _auto_mesh(mesh: Any) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def on_auto_mesh(tree: Any) -> Any:
    """Returns the arrays with Auto axes in place of a mesh's Explicit ones. No bytes move."""

    def convert(x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
            return x
        return jax.device_put(x, NamedSharding(_auto_mesh(sharding.mesh), sharding.spec))

    return jax.tree.map(convert, tree)


def cache_mesh(mesh: Any) -> tuple[Mesh, float, NamedSharding]:
    """Returns `check_mesh` of a new cache's mesh, its `memory_fraction`, and the sharding of arrays that it
    does not divide.
    """
    mesh = check_mesh(mesh)
    return mesh, memory_fraction(mesh), NamedSharding(mesh, REPLICATED)


def memory_fraction(mesh: Mesh | None) -> float:
    """Returns the fraction of arrays divided along "model" that is in one memory: the memory of a device or,
    on CPU, of all devices of this process.
    """
    if mesh is None:
        return 1
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    count = len(local) if local and local[0].platform == "cpu" else 1
    return count / mesh.shape[MODEL]


def device_groups(number: int, own: Sequence[jax.Device] | None = None) -> list[list[jax.Device]]:
    """Returns the devices of each of `number` engines. own: the devices of the first engine. The others get
    the same number. Raises InputError if there are too few.
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


def shard_map_over(
    function: Callable, mesh: Any, in_specs: Any, out_specs: Any, axes: Collection[str] = (MODEL,)
) -> Callable:
    """Returns a `shard_map` of the function over these mesh axes. Other axes stay automatic."""
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes))
    )
