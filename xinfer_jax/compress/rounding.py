"""Rounding on the device: to nearest, and so that it makes up for its own errors on a calibration text.

The latter is least squares twice: a matrix is first refitted so that, on what the layers rounded before it
really put out, it gives what the unrounded model gives there; then its columns are rounded in order, and the
error of each is passed on to those that follow (GPTQ, Frantar et al. 2022).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..weights.quantized import (
    GroupedWeight,
    Int8Weight,
    QuantizedWeight,
    finest_step,
    float16_step,
    group_size,
    in_groups,
    nearest,
    pack,
)

_BLOCK = 64  # columns between two updates of all later ones, where groups do not say
_SHRINKS = (1.0, 0.94, 0.88, 0.82, 0.76)  # tried on each end of a group's range


def compensated_matrix(
    matrix_OI: jax.Array, x_MI: jax.Array, wanted_MO: jax.Array, bits: int, group: int | None
) -> QuantizedWeight:
    """The quantized matrix for which x @ matrix.T is about what is wanted.

    Args:
        matrix_OI: float32, where the search starts from.
        x_MI: float32, what it is multiplied by, token by token, in the rounded model.
        wanted_MO: float32, what should come out.
        bits, group: as in `quantize_matrix`.
    """
    outputs, inputs = matrix_OI.shape
    gram_II, missing_OI = (np.asarray(a, np.float64) for a in _moments(matrix_OI, x_MI, wanted_MO))
    # The fewer tokens there are for an input, the less they are believed.
    ridge = (0.01 + inputs / len(x_MI)) * np.trace(gram_II) / inputs + np.finfo(np.float32).tiny
    inverse_II = np.linalg.inv(gram_II + ridge * np.eye(inputs))
    fitted_OI = np.asarray(matrix_OI, np.float64) + missing_OI @ inverse_II
    J = group or group_size(matrix_OI.shape, bits)
    whole = bits == 8 and J >= inputs
    block = min(_BLOCK, inputs) if whole else J
    extra = -inputs % block  # padding is 0, is rounded exactly, and touches nothing
    upper_II = np.eye(inputs + extra)
    upper_II[:inputs, :inputs] = np.linalg.cholesky(inverse_II).T
    padded = (np.pad(fitted_OI, ((0, 0), (0, extra))), upper_II, np.pad(np.diag(gram_II), (0, extra)))
    values_QJO, scale_QO, zero_QO = _rounded(*(jnp.array(a, jnp.float32) for a in padded), bits, block, whole)
    if whole:
        return Int8Weight(values_QJO.reshape(-1, outputs)[:inputs].T, scale_QO[0])
    if bits == 8:
        return GroupedWeight(values_QJO, scale_QO, None, None, inputs)
    values_QYO = pack(values_QJO.astype(jnp.uint8))
    return GroupedWeight(values_QYO, scale_QO, zero_QO.astype(jnp.uint8), None, inputs)


def rounded_matrix(matrix_OI: jax.Array, bits: int, group: int | None) -> jax.Array:
    """`dequantize(quantize_matrix(...))` for a search that rounds each matrix many times."""
    J = group or group_size(matrix_OI.shape, bits)
    if bits == 8 and J >= matrix_OI.shape[1]:
        most_O1 = jnp.abs(matrix_OI).max(1, keepdims=True)
        step_O1 = jnp.where(most_O1 > 0, most_O1, 1) / 127
        return jnp.round(matrix_OI / step_O1) * step_O1
    levels_OQJ, step_OQ, zero_OQ = nearest(in_groups(matrix_OI, J, jnp), bits, jnp)
    rounded_OQJ = (levels_OQJ - zero_OQ[..., None]) * step_OQ[..., None]
    return rounded_OQJ.reshape(len(matrix_OI), -1)[:, : matrix_OI.shape[1]]


@jax.jit
def _moments(matrix_OI: jax.Array, x_MI: jax.Array, wanted_MO: jax.Array) -> tuple[jax.Array, jax.Array]:
    dot = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    return dot(x_MI.T, x_MI), dot((wanted_MO - dot(x_MI, matrix_OI.T)).T, x_MI)


@partial(jax.jit, static_argnames=("bits", "block", "whole"))
def _rounded(matrix_OI, upper_II, weight_I, bits: int, block: int, whole: bool):
    """Levels [Q, J, O], scale and zero [Q, O]. upper: Cholesky factor of inputs' inverse second moments."""
    most_O = jnp.abs(matrix_OI).max(1)

    def next_block(matrix_OI: jax.Array, first: jax.Array):
        block_OJ = lax.dynamic_slice_in_dim(matrix_OI, first, block, 1)
        upper_JI = lax.dynamic_slice_in_dim(upper_II, first, block, 0)
        upper_JJ = lax.dynamic_slice_in_dim(upper_JI, first, block, 1)
        if bits == 8:
            step_O = jnp.where(most_O > 0, most_O, 1) / 127 if whole else finest_step(block_OJ, jnp)
            zero_O = jnp.zeros_like(step_O)
            least = -127
            most = 127
        else:
            step_O, zero_O = _range(block_OJ, lax.dynamic_slice_in_dim(weight_I, first, block))
            least = 0
            most = 15

        def next_column(j: jax.Array, state):
            block_OJ, levels_JO, errors_JO = state
            level_O = jnp.clip(jnp.round(block_OJ[:, j] / step_O) + zero_O, least, most)
            error_O = (block_OJ[:, j] - (level_O - zero_O) * step_O) / upper_JJ[j, j]
            block_OJ = block_OJ - error_O[:, None] * upper_JJ[j]
            return block_OJ, levels_JO.at[j].set(level_O), errors_JO.at[j].set(error_O)

        nothing = jnp.zeros_like(block_OJ.T)
        _, levels_JO, errors_JO = lax.fori_loop(0, block, next_column, (block_OJ, nothing, nothing))
        after_OI = matrix_OI - jnp.matmul(errors_JO.T, upper_JI, precision=lax.Precision.HIGHEST)
        return after_OI, (levels_JO.astype(jnp.int8), step_O if whole else step_O.astype(jnp.float16), zero_O)

    return lax.scan(next_block, matrix_OI, jnp.arange(0, matrix_OI.shape[1], block))[1]


def _range(block_OJ: jax.Array, weight_J: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Step and zero [O] of 16 levels, the range's ends drawn in to make the weighted squared error least."""
    low_O = jnp.minimum(block_OJ.min(1), 0)
    high_O = jnp.maximum(block_OJ.max(1), 0)
    shrinks = jnp.array([(low, high) for low in _SHRINKS for high in _SHRINKS])

    def levels(shrink_2: jax.Array) -> tuple[jax.Array, jax.Array]:
        step_O = float16_step((high_O * shrink_2[1] - low_O * shrink_2[0]) / 15, jnp)
        return step_O, jnp.clip(jnp.round(-low_O * shrink_2[0] / step_O), 0, 15)

    def error(shrink_2: jax.Array) -> jax.Array:
        step_O1, zero_O1 = (a[:, None] for a in levels(shrink_2))
        rounded_OJ = (jnp.clip(jnp.round(block_OJ / step_O1) + zero_O1, 0, 15) - zero_O1) * step_O1
        return jnp.sum(jnp.square(rounded_OJ - block_OJ) * weight_J, 1)

    return levels(shrinks[lax.map(error, shrinks).argmin(0)].T)
