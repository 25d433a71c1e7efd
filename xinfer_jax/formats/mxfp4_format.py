"""Experts in MXFP4, as gpt-oss's checkpoints have them.

X_blocks, uint8 [experts, outputs, Q, 16], and X_scales, uint8 [experts, outputs, Q], stand for X [experts,
inputs, outputs], which is gate_up_proj, with outputs of gate and up by turns, or down_proj. `weights.mxfp4`
describes the meaning of their bytes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ..families.conversion import TensorOfLeaves
from ..kernels_pallas.mxfp4 import is_for_tpu, values_from_tpu
from ..weights.mxfp4 import BYTES, GROUP, NUMBERS, Mxfp4Weight, mxfp4_struct
from ..weights.padded_weight import stored_weight
from ..weights.quantized_weight import is_quantized
from .kept_leaves import KeptForm
from .scaled_tensor import (
    MatrixFormat,
    ScaledNumbers,
    ScaledTensor,
    check_groups,
    flat_bytes,
    read_bytes,
    read_rows,
)
from .tensors import Require, Shape, StoredTensor, Tensors, TensorSpec

_JOINED = dict.fromkeys(("gate_proj", "up_proj"), ("gate_proj", "up_proj")) | {"down_proj": ("down_proj",)}
# The modules of gpt-oss that its files have as float numbers.
_FLOATS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
PAIRS = NUMBERS[np.arange(256)[:, None] >> np.array([0, 4]) & 15]  # the two numbers of a byte


@dataclasses.dataclass(frozen=True)
class Mxfp4Format(MatrixFormat):
    method = "mxfp4"
    methods = (method,)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], require: Require) -> "Mxfp4Format":
        """Returns the format. The tensors show which matrices are not converted."""
        return cls()

    @classmethod
    def settings_for(cls, leaves: Sequence[Any]) -> dict[str, Any] | None:
        quantized = map(stored_weight, filter(is_quantized, leaves))
        if not all(isinstance(leaf, Mxfp4Weight) and len(leaf.shape) > 2 for leaf in quantized):
            return None
        return dict(quant_method=cls.method, modules_to_not_convert=_FLOATS)

    @classmethod
    def with_floats(cls, settings: Mapping[str, Any], floats: list[str]) -> dict[str, Any]:
        return {**settings}

    def find(self, tensors: Tensors) -> dict[str, Shape]:
        names = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
        return {name: (0, 0, 0) for name in names if name not in tensors}

    def tensor_specs(self, name: str, shape: Shape, tensors: Tensors) -> dict[str, TensorSpec]:
        (experts, inputs, outputs) = shape
        check_groups(name, inputs, GROUP)
        groups = (experts, outputs, inputs // GROUP)
        return {f"{name}_blocks": ((*groups, BYTES), {"U8"}), f"{name}_scales": (groups, {"U8"})}

    def pack(self, leaves: Mapping[str, Any], dtype: Any) -> dict[str, TensorOfLeaves]:
        tensors = {}
        for name, leaf in leaves.items():
            (prefix, projection, _) = name.rsplit(".", 2)
            others = _JOINED.get(projection, ())
            parts: list[Any] = [leaves.get(f"{prefix}.{other}.weight") for other in others]
            kinds = [stored_weight(x) for x in parts]
            if not parts or not all(isinstance(x, Mxfp4Weight) and len(x.shape) > 2 for x in kinds):
                raise self.misfit(name, leaf)
            (experts, outputs, inputs) = leaf.shape
            stem = f"{prefix}.{'down_proj' if len(parts) == 1 else 'gate_up_proj'}"
            specs = self.tensor_specs(stem, (experts, inputs, len(parts) * outputs), {})
            for (stored, (shape, _)), field in zip(specs.items(), ("values", "scale"), strict=True):
                tensors[stored] = TensorOfLeaves(shape, np.uint8, partial(_by_turns, parts, field, shape))
        return tensors

    def open(self, name: str, shape: Shape, tensors: Tensors) -> "ExpertsOutputsFirst":
        (experts, inputs, outputs) = shape
        (blocks, scales) = (tensors[f"{name}_{field}"] for field in ("blocks", "scales"))
        blocks = dataclasses.replace(blocks, shape=(experts * outputs, inputs // 2))
        return ExpertsOutputsFirst(mxfp4_tensor(name, (experts, outputs, inputs), blocks, scales))


def _by_turns(
    parts: Sequence[Any], field: str, shape: Shape, convert: Callable[[Any], np.ndarray]
) -> np.ndarray:
    """Returns a stored tensor: the outputs of its leaves, which they have last, by turns."""
    arrays = []
    for part in parts:
        kept = stored_weight(part)
        array = convert(getattr(kept, field))
        if field == "values" and is_for_tpu(kept):
            array = values_from_tpu(array)
        elif field == "scale":
            array = array[:, : part.shape[-1] // GROUP]
        arrays.append(np.moveaxis(array[..., : part.shape[1]], -1, 1))
    return np.stack(arrays, 2).reshape(shape)


def mxfp4_tensor(name: str, shape: Shape, values: StoredTensor, scales: StoredTensor) -> ScaledTensor:
    """Returns the tensor of a matrix, or of experts, in MXFP4: pairs of numbers in a byte, inputs last."""
    (outputs, inputs) = shape[-2:]
    exponents = dataclasses.replace(flat_bytes(scales), type="F8_E8M0")  # its NaN is that of MXFP4
    read_scales = read_rows(exponents, exponents.shape)  # type: ignore[arg-type]
    numbers = ScaledNumbers(
        name,
        (outputs, inputs),
        (1, GROUP),
        read_bytes(values, PAIRS),
        read_scales,
        kept=_kept_form,
        stored=(values, scales),
    )
    return ScaledTensor(numbers, shape)


def _kept_form(
    shape: Shape, parts: Sequence[ScaledTensor], devices: int, asked: str | None
) -> KeptForm | None:
    return KeptForm(mxfp4_struct, _fill) if shape[-1] % GROUP == 0 else None


def _fill(leaf: Any, part: ScaledTensor, first: int, at: slice) -> None:
    """Does the work of `KeptForm.fill`."""
    rows = part.rows(at)
    group = part.first_column // GROUP
    Q = part.shape[1] // GROUP
    at_Q = np.arange(group, group + Q) * GROUP
    part.numbers.finite_per_row(part.numbers.scales, rows, at_Q)  # raises where one is NaN
    (values, scales) = map(flat_bytes, part.numbers.stored)
    values_OY = values.slice_axis(1, group * BYTES, Q * BYTES)[rows][:: part.step]
    to = slice(first + at.start, first + at.stop)
    leaf.values[..., to] = values_OY.reshape(-1, Q, BYTES).transpose(1, 2, 0)
    leaf.scale[:, to] = scales.slice_axis(1, group, Q)[rows][:: part.step].T


@dataclasses.dataclass(frozen=True)
class ExpertsOutputsFirst:
    """A tensor of all experts, [experts, inputs, outputs], whose file has their outputs first."""

    stored: ScaledTensor  # [experts, outputs, inputs]
    type: ClassVar = "F32"

    @property
    def shape(self) -> Shape:
        (experts, outputs, inputs) = self.stored.shape
        return experts, inputs, outputs

    def transposed(self, first: int, step: int) -> list[ScaledTensor]:
        """Returns each expert's matrix: the outputs from `first` on, every `step`-th."""
        (experts, outputs, inputs) = self.stored.shape
        every = dataclasses.replace(self.stored, step=step)
        return [
            dataclasses.replace(every, first_row=i * outputs + first, shape=(outputs // step, inputs))
            for i in range(experts)
        ]
