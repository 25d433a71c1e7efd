"""Ternary matrices of BitNet b1.58 checkpoints (Ma et al. 2024).

X.weight is float numbers, or four outputs packed in a byte. X.weight_scale is the scale.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..device import run_in_blocks
from ..errors import InputError
from ..families.conversion import TensorOfLeaves, itself
from ..weights.ternary import TernaryWeight, pack_ternary, ternary_leaf, ternary_levels, ternary_struct
from .tensor_files import on_host
from .tensors import QuantizedFormat, Require, Shape, Tensors, TensorSpec, is_listed

_PER_BYTE = 4  # outputs in a byte: o, o + O/4, ... from the lowest bits on
_FLOAT_TYPES = {"F16", "BF16", "F32"}


@dataclasses.dataclass(frozen=True)
class BitNetFormat(QuantizedFormat):
    """The format of BitNet checkpoints, which depends on linear_class and quantization_mode."""

    method = "bitnet"
    methods = (method,)
    is_read_whole = True  # a byte holds outputs of several parts
    divides: bool  # bitlinear divides by X.weight_scale; autobitlinear multiplies by it
    online: bool  # X.weight is float numbers, quantized here by their mean magnitude; there is no scale
    not_converted: tuple[str, ...]  # modules_to_not_convert

    @classmethod
    def from_config(cls, config: Mapping[str, Any], require: Require) -> "BitNetFormat":
        linear = config.get("linear_class", "bitlinear")
        mode = config.get("quantization_mode", "offline")
        require(linear in ("bitlinear", "autobitlinear"), "linear_class")
        require(mode in ("offline", "online"), "quantization_mode")
        require(not config.get("use_rms_norm"), "use_rms_norm")
        names = config.get("modules_to_not_convert")
        names = ["lm_head"] if names is None else names
        are_names = isinstance(names, list | tuple) and all(re.fullmatch(r"[\w.]+", str(x)) for x in names)
        require(are_names, "modules_to_not_convert")  # regular expressions are not supported
        divides = linear == "bitlinear"  # its weights are always packed
        return cls(divides, not divides and mode == "online", tuple(names))

    @classmethod
    def with_floats(cls, settings: Mapping[str, Any], floats: list[str]) -> dict[str, Any]:
        return super().with_floats({**settings, "quantization_mode": "offline"}, floats)

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        module, _, field = name.rpartition(".")
        if not module.endswith("_proj") and module != "lm_head" or is_listed(module, self.not_converted):
            return {}
        if field == "bias":
            if not self.divides and not self.online:  # the scale would apply to the bias too
                raise InputError(f"{name}: biases with linear_class 'autobitlinear' are not supported")
            return {}
        if self.online:
            return {name: (shape, _FLOAT_TYPES)}
        scale: dict[str, TensorSpec] = {f"{name}_scale": ((1,), _FLOAT_TYPES)}
        if not self.divides and name in tensors and tensors[name].type != "U8":
            return {name: (shape, _FLOAT_TYPES)} | scale
        if shape[0] % _PER_BYTE:
            raise InputError(
                f"{name} has {shape[0]} outputs, which bitnet cannot pack: a multiple of {_PER_BYTE} is"
                " needed"
            )
        return {name: ((shape[0] // _PER_BYTE, shape[1]), {"U8"})} | scale

    def struct(self, name: str, shape: Shape, tensors: Tensors) -> TernaryWeight:
        return ternary_struct(shape)

    def load(self, name: str, shape: Shape, tensors: Tensors) -> TernaryWeight:
        stored = tensors[name]
        (outputs, inputs) = shape
        if self.online:
            return ternary_leaf(stored, name)
        (scale,) = tensors[f"{name}_scale"].array().astype(np.float32)
        if not np.isfinite(scale) or scale == 0 and self.divides:
            raise InputError(f"{name}_scale is {scale}, not a valid scale: fetch the checkpoint again")
        scale = 1 / scale if self.divides else scale
        if stored.type == "U8":
            packed = stored.array()
            return pack_ternary(lambda at: _unpack_bytes(packed, at, name), shape, scale)
        maxima: list[np.floating] = []

        def find_largest(at: slice) -> None:
            maxima.append(np.abs(stored[at].astype(np.float32)).max())

        run_in_blocks(find_largest, outputs, 4 * inputs)
        largest = np.float32(max(maxima))
        return pack_ternary(lambda at: _ternary_levels(stored[at], largest, name), shape, scale * largest)

    def pack(self, leaves: Mapping[str, Any], dtype: Any) -> dict[str, TensorOfLeaves]:
        tensors = {}
        for name, leaf in leaves.items():
            specs = self.tensor_specs(name, leaf.shape, {}) if isinstance(leaf, TernaryWeight) else {}
            scale = self._stored_scale(on_host(leaf.scale), dtype) if specs else None
            if scale is None:
                raise self.misfit(name, leaf)
            ((shape, _), _) = specs.values()
            tensors[name] = TensorOfLeaves(shape, np.uint8, partial(_pack_bytes, leaf, shape))
            tensors[f"{name}_scale"] = TensorOfLeaves((1,), scale.dtype, partial(itself, scale))
        return tensors

    def _stored_scale(self, scale_O: np.ndarray, dtype: Any) -> np.ndarray | None:
        """Returns X.weight_scale, [1]. It has this dtype if `load` makes exactly these scales of it,
        otherwise float32.
        """
        scale = scale_O[:1]
        one = np.float32(1)
        with np.errstate(all="ignore"):
            exact = one / scale if self.divides else scale
            near = (exact.astype(dtype), exact, np.nextafter(exact, -np.inf), np.nextafter(exact, np.inf))
            for stored in near if (scale_O == scale).all() else ():
                wide = stored.astype(np.float32)
                if np.isfinite(wide) and (one / wide if self.divides else wide) == scale:
                    return stored
        return None


def _pack_bytes(leaf: TernaryWeight, shape: Shape, convert: Callable[[Any], np.ndarray]) -> np.ndarray:
    """Returns the packed matrix, from which `_unpack_bytes` makes its numbers."""
    values_W2O = convert(leaf.values)
    packed = np.zeros(shape, np.uint8)

    def fill(rows: slice) -> None:
        for i in range(_PER_BYTE):
            outputs = slice(rows.start + i * len(packed), rows.stop + i * len(packed))
            levels = ternary_levels(values_W2O[..., outputs], leaf.inputs) + 1
            packed[rows] |= levels.astype(np.uint8) << np.uint8(2 * i)

    run_in_blocks(fill, len(packed), _PER_BYTE * leaf.inputs)
    return packed


def _unpack_bytes(packed: np.ndarray, at: slice, name: str) -> np.ndarray:
    """Returns some outputs of a packed matrix: int8 [outputs, I], with values -1, 0 and 1."""
    position, row = np.divmod(np.arange(at.start, at.stop), len(packed))
    values = packed[row] >> (2 * position[:, None]).astype(np.uint8) & 3
    if (values == 3).any():
        raise InputError(f"{name} holds a number that is not -1, 0 or 1: fetch the checkpoint again")
    return values.astype(np.int8) - 1


def _ternary_levels(block_OI: np.ndarray, largest: np.float32, name: str) -> np.ndarray:
    """Returns the numbers -largest, 0 and largest as -1, 0 and 1."""
    block_OI = block_OI.astype(np.float32)
    if not np.isin(block_OI, (-largest, 0, largest)).all():
        raise InputError(
            f"{name} holds other numbers than -{largest}, 0 and {largest}, although quantization_mode"
            " 'offline' means quantized weights: say 'online' to quantize them while loading"
        )
    return np.sign(block_OI)
