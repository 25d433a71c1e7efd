"""Our format of quantized checkpoints: a matrix is X.weight.values, .scale, .zero, .order, .offset and
.step.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..errors import InputError
from ..families.conversion import TensorOfLeaves, itself
from ..weights.fp8_weight import Fp8Weight
from ..weights.grouped_weight import GroupedWeight
from ..weights.hadamard import input_block_width
from ..weights.int8_weight import Int8Weight
from ..weights.mxfp4 import Mxfp4Weight, mxfp4_struct
from ..weights.quantized_weight import QuantizedWeight, is_quantized
from ..weights.ternary import TernaryWeight, ternary_struct
from .tensors import QuantizedFormat, Shape, StoredTensor, Tensors, TensorSpec, not_saved

VERSIONS = (1, 2, 3, 4)  # 2: rotated weights or int8 activations; 3: inputs rotated in blocks; 4: steps
_FIELDS = ("values", "scale", "zero", "order", "offset", "step")


@dataclasses.dataclass(frozen=True)
class OwnFormat(QuantizedFormat):
    method = "xinfer_jax"
    rotated: bool = False  # `ModelConfig.rotated`
    once: bool = False  # `Int8Weight.int8_activations`
    blocks: bool = False  # `input_block` is that of `input_block_width`

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
            if isinstance(leaf, Fp8Weight):
                raise not_saved(name)
            if len(leaf.shape) > 2:
                raise InputError(
                    f"{name}: experts in int8 or int4 cannot be saved: save the float model, and load it with"
                    " quantize"
                )
            for field in _FIELDS:
                if (array := getattr(leaf, field, None)) is not None:
                    make = partial(itself, array)
                    tensors[f"{name}.{field}"] = TensorOfLeaves(array.shape, array.dtype, make)
        return tensors

    def _make_weight(
        self, name: str, shape: Shape, tensors: Tensors, get: Callable[[StoredTensor], Any]
    ) -> QuantizedWeight:
        arrays = {field: get(tensors[full]) for field in _FIELDS if (full := f"{name}.{field}") in tensors}
        if arrays["scale"].dtype == np.uint8:
            return Mxfp4Weight(**arrays)
        if arrays["values"].dtype == np.int32:
            return TernaryWeight(arrays["values"], arrays["scale"], shape[1])
        rotated = None if self.rotated else (0, 0)
        block = input_block_width(shape[1]) if self.blocks else 0
        if len(arrays["values"].shape) == 2:
            return Int8Weight(**arrays, int8_activations=self.once, rotated=rotated, input_block=block)
        arrays = {"zero": None, "order": None} | arrays
        return GroupedWeight(**arrays, inputs=shape[1], rotated=rotated, input_block=block)


def quantization_config(leaves: Sequence[Any], rotated: bool) -> dict[str, Any]:
    """Returns what config.json says of a model with these leaves; {}: none is quantized.

    Raises:
        InputError: no matrix of a rotated model is quantized.
    """
    if not any(map(is_quantized, leaves)):
        if rotated:
            raise InputError("a rotated model of float weights cannot be saved: quantize its matrices first")
        return {}
    fields = {"once": "int8_activations", "blocks": "input_block"}
    flags = {"rotated": rotated}
    flags |= {flag: any(getattr(leaf, name, 0) for leaf in leaves) for flag, name in fields.items()}
    flags = {name: True for name, value in flags.items() if value}
    has_steps = any(getattr(leaf, "step", None) is not None for leaf in leaves)
    version = 4 if has_steps else 3 if "blocks" in flags else 2 if flags else 1
    return {"quant_method": OwnFormat.method, "version": version} | flags
