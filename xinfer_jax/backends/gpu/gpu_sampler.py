"""A sampler whose host waits for one predicate a step, and log-sum-exp in one pass, for NVIDIA GPUs."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ... import kernels_pallas
from ...config.run_config import PLAIN, RunConfig
from ...kernels_pallas.reference import LOGITS_GROUP
from ...ops.forms import always
from ...ops.operation import Call
from ...sampling.batched_settings import has_all_settings
from ...sampling.context import Context, next_masks
from ...sampling.sampler import (
    NUM_CANDIDATES,
    at_token,
    bias_and_repeat,
    logsumexp,
    process_logits,
    sample_candidates,
    sample_rows,
    skippable_processors,
    top_candidates,
)
from ...sampling.sampling_config import SamplingConfig
from ...sharding import abstract_mesh_of
from ..row_groups import in_row_groups
from .reductions import logsumexp_in_one_pass
from .top_k import top_k_of_groups

_FEW_LOGITS = 4096  # so many are summarized without a kernel
_GROUP = 16  # rows that are sampled from the whole vocabulary at the same time


def choice_form(call: Call) -> Callable:
    """Returns a form of `choose_tokens`."""
    return partial(_choose_in_one_branch, run_config=call.run_config)


@always
def known_form(logsumexp_B: jax.Array, logits_BV: jax.Array) -> jax.Array:
    """Returns a form of `known_logsumexp`: `choose_tokens` has computed it."""
    return logsumexp_B


@always
def sampled_from_form(taken_BV: jax.Array, **operands: Any) -> jax.Array:
    """Returns a form of `sampled_from`, which computes these logits again."""
    return sampled_from_in_groups(**operands)


def logsumexp_form(call: Call) -> Callable | None:
    """Returns a form of `logsumexp` in one pass. Over a mesh it is the form of XLA."""
    return None if abstract_mesh_of(call.operands["logits_BV"]) else logsumexp_in_one_pass


def choose_at_draft_positions(
    logits_BTV: jax.Array, key_B: jax.Array, sampling_B: SamplingConfig, context: Context, draft_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Runs `choose_tokens` for T positions of each row at the same time, as B * T rows: before its T - 1
    draft tokens, after the first, …, after all. Returns tokens, int32 [B, T], and their log-probabilities
    before any processor, float32 [B, T]. No kernel reads the logits: it would need a bias and the tokens seen
    of each position in memory.
    """
    (_, T, V) = logits_BTV.shape

    def as_rows(logits_BTV, key_B, sampling_B, context, draft_BT):
        repeated = repeated_rows((key_B, sampling_B), T)
        return logits_BTV.reshape(-1, V), *repeated, at_draft_positions(context, draft_BT)

    arrays = logits_BTV, key_B, sampling_B, context, draft_BT
    token_R, logsumexp_R = _choose_of_rows(as_rows, max(1, _GROUP // T), PLAIN, *arrays)
    logprob_R = at_token(logits_BTV.reshape(-1, V), token_R) - logsumexp_R
    return token_R.reshape(-1, T), logprob_R.reshape(-1, T)


def at_draft_positions(context: Context, draft_BT: jax.Array) -> Context:
    """Returns the contexts of T + 1 positions of each row, as B * (T + 1) rows: before its draft tokens,
    after the first, …, after all. Arrays of the vocabulary are computed element by element, so a compiler can
    compute them when they are read, and need not store them.
    """
    (B, T) = draft_BT.shape
    rows = repeated_rows(context, T + 1)
    draft_RT = jnp.repeat(draft_BT, T + 1, 0)
    before_R = jnp.tile(jnp.arange(T + 1, dtype=jnp.int32), B)  # draft tokens before the position
    token_V = jnp.arange(context.seen_BV.shape[1])
    more_RV = jnp.int32(0)
    for i in range(T):
        occurs_RV = (draft_RT[:, i, None] == token_V) & (before_R > i)[:, None]
        more_RV += occurs_RV.astype(jnp.int32)
    count_RV = None if context.count_BV is None else rows.count_BV + more_RV
    appended = context_with_tokens(rows, draft_RT, before_R)
    bits = context.allowed_bits
    if bits is not None and bits.shape[1] == T + 1:  # a mask of each position
        bits = jnp.reshape(bits, (B * (T + 1), 1, -1))
    elif bits is not None:
        bits = rows.allowed_bits
    seen_RV = rows.seen_BV | (more_RV > 0)
    return dataclasses.replace(appended, seen_BV=seen_RV, count_BV=count_RV, allowed_bits=bits)


def context_with_tokens(context: Context, token_BT: jax.Array, count_B: jax.Array) -> Context:
    """Returns the context with the first `count_B` of these tokens appended to each row."""
    row_B1 = jnp.arange(len(token_BT))[:, None]
    index_T = jnp.arange(token_BT.shape[1])
    appended_BT = index_T < count_B[:, None]
    history_BS = context.history_BS
    if history_BS is not None:
        at_BT = jnp.where(appended_BT, context.position_B[:, None] + index_T, history_BS.shape[1])
        history_BS = jnp.asarray(history_BS).at[row_B1, at_BT].set(token_BT, mode="drop")
    automata = context.automata
    if automata is not None:
        for i in range(token_BT.shape[1]):
            automata = automata.append(token_BT[:, i], appended_BT[:, i])
    count_BV = context.count_BV
    if count_BV is not None:
        count_BV = jnp.asarray(count_BV).at[row_B1, token_BT].add(appended_BT.astype(jnp.int32))
    return dataclasses.replace(
        context,
        position_B=context.position_B + count_B,
        num_generated_B=context.num_generated_B + count_B,
        seen_BV=jnp.asarray(context.seen_BV).at[row_B1, token_BT].max(appended_BT),
        count_BV=count_BV,
        history_BS=history_BS,
        allowed_bits=next_masks(context.allowed_bits, count_B),
        automata=automata,
    )


def repeated_rows(tree: Any, times: int) -> Any:
    """Returns a tree of arrays with `times` copies of each row. The copies of a row are consecutive."""
    return jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), times, 0), tree)


