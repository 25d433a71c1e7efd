"""Matrices of MLX checkpoints: numbers of 2 to 8 bits, with a scale and an offset for each group of inputs.

X.weight has words of 32 bits along its inputs, lowest bits first. X.scales and X.biases are [O, Q].
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, format_value
from ..families.skipped_tensors import text_name
from .kept_leaves import whole_numbers_form
from .scaled_tensor import MatrixFormat, Read, ScaledNumbers, ScaledTensor, check_groups, read_rows
from .tensors import Require, Shape, StoredTensor, Tensors, TensorSpec


@dataclasses.dataclass(frozen=True)
class MlxFormat(MatrixFormat):
    method = "mlx"
    methods = (method,)
    is_written = False
    settings: dict[
        str, Any
    ]  # `quantization` of config.json; that of single modules by names in the text model

    @classmethod
    def find_settings(cls, settings: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
        own = settings.get("quantization")
        if not isinstance(own, Mapping) or settings.get("quantization_config") not in (None, own):
            return None
        return {**own, "quant_method": cls.method} if "group_size" in own else None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], require: Require) -> "MlxFormat":
        return cls({text_name(key) or key: x for key, x in config.items()})

    def find(self, tensors: Tensors) -> dict[str, Shape]:
        modules = (name.removesuffix(".scales") for name in tensors if name.endswith(".scales"))
        return {f"{module}.weight": (0, 0) for module in modules}

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        (outputs, inputs) = shape
        (bits, J) = self._sizes(name)
        check_groups(name, inputs, J)
        groups = ((outputs, inputs // J), {"F16", "BF16", "F32"})
        module = name.removesuffix(".weight")
        words = ((outputs, inputs * bits // 32), {"U32"})
        return {name: words, f"{module}.scales": groups, f"{module}.biases": groups}

    def open(self, name: str, shape: Shape, tensors: Tensors) -> ScaledTensor:
        (outputs, inputs) = shape
        (bits, J) = self._sizes(name)
        (words, *groups) = (tensors[x] for x in self.tensor_specs(name, shape, tensors))
        (scales, offsets) = (read_rows(x, (outputs, inputs // J)) for x in groups)
        leaf_bits = 4 if bits <= 4 else 8
        middle = 0 if bits in (5, 6) else 2 ** (leaf_bits - 1)
        zeros = lambda rows, columns: np.full(  # noqa: E731
            (rows.stop - rows.start, columns.stop - columns.start), -middle, np.int8
        )
        read = _read_words(words, bits, middle)
        kept = dict(kept=whole_numbers_form, bits=leaf_bits)
        numbers = ScaledNumbers(name, (outputs, inputs), (1, J), read, scales, zeros, offsets, **kept)
        return ScaledTensor(numbers, shape)

    def _sizes(self, name: str) -> tuple[int, int]:
        """Returns the bits of a number, and inputs of a group. Raises InputError."""
        own = self.settings.get(name.removesuffix(".weight"))
        given = {"mode": "affine"} | self.settings | (own if isinstance(own, dict) else {})
        (bits, J, mode) = (given.get(key) for key in ("bits", "group_size", "mode"))
        if bits not in (2, 3, 4, 5, 6, 8) or J not in (32, 64, 128) or mode != "affine":
            what = format_value([bits, J, mode])
            raise InputError(f"{name}: bits, group_size and mode {what} of MLX are not supported")
        return bits, J


def _read_words(words: StoredTensor, bits: int, middle: int) -> Read:
    """Returns a reader of numbers less the middle one: 32 of them have as many words as bits."""

    def read(rows: slice, columns: slice) -> np.ndarray:
        first = columns.start // 32
        part = words.slice_axis(1, first * bits, (-(-columns.stop // 32) - first) * bits)[rows]
        stored = np.unpackbits(part.view(np.uint8), axis=1, bitorder="little")
        levels = np.packbits(stored.reshape(len(part), -1, bits), axis=2, bitorder="little")[..., 0]
        skipped = columns.start - 32 * first
        return (levels[:, skipped : skipped + columns.stop - columns.start] - np.uint8(middle)).view(np.int8)

    return read
