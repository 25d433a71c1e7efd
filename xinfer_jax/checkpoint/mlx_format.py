"""Matrices of MLX checkpoints: numbers of 2 to 8 bits, with a scale and an offset for each group of inputs.

X.weight has words of 32 bits along its inputs, lowest bits first; X.scales and X.biases are [O, Q].
"""

import dataclasses
from typing import Any

import numpy as np

from ..errors import InputError, format_value
from ..host import aligned_empty, run_in_blocks
from ..weights.grouped_weight import GroupedWeight, offset_struct, pack_int4
from .tensors import QuantizedFormat, Shape, Tensors, TensorSpec


@dataclasses.dataclass(frozen=True)
class MlxFormat(QuantizedFormat):
    method = "mlx"
    settings: dict[str, Any]  # `quantization` of config.json; that of single modules is by their names

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        module = name.removesuffix(".weight")
        if len(shape) != 2 or f"{module}.scales" not in tensors:
            return {}
        (bits, J) = self._sizes(name)
        groups = ((shape[0], shape[1] // J), {"F16", "BF16", "F32"})
        words = ((shape[0], shape[1] * bits // 32), {"U32"})
        return {name: words, f"{module}.scales": groups, f"{module}.biases": groups}

    def struct(self, name: str, shape: Shape, tensors: Tensors) -> GroupedWeight:
        (bits, J) = self._sizes(name)
        return offset_struct(shape, 4 if bits <= 4 else 8, J, np.float32)

    def load(self, name: str, shape: Shape, tensors: Tensors) -> GroupedWeight:
        (bits, J) = self._sizes(name)
        (words, *parts) = (tensors[x].array() for x in self.tensor_specs(name, shape, tensors))
        (scale_QO, offset_QO) = (np.ascontiguousarray(x.T, np.float32) for x in parts)
        if not np.isfinite([scale_QO, offset_QO]).all():
            raise InputError(f"{name} has scales that are NaN or inf: fetch the checkpoint again")
        middle = 128 * (bits == 8)
        values = aligned_empty(self.struct(name, shape, tensors).values)

        def fill(at: slice) -> None:
            stored = np.unpackbits(words[at].view(np.uint8), axis=1, bitorder="little")
            levels_OI = np.packbits(stored.reshape(-1, shape[1], bits), axis=2, bitorder="little")
            levels_QJO = levels_OI.reshape(len(stored), -1, J).transpose(1, 2, 0)
            values[..., at] = pack_int4(levels_QJO) if bits <= 4 else levels_QJO.astype(np.int16) - middle

        run_in_blocks(fill, *shape)
        return GroupedWeight(values, scale_QO, None, None, shape[1], offset_QO + middle * scale_QO)

    def _sizes(self, name: str) -> tuple[int, int]:
        """Bits of a number, and inputs of a group. Raises InputError."""
        own = self.settings.get(name.removesuffix(".weight"))
        given = {"mode": "affine"} | self.settings | (own if isinstance(own, dict) else {})
        (bits, J, mode) = (given.get(key) for key in ("bits", "group_size", "mode"))
        if bits not in (2, 3, 4, 5, 6, 8) or J not in (32, 64, 128) or mode != "affine":
            what = format_value([bits, J, mode])
            raise InputError(f"{name}: bits, group_size and mode {what} of MLX are not supported")
        return bits, J
