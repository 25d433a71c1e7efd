"""Rounding as a program for the device: to nearest, and so that it makes up for its own errors on a
calibration text.

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
    pack,
)

_BLOCK = 64  # columns between two updates of all later ones, where groups do not say
_SHRINKS = (1.0, 0.94, 0.88, 0.82, 0.76)  # tried on each end of a group's range


def compensated_matrix(
    matrix_NK: jax.Array, x_MK: jax.Array, wanted_MN: jax.Array, bits: int, group: int | None
) -> QuantizedWeight:
    """The quantized matrix Q for which x @ Q.T is about what is wanted.

    Args:
        matrix_NK: float32, where the search starts from.
        x_MK: float32, what it is multiplied by, token by token, in the rounded model.
        wanted_MN: float32, what should come out.
        bits: 8 or 4.
        group: as in `quantization.quantize_matrix`.
    """
    N, K = matrix_NK.shape
    gram_KK, missing_NK = (np.asarray(a, np.float64) for a in _moments(matrix_NK, x_MK, wanted_MN))
    # The fewer tokens there are for an input, the less they are believed.
    ridge = (0.01 + K / len(x_MK)) * np.trace(gram_KK) / K + np.finfo(np.float32).tiny
    inverse_KK = np.linalg.inv(gram_KK + ridge * np.eye(K))
    fitted_NK = np.asarray(matrix_NK, np.float64) + missing_NK @ inverse_KK
    J = group or group_size((N, K), bits)
    whole = bits == 8 and J >= K
    block = min(_BLOCK, K) if whole else J
    extra = -K % block  # padding is 0, is rounded exactly, and touches nothing
    padded_NK = jnp.array(np.pad(fitted_NK, ((0, 0), (0, extra))), jnp.float32)
    upper_KK = np.eye(K + extra)
    upper_KK[:K, :K] = np.linalg.cholesky(inverse_KK).T
    weight_K = np.pad(np.diag(gram_KK), (0, extra))
    values_GJN, scale_GN, zero_GN = _rounded(
        padded_NK, jnp.array(upper_KK, jnp.float32), jnp.array(weight_K, jnp.float32), bits, block, whole
    )
    if whole:
        return Int8Weight(values_GJN.reshape(K + extra, N)[:K].T, scale_GN[0])
    if bits == 8:
        return GroupedWeight(values_GJN, scale_GN, None, None, K)
    return GroupedWeight(pack(values_GJN.astype(jnp.uint8)), scale_GN, zero_GN.astype(jnp.uint8), None, K)


def rounded_matrix(matrix_NK: jax.Array, bits: int, group: int | None) -> jax.Array:
    """`dequantize(quantize_matrix(...))` for a search that rounds each matrix many times."""
    N, K = matrix_NK.shape
    J = group or group_size((N, K), bits)
    if bits == 8 and J >= K:
        most_N1 = jnp.abs(matrix_NK).max(1, keepdims=True)
        step_N1 = jnp.where(most_N1 > 0, most_N1, 1) / 127
        return jnp.round(matrix_NK / step_N1) * step_N1
    G = -(-K // J)
    block_NGJ = jnp.pad(matrix_NK, ((0, 0), (0, G * J - K))).reshape(N, G, J)
    low, high = (jnp.minimum(block_NGJ.min(-1), 0), jnp.maximum(block_NGJ.max(-1), 0))
    step_NG1 = (finest_step(block_NGJ, jnp) if bits == 8 else float16_step((high - low) / 15, jnp))[..., None]
    levels_NGJ = jnp.round(block_NGJ / step_NG1)
    if bits == 8:
        levels_NGJ = jnp.clip(levels_NGJ, -127, 127)
    else:
        zero_NG1 = jnp.clip(jnp.round(-low[..., None] / step_NG1), 0, 15)
        levels_NGJ = jnp.clip(levels_NGJ + zero_NG1, 0, 15) - zero_NG1
    return (levels_NGJ * step_NG1).reshape(N, G * J)[:, :K]


@jax.jit
def _moments(matrix_NK: jax.Array, x_MK: jax.Array, wanted_MN: jax.Array) -> tuple[jax.Array, jax.Array]:
    dot = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    return dot(x_MK.T, x_MK), dot((wanted_MN - dot(x_MK, matrix_NK.T)).T, x_MK)


@partial(jax.jit, static_argnames=("bits", "block", "whole"))
def _rounded(matrix_NK, upper_KK, weight_K, bits: int, block: int, whole: bool):
    """Levels [G, J, N], their scale and zero [G, N]. upper: the Cholesky factor of the inverse of the inputs'
    second moments.
    """
    most_N = jnp.abs(matrix_NK).max(1)

    def next_block(matrix_NK: jax.Array, first: jax.Array):
        block_NJ = lax.dynamic_slice_in_dim(matrix_NK, first, block, 1)
        upper_JK = lax.dynamic_slice_in_dim(upper_KK, first, block, 0)
        upper_JJ = lax.dynamic_slice_in_dim(upper_JK, first, block, 1)
        if bits == 8:
            step_N = jnp.where(most_N > 0, most_N, 1) / 127 if whole else finest_step(block_NJ, jnp)
            zero_N, least, most = jnp.zeros_like(step_N), -127, 127
        else:
            step_N, zero_N = _range(block_NJ, lax.dynamic_slice_in_dim(weight_K, first, block))
            least, most = 0, 15

        def next_column(j: jax.Array, state):
            block_NJ, levels_JN, errors_JN = state
            level_N = jnp.clip(jnp.round(block_NJ[:, j] / step_N) + zero_N, least, most)
            error_N = (block_NJ[:, j] - (level_N - zero_N) * step_N) / upper_JJ[j, j]
            return (
                block_NJ - error_N[:, None] * upper_JJ[j],
                levels_JN.at[j].set(level_N),
                errors_JN.at[j].set(error_N),
            )

        nothing = jnp.zeros_like(block_NJ.T)
        _, levels_JN, errors_JN = lax.fori_loop(0, block, next_column, (block_NJ, nothing, nothing))
        after_NK = matrix_NK - jnp.matmul(errors_JN.T, upper_JK, precision=lax.Precision.HIGHEST)
        return after_NK, (levels_JN.astype(jnp.int8), step_N if whole else step_N.astype(jnp.float16), zero_N)

    return lax.scan(next_block, matrix_NK, jnp.arange(0, matrix_NK.shape[1], block))[1]


def _range(block_NJ: jax.Array, weight_J: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Step and zero [N] of 16 levels: the ends of the range drawn in as far as makes the weighted squared
    error least.
    """
    low_N, high_N = jnp.minimum(block_NJ.min(1), 0), jnp.maximum(block_NJ.max(1), 0)
    shrinks = jnp.array([(low, high) for low in _SHRINKS for high in _SHRINKS])

    def levels(shrink_2: jax.Array) -> tuple[jax.Array, jax.Array]:
        step_N = float16_step((high_N * shrink_2[1] - low_N * shrink_2[0]) / 15, jnp)
        return step_N, jnp.clip(jnp.round(-low_N * shrink_2[0] / step_N), 0, 15)

    def error(shrink_2: jax.Array) -> jax.Array:
        step_N1, zero_N1 = (a[:, None] for a in levels(shrink_2))
        rounded_NJ = (jnp.clip(jnp.round(block_NJ / step_N1) + zero_N1, 0, 15) - zero_N1) * step_N1
        return jnp.sum(jnp.square(rounded_NJ - block_NJ) * weight_J, 1)

    return levels(shrinks[lax.map(error, shrinks).argmin(0)].T)
