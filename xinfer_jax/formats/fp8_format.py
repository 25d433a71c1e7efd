"""Matrices in FP8: numbers of 8 bits with a scale for each block, output, or matrix.

X.weight, or X of all experts, has a type of 8 bits. The scale is X.weight_scale_inv, or X.weight_scale.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ..errors import InputError
from ..families.conversion import TensorOfLeaves, itself, of_expert
from ..weights.fp8_weight import FP8_BLOCK, Fp8Weight, fp8_struct
from .kept_leaves import KeptForm
from .scaled_tensor import MatrixFormat, Read, ScaledNumbers, ScaledTensor, flat_bytes, read_bytes, read_rows
from .tensors import DTYPES, Require, Shape, StoredTensor, Tensors, TensorSpec

FLOAT8 = {"F8_E4M3", "F8_E5M2"}
SCALE_TYPES = {"F32", "BF16", "F16", "F8_E8M0"}
_TABLES = {  # the number of each byte
    type: np.arange(256).astype(np.uint8).view(DTYPES[type]).astype(np.float32)[:, None] for type in FLOAT8
}
_OF_ACTIVATIONS = (
    "activation_scale",
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "output_scale",
)


@dataclasses.dataclass(frozen=True)
class Fp8Format(MatrixFormat):
    method = "fp8"
    methods: ClassVar[tuple[str, ...]] = (method,)
    kept_as = Fp8Weight.kept_as
    kept_needs = "FP8 (E4M3) of a checkpoint, with a scale for a matrix, an output, or 128 × 128 numbers"
    joined_are_written = False
    stays_quantized = False
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale
    has_block: bool = False  # there are no others

    @classmethod
    def from_config(cls, config: Mapping[str, Any], require: Require) -> "Fp8Format":
        block = config.get("weight_block_size", (128, 128))
        require(config.get("activation_scheme") in (None, "dynamic", "static"), "activation_scheme")
        require(config.get("scale_fmt") in (None, "float", "ue8m0"), "scale_fmt")
        require(config.get("expert_dtype") in (None, "fp8"), "expert_dtype")
        require(config.get("fmt") in (None, "e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"), "fmt")
        is_pair = isinstance(block, list | tuple) and len(block) == 2
        are_sizes = is_pair and all(type(x) is int and x > 0 for x in block)
        require(block is None or are_sizes, "weight_block_size")
        return cls(block and (block[0], block[1]), bool(config.get("weight_block_size")))

    def find(self, tensors: Tensors) -> dict[str, Shape]:
        return {name: x.shape for name, x in tensors.items() if x.type in FLOAT8 and len(x.shape) > 1}

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        scale = _scale_name(name, tensors)
        stored = tensors[scale].shape if scale in tensors else ()
        (wanted, _, _) = scale_layout(stored, shape, self.block, self.has_block)
        return {name: (shape, FLOAT8), scale: (wanted, SCALE_TYPES)}

    def open(self, name: str, shape: Shape, tensors: Tensors) -> ScaledTensor:
        scale = tensors[_scale_name(name, tensors)]
        layout = scale_layout(scale.shape, shape, self.block, self.has_block)
        return float8_tensor(name, shape, tensors[name], scale, layout)

    def pack(self, leaves: Mapping[str, Any], dtype: Any) -> dict[str, TensorOfLeaves]:
        tensors = {}
        for name, leaf in leaves.items():
            is_known = self.method == "fp8" and isinstance(leaf, Fp8Weight)
            if not is_known or self.has_block and not leaf.has_blocks:
                raise self.misfit(name, leaf)
            scale = f"{name}_scale{'_inv' if leaf.has_blocks else ''}"
            for stored, array in ((name, leaf.values), (scale, leaf.scale)):
                if "{}" not in name:
                    tensors[stored] = TensorOfLeaves(array.shape, array.dtype, partial(itself, array))
                    continue
                for expert in range(len(array)):
                    make = partial(of_expert, array, expert)
                    tensors[stored.format(expert)] = TensorOfLeaves(array.shape[1:], array.dtype, make)
        return tensors

    def is_unused(self, name: str, tensors: Tensors) -> bool:
        return is_of_activations(name)


def is_of_activations(name: str) -> bool:
    """Returns True if a tensor quantizes activations, which stay floats here."""
    return name.endswith(_OF_ACTIVATIONS)


def _scale_name(name: str, tensors: Tensors) -> str:
    return next((x for end in ("_scale_inv", "_scale") if (x := name + end) in tensors), f"{name}_scale_inv")


def float8_tensor(
    name: str, shape: Shape, stored: StoredTensor, scale: StoredTensor, layout: Any
) -> ScaledTensor:
    """Returns a matrix, or the matrices of experts, in FP8. layout: see `scaled_numbers`."""
    kept = _kept_form if stored.type == "F8_E4M3" else None
    read = read_bytes(stored, _TABLES[stored.type])
    numbers = scaled_numbers(name, shape, read, scale, layout, kept=kept, stored=(stored,))
    return ScaledTensor(numbers, shape)


def _kept_form(
    shape: Shape, parts: Sequence[ScaledTensor], devices: int, asked: str | None
) -> KeptForm | None:
    """Returns the form of matrices with a scale for each output, or for blocks that are the blocks of the
    leaf.
    """
    if asked != Fp8Format.kept_as:
        return None

    def keeps_blocks(part: ScaledTensor) -> bool:
        starts = (part.first_row % part.numbers.shape[0] % FP8_BLOCK, part.first_column % FP8_BLOCK)
        is_whole = part.shape[0] == shape[-2] or part.shape[0] % FP8_BLOCK == 0
        is_block = part.numbers.block == (FP8_BLOCK, FP8_BLOCK)
        return is_block and starts == (0, 0) and part.step == 1 and is_whole

    has_blocks = all(map(keeps_blocks, parts))
    if not has_blocks and any(part.numbers.block[1] < part.numbers.shape[1] for part in parts):
        return None
    struct = partial(fp8_struct, has_blocks=has_blocks)
    block = FP8_BLOCK if has_blocks and len(shape) == 2 else 1
    return KeptForm(struct, _fill, block=block)


def _fill(leaf: Fp8Weight, part: ScaledTensor, first: int, at: slice) -> None:
    """Does the work of `KeptForm.fill`."""
    rows = part.rows(at)
    to = np.arange(first + at.start, first + at.stop)
    inputs = part.shape[1]
    stored = flat_bytes(*part.numbers.stored)
    values_OI = stored.slice_axis(1, part.first_column, inputs)[rows][:: part.step]
    if ((values_OI & 127) == 127).any():
        raise InputError(f"{part.numbers.name} holds NaN: fetch the checkpoint again")
    values: Any = leaf.values
    scale: Any = leaf.scale
    values[to] = values_OI.view(values.dtype)
    columns = part.first_column + np.arange(0, inputs, FP8_BLOCK if leaf.has_blocks else inputs)
    scale_OQ = part.numbers.finite_per_row(part.numbers.scales, rows, columns)[:: part.step]
    if leaf.has_blocks:
        is_first = to % FP8_BLOCK == 0
        scale[to[is_first] // FP8_BLOCK] = scale_OQ[is_first]
    else:
        scale[to] = scale_OQ[:, 0]


def scaled_numbers(
    name: str, shape: Shape, read: Read, scale: StoredTensor, layout: Any, **how: Any
) -> ScaledNumbers:
    """Returns numbers that are read with these scales. layout: the layout of the scales, as `scale_layout`
    returns it.
    """
    (_, shared, scale_shape) = layout
    return ScaledNumbers(name, (shape[-2], shape[-1]), shared, read, read_rows(scale, scale_shape), **how)


def scale_layout(
    stored: Shape, shape: Shape, block: Sequence[int] | None, has_block: bool = True
) -> tuple[Shape, tuple[int, int], tuple[int, int]]:
    """Finds the layout of the scales of a matrix, or of experts: in blocks, one for each output, or one for
    all outputs.

    Args:
        stored: the shape in which the scales are stored.
        shape: the shape of the matrix.
        block: rows and columns of a block. None: there are no blocks.
        has_block: False: the scales may have another layout than blocks.

    Returns:
        The shape that the scales must have, the rows and columns that share one, and the shape of the scales
        as a matrix.
    """
    (*experts, outputs, inputs) = shape
    count = math.prod(experts)
    scalars = [(*experts, *ones) for ones in ((), (1,), (1, 1))]
    forms = dict.fromkeys(scalars, ((outputs, inputs), (count, 1)))
    by_output = [(*experts, outputs, 1), (*experts, outputs)]
    forms |= dict.fromkeys(by_output, ((1, inputs), (count * outputs, 1)))
    if block is not None:
        height = -(-outputs // block[0])
        width = -(-inputs // block[1])
        by_block = [(*experts, height, width), (*experts, height, 1, width, 1)]
        of_blocks = dict.fromkeys(by_block, ((block[0], block[1]), (count * height, width)))
        forms = of_blocks if has_block else forms | of_blocks
    wanted = stored if stored in forms else next(iter(forms))
    return wanted, *forms[wanted]
