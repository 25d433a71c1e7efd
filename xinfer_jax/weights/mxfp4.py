"""MXFP4 weights (OCP Microscaling Formats 1.0): numbers of 4 bits, and a power of two for each 32 inputs.

A matrix has O outputs and I inputs, in Q groups of 32 inputs. A number has a sign, two bits of exponent and
one of mantissa (E2M1): 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with both signs. Its bits become those of a float32
number by shifts and masks. The smallest exponent is that of 0 and 0.5, which have no leading one: it is
subtracted, where that gives less than the number with it. This is exact on every device, and needs no table:
one row times [2880, 2880], 2 Zen 4 cores, in billions of weights a second: 15 in this way (int4 22), 14 by
way of float16 (its subnormal numbers need no subtraction), 3 with a table, 0.5 with integers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formatting import ShortRepr
from .matmul import dot, tiled_product

GROUP = 32  # inputs that share a scale
BYTES = GROUP // 2  # of a group of one output
NUMBERS = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)  # of 4 bits
_RUN = 8  # bytes of one sum: LLVM does not unroll 16, a tenth of the speed
_ROW_BY_ROW = 8  # up to this number of rows, one row at a time is faster


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Mxfp4Weight(ShortRepr):
    """A matrix [O, I] of numbers of 4 bits times powers of two, in groups of 32 inputs. Outputs are the last
    axis; all bytes are those of the checkpoint.
    """

    values: (
        jax.Array
    )  # uint8 [Q, 16, O]: input 2y of a group in the low half of byte y, 2y + 1 in the high one
    scale: jax.Array  # uint8 [Q, O]: exponent + 127; 2**-127, which is no normal float32 number, counts as 0

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.scale.shape[:-2], self.scale.shape[-1], self.inputs

    @property
    def inputs(self) -> int:
        """I."""
        return self.scale.shape[-2] * GROUP

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return GROUP


def mxfp4_struct(shape: tuple[int, ...]) -> Mxfp4Weight:
    """Returns the leaf of matrices [..., O, I] with `jax.ShapeDtypeStruct` instead of arrays."""
    (*experts, outputs, inputs) = shape
    struct: Any = jax.ShapeDtypeStruct
    Q = inputs // GROUP
    return Mxfp4Weight(
        struct((*experts, Q, BYTES, outputs), np.uint8), struct((*experts, Q, outputs), np.uint8)
    )


def unpack_mxfp4(values: jax.Array) -> jax.Array:
    """Returns the numbers of packed bytes: uint8 [..., Y, O] -> float32 [..., Y, 2, O]."""
    bits = values.astype(jnp.int32)[..., None, :]

    def shifted(*places: int) -> jax.Array:
        return bits << np.array(places, np.int32)[:, None]

    magnitude = (shifted(22, 18) & np.int32(7 << 22)) + np.int32(126 << 23)
    with_one = lax.bitcast_convert_type(magnitude, jnp.float32)
    magnitude = lax.bitcast_convert_type(jnp.minimum(with_one, 2 * with_one - 1), jnp.int32)
    sign = shifted(28, 24) & np.int32(-(2**31))
    return lax.bitcast_convert_type(magnitude | sign, jnp.float32)


def _powers(scale: jax.Array) -> jax.Array:
    """The powers of two, float32."""
    return lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)


def dequantize_mxfp4(weight: Mxfp4Weight) -> jax.Array:
    """Returns the matrix, float32 [O, I]: exact."""
    return _matrix(weight).T


def _matrix(weight: Mxfp4Weight) -> jax.Array:
    """[I, O]."""
    matrix_QY2O = unpack_mxfp4(weight.values) * _powers(weight.scale)[:, None, None]
    return matrix_QY2O.reshape(weight.inputs, -1)


def mxfp4_product(x_MI: jax.Array, weight: Mxfp4Weight) -> jax.Array:
    """Returns x @ matrix.T, float32 [M, O], on CPUs: rows one by one, or a tile of outputs at a time."""
    x_MI = x_MI.astype(jnp.float32)
    if len(x_MI) == 1:
        return _row(x_MI[0], weight)[None]
    if len(x_MI) <= _ROW_BY_ROW:  # the barrier makes weights depend on x, or XLA would unpack them before
        return lax.map(lambda x_I: _row(*lax.optimization_barrier((x_I, weight))), x_MI)

    def multiply_tile(first: jax.Array, size: int, weight: Mxfp4Weight) -> jax.Array:  # [M, size]
        tile = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size, x.ndim - 1), weight)
        return dot(x_MI, _matrix(tile), 0)

    return tiled_product(multiply_tile, x_MI, weight.shape[0], 4 * weight.inputs, weight)


def _row(x_I: jax.Array, weight: Mxfp4Weight) -> jax.Array:
    """One row's product, [O]. A group is C runs of R bytes."""
    outputs = weight.shape[0]
    # No barrier for the weights: they are a slice by an expert's number, which XLA does not unpack before the
    # loop that computes the number, and which jax 0.12 would copy for a barrier.
    x_QCR2 = lax.optimization_barrier(x_I.reshape(-1, BYTES // _RUN, _RUN, 2))
    values_QCRO = weight.values.reshape(-1, BYTES // _RUN, _RUN, outputs)
    terms_QCR2O = x_QCR2[..., None] * unpack_mxfp4(values_QCRO)
    terms_QCRO = terms_QCR2O[..., 0, :] + terms_QCR2O[..., 1, :]
    # Not a + b: for plain sums XLA calls a library, which reads a float32 copy of all terms.
    sum_QCO = lax.reduce(terms_QCRO, np.float32(0), lambda a, b: -(-a - b), (2,))
    y_RO = (sum_QCO * _powers(weight.scale)[:, None]).reshape(-1, outputs)
    # A dot with ones: XLA would fuse a sum over runs into the loop, which then has no vector instructions.
    return dot(jnp.ones(len(y_RO)), y_RO, 0)
