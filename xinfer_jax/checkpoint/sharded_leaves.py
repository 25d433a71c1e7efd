"""Reads a checkpoint's leaves for a mesh: each process reads only the parts that its devices hold.

In the files, a part of a matrix is one of n equal slices along its outputs or its inputs, in every storage
format. Some matrices are read whole and split in memory, one at a time (`LeafLoader` says which).

If the devices do not divide the vocabulary, rows of zeros are appended. No token has their ids, and
`model.decoder.unembed` drops their logits.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import InputError
from ..families.naming import FileSpec
from ..formats.tensors import StoredTensor, Tensors
from ..sharding import MODEL, RULES
from ..weights.layout import partition_specs
from ..weights.params import ParamSpec
from ..weights.weight_leaf import WeightLeaf

_Spec = TypeVar("_Spec", bound=ParamSpec)


class LeafPartition(NamedTuple):
    """The split of a tensor into parts: along its outputs (axis 0), along its inputs (axis 1), or no split
    (axis None).
    """

    num_parts: int
    axis: int | None
    devices_per_part: int  # more than one where key/value heads are repeated

    def part_spec(self, spec: _Spec) -> _Spec:
        """Returns the spec of one part. The spec of a vocabulary includes its padding."""
        if self.axis is None:
            return spec
        shape = list(spec.shape)
        shape[self.axis] = -(-shape[self.axis] // self.num_parts)
        return dataclasses.replace(spec, shape=tuple(shape))

    def slice_parts(self, stored: list[StoredTensor], i: int) -> list[StoredTensor]:
        """Returns the stored tensors of part i: some of the experts' tensors, or a slice of the single
        tensor.
        """
        if self.axis is None or not stored:
            return stored
        if len(stored) > 1 or len(stored[0].shape) == 3:
            count = len(stored) // self.num_parts
            return stored[i * count : (i + 1) * count]
        return [self._slice(stored[0], self.axis, i)]

    def slice_quantized(self, names: Iterable[str], tensors: Tensors, i: int) -> dict[str, StoredTensor]:
        """Returns the slices of a quantized matrix's tensors for part i. All of them have inputs first and
        outputs last, except a two-dimensional `.values`.
        """
        found = {name: tensors[name] for name in names}
        if self.axis is None:
            return found
        for name, tensor in found.items():
            last = len(tensor.shape) - 1
            outputs_first = last == 0 or name.endswith(".values") and last == 1
            axis = (0, last)[self.axis] if outputs_first else (last, 0)[self.axis]
            has_only_inputs = name.endswith(".order")
            has_only_outputs = last == 0 and not has_only_inputs
            if not (has_only_inputs and self.axis == 0 or has_only_outputs and self.axis == 1):
                found[name] = self._slice(tensor, axis, i)
        return found

    def _slice(self, tensor: StoredTensor, axis: int, i: int) -> StoredTensor:
        size, rest = divmod(tensor.shape[axis], self.num_parts)
        if rest:
            raise InputError(
                f"a tensor {list(tensor.shape)} of the checkpoint has no {self.num_parts} equal parts on axis"
                f" {axis}"
            )
        return tensor.slice_axis(axis, i * size, size)


def leaf_partition(spec: ParamSpec, devices: int) -> LeafPartition:
    """Returns the split of a leaf over the devices of a mesh. spec: the spec before key/value heads are
    repeated.
    """
    axis = next((axis for axis, name in enumerate(spec.axes) if name and RULES[name] == MODEL), None)
    if axis is None:
        return LeafPartition(1, None, devices)
    n = min(devices, spec.kv_heads) if spec.axes[axis] == "kv_heads" else devices
    return LeafPartition(n, axis, devices // n)


def check_partition(spec: FileSpec, struct: Any, partition: LeafPartition) -> None:
    """Raises InputError if a part would split a group of inputs, or a block of them."""
    if partition.axis != 1 or len(spec.shape) > 2 or not isinstance(struct, WeightLeaf):
        return
    part = partition.part_spec(spec).shape[1]
    whole = math.lcm(getattr(struct, "group", 1), struct.block[1])
    if part % whole:
        raise InputError(
            f"{spec.hf_name} has {part} inputs for each of {partition.num_parts} devices, which groups of"
            f" {whole} do not divide: choose fewer devices"
        )


def sharded_shapes(spec: FileSpec, part: Any, mesh: Mesh, devices: int, num_parts: int = 1) -> Any:
    """Returns the shapes of a leaf over the mesh. part: the shapes of each device's part, times
    `num_parts`.
    """

    def shard_struct(struct: Any, places: PartitionSpec) -> Any:
        sizes = zip(struct.shape, places, strict=True)
        shape = tuple(-(-size // num_parts) * devices if place else size for size, place in sizes)
        return jax.ShapeDtypeStruct(shape, struct.dtype, sharding=NamedSharding(mesh, places))

    leaf = jax.tree.map(shard_struct, part, partition_specs(spec, part, None, RULES))
    if isinstance(part, WeightLeaf) and "inputs" in vars(part) and spec.axes[1] and RULES[spec.axes[1]]:
        leaf = dataclasses.replace(leaf, inputs=vars(part)["inputs"] // num_parts * devices)
    return leaf


def device_part(spec: FileSpec, leaf: Any, i: int, num_parts: int) -> Any:
    """Returns part i of a whole leaf on the host, with zeros if the leaf ends before."""

    def part(x: np.ndarray, places: PartitionSpec) -> np.ndarray:
        for axis, place in enumerate(places):
            if place:
                size = -(-x.shape[axis] // num_parts)
                x = x[(slice(None),) * axis + (slice(i * size, (i + 1) * size),)]
                missing = size - x.shape[axis]
                x = np.pad(x, [(0, missing if at == axis else 0) for at in range(x.ndim)]) if missing else x
        return x

    return jax.tree.map(part, leaf, partition_specs(spec, leaf, None, RULES))


def shard_leaf(spec: FileSpec, get_part: Callable[[int], Any], struct: Any, mesh: Mesh) -> Any:
    """Puts a leaf of these shapes on this process's devices of the mesh. get_part: returns a device's part as
    host arrays, by the device's index along "model".
    """
    places = jax.tree.leaves(
        partition_specs(spec, struct, mesh, RULES), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    structs, tree = jax.tree.flatten(struct)
    device_arrays: list[list[Any]] = [[] for _ in structs]
    axis = mesh.axis_names.index(MODEL)
    local_devices: dict[int, list[Any]] = {}
    for at, device in np.ndenumerate(mesh.devices):
        if device.process_index == jax.process_index():
            local_devices.setdefault(at[axis], []).append(device)
    for i, devices in local_devices.items():
        for arrays, x in zip(device_arrays, jax.tree.leaves(get_part(i)), strict=True):
            arrays += [jax.device_put(x, device) for device in devices]
    leaves = [
        jax.make_array_from_single_device_arrays(struct.shape, NamedSharding(mesh, place), arrays)
        for struct, place, arrays in zip(structs, places, device_arrays, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)
