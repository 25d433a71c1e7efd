"""MXFP4 weights (OCP Microscaling Formats 1.0): numbers of 4 bits, and a power of two for each 32 inputs.

A matrix has O outputs and I inputs, in Q groups of 32 inputs. A number has a sign, two bits of exponent and
one of mantissa (E2M1): 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with both signs. Its bits become those of a float,
which is exact and needs no table (a table takes four times as long): of float32 (`kernels_pallas.mxfp4`), or
for a row on CPUs of float16, since they convert subnormal numbers of that type to float32 exactly. With fewer
partial sums (one of a group, or of several) LLVM no longer unrolls the loop, and it is four times as slow.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.mxfp4 import (
    GROUP as GROUP,
    dequantize_mxfp4,
    is_for_tpu,
    number,
    power,
    values_for_tpu,
    values_from_tpu,
)

from ..ops.cpu import product_table
from ..ops.cpu.cpu_products import tiled_product
from ..ops.product import dot
from .padded_weight import PaddedWeight
from .quantized_weight import QuantizedWeight
from .weight_leaf import WeightLeaf

BYTES = GROUP // 2  # of a group of one output
# Of 4 bits.
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_RUN = 8  # bytes of one sum: LLVM does not unroll 16, a tenth of the speed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Mxfp4Weight(QuantizedWeight):
    """A matrix [O, I] of numbers of 4 bits times powers of two, in groups of 32 inputs. Outputs are the last
    axis. Bytes are those of the checkpoint, of experts on TPUs in another order, `for_tpu`.
    """

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
        """Experts with `values_for_tpu`, padded; those with an odd number of groups stay."""
        if len(self.shape) == 2 or self.scale.shape[-2] % 2 or is_for_tpu(self):
            return self
        return PaddedWeight.padded(dataclasses.replace(self, values=values_for_tpu(self.values)))

    def for_files(self) -> Self:
        """Matrices in the order of checkpoints."""
        return dataclasses.replace(self, values=values_from_tpu(self.values)) if is_for_tpu(self) else self

    @property
    def group(self) -> int:
        return GROUP

    def field_axes(self, *axes: str | None) -> dict[str, tuple[str | None, ...]]:
        *experts, outputs, inputs = axes
        within = () if is_for_tpu(self) else (None,)
        return {"values": (*experts, inputs, *within, outputs), "scale": (*experts, inputs, outputs)}

    def dequantize(self) -> jax.Array:
        return dequantize_mxfp4(self)

    def cpu_product(self, x_MI: jax.Array) -> jax.Array:
        x_MI = x_MI.astype(jnp.float32)
        weight = self.for_files()
        if product_table.fastest_form("mxfp4", len(x_MI), *self.shape) == product_table.ROWS:
            if len(x_MI) == 1:
                return _row(x_MI[0], weight)[None]
            # The barrier makes weights depend on x, or XLA would unpack them before.
            return lax.map(lambda x_I: _row(*lax.optimization_barrier((x_I, weight))), x_MI)

        def multiply_tile(first: jax.Array, size: int, weight: Mxfp4Weight) -> jax.Array:  # [M, size]
            tile = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size, x.ndim - 1), weight)
            power_Q1O = power(tile.scale)[:, None]
            (low_IO, high_IO) = (
                (number(tile.values, shift) * power_Q1O).reshape(-1, size) for shift in (0, 4)
            )
            return dot(x_MI[:, ::2], low_IO, 0) + dot(x_MI[:, 1::2], high_IO, 0)

        return tiled_product(multiply_tile, x_MI, self.shape[0], 4 * self.inputs, weight)


def mxfp4_struct(shape: tuple[int, ...]) -> Mxfp4Weight:
    """Returns the leaf of matrices [..., O, I] with `jax.ShapeDtypeStruct` instead of arrays."""
    (*experts, outputs, inputs) = shape
    struct: Any = jax.ShapeDtypeStruct
    Q = inputs // GROUP
    return Mxfp4Weight(
        struct((*experts, Q, BYTES, outputs), np.uint8), struct((*experts, Q, outputs), np.uint8)
    )


def _unpack_as_float16(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The numbers in the low halves of bytes and those in the high ones, times 2**-14: bits of float16 from
    bytes whose sign fills 16 bits.
    """
    bits = lax.bitcast_convert_type(values, jnp.int8).astype(jnp.int16)
    halves = ((bits << 12) >> 3, bits << 5)
    (low, high) = (lax.bitcast_convert_type(x & np.int16(-0x7200), jnp.float16) for x in halves)
    return low.astype(jnp.float32), high.astype(jnp.float32)


def _row(x_I: jax.Array, weight: Mxfp4Weight) -> jax.Array:
    """One row's product, [O]. A group is C runs of R bytes."""
    outputs = weight.shape[0]
    # A dot, which XLA does not fuse into the loop: there it would compute x for every output, and LLVM would
    # not unroll it. The barrier does without the weights: a slice by an expert's number is not unpacked
    # before the loop that computes the number, and jax 0.12 would copy it for a barrier.
    by_half = np.eye(2 * _RUN, dtype=np.float32).reshape(_RUN, 2, -1).swapaxes(0, 1).reshape(2 * _RUN, -1).T
    x_QCJ = dot(x_I.reshape(-1, 2 * _RUN), jnp.asarray(by_half), 0).reshape(-1, BYTES // _RUN, 2 * _RUN)
    x_QCJ = lax.optimization_barrier(x_QCJ)
    low_QCRO, high_QCRO = _unpack_as_float16(weight.values.reshape(-1, BYTES // _RUN, _RUN, outputs))
    terms_QCRO = x_QCJ[..., :_RUN, None] * low_QCRO + x_QCJ[..., _RUN:, None] * high_QCRO
    # Not a + b: for plain sums XLA calls a library, which reads a float32 copy of all terms.
    sum_QCO = lax.reduce(terms_QCRO, np.float32(0), lambda a, b: -(-a - b), (2,))
    y_RO = (sum_QCO * 2**14 * power(weight.scale)[:, None]).reshape(-1, outputs)
    # A dot with ones: XLA would fuse a sum over runs into the loop, which then has no vector instructions.
    return dot(jnp.ones(len(y_RO), jnp.float32), y_RO, 0)
