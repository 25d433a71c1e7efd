"""The operations before a mixture's experts on TPUs, in one launch. XLA makes some ten small operations of
them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from . import streaming


def route(x_MD, matrices, norm_D=None, *, count, eps=0.0, offset=0.0, interpret=False) -> list[jax.Array]:
    """Returns the inputs of a mixture of experts:

    - x [M, D] after its norm, if there is one.
    - The softmax of the largest scores of each row, float32 [M, count]. Scores are products with the first
      matrix.
    - Their outputs, int32: the first one of equal scores.
    - If there is a second matrix [1, D], the sigmoid of the product with it, [M, D], D times the same.

    NaN counts as infinity. If a row has fewer finite scores, an output comes again, with weight 0. It takes
    the arguments of `product`, with matrices of floats, and the second matrix without a bias.
    """
    M, D = x_MD.shape
    settings = streaming.settings_of(x_MD, matrices, eps, offset)
    shapes = [(M, D), (M, count), (M, count), *[(M, D)] * (len(matrices) - 1)]
    dtypes = [x_MD.dtype, jnp.float32, jnp.int32, x_MD.dtype]
    results = [(shape, dtype, pl.BlockSpec()) for shape, dtype in zip(shapes, dtypes, strict=False)]
    kernel = partial(_kernel, count=count)
    return streaming.call(kernel, settings, x_MD, matrices, results, "route", interpret, norm_D)


def _kernel(step: streaming.Step, count: int) -> None:
    streaming.prepare(step)
    normed_ref, weight_ref, expert_ref, *gate_refs = step.results
    M, D = normed_ref.shape
    normed_ref[...] = step.memory.rows[:M, :D].astype(normed_ref.dtype)
    for ref, (matrix_ref,) in zip(gate_refs, step.operands.matrices[1:], strict=True):
        product_MD = normed_ref[...].astype(jnp.float32) * matrix_ref[...].astype(jnp.float32)
        gate_M1 = jax.nn.sigmoid(product_MD.sum(1, keepdims=True))
        ref[...] = jnp.broadcast_to(gate_M1, ref.shape).astype(ref.dtype)
    score_MX = streaming.multiply_tile(step, 0)[:M]
    score_MX = jnp.where(score_MX == score_MX, score_MX, jnp.inf)
    expert_MX = lax.broadcasted_iota(jnp.int32, score_MX.shape, 1)
    largest = []
    for u in range(count):
        largest.append(score_MX.max(1, keepdims=True))
        expert_M1 = jnp.where(score_MX == largest[u], expert_MX, score_MX.shape[1]).min(1, keepdims=True)
        expert_ref[:, u : u + 1] = expert_M1
        score_MX = jnp.where(expert_MX == expert_M1, -jnp.inf, score_MX)
    weights = [jnp.exp(score_M1 - largest[0]) for score_M1 in largest]
    total_M1 = sum(weights)
    for u, weight_M1 in enumerate(weights):
        weight_ref[:, u : u + 1] = weight_M1 / total_M1
