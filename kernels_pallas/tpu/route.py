"""The operations before a mixture's experts on TPUs, in one launch. XLA makes some ten small operations of
them.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from . import streaming


class GroupedTopk(NamedTuple):
    """The settings of a router whose weights are scores, with groups of experts. Fields have the names of
    config.json.
    """

    scoring_func: str  # "sigmoid" or "softmax"
    n_group: int
    topk_group: int  # groups of which each token may use the experts
    group_score: str  # the sum of the "top2" of a group, or its "max"
    masked_score: float  # in place of the scores in other groups
    norm_topk_prob: bool
    norm_epsilon: float
    norm_minimum: float
    routed_scaling_factor: float


def route(  # noqa: PLR0913
    x_MD, matrices, norm_D=None, *, count, eps=0.0, offset=0.0, grouped=None, interpret=False
) -> list[jax.Array]:
    """Returns the inputs of a mixture of experts:

    - x [M, D] after its norm, if there is one.
    - The weights of each row's experts, float32 [M, count]: the softmax of its largest scores, which are
      products with the first matrix. With `grouped` they are its weights.
    - These experts, int32: the first one of equal scores.
    - If there is a second matrix [1, D], the sigmoid of the product with it, [M, D], D times the same.

    NaN counts as infinity. If a row has fewer finite scores, an output comes again, with weight 0. It takes
    the arguments of `product`, with matrices of floats, and the second matrix without a bias.

    grouped: None, or a dict with the fields of `GroupedTopk`. The bias of the first matrix is then added to
    scores for the choice alone, and its dtype may be another than that of x.
    """
    M, D = x_MD.shape
    settings = streaming.settings_of(x_MD, matrices, eps, offset, dtype=matrices[0].values.dtype)
    shapes = [(M, D), (M, count), (M, count), *[(M, D)] * (len(matrices) - 1)]
    dtypes = [x_MD.dtype, jnp.float32, jnp.int32, x_MD.dtype]
    results = [(shape, dtype, pl.BlockSpec()) for shape, dtype in zip(shapes, dtypes, strict=False)]
    kernel = partial(_kernel, count=count, grouped=grouped and GroupedTopk(**grouped))
    return streaming.call(kernel, settings, x_MD, matrices, results, "route", interpret, norm_D)


def _kernel(step: streaming.Step, count: int, grouped: GroupedTopk | None) -> None:
    streaming.prepare(step)
    normed_ref, weight_ref, expert_ref, *gate_refs = step.results
    M, D = normed_ref.shape
    normed_ref[...] = step.memory.rows[:M, :D].astype(normed_ref.dtype)
    for ref, (matrix_ref,) in zip(gate_refs, step.operands.matrices[1:], strict=True):
        product_MD = normed_ref[...].astype(jnp.float32) * matrix_ref[...].astype(jnp.float32)
        gate_M1 = jax.nn.sigmoid(product_MD.sum(1, keepdims=True))
        ref[...] = jnp.broadcast_to(gate_M1, ref.shape).astype(ref.dtype)
    if grouped is None:
        score_MX = streaming.multiply_tile(step, 0)[:M]
        experts, scores = _largest(score_MX, count)
        exponentials = [jnp.exp(score_M1 - scores[0]) for score_M1 in scores]
        weights = [x_M1 / sum(exponentials) for x_M1 in exponentials]
    else:
        score_MX, choice_MX = _grouped_scores(step, grouped)
        experts, _ = _largest(choice_MX, count)
        expert_MX = lax.broadcasted_iota(jnp.int32, score_MX.shape, 1)
        weights = [jnp.where(expert_MX == x_M1, score_MX, 0).sum(1, keepdims=True) for x_M1 in experts]
        if grouped.norm_topk_prob:
            sum_M1 = jnp.maximum(sum(weights) + grouped.norm_epsilon, grouped.norm_minimum)
            weights = [weight_M1 / sum_M1 for weight_M1 in weights]
        weights = [weight_M1 * grouped.routed_scaling_factor for weight_M1 in weights]
    for u in range(count):
        expert_ref[:, u : u + 1] = experts[u]
        weight_ref[:, u : u + 1] = weights[u]


def _largest(score_MX, count: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the experts of the largest scores, and these scores, [M, 1] each. NaN counts as infinity."""
    expert_MX = lax.broadcasted_iota(jnp.int32, score_MX.shape, 1)
    score_MX = _without_nan(score_MX)
    experts: list[jax.Array] = []
    scores: list[jax.Array] = []
    for _ in range(count):
        scores.append(score_MX.max(1, keepdims=True))
        experts.append(_first(score_MX == scores[-1]))
        score_MX = jnp.where(expert_MX == experts[-1], -jnp.inf, score_MX)
    return experts, scores


def _first(where_MX: jax.Array) -> jax.Array:
    """Returns the first index of each row that is True, [M, 1]."""
    index_MX = lax.broadcasted_iota(jnp.int32, where_MX.shape, 1)
    return jnp.where(where_MX, index_MX, where_MX.shape[1]).min(1, keepdims=True)


def _without_nan(x_MX: jax.Array) -> jax.Array:
    return jnp.where(x_MX == x_MX, x_MX, jnp.inf)


def _grouped_scores(step: streaming.Step, grouped: GroupedTopk) -> tuple[jax.Array, jax.Array]:
    """Returns the scores [M, X] by which experts are weighted, and by which they are chosen."""
    M, _ = step.results[0].shape
    # The layer rounds x after its norm.
    step.memory.x[0][:M] = step.results[0][...].astype(step.memory.x[0].dtype)
    (scale, bias), *others = step.memory.of_outputs
    unbiased = step._replace(memory=step.memory._replace(of_outputs=[(scale, None), *others]))
    score_MX = streaming.multiply_tile(unbiased, 0)[:M]
    if grouped.scoring_func == "sigmoid":
        score_MX = jax.nn.sigmoid(score_MX)
    else:
        score_MX = jnp.exp(score_MX - score_MX.max(1, keepdims=True))
        score_MX = score_MX / score_MX.sum(1, keepdims=True)
    choice_MX = score_MX if bias is None else score_MX + bias[...]
    if grouped.n_group > 1:
        choice_MX = _within_groups(_without_nan(choice_MX), grouped)
    return score_MX, choice_MX


def _within_groups(choice_MX: jax.Array, grouped: GroupedTopk) -> jax.Array:
    """Returns the numbers by which experts are chosen, masked in the groups that a row does not use."""
    groups = grouped.n_group
    expert_MX = lax.broadcasted_iota(jnp.int32, choice_MX.shape, 1)
    group_MX = lax.div(expert_MX, choice_MX.shape[1] // groups)
    best: list[jax.Array] = []
    for g in range(groups):
        in_group_MX = jnp.where(group_MX == g, choice_MX, -jnp.inf)
        best.append(in_group_MX.max(1, keepdims=True))
        if grouped.group_score == "top2":
            is_best_MX = expert_MX == _first(in_group_MX == best[g])
            best[g] += jnp.where(is_best_MX, -jnp.inf, in_group_MX).max(1, keepdims=True)
    is_used_MX = jnp.zeros(choice_MX.shape, bool)
    for g in range(groups):
        better = [best[h] > best[g] if h > g else best[h] >= best[g] for h in range(groups) if h != g]
        is_used_M1 = sum(x_M1.astype(jnp.int32) for x_M1 in better) < grouped.topk_group
        is_used_MX |= (group_MX == g) & is_used_M1
    return jnp.where(is_used_MX, choice_MX, grouped.masked_score)
