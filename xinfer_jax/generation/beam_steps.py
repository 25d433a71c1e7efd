"""Beam search as a strategy: a step scores the continuations of every beam, takes C candidates, and separates
the sequences that ended from the sequences that continue.

Letters beyond the usual ones: W beams (the width), C candidates of a step, R = B · W rows of the model.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..cache.kv_cache import KVCache
from ..config.model_config import ModelConfig
from ..sampling.context import Context
from ..sampling.random_keys import DRAW_BEAMS, gumbel_noise
from ..sampling.sampler import all_greedy, is_plain_greedy, process_logits, warp_logits
from .executor import Executor, RunnableModel
from .proposers import logits_at, one_token
from .state import DecodeState
from .strategies import Carry, Strategy


class BeamRequest(NamedTuple):
    """The arguments of a beam search, traced."""

    rows: DecodeState  # of each prompt: settings, keys, limits, what the processors know of it
    shortest: Any  # int32: tokens of the shortest prompt
    length_penalty: Any  # float32


class BeamResults(NamedTuple):
    """The fields of `BeamState` that the host needs."""

    ended_BWT: Any
    length_BW: Any
    final_BW: Any
    broken_B: Any
    step: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamState:
    """The running beams, and the best of the sequences that ended. The rows of the cache and of `context` are
    not yet reordered by `parent_R`.
    """

    context: Context  # R rows: what the processors know of each beam but for its last token
    step: jax.Array  # int32: tokens generated so far
    token_R: jax.Array  # int32: the last token of each beam
    parent_R: jax.Array  # int32: the row that each beam continues
    tokens_BWT: jax.Array  # int32: tokens of the running beams
    score_BW: jax.Array  # float32: sums of their log-probabilities, best first; -inf: no such beam
    ended_BWT: jax.Array  # int32: tokens of the sequences that ended, EOS included
    length_BW: jax.Array  # int32: how many of them
    final_BW: jax.Array  # float32: their scores, best first; -inf: none yet
    open_B: jax.Array  # bool: the prompt's result may still improve
    broken_B: jax.Array  # int32: the step at which a score was NaN; -1: none


@dataclasses.dataclass(frozen=True)
class BeamSearch(Strategy):
    """`num_beams` continuations of each prompt are followed side by side.

    constants: the parameters, and a `BeamRequest`.
    carry: a `BeamState`, and the cache of R rows.
    """

    config: ModelConfig
    beams: int
    ends: int  # number of EOS ids
    early_stopping: bool | str
    size: int  # most tokens of a sequence
    tail: int  # most positions in which the beams of a prompt may differ

    def init(self, executor: Executor, constants: tuple, outputs: Any, cache: KVCache) -> tuple[Carry, Any]:
        """Returns the first carry, and True if the search continues. cache: the cache of the prompts, with
        these outputs.
        """
        state, continues = executor.call(_FIRST, outputs, constants[1], self)
        prompt_R = np.repeat(np.arange(len(cache.length_B), dtype=np.int32), self.beams)
        return (state, executor.reorder(cache, prompt_R)), continues

    def step(self, executor: Executor, constants: tuple, carry: Carry) -> tuple[Carry, Any]:
        params, request = constants
        state, cache = carry
        cache = executor.reorder_tail(cache, state.parent_R, request.shortest, self.tail)
        out = executor.forward(RunnableModel(params, self.config), one_token, (state.token_R,), cache, 0)
        state, continues = executor.call(_NEXT, out.hidden, state, request, self)
        return (state, out.cache), continues

    def active(self, constants: tuple, carry: Carry) -> Any:
        return _continues(carry[0], constants[1])

    def results(self, carry: Carry) -> BeamResults:
        """Returns the fields of the state that the host needs."""
        state = carry[0]
        return BeamResults(state.ended_BWT, state.length_BW, state.final_BW, state.broken_B, state.step)


def _continues(state: BeamState, request: BeamRequest) -> jax.Array:
    return (state.step < jnp.max(request.rows.limit_B)) & jnp.any(state.open_B)


def _first(logits, request, search):
    """Returns the beams after their first token, and True if the search continues."""
    logits_BV = logits_at(logits, 0)
    B, V = logits_BV.shape
    W = search.beams
    rows = request.rows
    zeros_BW = jnp.zeros((B, W), jnp.int32)
    none_BW = jnp.full((B, W), -jnp.inf)
    tokens_BWT = jnp.zeros((B, W, search.size), jnp.int32)
    row_R = jnp.repeat(jnp.arange(B), W)
    # All beams start as the same prompt. Only the first one may be continued, or they would stay the same.
    state = BeamState(
        rows.context.reorder(row_R), jnp.int32(0), row_R, row_R, tokens_BWT,
        none_BW.at[:, 0].set(0), tokens_BWT, zeros_BW, none_BW, rows.active_B, jnp.full(B, -1, jnp.int32),
    )  # fmt: skip
    state = _extend(jnp.broadcast_to(logits_BV[:, None], (B, W, V)), state, request, search)
    return state, _continues(state, request)


def _next(logits, state, request, search):
    """Returns the beams after one more token, and True if the search continues."""
    logits_RV = logits_at(logits, 0)
    B, W = state.score_BW.shape
    V = logits_RV.shape[1]
    context = state.context.reorder(state.parent_R).append_token(state.token_R, jnp.ones(B * W, bool))
    state = dataclasses.replace(state, context=context)
    state = _extend(logits_RV.reshape(B, W, V), state, request, search)
    return state, _continues(state, request)


_FIRST = jax.jit(_first, static_argnums=2)
_NEXT = jax.jit(_next, static_argnums=3)


def _extend(logits_BWV, state, request, search):
    _, W, V = logits_BWV.shape
    least = max(2, 1 + search.ends)  # with so many candidates per beam, one or two continue
    logprobs_BWV = jax.nn.log_softmax(logits_BWV, -1)
    # One logit that is NaN or inf makes all of them NaN. Where there is no beam they mean nothing.
    broken_B = jnp.any(jnp.isnan(logprobs_BWV[..., 0]) & (state.score_BW > -jnp.inf), 1)
    score_BWV = _scores(logprobs_BWV, state, request.rows.sampling_B, least)
    candidates = _candidates(score_BWV, state, request.rows, min(least * W, W * V))
    state = _with_broken(state, broken_B | jnp.any(jnp.isnan(candidates[0]), 1))
    return _select(candidates, state, request, search.early_stopping)


def _with_broken(state, broken_B):
    """Returns the state that records the prompts whose scores are NaN. They are searched no further. The
    other prompts' search continues.
    """
    broken_B = broken_B & state.open_B
    first_B = jnp.where(broken_B, state.step, state.broken_B)
    return dataclasses.replace(state, broken_B=first_B, open_B=state.open_B & ~broken_B)


def _scores(logprobs_BWV, state, sampling_B, least):
    """Returns each beam's score plus the processed log-probability of every next token, [B, W, V]. A sampled
    beam keeps at least `least` tokens.
    """
    B, W, V = logprobs_BWV.shape
    logprobs_RV = logprobs_BWV.reshape(B * W, V)

    def processed():
        sampling_R = jax.tree.map(lambda setting_B: jnp.repeat(setting_B, W, 0), sampling_B)
        callers = state.context.callers
        if callers is not None:
            warp = lambda kept_RV: warp_logits(kept_RV, sampling_R, 0.0, least)  # noqa: E731
            kept_RV, broken_R = callers.process(logprobs_RV, sampling_R, state.context, warp)
            return jnp.where(broken_R[:, None] < 0, jnp.nan, kept_RV)
        kept_RV = process_logits(logprobs_RV, sampling_R, state.context)
        return lax.cond(
            all_greedy(sampling_B), lambda: kept_RV, lambda: warp_logits(kept_RV, sampling_R, 0.0, least)
        )

    is_plain = is_plain_greedy(sampling_B, state.context)
    logprobs_RV = lax.cond(is_plain, lambda: logprobs_RV, processed)
    score_BW1 = state.score_BW[..., None]
    return jnp.where(score_BW1 == -jnp.inf, -jnp.inf, logprobs_RV.reshape(B, W, V) + score_BW1)


def _candidates(score_BWV, state, rows, C):
    """Returns the C best candidates, or C drawn without replacement: their scores, beams, tokens, and
    sequences [B, C, T]. The best is first, as in transformers 5.24 (before, they were in the order drawn).
    """
    B, W, V = score_BWV.shape

    def drawn():
        at = rows.position_B + state.step, DRAW_BEAMS, jnp.arange(W * V)
        noise_BWV = jax.vmap(gumbel_noise, (0, 0, None, None))(rows.key_B, *at).reshape(B, W, V)
        return score_BWV + jnp.where(rows.sampling_B.temperature[:, None, None] > 0, noise_BWV, 0)

    order_BWV = lax.cond(all_greedy(rows.sampling_B), lambda: score_BWV, drawn)
    _, drawn_BC = lax.top_k(order_BWV.reshape(B, W * V), C)
    score_BC, at_BC = lax.top_k(_take(score_BWV.reshape(B, W * V), drawn_BC), C)
    index_BC = _take(drawn_BC, at_BC)
    beam_BC = index_BC // V
    token_BC = index_BC % V
    tokens_BCT = _take(state.tokens_BWT, beam_BC).at[:, :, state.step].set(token_BC)
    return score_BC, beam_BC, token_BC, tokens_BCT


def _select(candidates, state, request, early_stopping):
    """Returns the next state: the best candidates that continue are the running beams. If one of the first W
    candidates ends, it joins the ended sequences if it is good enough.
    """
    score_BC, beam_BC, token_BC, tokens_BCT = candidates
    length_penalty = request.length_penalty
    limit_B = request.rows.limit_B
    (B, W) = state.score_BW.shape
    length = state.step + 1
    is_eos_BC = jnp.any(token_BC[..., None] == request.rows.context.eos_BE[:, None], -1)
    ends_BC = is_eos_BC | (length >= limit_B)[:, None]
    score_BW, run_BW = lax.top_k(jnp.where(ends_BC, -jnp.inf, score_BC), W)
    # The candidates after the first W only replace beams that end. So unlikely a sequence must not end a
    # search.
    counts_BC = ends_BC & (jnp.arange(score_BC.shape[1]) < W) & state.open_B[:, None]
    final_BC = jnp.where(counts_BC, score_BC / _divisor(length, length_penalty), -jnp.inf)
    final_BW, kept_BW = lax.top_k(jnp.concatenate([state.final_BW, final_BC], 1), W)
    horizon = jnp.where((length_penalty > 0) & (early_stopping == "never"), limit_B, length)
    open_B = state.open_B & (score_BW[:, 0] / _divisor(horizon, length_penalty) > final_BW[:, -1])
    if early_stopping is True:
        open_B &= final_BW[:, -1] == -jnp.inf
    return dataclasses.replace(
        state,
        step=length,
        token_R=_take(token_BC, run_BW).reshape(-1),
        parent_R=(_take(beam_BC, run_BW) + W * jnp.arange(B)[:, None]).reshape(-1),
        tokens_BWT=_take(tokens_BCT, run_BW),
        score_BW=score_BW,
        ended_BWT=_take(jnp.concatenate([state.ended_BWT, tokens_BCT], 1), kept_BW),
        length_BW=_take(jnp.concatenate([state.length_BW, jnp.full_like(token_BC, length)], 1), kept_BW),
        final_BW=final_BW,
        open_B=open_B,
    )


def _divisor(length: jax.Array, length_penalty: jax.Array) -> jax.Array:
    return length.astype(jnp.float32) ** length_penalty


def _take(x_BC: Any, index_BW: jax.Array) -> jax.Array:
    """Returns x[b, index[b, w]] for every b and w, whatever axes follow."""
    return x_BC[jnp.arange(len(index_BW))[:, None], index_BW]
