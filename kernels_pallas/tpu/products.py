"""Matrix products of few rows on TPUs, several in one launch, with the RMS norm of their input, biases,
activation and residual.

- x is all on the chip, in the form that the matrices need. Tiles of their outputs are streamed from HBM, each
  once. A grid step takes a tile of every matrix that has one left, about `STEP_BYTES` in total.
- int8 weights are multiplied as integers: the matrix units take twice as many of them as of bfloat16, and
  nothing is converted. A row of x is split into two rows of int8 numbers. The step of the first row is its
  largest number divided by 127, and the step of the second row is that step divided by 254. So x loses less
  than by rounding to bfloat16. Rows cost nothing: loading 128 columns of weights into a matrix unit takes
  longer.
- int4 becomes bfloat16. From v6e on, units unpack it and compute with pairs of such numbers, by a scale that
  is rounded to bfloat16. Inputs are then in another order, into which products with zeros and ones put x.
  Before v6e zero points are subtracted from four levels of a word at once, and scaled as float32.
- FP8 is in `fp8`.
- Nothing was measured on a TPU. The schedules that libtpu prints of compiled kernels take less time than the
  copies for bfloat16 and int8 up to 64 rows, and for FP8 up to 16 rows. For int4 the schedule of a v6e takes
  1.1 times the copies up to 16 rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..reference_products import ACTIVATIONS
from . import streaming
from .adapters import added_by_adapters


def product(  # noqa: PLR0913
    x_MI, matrices, norm_I=None, residual_MO=None, step_M=None, *, eps=0.0, offset=0.0, activation=None,
    dtype=None, interpret=False,
) -> list[jax.Array]:  # fmt: skip
    """Returns the products of `reference_products.product` in one launch, in the dtype of x if none is given.

    x is bfloat16, or float32 with matrices of float32, and has at most 64 rows. step_M is None. Matrices are
    all floats of x's dtype, all int8 or FP8 with scales of one kind, or all int4 in groups of a multiple of
    64 inputs. interpret: True: emulate a TPU on a CPU, slowly, and raise if accesses to memory race.
    """
    assert step_M is None
    M = len(x_MI)
    settings = streaming.settings_of(x_MI, matrices, eps, offset, activation)
    adapters = [matrix.adapters for matrix in matrices if matrix.adapters is not None]
    sums = iter(adapters and added_by_adapters(x_MI, adapters, norm_I, eps, offset, interpret))
    added = [None if matrix.adapters is None else next(sums) for matrix in matrices]
    results = [
        ((M, matrices[n].outputs), dtype or x_MI.dtype, streaming.rows_of_tile(M, settings, n))
        for n in range(1 if activation else len(matrices))
    ]
    around = norm_I, residual_MO, added
    return streaming.call(_kernel, settings, x_MI, matrices, results, "product", interpret, *around)


def _kernel(step: streaming.Step) -> None:
    number, settings, operands, results, *_ = step
    pl.when(number == 0)(partial(streaming.prepare, step))

    def tile(n: int) -> jax.Array:
        y_MO = streaming.multiply_tile(step, n)[: len(operands.x)]
        return y_MO if operands.added[n] is None else y_MO + operands.added[n][...]

    def store(n: int) -> None:
        y_MO = tile(n)
        if settings.activation is not None:
            y_MO = ACTIVATIONS[settings.activation](y_MO) * tile(1)
        if operands.residual is not None:
            y_MO += operands.residual[...].astype(jnp.float32)
        results[n][...] = y_MO.astype(results[n].dtype)

    for n in range(len(results)):
        if settings.counts[n] == max(settings.counts):
            store(n)
        else:
            pl.when(number < settings.counts[n])(partial(store, n))
