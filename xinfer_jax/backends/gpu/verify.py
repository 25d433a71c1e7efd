"""Verifying all draft tokens of a step at the same time, for NVIDIA GPUs."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...generation.loop import Hidden, to_logits
from ...generation.state import DecodeState, after_recording, next_column
from ...ops.forms import always
from ...ops.operation import Call
from ...sampling.logprobs import Alternatives, if_wanted, record_alternatives
from ...sampling.sampler import is_plain_greedy
from ..kernels.head import can_fuse_head, greedy_tokens
from .gpu_sampler import choose_at_draft_positions, context_with_tokens, sampled_from_in_groups


@always
def recording_form(token: jax.Array, alternatives: Any) -> tuple[jax.Array, Any]:
    """Returns a form of `after_recording`, which keeps the order."""
    return lax.optimization_barrier((token, alternatives))


def verify_form(call: Call) -> Callable | None:
    """Returns a form of `verify` that samples all positions at the same time. The tokens after the first
    rejected draft token are thrown away: they cost less than the launches of each position. None: there are
    processors of a caller, whose state after each draft token is known only in turn.

    The host waits for these predicates:

    - Greedy rows have one if a fused kernel serves (up to 64 rows x positions).
    - Sampled rows have this one and the predicate of the sampler. If no kernel serves or alternatives are
      recorded, they have only the predicate of the sampler.
    - Recorded alternatives have one more if `wanted_B` says which rows asked for them.
    """
    if call.operands["state"].context.callers is not None:
        return None
    return partial(_verify_at_once, outputs=call.static["outputs"], run_config=call.run_config)


def _verify_at_once(state, draft_BT, outputs, run_config):
    """Returns the state after `verify`. The contexts of all positions are known, as they contain draft
    tokens.
    """
    if state.alternatives is None and isinstance(outputs, Hidden):
        token_BT, logprob_BT = _sample_from_hidden(outputs, run_config, state, draft_BT)
        return append_tokens(state, token_BT, logprob_BT, _count_appended(token_BT, draft_BT, state))
    logits_BTV = to_logits(outputs)
    token_BT, logprob_BT = _sample_from_logits(logits_BTV, state, draft_BT)
    count_B = _count_appended(token_BT, draft_BT, state)
    state = record_tokens(logits_BTV, token_BT, draft_BT, count_B, state)
    token_BT, state = after_recording(token_BT, state)
    return append_tokens(state, token_BT, logprob_BT, count_B)


def _sample_from_hidden(outputs, run_config, state, draft_BT):
    """Returns the tokens [B, T] of all positions, and their log-probabilities. If a fused kernel serves,
    greedy rows need no logits.
    """
    (B, T, D) = outputs.states.shape
    hidden_RD = outputs.states.reshape(-1, D)

    def from_logits():
        return _sample_from_logits(to_logits(outputs), state, draft_BT)

    def greedy():
        found = greedy_tokens(outputs.params, outputs.config, hidden_RD, run_config)
        return tuple(x_R.reshape(B, T) for x_R in found)

    if not can_fuse_head(outputs.params, hidden_RD, run_config):
        return from_logits()
    return lax.cond(is_plain_greedy(state.sampling_B, state.context), greedy, from_logits)


def _sample_from_logits(logits_BTV, state, draft_BT):
    """Returns the tokens [B, T] of all positions, and their log-probabilities."""
    rows = state.key_B, state.sampling_B, state.context
    return choose_at_draft_positions(logits_BTV, *rows, draft_BT)


def _count_appended(token_BT, draft_BT, state):
    """Returns int32 [B]: tokens that each row appends: up to the first that is no draft token, or ends the
    row.
    """
    count = draft_BT.shape[1]
    index_T = jnp.arange(count)
    token_BT = token_BT[:, :count]
    goes_on_BT = (token_BT == draft_BT) & ~_ends_row(token_BT, state.context.eos_BE)
    goes_on_BT &= state.length_B[:, None] + index_T + 1 < state.limit_B[:, None]
    accepted_B = jnp.min(jnp.where(goes_on_BT, count, index_T), 1, initial=count)
    return jnp.where(state.active_B, accepted_B + 1, 0)


def record_tokens(
    logits_BTV: jax.Array, token_BT: jax.Array, draft_BT: jax.Array, count_B: jax.Array, state: DecodeState
) -> DecodeState:
    """Runs `record_token` for the first `count_B` tokens of each row, on GPUs: one predicate serves all.

    Args:
        logits_BTV, token_BT: logits and tokens of T positions.
        draft_BT: T - 1 draft tokens. The ones before a position were in its context.
        count_B: 0 for rows that have ended.
        state: the state before these tokens.
    """
    if state.alternatives is None:
        return state
    column_BT = _columns(state, count_B, token_BT.shape[1])

    def record(i: Any, alternatives: Alternatives) -> Alternatives:
        context = context_with_tokens(state.context, draft_BT, jnp.full_like(count_B, i))
        rows = logits_BTV[:, i], state.key_B, state.sampling_B, context
        taken = partial(sampled_from_in_groups, *rows)
        return record_alternatives(alternatives, column_BT[:, i], rows[0], taken, token_BT[:, i])

    def record_all(alternatives: Alternatives) -> Alternatives:
        return lax.fori_loop(0, token_BT.shape[1], record, alternatives)

    return dataclasses.replace(state, alternatives=if_wanted(state.alternatives, column_BT[:, 0], record_all))


def append_tokens(
    state: DecodeState, token_BT: jax.Array, logprob_BT: jax.Array, count_B: jax.Array
) -> DecodeState:
    """Runs `append_token` for the first `count_B` tokens of each row. count_B: 0 for rows that have ended."""
    column_BT = _columns(state, count_B, token_BT.shape[1])
    row_B1 = jnp.arange(len(token_BT))[:, None]
    last_B1 = jnp.maximum(count_B - 1, 0)[:, None]
    token_B = jnp.where(count_B > 0, jnp.take_along_axis(token_BT, last_B1, 1)[:, 0], state.token_B)
    ends_B = jnp.take_along_axis(_ends_row(token_BT, state.context.eos_BE), last_B1, 1)[:, 0]
    return dataclasses.replace(
        state,
        token_B=token_B,
        finished_B=state.finished_B | ((count_B > 0) & ends_B),
        context=context_with_tokens(state.context, token_BT, count_B),
        tokens_BT=jnp.asarray(state.tokens_BT).at[row_B1, column_BT].set(token_BT, mode="drop"),
        logprobs_BT=jnp.asarray(state.logprobs_BT).at[row_B1, column_BT].set(logprob_BT, mode="drop"),
    )


def _ends_row(token_BT: jax.Array, eos_BE: jax.Array) -> jax.Array:
    """Returns bool [B, T]: True if a token ends its row."""
    return jnp.any(token_BT[..., None] == eos_BE[:, None], -1)


def _columns(state: DecodeState, count_B: jax.Array, size: int) -> jax.Array:
    """Returns int32 [B, T]: the columns of each row's next tokens, past the end from `count_B` on. size:
    T.
    """
    index_T = jnp.arange(size)
    column_BT = next_column(state)[:, None] + index_T
    return jnp.where(index_T < count_B[:, None], column_BT, state.tokens_BT.shape[1])
