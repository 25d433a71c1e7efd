"""MXFP4 weights (OCP Microscaling Formats 1.0): numbers of 4 bits, and a power of two for each 32 inputs.

A matrix has O outputs and I inputs, in Q groups of 32 inputs. A number has a sign, two bits of exponent and
one of mantissa (E2M1): 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with both signs. Its bits become the bits of a float
(`kernels_pallas.mxfp4`), which is exact and needs no table: a table takes four times as long.
"""

import dataclasses
from typing import Any, Self

import jax
import numpy as np

from ..kernels_pallas.mxfp4 import (
    GROUP as GROUP,
    dequantize_mxfp4,
    is_for_tpu,
    values_for_tpu,
    values_from_tpu,
)
from .padded_weight import PaddedWeight
from .quantized_weight import QuantizedWeight
from .weight_leaf import WeightLeaf

BYTES = GROUP // 2  # of a group of one output
# Of 4 bits.
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Mxfp4Weight(QuantizedWeight):
    """A matrix [O, I] of numbers of 4 bits times powers of two, in groups of 32 inputs. Outputs are the last
    axis. Bytes are the bytes of the checkpoint. Experts on TPUs have another order, `for_tpu`.
    """

    operation = "mxfp4_product"
    group = GROUP
    values: jax.Array  # uint8 [Q, 16, O]: input 2y of a group in the low half of byte y, 2y + 1 in the high
    scale: jax.Array  # uint8 [Q, O]: exponent + 127. 2**-127 is no normal float32 number and counts as 0

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.scale.shape[:-2], self.scale.shape[-1], self.inputs

    @property
    def inputs(self) -> int:
        """I."""
        return 2 * self.values.shape[-2] if is_for_tpu(self) else self.values.shape[-3] * GROUP

    def for_tpu(self) -> WeightLeaf:
        """Returns experts with `values_for_tpu`, padded. Experts with an odd number of groups stay."""
        if len(self.shape) == 2 or self.scale.shape[-2] % 2 or is_for_tpu(self):
            return self
        return PaddedWeight.padded(dataclasses.replace(self, values=values_for_tpu(self.values)))

    def for_files(self) -> Self:
        """Returns matrices in the order of checkpoints."""
        return dataclasses.replace(self, values=values_from_tpu(self.values)) if is_for_tpu(self) else self

    def field_axes(self, *axes: str | None) -> dict[str, tuple[str | None, ...]]:
        *experts, outputs, inputs = axes
        within = () if is_for_tpu(self) else (None,)
        return {"values": (*experts, inputs, *within, outputs), "scale": (*experts, inputs, outputs)}

    def dequantize(self) -> jax.Array:
        return dequantize_mxfp4(self)


def mxfp4_struct(shape: tuple[int, ...]) -> Mxfp4Weight:
    """Returns the leaf of matrices [..., O, I] with `jax.ShapeDtypeStruct` instead of arrays."""
    (*experts, outputs, inputs) = shape
    struct: Any = jax.ShapeDtypeStruct
    Q = inputs // GROUP
    return Mxfp4Weight(
        struct((*experts, Q, BYTES, outputs), np.uint8), struct((*experts, Q, outputs), np.uint8)
    )
