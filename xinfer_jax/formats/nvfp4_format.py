"""Matrices in NVFP4, numbers of 4 bits (E2M1) with an FP8 scale for 16 inputs, and the files of ModelOpt.

ModelOpt stores X.weight, uint8 [O, I/2], X.weight_scale [O, I/16] and X.weight_scale_2, one number by which
scales are multiplied. Its matrices in FP8 are as in other files.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .files import read_json
from .fp8_format import Fp8Format
from .mxfp4_format import PAIRS
from .scaled_tensor import ScaledNumbers, ScaledTensor, check_groups, read_bytes, read_rows
from .tensors import Require, Shape, StoredTensor, Tensors, TensorSpec

_GROUP = 16
_ALGORITHMS = (
    "FP8", "FP8_PB_WO", "FP8_BLOCK_SCALES", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModelOptFormat(Fp8Format):
    method = "modelopt"
    methods = ("modelopt", "modelopt_fp4", "modelopt_mixed")
    files = ("hf_quant_config.json",)

    @classmethod
    def find_settings(cls, settings: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
        found = {} if settings.get("quantization_config") else read_json(path / cls.files[0]) or {}
        own = found.get("quantization")
        return {"quant_method": cls.method} | own if isinstance(own, dict) else None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], require: Require) -> "ModelOptFormat":
        """Returns the format. The tensors show which scales a matrix has."""
        layers = config.get("quantized_layers") or {}
        are_layers = isinstance(layers, Mapping) and all(isinstance(x, Mapping) for x in layers.values())
        require(are_layers, "quantized_layers")
        for algorithm in (config, *layers.values()):
            is_known = str(algorithm.get("quant_algo")).upper() in _ALGORITHMS
            require(is_known, "quant_algo" if algorithm is config else "quantized_layers")
            require(algorithm.get("group_size") in (None, 16, 128), "group_size")
        return cls((128, 128))

    def find(self, tensors: Tensors) -> dict[str, Shape]:
        packed = {name: x.shape for name, x in tensors.items() if x.type == "U8" and name.endswith(".weight")}
        return super().find(tensors) | packed

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        if tensors[name].type != "U8":
            return super().tensor_specs(name, shape, tensors)
        return nvfp4_specs(name, shape, name) | number_spec(f"{name}_scale_2", tensors)

    def open(self, name: str, shape: Shape, tensors: Tensors) -> ScaledTensor:
        if tensors[name].type != "U8":
            return super().open(name, shape, tensors)
        factor = tensors[f"{name}_scale_2"]
        scales = tensors[f"{name}_scale"]
        return nvfp4_tensor(name, shape, tensors[name], scales, lambda x: x * factor.array())


def number_spec(name: str, tensors: Tensors) -> dict[str, TensorSpec]:
    """Returns the scale of a whole matrix: one number, in an array or not."""
    is_array = name in tensors and tensors[name].shape == (1,)
    return {name: ((1,) if is_array else (), {"F32"})}


def nvfp4_specs(name: str, shape: Shape, packed: str) -> dict[str, TensorSpec]:
    """Returns the tensors of a matrix in NVFP4: packed numbers, and scales of groups. The scale of all is
    separate.
    """
    (outputs, inputs) = shape
    check_groups(name, inputs, _GROUP)
    scales = (outputs, inputs // _GROUP)
    return {packed: ((outputs, inputs // 2), {"U8"}), f"{name}_scale": (scales, {"F8_E4M3"})}


def nvfp4_tensor(
    name: str, shape: Shape, values: StoredTensor, scales: StoredTensor, finish: Callable
) -> ScaledTensor:
    """Returns the tensor of a matrix in NVFP4. finish: applies the scale of all to the scales of groups."""
    (outputs, inputs) = shape
    read_scales = read_rows(scales, (outputs, inputs // _GROUP), finish)
    numbers = ScaledNumbers(name, (outputs, inputs), (1, _GROUP), read_bytes(values, PAIRS), read_scales)
    return ScaledTensor(numbers, shape)
