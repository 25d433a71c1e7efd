"""A checkpoint's leaves over a mesh: of each a process reads the parts that its devices hold.

A part of a matrix in the files is one of n equal ones along its outputs or its inputs, in whatever form it is
stored. Read whole and cut in memory, one at a time, is what is divided by inputs and belongs together beyond
a part: int8 made while loading (its scales are those of whole rows), and inputs in an order of their own; and
BitNet's matrices, whose bytes hold outputs from all over.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..config.model_config import ModelConfig
from ..errors import InputError
from ..sharding import MODEL, RULES
from ..weights.layout import specs_of
from ..weights.params import ParamSpec
from ..weights.quantized import GroupedWeight
from ..weights.ternary import TernaryWeight
from .tensors import StoredTensor


def with_heads_for(config: ModelConfig, devices: int) -> ModelConfig:
    """The config of a model whose key heads are repeated where devices outnumber them: each has one.

    Raises:
        InputError: neither number divides the other.
    """
    heads = config.num_key_value_heads
    if devices % heads and heads % devices:
        raise InputError(
            f"kv_heads has {heads}, which {devices} devices do not divide: choose a number that does"
        )
    return dataclasses.replace(config, num_key_value_heads=max(heads, devices))


class Cut(NamedTuple):
    """How a tensor of a model is divided: into n parts along outputs (0), inputs (1) or not (None)."""

    n: int
    axis: int | None
    each: int  # devices that hold a part: more than one where key heads are repeated

    def spec(self, spec: ParamSpec) -> ParamSpec:
        """Of a part."""
        if self.axis is None:
            return spec
        shape = [size // self.n if axis == self.axis else size for axis, size in enumerate(spec.shape)]
        return dataclasses.replace(spec, shape=tuple(shape))

    def pieces(self, pieces: list[StoredTensor], i: int) -> list[StoredTensor]:
        """Those of a part: of experts some, of a tensor the part."""
        if self.axis is None or not pieces:
            return pieces
        if len(pieces) > 1 or len(pieces[0].shape) == 3:
            size = len(pieces) // self.n
            return pieces[i * size : (i + 1) * size]
        return [pieces[0].part(self.axis, i, self.n)]

    def tensors(
        self, names: Mapping[str, Any], tensors: Mapping[str, StoredTensor], i: int
    ) -> dict[str, Any]:
        """Those of a part of a quantized matrix: all but `.values` of two axes have inputs first."""
        found = {name: tensors[name] for name in names}
        if self.axis is None:
            return found
        for name, tensor in found.items():
            last = len(tensor.shape) - 1
            front = last == 0 or name.endswith(".values") and last == 1
            axis = (0, last)[self.axis] if front else (last, 0)[self.axis]
            by_inputs_only = name.endswith((".order", "g_idx"))
            by_outputs_only = last == 0 and not by_inputs_only
            if (by_inputs_only and self.axis == 0) or (by_outputs_only and self.axis == 1):
                continue
            found[name] = tensor.part(axis, i, self.n)
        return found


def cut_of(spec: ParamSpec, config: ModelConfig, devices: int) -> Cut:
    """config: as the files have it."""
    divided = [axis for axis, name in enumerate(spec.axes) if name and RULES[name] == MODEL]
    if not divided:
        return Cut(1, None, devices)
    n = min(devices, config.num_key_value_heads) if spec.axes[divided[0]] == "kv_heads" else devices
    return Cut(n, divided[0], devices // n)


def check_parts(spec: ParamSpec, form: Any, cut: Cut, word: int) -> None:
    """Raises InputError where parts of a matrix [O, I] of that form would cut its groups of inputs, or words
    of so many numbers.
    """
    if cut.axis is None or not isinstance(form, GroupedWeight | TernaryWeight):
        return
    part = spec.shape[cut.axis] // cut.n
    for size, what in ((form.group if cut.axis == 1 else 1, "groups"), (word, "packed words")):
        if part % size:
            raise InputError(
                f"{spec.hf_name} has {part} {('outputs', 'inputs')[cut.axis]} for each of {cut.n} devices,"
                f" which {what} of {size} do not divide: choose fewer devices"
            )


def whole_form(spec: ParamSpec, part: Any, mesh: Mesh, devices: int) -> Any:
    """Shapes of a leaf over the mesh, from those of a part; devices: that hold a part each."""
    specs = specs_of(spec, part, None, RULES)

    def whole(form: Any, places: PartitionSpec) -> Any:
        shape = [size * devices if place else size for size, place in zip(form.shape, places, strict=True)]
        return jax.ShapeDtypeStruct(tuple(shape), form.dtype, sharding=NamedSharding(mesh, places))

    form = jax.tree.map(whole, part, specs)
    if hasattr(part, "inputs") and spec.axes[1] and RULES[spec.axes[1]]:
        form = dataclasses.replace(form, inputs=part.inputs * devices)
    return form


def part_of(spec: ParamSpec, whole: Any, i: int, devices: int) -> Any:
    """A device's part of a leaf on the host."""

    def own(x: np.ndarray, places: PartitionSpec) -> np.ndarray:
        for axis, place in enumerate(places):
            if place:
                x = np.split(x, devices, axis)[i]
        return x

    return jax.tree.map(own, whole, specs_of(spec, whole, None, RULES))


def spread(spec: ParamSpec, parts: Any, form: Any, mesh: Mesh) -> Any:
    """A leaf over the mesh. parts: what gives a device's part as arrays of the host, by the device's number
    along "model"; form: shapes of the whole.
    """
    places = jax.tree.leaves(
        specs_of(spec, form, mesh, RULES), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    forms, tree = jax.tree.flatten(form)
    own: list[list[Any]] = [[] for _ in forms]
    axis = mesh.axis_names.index(MODEL)
    here: dict[int, list[Any]] = {}
    for at, device in np.ndenumerate(mesh.devices):
        if device.process_index == jax.process_index():
            here.setdefault(at[axis], []).append(device)
    for i, devices in here.items():
        for arrays, x in zip(own, jax.tree.leaves(parts(i)), strict=True):
            arrays += [jax.device_put(x, device) for device in devices]
    made = [
        jax.make_array_from_single_device_arrays(form.shape, NamedSharding(mesh, place), arrays)
        for form, place, arrays in zip(forms, places, own, strict=True)
    ]
    return jax.tree.unflatten(tree, made)
