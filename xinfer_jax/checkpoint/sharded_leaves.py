"""Reads a checkpoint's leaves for a mesh: each process reads only the parts that its devices hold.

In the files, a part of a matrix is one of n equal slices along its outputs or its inputs, in every storage
format. Some matrices are read whole and split in memory, one at a time, because slices along their inputs
depend on each other: int8 that is quantized while loading (a scale covers a whole row) and inputs in an order
of their own (g_idx). BitNet's matrices are read whole too, since each of their bytes holds outputs of several
parts.

Where the devices do not divide the vocabulary, rows of zeros are appended. No token has their ids, and
`model.decoder.unembed` drops their logits.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..config.layer_spec import AttentionSpec
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..families.naming import FileSpec
from ..sharding import MODEL, RULES, check_divisible
from ..weights.grouped_weight import GroupedWeight
from ..weights.layout import partition_specs
from ..weights.ternary import TernaryWeight
from .tensors import StoredTensor


def with_repeated_kv_heads(config: ModelConfig, devices: int) -> ModelConfig:
    """The config with key/value heads repeated, where the devices outnumber them, so that each device has
    one.

    Raises:
        InputError: neither number divides the other.
    """

    def repeated(heads: int) -> int:
        if devices % heads:
            check_divisible("kv_heads", heads, devices)
        return max(heads, devices)

    def of_layer(spec: AttentionSpec) -> AttentionSpec:
        own = spec.num_key_value_heads
        return dataclasses.replace(spec, num_key_value_heads=own and repeated(own))

    config = dataclasses.replace(config, num_key_value_heads=repeated(config.num_key_value_heads))
    return config.with_attention(of_layer)


class LeafPartition(NamedTuple):
    """How a tensor is split into parts along its outputs (axis 0), its inputs (1) or not at all (None)."""

    num_parts: int
    axis: int | None
    devices_per_part: int  # more than one where key/value heads are repeated
    size: int = 0  # of a part along the axis; for the vocabulary with padding
    vocab_size: int = 0  # outputs of a vocabulary matrix, without padding; 0: another matrix
    packed: int = 1  # outputs of a vocabulary matrix that the files pack in one word

    def part_spec(self, spec: FileSpec) -> FileSpec:
        """The spec of one part, padding included."""
        return self._with_size(spec, self.size)

    def stored_spec(self, spec: FileSpec, i: int) -> FileSpec:
        """The spec of what the files hold of part i, without padding."""
        if not self.vocab_size:
            return self._with_size(spec, self.size)
        return self._with_size(spec, min(self.size, self.vocab_size - self._stored_part(i) * self.size))

    def _with_size(self, spec: FileSpec, size: int) -> FileSpec:
        if self.axis is None:
            return spec
        shape = list(spec.shape)
        shape[self.axis] = size
        return dataclasses.replace(spec, shape=tuple(shape))

    def slice_parts(self, stored: list[StoredTensor], i: int) -> list[StoredTensor]:
        """What belongs to part i: some of the experts' tensors, or a slice of the single tensor."""
        if self.axis is None or not stored:
            return stored
        if len(stored) > 1 or len(stored[0].shape) == 3:
            count = len(stored) // self.num_parts
            return stored[i * count : (i + 1) * count]
        return [self._slice(stored[0], self.axis, i)]

    def slice_quantized(
        self, names: Mapping[str, Any], tensors: Mapping[str, StoredTensor], i: int
    ) -> dict[str, Any]:
        """The slices of a quantized matrix's tensors for part i.

        All of them have inputs first and outputs last, except a two-dimensional `.values`, and MXFP4's, which
        have experts first.
        """
        found = {name: tensors[name] for name in names}
        if self.axis is None:
            return found
        for name, tensor in found.items():
            last = len(tensor.shape) - 1
            outputs_first = last == 0 or name.endswith(".values") and last == 1
            outputs_first |= name.endswith(("_blocks", "_scales"))
            axis = (0, last)[self.axis] if outputs_first else (last, 0)[self.axis]
            has_only_inputs = name.endswith((".order", "g_idx"))
            has_only_outputs = last == 0 and not has_only_inputs
            if (has_only_inputs and self.axis == 0) or (has_only_outputs and self.axis == 1):
                continue
            found[name] = self._slice(tensor, axis, i)
        return found

    def pad(self, spec: FileSpec, part: Any, i: int) -> Any:
        """Part i as it was read, on the host, with rows of zeros up to the size of the other parts."""
        left = self.vocab_size - i * self.size
        if not self.vocab_size or left >= self.size:
            return part

        def pad_array(x: np.ndarray, places: PartitionSpec) -> np.ndarray:
            for axis, place in enumerate(places):
                if place:
                    x = _slice_or_pad(_slice_or_pad(x, axis, 0, max(0, left)), axis, 0, self.size)
            return x

        return jax.tree.map(pad_array, part, partition_specs(spec, part, None, RULES))

    def _stored_part(self, i: int) -> int:
        """The part that is read for part i: the last one with rows in the files, where part i has none."""
        return min(i, (self.vocab_size - 1) // self.size)

    def _slice(self, tensor: StoredTensor, axis: int, i: int) -> StoredTensor:
        length = tensor.shape[axis]
        if self.vocab_size:
            size = self.size if length == self.vocab_size else self.size // self.packed
            start = self._stored_part(i) * size
            return tensor.slice_axis(axis, start, min(size, length - start))
        size, rest = divmod(length, self.num_parts)
        if rest:
            raise InputError(
                f"{tensor.file}: a tensor {list(tensor.shape)} has no {self.num_parts} equal parts on axis"
                f" {axis}"
            )
        return tensor.slice_axis(axis, i * size, size)


def leaf_partition(spec: FileSpec, devices: int, packed: int = 1) -> LeafPartition:
    """How a leaf is split over the devices of a mesh.

    Args:
        spec: of the whole leaf in the files, before key/value heads are repeated.
        devices: along the mesh axis "model".
        packed: how many numbers the files pack in one word.
    """
    sharded_axes = [axis for axis, name in enumerate(spec.axes) if name and RULES[name] == MODEL]
    if not sharded_axes:
        return LeafPartition(1, None, devices)
    axis = sharded_axes[0]
    length = spec.shape[axis]
    if spec.axes[axis] == "vocab":
        return LeafPartition(devices, axis, 1, -(-length // (devices * packed)) * packed, length, packed)
    n = min(devices, spec.kv_heads) if spec.axes[axis] == "kv_heads" else devices
    return LeafPartition(n, axis, devices // n, length // n)


def check_partition(spec: FileSpec, struct: Any, partition: LeafPartition, packed: int) -> None:
    """Raises InputError where a part would split a group of inputs, or a word of packed numbers."""
    if partition.axis is None or not isinstance(struct, GroupedWeight | TernaryWeight):
        return
    group = struct.group if partition.axis == 1 else 1
    for size, what in ((group, "groups"), (packed, "packed words")):
        if partition.size % size:
            raise InputError(
                f"{spec.hf_name} has {partition.size} {('outputs', 'inputs')[partition.axis]} for each of"
                f" {partition.num_parts} devices, which {what} of {size} do not divide: choose fewer devices"
            )


def sharded_shapes(spec: FileSpec, part: Any, mesh: Mesh, devices: int) -> Any:
    """The shapes of a leaf over the mesh.

    Args:
        spec: of the leaf.
        part: shapes of one part.
        mesh: of the shardings.
        devices: number of parts; 1: `part` is the whole leaf.
    """
    places_tree = partition_specs(spec, part, None, RULES)

    def shard_struct(struct: Any, places: PartitionSpec) -> Any:
        shape = [size * devices if place else size for size, place in zip(struct.shape, places, strict=True)]
        return jax.ShapeDtypeStruct(tuple(shape), struct.dtype, sharding=NamedSharding(mesh, places))

    leaf = jax.tree.map(shard_struct, part, places_tree)
    if hasattr(part, "inputs") and spec.axes[1] and RULES[spec.axes[1]]:
        leaf = dataclasses.replace(leaf, inputs=part.inputs * devices)
    return leaf


def device_part(spec: FileSpec, leaf: Any, i: int, num_parts: int) -> Any:
    """Part i of a whole leaf on the host."""

    def part(x: np.ndarray, places: PartitionSpec) -> np.ndarray:
        for axis, place in enumerate(places):
            if place:
                size = -(-x.shape[axis] // num_parts)
                x = _slice_or_pad(x, axis, i * size, size)
        return x

    return jax.tree.map(part, leaf, partition_specs(spec, leaf, None, RULES))


def _slice_or_pad(x: np.ndarray, axis: int, start: int, size: int) -> np.ndarray:
    """The slice along an axis, with zeros where the array ends before."""
    x = x[(slice(None),) * axis + (slice(start, start + size),)]
    if x.shape[axis] >= size:
        return x
    return np.pad(x, [(0, size - length if at == axis else 0) for at, length in enumerate(x.shape)])


def shard_leaf(spec: FileSpec, get_part: Callable[[int], Any], struct: Any, mesh: Mesh) -> Any:
    """Puts a leaf on the devices of the mesh.

    Args:
        spec: of the leaf.
        get_part: returns a device's part as host arrays, by the device's index along "model".
        struct: shapes of the whole leaf.
        mesh: the mesh; only this process's devices are filled.
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