def _choose_in_one_branch(logits_BV, key_B, sampling_B, context, run_config):
    """Runs `choose_tokens` for GPUs. It returns the logits as they are in place of the logits that the tokens
    were sampled from, and their logsumexp.
    """
    arrays = logits_BV, key_B, sampling_B, context
    token_B, logsumexp_B = _choose_of_rows(lambda *arrays: arrays, _GROUP, run_config, *arrays)
    return token_B, logits_BV, logsumexp_B


def _choose_of_rows(
    as_rows: Callable, group: int, run_config: RunConfig, *arrays: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of the rows `as_rows(*arrays)` (logits, keys, settings and context), and the
    logsumexp of these logits.

    On GPUs the host waits for the predicate of each branch. There is one predicate: all rows are sampled from
    their candidates, by processors that cost no additional pass over the logits. The other branch makes the
    rows of `group` entries of the arrays one group after the other.
    """
    logits_BV, key_B, sampling_B, context = as_rows(*arrays)
    (candidates_BA, index_BA), logsumexp_B = _summarize_logits(logits_BV, sampling_B, context, run_config)
    rest = key_B, sampling_B, context.position_B, logits_BV.shape[1]
    token_B, _, common_B = sample_candidates(candidates_BA, index_BA, *rest)
    common_B &= jnp.isfinite(logsumexp_B)  # a kernel may miss that logits are NaN
    common_B &= ~uses_other_processors(sampling_B, context)

    def from_all() -> jax.Array:
        drawn_B = in_row_groups(lambda *arrays: _process_and_sample(*as_rows(*arrays))[0], group, *arrays)
        return jnp.where(common_B, token_B, drawn_B)

    return lax.cond(jnp.all(common_B), lambda: token_B, from_all), logsumexp_B


def _summarize_logits(logits_BV, sampling_B, context, run_config):
    """Returns the candidates among the logits with bias and repetition penalty, as `largest_k` returns them,
    and the logsumexp of the logits as they are.
    """
    V = logits_BV.shape[1]
    chosen = "xla"
    if V > _FEW_LOGITS and abstract_mesh_of(logits_BV) is None:
        chosen = kernels_pallas.select("summarize_logits", run_config.impl, logits_BV).impl
    if chosen == "xla":
        processed_BV = bias_and_repeat(logits_BV, sampling_B, context)
        summed = logsumexp if abstract_mesh_of(logits_BV) else logsumexp_in_one_pass
        return top_candidates(processed_BV), summed(logits_BV)
    bias = ()
    if has_all_settings(sampling_B):
        bias = sampling_B.logit_bias, context.biased_B
    args = logits_BV, sampling_B.repetition_penalty, context.seen_BV, *bias
    largest_BQ, logsumexp_B = kernels_pallas.run_kernel(chosen, "summarize_logits", *args)

    def processed_at(index_BI: jax.Array) -> jax.Array:
        def take(x_BV):
            return jnp.take_along_axis(jnp.asarray(x_BV), index_BI, -1)

        sampling = sampling_B
        if bias:
            sampling = dataclasses.replace(sampling_B, logit_bias=take(sampling_B.logit_bias))
        seen = dataclasses.replace(context, seen_BV=take(context.seen_BV))
        return bias_and_repeat(take(logits_BV), sampling, seen)

    count = min(NUM_CANDIDATES, V)
    return top_k_of_groups(largest_BQ, processed_at, LOGITS_GROUP, V, count), logsumexp_B


def sampled_from_in_groups(
    logits_BV: jax.Array, key_B: jax.Array, sampling_B: SamplingConfig, context: Context
) -> jax.Array:
    """Returns the logits [B, V] that GPUs sample from."""
    arrays = logits_BV, key_B, sampling_B, context
    return in_row_groups(lambda *rows: _process_and_sample(*rows)[1], _GROUP, *arrays)


def _process_and_sample(logits_BV, key_B, sampling_B, context):
    processed_BV = process_logits(logits_BV, sampling_B, context)
    return sample_rows(processed_BV, key_B, sampling_B, context.position_B)


def uses_other_processors(sampling_B: SamplingConfig, context: Context) -> jax.Array:
    """Returns bool [B]: which rows use a processor of `process_logits` that is not always applied."""
    none_B = jnp.zeros(context.position_B.shape[0], bool)
    return sum((uses_B for uses_B, _ in skippable_processors(sampling_B, context)), none_B)
