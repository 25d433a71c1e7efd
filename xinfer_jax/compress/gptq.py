"""Quantization on the device: to nearest, or by GPTQ, which compensates its own errors on a calibration text.

GPTQ solves least squares twice. First the float matrix is fitted: from the outputs of the quantized layers
before it, it shall compute the outputs of the float model. Then its columns are quantized in order, and later
columns compensate the error of each (Frantar et al. 2022).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..weights.grouped_weight import GroupedWeight, group_size, pack_int4, split_groups
from ..weights.int8_weight import Int8Weight
from ..weights.quantization import best_int8_step, float16_step, round_to_nearest
from ..weights.quantized_weight import QuantizedWeight

_BLOCK = 64  # columns between two updates of all later columns, where all inputs share a scale
_SHRINKS = (1.0, 0.94, 0.88, 0.82, 0.76)  # factors tried on both ends of a group's range


def gptq_matrix(
    matrix_OI: jax.Array, x_MI: jax.Array, wanted_MO: jax.Array, bits: int, group: int | None
) -> QuantizedWeight:
    """Returns a quantized matrix for which x @ matrix.T is close to `wanted_MO`.

    Args:
        matrix_OI: float32, the float matrix.
        x_MI: float32, its inputs in the quantized model.
        wanted_MO: float32, its outputs in the float model.
        bits, group: see `quantize_matrix`.
    """
    outputs, inputs = matrix_OI.shape
    gram_II, missing_OI = (np.asarray(a, np.float64) for a in _moments(matrix_OI, x_MI, wanted_MO))
    # Fewer tokens per input need a larger ridge.
    ridge = (0.01 + inputs / len(x_MI)) * np.trace(gram_II) / inputs + np.finfo(np.float32).tiny
    inverse_II = np.linalg.inv(gram_II + ridge * np.eye(inputs))
    fitted_OI = np.asarray(matrix_OI, np.float64) + missing_OI @ inverse_II
    J = group or group_size(matrix_OI.shape, bits)
    per_output = bits == 8 and J >= inputs
    block = min(_BLOCK, inputs) if per_output else J
    extra = -inputs % block  # padding is 0, is quantized exactly, and changes no other column
    upper_II = np.eye(inputs + extra)
    upper_II[:inputs, :inputs] = np.linalg.cholesky(inverse_II).T
    padded = (np.pad(fitted_OI, ((0, 0), (0, extra))), upper_II, np.pad(np.diag(gram_II), (0, extra)))
    arrays = (jnp.array(a, jnp.float32) for a in padded)
    values_QJO, scale_QO, zero_QO = _quantize_columns(*arrays, bits, block, per_output)
    if per_output:
        return Int8Weight(values_QJO.reshape(-1, outputs)[:inputs].T, scale_QO[0])
    if bits == 8:
        return GroupedWeight(values_QJO, scale_QO, None, None, inputs)
    values_QYO = pack_int4(values_QJO.astype(jnp.uint8))
    return GroupedWeight(values_QYO, scale_QO, zero_QO.astype(jnp.uint8), None, inputs)


def fake_quantize(matrix_OI: jax.Array, bits: int, group: int | None) -> jax.Array:
    """Returns `dequantize(quantize_matrix(...))`, for a search that quantizes each matrix many times."""
    J = group or group_size(matrix_OI.shape, bits)
    if bits == 8 and J >= matrix_OI.shape[1]:
        max_O1 = jnp.abs(matrix_OI).max(1, keepdims=True)
        step_O1 = jnp.where(max_O1 > 0, max_O1, 1) / 127
        return jnp.round(matrix_OI / step_O1) * step_O1
    levels_OQJ, step_OQ, zero_OQ = round_to_nearest(split_groups(matrix_OI, J, jnp), bits, jnp)
    quantized_OQJ = (levels_OQJ - zero_OQ[..., None]) * step_OQ[..., None]
    return quantized_OQJ.reshape(len(matrix_OI), -1)[:, : matrix_OI.shape[1]]


@jax.jit
def _moments(matrix_OI: jax.Array, x_MI: jax.Array, wanted_MO: jax.Array) -> tuple[jax.Array, jax.Array]:
    dot = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    return dot(x_MI.T, x_MI), dot((wanted_MO - dot(x_MI, matrix_OI.T)).T, x_MI)


@partial(jax.jit, static_argnames=("bits", "block", "per_output"))
def _quantize_columns(matrix_OI, upper_II, weight_I, bits: int, block: int, per_output: bool):
    """Returns levels [Q, J, O], scales and zero points [Q, O].

    upper_II: Cholesky factor of the inverse of the inputs' second moments.
    """
    max_O = jnp.abs(matrix_OI).max(1)

    def next_block(matrix_OI: jax.Array, first: jax.Array):
        block_OJ = lax.dynamic_slice_in_dim(matrix_OI, first, block, 1)
        upper_JI = lax.dynamic_slice_in_dim(upper_II, first, block, 0)
        upper_JJ = lax.dynamic_slice_in_dim(upper_JI, first, block, 1)
        if bits == 8:
            step_O = jnp.where(max_O > 0, max_O, 1) / 127 if per_output else best_int8_step(block_OJ, jnp)
            zero_O = jnp.zeros_like(step_O)
            least = -127
            most = 127
        else:
            step_O, zero_O = _best_step_and_zero(block_OJ, lax.dynamic_slice_in_dim(weight_I, first, block))
            least = 0
            most = 15

        def next_column(j: jax.Array, state):
            block_OJ, levels_JO, errors_JO = state
            level_O = jnp.clip(jnp.round(block_OJ[:, j] / step_O) + zero_O, least, most)
            error_O = (block_OJ[:, j] - (level_O - zero_O) * step_O) / upper_JJ[j, j]
            block_OJ = block_OJ - error_O[:, None] * upper_JJ[j]
            return block_OJ, levels_JO.at[j].set(level_O), errors_JO.at[j].set(error_O)

        zeros_JO = jnp.zeros_like(block_OJ.T)
        _, levels_JO, errors_JO = lax.fori_loop(0, block, next_column, (block_OJ, zeros_JO, zeros_JO))
        after_OI = matrix_OI - jnp.matmul(errors_JO.T, upper_JI, precision=lax.Precision.HIGHEST)
        levels_JO = levels_JO.astype(jnp.int8)
        return after_OI, (levels_JO, step_O if per_output else step_O.astype(jnp.float16), zero_O)

    return lax.scan(next_block, matrix_OI, jnp.arange(0, matrix_OI.shape[1], block))[1]


def _best_step_and_zero(block_OJ: jax.Array, weight_J: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns step and zero point [O] of 16 levels: of the range with the least weighted squared error."""
    low_O = jnp.minimum(block_OJ.min(1), 0)
    high_O = jnp.maximum(block_OJ.max(1), 0)
    shrinks = jnp.array([(low, high) for low in _SHRINKS for high in _SHRINKS])

    def step_and_zero(shrink_2: jax.Array) -> tuple[jax.Array, jax.Array]:
        step_O = float16_step((high_O * shrink_2[1] - low_O * shrink_2[0]) / 15, jnp)
        return step_O, jnp.clip(jnp.round(-low_O * shrink_2[0] / step_O), 0, 15)

    def error(shrink_2: jax.Array) -> jax.Array:
        step_O1, zero_O1 = (a[:, None] for a in step_and_zero(shrink_2))
        quantized_OJ = (jnp.clip(jnp.round(block_OJ / step_O1) + zero_O1, 0, 15) - zero_O1) * step_O1
        return jnp.sum(jnp.square(quantized_OJ - block_OJ) * weight_J, 1)

    return step_and_zero(shrinks[lax.map(error, shrinks).argmin(0)].T)
