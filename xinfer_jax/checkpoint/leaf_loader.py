"""Reads one leaf of the parameter tree: from float or quantized tensors, for one device or a mesh."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..device import aligned_empty, run_in_blocks
from ..errors import InputError
from ..families.naming import FileSpec
from ..formats.kept_leaves import KeptForm, kept_form, read_kept
from ..formats.tensors import JoinedRows, QuantizedFormat, StoredTensor, Tensors
from ..sharding import MODEL
from ..weights.quantization import (
    bits_of,
    device_form,
    group_size_for_shards,
    in_blocks,
    quantized_leaf,
    quantized_struct,
    with_int8_activations,
)
from .sharded_leaves import check_partition, device_part, leaf_partition, shard_leaf, sharded_shapes


@dataclasses.dataclass(frozen=True)
class LeafLoader:
    """Returns a leaf's shapes (`struct`), or reads it (`load`).

    The argument `quantized` of its methods has the tensors that store a leaf in `quant_format`. For other
    leaves it is empty.
    """

    tensors: Tensors  # those of floats, and quantized ones as such
    dtype: Any  # of leaves whose spec names none
    quantize: str | None
    quant_format: QuantizedFormat | None  # whose matrices are read as leaves only
    keeps: bool  # quantized matrices stay as they are stored, where a leaf has their form
    asked: str | None  # a format whose matrices stay since `quantize` names it
    mesh: Mesh | None
    int8_activations: (
        bool  # of the matrices that are quantized: inputs are rotated in blocks; a scale per output
    )

    def struct(self, spec: FileSpec, quantized: Collection[str]) -> Any:
        """Returns the shapes of a leaf, over all devices."""
        whole = self._host_struct(spec, quantized)
        if self.mesh is None:
            return whole
        partition = leaf_partition(spec, self._num_devices)
        check_partition(spec, whole, partition)
        return sharded_shapes(spec, whole, self.mesh, self._num_devices, partition.num_parts)

    def load(self, spec: FileSpec, quantized: Collection[str], struct: Any) -> Any:
        """Reads a leaf and puts it on the devices. struct: its shapes."""
        stored = [] if quantized else spec.tensor_parts(self.tensors)
        group = self._group(spec)
        form = None if quantized else self._kept_form(spec)
        if self.mesh is None:
            return jax.device_put(self._load_host(spec, quantized, self.tensors, stored, group, form))
        partition = leaf_partition(spec, self._num_devices)
        if self._reads_whole(spec, quantized):
            leaf = self._load_host(spec, quantized, self.tensors, stored, group, form)

        def get_part(device: int) -> Any:
            i = device // partition.devices_per_part
            if self._reads_whole(spec, quantized):
                return device_part(spec, leaf, i, partition.num_parts)
            tensors = partition.slice_quantized(quantized, self.tensors, i)
            own = partition.slice_parts(stored, i)
            return self._load_host(partition.part_spec(spec), quantized, tensors, own, group, form)

        return shard_leaf(spec, get_part, struct, self.mesh)

    @property
    def _num_devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.shape[MODEL]

    def _kept_form(self, spec: FileSpec) -> KeptForm | None:
        """Returns the form in which a matrix of the files stays, or None if it is read as floats."""
        if not self.keeps or not spec.is_quantizable:
            return None
        partition = leaf_partition(spec, self._num_devices)
        parts = partition.num_parts if len(spec.shape) == 2 and partition.axis == 1 else 1
        stored = spec.tensor_parts(self.tensors)
        form = kept_form(spec.shape, stored, parts, self.asked)
        part = partition.part_spec(spec).shape[partition.axis or 0]
        is_cut = form is not None and partition.num_parts > 1 and part % form.block
        return None if is_cut else form

    def _group(self, spec: FileSpec) -> int | None:
        """Returns the group size for quantizing a matrix, if it is not the default. Over a mesh it gives the
        groups of the whole matrix. In int8 with int8 activations there is one group, so that there is one
        scale per output.
        """
        if self.quantize is None:
            return None
        if self.int8_activations and spec.is_matrix and bits_of(spec.hf_name, self.quantize) == 8:
            return spec.shape[-1]
        if self.mesh is None or len(spec.shape) != 2:
            return None
        parts = self._num_devices if leaf_partition(spec, self._num_devices).axis == 1 else 1
        return group_size_for_shards(spec.shape, spec.hf_name, self.quantize, parts)

    def _reads_whole(self, spec: FileSpec, quantized: Collection[str]) -> bool:
        """Returns True if a leaf is read whole and split in memory. There are three reasons:

        - Slices along the inputs depend on each other, since they share scales or an order.
        - A stored number may belong to several parts.
        - The number of devices does not divide the vocabulary.
        """
        if quantized and self.quant_format and self.quant_format.is_read_whole:
            return True
        if spec.axes[0] == "vocab":
            return spec.shape[0] % self._num_devices > 0
        form = None if quantized else self._kept_form(spec)
        has_order = any(name.endswith(".order") for name in quantized) or form and form.order is not None
        partition = leaf_partition(spec, self._num_devices)
        # A part with one group would have the form of a matrix with a scale for each output.
        is_small = (self._group(spec) or 0) * partition.num_parts >= spec.shape[-1]
        shares_scales = self.int8_activations or is_small
        return partition.axis == 1 and bool(has_order or shares_scales)

    def _host_struct(self, spec: FileSpec, quantized: Collection[str]) -> Any:
        if self.quant_format and quantized:
            return device_form(self.quant_format.struct(spec.hf_name, spec.shape, self.tensors))
        if form := self._kept_form(spec):
            return device_form(form.struct(spec.shape))
        if self.quantize is None or not spec.is_quantizable:
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype or self.dtype)
        struct = quantized_struct(spec.shape, spec.hf_name, self.quantize, self._group(spec))
        return device_form(self._with_activations(struct))

    def _load_host(
        self,
        spec: FileSpec,
        quantized: Any,
        tensors: Any,
        stored: list[Any],
        group: int | None,
        form: KeptForm | None,
    ) -> Any:
        """Returns a leaf, or a part of one, on the host."""
        if self.quant_format and quantized:
            return device_form(self.quant_format.load(spec.hf_name, spec.shape, tensors))
        if form:
            return device_form(read_kept(spec.shape, stored, form))
        if self.quantize is not None and spec.is_quantizable:
            is_stack = len(spec.shape) > 2
            matrices = stored if is_stack else [stored[0] if len(stored) == 1 else JoinedRows(stored)]
            matrices = list(map(in_blocks, matrices)) if self.int8_activations else matrices
            matrix = matrices if is_stack else matrices[0]
            weight = quantized_leaf(matrix, spec.hf_name, self.quantize, group)
            return device_form(self._with_activations(weight))
        leaf = _read_stacked(spec.hf_name, stored, jax.ShapeDtypeStruct(spec.shape, spec.dtype or self.dtype))
        if spec.hf_name.endswith(".A_log") and not np.isfinite(leaf).all():
            raise InputError(f"{spec.hf_name} holds NaN or inf: fetch the checkpoint again")
        return leaf

    def _with_activations(self, weight: Any) -> Any:
        """Returns a matrix, or its shapes, with int8 activations if they are asked for."""
        return with_int8_activations(weight) if self.int8_activations else weight


def _read_stacked(name: str, stored: list[StoredTensor], struct: jax.ShapeDtypeStruct) -> np.ndarray:
    """Reads tensors of equal shape into one array. name: the name of the leaf, for errors."""
    out = aligned_empty(struct)
    for tensor, part in zip(stored, out.reshape(len(stored), *stored[0].shape), strict=True):

        def fill(rows: slice, tensor=tensor, part=part) -> None:
            tensor.read_into(part[rows], rows.start)
            if part.dtype == np.float16 and tensor.type != "F16" and not np.isfinite(part[rows]).all():
                raise InputError(f"{name} holds values beyond float16's range: use dtype bfloat16 or float32")

        run_in_blocks(fill, len(part), max(1, part[:1].size) * tensor.struct.dtype.itemsize)
    return out
