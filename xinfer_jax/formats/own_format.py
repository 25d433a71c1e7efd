"""Our format of quantized checkpoints: X.weight is X.weight.values, .scale, .zero, .order, .offset, .step."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..errors import InputError
from ..families.conversion import TensorOfLeaves, itself
from ..weights.grouped_weight import GroupedWeight
from ..weights.hadamard import input_block_width
from ..weights.int8_weight import Int8Weight
from ..weights.mxfp4 import Mxfp4Weight, mxfp4_struct
from ..weights.padded_weight import stored_weight
from ..weights.quantized_weight import QuantizedWeight
from ..weights.rotated_weight import RotatedWeight
from ..weights.ternary import TernaryWeight, ternary_struct
from .tensors import QuantizedFormat, Require, Shape, StoredTensor, Tensors, TensorSpec

_VERSION = 5
_OLD_VERSIONS = (1, 2, 3, 4)  # whose settings say what tensors and leaves show now
_LEAVES = (Int8Weight, GroupedWeight, Mxfp4Weight, TernaryWeight)
_FIELDS = ("values", "scale", "zero", "order", "offset", "step")


@dataclasses.dataclass(frozen=True)
class OwnFormat(QuantizedFormat):
    method = "xinfer_jax"
    methods = (method,)
    is_written = False  # with the settings of the files that a model is from: `settings_for` makes its own
    int8_activations: bool = False  # of `with_int8_activations`

    @classmethod
    def from_config(cls, config: Mapping[str, Any], require: Require) -> "OwnFormat":
        """Raises InputError: the files are of another version."""
        version = config.get("version")
        if version in _OLD_VERSIONS:
            flag = " --activations=int8" if config.keys() & {"rotated", "once", "blocks"} else ""
            raise InputError(
                f"version {version} of our format of quantized weights is not read, only {_VERSION}: write"
                " the files again from the float checkpoint with `xinfer-jax quantize"
                f" --model=CHECKPOINT --output=DIR --quantize={'int4' if version == 4 else 'int8'}{flag}`"
            )
        require(version == _VERSION, "version")
        require(config.get("activations") in (None, "int8"), "activations")
        return cls(config.get("activations") == "int8")

    @classmethod
    def settings_for(cls, leaves: Sequence[Any]) -> dict[str, Any]:
        has_activations = any(getattr(leaf, "int8_activations", False) for leaf in leaves)
        activations = {"activations": "int8"} if has_activations else {}
        return {"quant_method": cls.method, "version": _VERSION} | activations

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        values = f"{name}.values"
        if len(shape) == 1 or name in tensors or values not in tensors:
            return {}
        (outputs, inputs) = shape
        stored = tensors[values]
        by_output: TensorSpec = ((outputs,), {"F32"})
        if f"{name}.scale" in tensors and tensors[f"{name}.scale"].type == "U8":
            fields = vars(mxfp4_struct(shape)).items()
            return {f"{name}.{field}": (struct.shape, {"U8"}) for field, struct in fields}
        if len(stored.shape) != 3:
            return {values: (shape, {"I8"}), f"{name}.scale": by_output}
        if stored.type == "I32":
            return {values: (ternary_struct(shape).values.shape, {"I32"}), f"{name}.scale": by_output}
        Y = stored.shape[1]
        packed = stored.type == "U8"
        Q = -(-inputs // max(1, Y * (2 if packed else 1)))
        specs = {values: ((Q, Y, outputs), {"U8", "I8"}), f"{name}.scale": ((Q, outputs), {"F16", "F32"})}
        optional = {f"{name}.zero": ((Q, outputs), {"U8"}), f"{name}.order": ((inputs,), {"I32"})}
        optional[f"{name}.offset"] = ((Q, outputs), {"F16", "F32"})
        if f"{name}.step" in tensors:
            specs = {values: ((Q, Y, outputs), {"U8"}), f"{name}.scale": ((Q, outputs), {"I16"})}
            specs |= {f"{name}.zero": optional[f"{name}.zero"], f"{name}.step": by_output}
        return specs | {field: spec for field, spec in optional.items() if field in tensors}

    def struct(self, name: str, shape: Shape, tensors: Tensors) -> QuantizedWeight:
        return self._make_weight(name, shape, tensors, lambda tensor: tensor.struct)

    def load(self, name: str, shape: Shape, tensors: Tensors) -> QuantizedWeight:
        weight = self._make_weight(name, shape, tensors, StoredTensor.array)
        order = getattr(weight, "order", None)
        if order is not None and not np.array_equal(np.sort(order), np.arange(shape[1])):
            raise InputError(f"{name}: order does not name every input once: fetch the checkpoint again")
        return weight

    def pack(self, leaves: Mapping[str, Any], dtype: Any) -> dict[str, TensorOfLeaves]:
        tensors = {}
        for name, leaf in leaves.items():
            if not isinstance(stored_weight(leaf), _LEAVES):
                raise self.misfit(name, leaf)
            if len(leaf.shape) > 2:
                raise InputError(
                    f"{name}: experts in int8 or int4 cannot be saved: save the float model, and load it with"
                    " quantize"
                )
            if isinstance(leaf, RotatedWeight) and leaf.input_block != self._input_block(leaf.shape):
                raise InputError(
                    f"{name} has its inputs rotated in blocks of {leaf.input_block}, and the files would say"
                    f" {self._input_block(leaf.shape)}: quantize all matrices with the same activations"
                )
            for field in _FIELDS:
                if (array := getattr(leaf, field, None)) is not None:
                    make = partial(itself, array)
                    tensors[f"{name}.{field}"] = TensorOfLeaves(array.shape, array.dtype, make)
        return tensors

    def _input_block(self, shape: Shape) -> int:
        return input_block_width(shape[1]) if self.int8_activations else 0

    def _make_weight(
        self, name: str, shape: Shape, tensors: Tensors, get: Callable[[StoredTensor], Any]
    ) -> QuantizedWeight:
        arrays = {field: get(tensors[full]) for field in _FIELDS if (full := f"{name}.{field}") in tensors}
        if arrays["scale"].dtype == np.uint8:
            return Mxfp4Weight(**arrays)
        if arrays["values"].dtype == np.int32:
            return TernaryWeight(arrays["values"], arrays["scale"], shape[1])
        block = self._input_block(shape)
        if len(arrays["values"].shape) == 2:
            return Int8Weight(**arrays, int8_activations=self.int8_activations, input_block=block)
        arrays = {"zero": None, "order": None} | arrays
        return GroupedWeight(**arrays, inputs=shape[1], input_block=block)
