"""Products for CPUs with MXFP4 weights.

The bits of a number become the bits of a float. For a single row the float is float16, since CPUs convert
subnormal numbers of that type to float32 exactly. With fewer partial sums (one of a group, or of several)
LLVM no longer unrolls the loop, and it is four times as slow.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...kernels_pallas.mxfp4 import number, power
from ...ops.forms import always
from ...ops.product import dot
from ...weights.mxfp4 import BYTES, Mxfp4Weight
from . import product_table
from .cpu_products import tiled_product

_RUN = 8  # bytes of one sum: LLVM does not unroll 16, a tenth of the speed


@always
def mxfp4_form(x: jax.Array, matrix: Mxfp4Weight) -> jax.Array:
    """Returns a form of `mxfp4_product`."""
    x_MI = x.astype(jnp.float32)
    weight = matrix.for_files()
    if product_table.fastest_form("mxfp4", len(x_MI), *matrix.shape) == product_table.ROWS:
        if len(x_MI) == 1:
            return _row(x_MI[0], weight)[None]
        # The barrier makes weights depend on x, or XLA would unpack them before.
        return lax.map(lambda x_I: _row(*lax.optimization_barrier((x_I, weight))), x_MI)

    def multiply_tile(first: jax.Array, size: int, weight: Mxfp4Weight) -> jax.Array:  # [M, size]
        tile = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size, x.ndim - 1), weight)
        power_Q1O = power(tile.scale)[:, None]
        (low_IO, high_IO) = ((number(tile.values, shift) * power_Q1O).reshape(-1, size) for shift in (0, 4))
        return dot(x_MI[:, ::2], low_IO, 0) + dot(x_MI[:, 1::2], high_IO, 0)

    return tiled_product(multiply_tile, x_MI, matrix.shape[0], 4 * matrix.inputs, weight)


def _unpack_as_float16(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers in the low halves of bytes and the numbers in the high halves, times 2**-14. The
    bits of float16 come from bytes whose sign fills 16 bits.
    """
    bits = lax.bitcast_convert_type(values, jnp.int8).astype(jnp.int16)
    halves = ((bits << 12) >> 3, bits << 5)
    (low, high) = (lax.bitcast_convert_type(x & np.int16(-0x7200), jnp.float16) for x in halves)
    return low.astype(jnp.float32), high.astype(jnp.float32)


def _row(x_I: jax.Array, weight: Mxfp4Weight) -> jax.Array:
    """Returns one row's product, [O]. A group is C runs of R bytes."""
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
