"""MXFP4 weights (OCP Microscaling Formats 1.0): numbers of 4 bits, and a power of two for each 32 inputs.

A matrix has O outputs and I inputs, in Q groups of 32 inputs. A number has a sign, two bits of exponent and
one of mantissa (E2M1): 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with both signs. Shifts and masks put its bits where a
float has them, which is exact on every device and needs no table:

- As float32. Its subnormal number, 0.5, would count as 0 on most devices. So the exponents are larger than
  those of subnormal numbers: 0 and 0.5 get a leading one, which is subtracted where that gives less.
- As float16, for a row on CPUs: they convert subnormal numbers of that type to float32 exactly.

The experts of one token in a layer of gpt-oss-20b, 100 million weights, on 2 Zen 4 cores beside other work:
by float16 10.7 ms (jax 0.10) and 9.4 (0.12), by float32 15 and 13, int4 7.4 and 10.1. One matrix by a table
takes four times as long as by float32, by integers more. Fewer partial sums (one of a group, or of several)
are four times as slow in one version or both: LLVM no longer unrolls the loop.
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


def unpack_mxfp4(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers in the low halves of packed bytes and those in the high halves, float32."""
    bits = values.astype(jnp.int32)
    # Shifts are single numbers: XLA would hoist an array of them out of a loop and load it for each weight.
    return _number(bits << 22, bits << 28), _number(bits << 18, bits << 24)


def _number(magnitude: jax.Array, sign: jax.Array) -> jax.Array:
    """Numbers from integers that have their magnitude's bits from bit 22 on, and their sign's at bit 31."""
    with_one = lax.bitcast_convert_type((magnitude & np.int32(7 << 22)) + np.int32(126 << 23), jnp.float32)
    magnitude = lax.bitcast_convert_type(jnp.minimum(with_one, 2 * with_one - 1), jnp.int32)
    return lax.bitcast_convert_type(magnitude | (sign & np.int32(-(2**31))), jnp.float32)


def _unpack_as_float16(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `unpack_mxfp4`, times 2**-14: bits of float16 from bytes whose sign fills 16 bits."""
    bits = lax.bitcast_convert_type(values, jnp.int8).astype(jnp.int16)
    halves = ((bits << 12) >> 3, bits << 5)
    (low, high) = (lax.bitcast_convert_type(x & np.int16(-0x7200), jnp.float16) for x in halves)
    return low.astype(jnp.float32), high.astype(jnp.float32)


def _powers(scale: jax.Array) -> jax.Array:
    """The powers of two, float32."""
    return lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)


def dequantize_mxfp4(weight: Mxfp4Weight) -> jax.Array:
    """Returns the matrix, float32 [O, I]: exact."""
    numbers_QY2O = jnp.stack(unpack_mxfp4(weight.values), 2)
    matrix_QY2O = numbers_QY2O * _powers(weight.scale)[:, None, None]
    return matrix_QY2O.reshape(weight.inputs, -1).T


def mxfp4_product(x_MI: jax.Array, weight: Mxfp4Weight) -> jax.Array:
    """Returns x @ matrix.T, float32 [M, O], on CPUs: rows one by one, or a tile of outputs at a time."""
    x_MI = x_MI.astype(jnp.float32)
    if len(x_MI) == 1:
        return _row(x_MI[0], weight)[None]
    if len(x_MI) <= _ROW_BY_ROW:  # the barrier makes weights depend on x, or XLA would unpack them before
        return lax.map(lambda x_I: _row(*lax.optimization_barrier((x_I, weight))), x_MI)

    def multiply_tile(first: jax.Array, size: int, weight: Mxfp4Weight) -> jax.Array:  # [M, size]
        tile = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size, x.ndim - 1), weight)
        (low_IO, high_IO) = (
            (half_QYO * _powers(tile.scale)[:, None]).reshape(-1, size)
            for half_QYO in unpack_mxfp4(tile.values)
        )
        return dot(x_MI[:, ::2], low_IO, 0) + dot(x_MI[:, 1::2], high_IO, 0)

    return tiled_product(multiply_tile, x_MI, weight.shape[0], 4 * weight.inputs, weight)


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
    y_RO = (sum_QCO * 2**14 * _powers(weight.scale)[:, None]).reshape(-1, outputs)
    # A dot with ones: XLA would fuse a sum over runs into the loop, which then has no vector instructions.
    return dot(jnp.ones(len(y_RO)), y_RO, 0)
