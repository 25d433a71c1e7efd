"""Experts in MXFP4, as gpt-oss's checkpoints have them: kept, or read as the float numbers that they mean.

X_blocks, uint8 [experts, outputs, Q, 16], and X_scales, uint8 [experts, outputs, Q], stand for X, which is
gate_up_proj, with outputs of gate and up by turns, or down_proj. `weights.mxfp4` says what their bytes mean.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np

from ..errors import InputError
from ..families.conversion import TensorOfLeaves
from ..host import aligned_empty, run_in_blocks
from ..weights.mxfp4 import BYTES, GROUP, NUMBERS, Mxfp4Weight, mxfp4_struct
from .tensors import QuantizedFormat, RowsAsTensor, Shape, StoredTensor, Tensors, TensorSpec

# Of a matrix: its tensor, its first row of an expert there, and the step to the next.
_PLACES = {
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
    "down_proj": ("down_proj", 0, 1),
}
_NAN = 255  # as a scale
_PAIRS = NUMBERS[np.arange(256)[:, None] >> np.array([0, 4]) & 15]  # the two numbers of a byte


@dataclasses.dataclass(frozen=True)
class Mxfp4Format(QuantizedFormat):
    method = "mxfp4"

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        module, _, field = name.rpartition(".")
        prefix, _, projection = module.rpartition(".")
        if field != "weight" or not prefix.endswith(".experts"):
            return {}
        (stored_name, _, step) = _PLACES[projection]
        stored_name = f"{prefix}.{stored_name}"
        if stored_name in tensors:
            return {}
        (experts, outputs, inputs) = shape
        if inputs % GROUP:
            raise InputError(f"{name} has {inputs} inputs, which mxfp4's groups of {GROUP} do not divide")
        groups = (experts, outputs * step, inputs // GROUP)
        blocks: TensorSpec = ((*groups, BYTES), {"U8"})
        return {f"{stored_name}_blocks": blocks, f"{stored_name}_scales": (groups, {"U8"})}

    def struct(self, name: str, shape: Shape, tensors: Tensors) -> Mxfp4Weight:
        return mxfp4_struct(shape)

    def load(self, name: str, shape: Shape, tensors: Tensors) -> Mxfp4Weight:
        (prefix, projection, _) = name.rsplit(".", 2)
        (stored_name, first, step) = _PLACES[projection]
        stem = f"{prefix}.{stored_name}"
        stored = Mxfp4Tensor(stem, tensors[f"{stem}_blocks"], tensors[f"{stem}_scales"])
        experts = stored.transposed(first, step)
        weight = jax.tree.map(aligned_empty, mxfp4_struct(shape))
        for expert, values_QYO, scale_QO in zip(experts, weight.values, weight.scale, strict=True):

            def fill(at: slice, expert=expert, values_QYO=values_QYO, scale_QO=scale_QO) -> None:
                (blocks_OQY, scales_OQ) = expert.read(at)
                values_QYO[..., at] = blocks_OQY.transpose(1, 2, 0)
                scale_QO[:, at] = scales_OQ.T

            run_in_blocks(fill, shape[1], shape[2])
        return weight

    def pack(self, leaves: Mapping[str, Any], dtype: Any) -> dict[str, TensorOfLeaves]:
        tensors = {}
        for name, leaf in leaves.items():
            specs = self.tensor_specs(name, leaf.shape, {})
            (prefix, projection, _) = name.rsplit(".", 2) if specs else ("", "", "")
            same = [other for other in _PLACES if specs and _PLACES[other][0] == _PLACES[projection][0]]
            parts: list[Any] = [leaves.get(f"{prefix}.{other}.weight") for other in same]
            if not parts or not all(isinstance(part, Mxfp4Weight) for part in parts):
                raise self.misfit(name)
            arrays = zip(*((part.values, part.scale) for part in parts), strict=True)
            for (stored, (shape, _)), joined in zip(specs.items(), arrays, strict=True):
                tensors[stored] = TensorOfLeaves(shape, np.uint8, partial(_by_turns, joined, shape))
        return tensors


def _by_turns(parts: tuple[Any, ...], shape: Shape, convert: Callable[[Any], np.ndarray]) -> np.ndarray:
    """A stored tensor: the outputs of its leaves, which they have last, by turns."""
    return np.stack([np.moveaxis(convert(x), -1, 1) for x in parts], 2).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Mxfp4Matrix(RowsAsTensor):
    """The matrix of an expert as float numbers, [outputs, inputs]."""

    name: str
    blocks: StoredTensor  # of the expert, with those of other matrices: [outputs * step, …]
    scales: StoredTensor
    first: int  # its first row there
    step: int  # from one of its rows to the next
    type: ClassVar = "F32"

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0] // self.step, self.blocks.shape[1] * GROUP

    def read(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Blocks, uint8 [rows, Q, 16], and scales, uint8 [rows, Q]; InputError: a scale is NaN."""
        first, end, _ = rows.indices(self.shape[0])
        stored = slice(first * self.step, end * self.step)
        (blocks_OQY, scales_OQ) = (x[stored][self.first :: self.step] for x in (self.blocks, self.scales))
        if (scales_OQ == _NAN).any():
            raise InputError(f"{self.name}_scales holds NaN: fetch the checkpoint again")
        return blocks_OQY, scales_OQ

    def __getitem__(self, rows: slice) -> np.ndarray:
        (blocks_OQY, scales_OQ) = self.read(rows)
        numbers_OQJ = _PAIRS[blocks_OQY].reshape(*scales_OQ.shape, GROUP)
        exponents_OQ1 = scales_OQ[..., None].astype(np.int32) - 127
        with np.errstate(over="ignore"):
            return np.ldexp(numbers_OQJ, exponents_OQ1).reshape(len(scales_OQ), -1)


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor:
    """A tensor of all experts, [experts, inputs, outputs], as a float checkpoint would have it."""

    name: str
    blocks: StoredTensor
    scales: StoredTensor
    type: ClassVar = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        (experts, outputs, groups) = self.scales.shape
        return experts, groups * GROUP, outputs

    def transposed(self, first: int, step: int) -> list[Mxfp4Matrix]:
        """Each expert's matrix: the outputs from `first` on, every `step`-th."""

        def matrix(expert: int) -> Mxfp4Matrix:
            (blocks, scales) = (x.view(expert * x.shape[1], x.shape[1:]) for x in (self.blocks, self.scales))
            return Mxfp4Matrix(self.name, blocks, scales, first, step)

        return list(map(matrix, range(self.shape[0])))


def dequantized(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint's tensors with those in MXFP4 as float ones. Raises InputError."""
    found = dict(tensors)
    stems = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    for name in [stem for stem in stems if stem not in tensors]:  # blocks beside floats are left: unexpected
        scales = found.pop(f"{name}_scales", None)
        blocks = found.pop(f"{name}_blocks")
        sizes = scales and (*scales.shape, BYTES)
        if sizes != blocks.shape or {blocks.type, scales.type} != {"U8"} or len(blocks.shape) != 4:
            raise InputError(f"{name}_blocks and {name}_scales are not MXFP4: fetch the checkpoint again")
        found[name] = Mxfp4Tensor(name, blocks, scales)
    return found
