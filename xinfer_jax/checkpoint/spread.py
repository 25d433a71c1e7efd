"""A checkpoint's leaves over a mesh: of each a process reads the parts that its devices hold.

A part of a matrix in the files is one of n equal ones along its outputs or its inputs, in whatever form it is
stored. Read whole and cut in memory, one at a time, is what is divided by inputs and belongs together beyond
a part: int8 made while loading (its scales are those of whole rows), and inputs in an order of their own; and
BitNet's matrices, whose bytes hold outputs from all over.

A vocabulary that the devices do not divide gets rows of zeros at its end. No token has their ids, and
`model.decoder.unembed` leaves their logits out.
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
    size: int = 0  # of a part along that axis; of a vocabulary with rows of padding in the last parts
    vocabulary: int = 0  # outputs of a matrix of the vocabulary, without padding; 0: it is another matrix
    word: int = 1  # outputs of such a matrix that the files pack together

    def spec(self, spec: ParamSpec, i: int | None = None) -> ParamSpec:
        """Of a part with its padding; i: of what the files have of that part."""
        if self.axis is None:
            return spec
        size = self.size
        if i is not None and self.vocabulary:
            size = min(size, self.vocabulary - self._stored(i) * size)
        shape = list(spec.shape)
        shape[self.axis] = size
        return dataclasses.replace(spec, shape=tuple(shape))

    def pieces(self, pieces: list[StoredTensor], i: int) -> list[StoredTensor]:
        """Those of a part: of experts some, of a tensor the part."""
        if self.axis is None or not pieces:
            return pieces
        if len(pieces) > 1 or len(pieces[0].shape) == 3:
            size = len(pieces) // self.n
            return pieces[i * size : (i + 1) * size]
        return [self._part(pieces[0], self.axis, i)]

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
            found[name] = self._part(tensor, axis, i)
        return found

    def padded(self, spec: ParamSpec, part: Any, i: int) -> Any:
        """A part on the host, as it was read, with the rows of zeros that make it as large as the others."""
        left = self.vocabulary - i * self.size
        if not self.vocabulary or left >= self.size:
            return part

        def whole(x: np.ndarray, places: PartitionSpec) -> np.ndarray:
            for axis, place in enumerate(places):
                if place:
                    x = _some(_some(x, axis, 0, max(0, left)), axis, 0, self.size)
            return x

        return jax.tree.map(whole, part, specs_of(spec, part, None, RULES))

    def _stored(self, i: int) -> int:
        """The number of a part that has rows in the files: itself, or the last that has."""
        return min(i, (self.vocabulary - 1) // self.size)

    def _part(self, tensor: StoredTensor, axis: int, i: int) -> StoredTensor:
        length = tensor.shape[axis]
        if self.vocabulary:
            size = self.size if length == self.vocabulary else self.size // self.word
            first = self._stored(i) * size
            return tensor.part(axis, first, min(size, length - first))
        size, rest = divmod(length, self.n)
        if rest:
            raise InputError(
                f"{tensor.file}: a tensor {list(tensor.shape)} has no {self.n} equal parts on axis {axis}"
            )
        return tensor.part(axis, i * size, size)


def cut_of(spec: ParamSpec, config: ModelConfig, devices: int, word: int = 1) -> Cut:
    """config: as the files have it; word: numbers that these pack together."""
    divided = [axis for axis, name in enumerate(spec.axes) if name and RULES[name] == MODEL]
    if not divided:
        return Cut(1, None, devices)
    axis = divided[0]
    length = spec.shape[divided[0]]
    if spec.axes[axis] == "vocab":
        return Cut(devices, axis, 1, -(-length // (devices * word)) * word, length, word)
    n = min(devices, config.num_key_value_heads) if spec.axes[axis] == "kv_heads" else devices
    return Cut(n, axis, devices // n, length // n)


def check_parts(spec: ParamSpec, form: Any, cut: Cut, word: int) -> None:
    """Raises InputError where parts of a matrix [O, I] of that form would cut its groups of inputs, or words
    of so many numbers.
    """
    if cut.axis is None or not isinstance(form, GroupedWeight | TernaryWeight):
        return
    for size, what in ((form.group if cut.axis == 1 else 1, "groups"), (word, "packed words")):
        if cut.size % size:
            raise InputError(
                f"{spec.hf_name} has {cut.size} {('outputs', 'inputs')[cut.axis]} for each of {cut.n}"
                f" devices, which {what} of {size} do not divide: choose fewer devices"
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
                size = -(-x.shape[axis] // devices)
                x = _some(x, axis, i * size, size)
        return x

    return jax.tree.map(own, whole, specs_of(spec, whole, None, RULES))


def _some(x: np.ndarray, axis: int, first: int, size: int) -> np.ndarray:
    """So many along an axis, zeros where it ends before."""
    x = x[(slice(None),) * axis + (slice(first, first + size),)]
    after = [(0, size - length if at == axis else 0) for at, length in enumerate(x.shape)]
    return np.pad(x, after) if x.shape[axis] < size else x


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
