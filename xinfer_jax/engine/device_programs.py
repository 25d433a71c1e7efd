"""The compiled programs of an engine, all of fixed shapes: decode steps, prompt log-probabilities, and copies
of rows and pages.

Rows between two calls are a `DecodeState` without output: `tokens_BT` and the like have no columns. A program
that samples adds empty columns, and returns them apart from the rows.

A row's bits do not depend on the number of decode steps in a call: its whole state is kept between two calls.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..cache.kv_cache import KVCache
from ..cache.paged import Paged, RoutePages
from ..config.model_config import ModelConfig
from ..generation.executor import decode_compiler_options
from ..generation.loop import decode
from ..generation.speculation import SpeculationState, Speculative, prompt_lookup
from ..generation.state import new_state
from ..generation.strategies import Plain, Strategy
from ..mixers.mixer import Mixer
from ..model.decoder import Inputs, apply_model, head_logits, last_norm
from ..ops.largest import largest_k
from ..sampling.batched_settings import select_rows
from ..sampling.logprobs import Alternatives, empty_alternatives, record_alternatives
from .pacing import MAX_DECODE_TOKENS

MAX_LOGPROBS = 20  # alternatives of a token
_LOGITS_TOKENS = 16  # tokens of a prompt whose logits exist at the same time


class SampledTokens(NamedTuple):
    """Tokens that the rows sampled in one call, and their log-probabilities; B rows, T columns."""

    tokens_BT: Any
    logprobs_BT: Any
    count_B: Any  # int32: columns of each row
    finished_B: Any
    alternatives: Any
    passes_B: Any  # int32: passes of the model that each row took part in
    accepted_B: Any  # int32: accepted draft tokens


class CacheArrays(NamedTuple):
    """What the caches of all slots are made of."""

    pools: Any  # (k, v) of each mixer with keys, and of routes if they are recorded
    states: Any  # the cache of each mixer without keys


class DecodeCall(NamedTuple):
    """What differs between two calls of `DECODE_STEPS`."""

    table_BP: Any  # int32: the block table
    running_B: Any  # bool: the rows that decode
    steps: Any  # int32: the most steps
    until_one_ends: Any  # bool: the call stops when one of these rows ends


def paged_cache(
    config: ModelConfig, pools: Any, states: Any, table_BP: Any, capacity: int, length_B: Any, longest_B: Any
) -> KVCache:
    """A cache over the pools of all pages, the last of routes if they are recorded, and these recurrent
    states of its rows. table_BP: the block table; length_B: tokens of each row; longest_B: of the prompt and
    its answer.
    """
    states = iter(states)
    pools = iter(pools)

    def layer(mixer: Mixer) -> Any:
        if not mixer.has_keys:
            return next(states)
        (k, v) = next(pools)
        return Paged(k, v, mixer.window, capacity, table_BP)

    layers = tuple(map(layer, config.cached_mixers))
    routes = next((RoutePages(k, v, None, capacity, table_BP) for k, v in pools), None)
    overflow_B: Any = np.zeros(len(table_BP), bool)
    longest_B = None if config.rope.switches_at is None else longest_B
    return KVCache(layers, length_B, overflow_B, None, longest_B, routes)


def cache_pools(cache: KVCache) -> tuple[tuple[Any, Any], ...]:
    """(k, v) of each layer of a paged cache that has pages, and of its routes if it records them."""
    paged = cache.kv_layers if cache.routes is None else (*cache.kv_layers, cache.routes)
    return tuple((layer.k, layer.v) for layer in paged)


def cache_states(cache: KVCache) -> tuple[Any, ...]:
    """The layers of a cache with recurrent states."""
    return tuple(layer for layer in cache.layers if not layer.has_keys)


@dataclasses.dataclass(frozen=True)
class EngineSteps(Strategy):
    """Steps of `Plain`, or of `Speculative` by prompt lookup, until all rows have ended, or one has.

    constants: the parameters, the rows' `Extras`, the rows that were active at first, and whether the call
    stops when one of them ends. carry: as of `Speculative`.
    """

    config: ModelConfig
    num_draft_tokens: int

    def step(self, executor, constants, carry):
        params, extras, *_ = constants
        state, cache, counts = carry
        if self.num_draft_tokens:
            strategy = Speculative(self.config, prompt_lookup, self.num_draft_tokens)
            return strategy.step(executor, (params, extras, None), carry)
        counts = dataclasses.replace(counts, passes_B=counts.passes_B + state.active_B)
        (state, cache), continues = Plain(self.config).step(executor, (params, extras), (state, cache))
        return (state, cache, counts), continues

    def continues(self, constants, carry):
        *_, active_before_B, until_one_ends = constants
        active_B = carry[0].active_B
        return jnp.any(active_B) & ~(until_one_ends & jnp.any(active_before_B & ~active_B))


def _decode_steps(
    params, strategy, extras, rows, caches: CacheArrays, call: DecodeCall, capacity, run_config
):
    """Up to `steps` decode steps of the rows that run, or of speculative decoding by prompt lookup; other
    rows stay as they are. strategy: `EngineSteps`.
    """
    running_B = call.running_B
    sampling_B = select_rows(rows.sampling_B, running_B)
    limit_B = jnp.where(running_B, rows.limit_B, 0)
    context = rows.context.select_rows(running_B)
    state = dataclasses.replace(rows, sampling_B=sampling_B, limit_B=limit_B, context=context)
    state = _add_output(state, MAX_DECODE_TOKENS)
    active_before_B = state.active_B
    zeros_B = jnp.zeros(len(running_B), jnp.int32)
    length_B = jnp.where(active_before_B, state.position_B - 1, 0)
    longest_B = rows.progress.longest_B(rows.position_B)
    cache = paged_cache(strategy.config, *caches, call.table_BP, capacity, length_B, longest_B)

    constants = params, extras, active_before_B, call.until_one_ends
    counts = SpeculationState(None, zeros_B, zeros_B)
    state, cache, counts = decode(strategy, constants, (state, cache, counts), call.steps, run_config)
    automata = state.context.automata
    if automata is not None:
        automata = dataclasses.replace(automata, width_B=rows.context.automata.width_B)
    callers = state.context.callers
    if callers is not None:
        callers = dataclasses.replace(callers, uses_BP=rows.context.callers.uses_BP)
    context = dataclasses.replace(state.context, automata=automata, callers=callers)
    state = dataclasses.replace(state, sampling_B=rows.sampling_B, limit_B=rows.limit_B, context=context)
    rows, out = _take_output(state)
    out = out._replace(passes_B=counts.passes_B, accepted_B=counts.accepted_B)
    return rows, cache_pools(cache), cache_states(cache), out


def _add_output(rows, size):
    state = new_state(rows.key_B, rows.sampling_B, rows.limit_B, rows.context, size)
    (B, V) = rows.context.seen_BV.shape
    old = rows.alternatives
    empty = empty_alternatives(B, size, old.id_BTA.shape[-1], V, False)
    empty = dataclasses.replace(empty, wanted_B=old.wanted_B)
    return dataclasses.replace(
        state,
        token_B=rows.token_B,
        finished_B=rows.finished_B,
        alternatives=empty,
        output_start_B=rows.length_B,
    )


def _take_output(state):
    """The rows without output, and the output. The host reads only the output: an array of the rows that the
    host has a view of could not be donated.
    """
    count_B = state.length_B - state.output_start_B
    zeros_B = jnp.zeros_like(state.limit_B)
    columns = state.tokens_BT, state.logprobs_BT
    out = SampledTokens(*columns, count_B, state.finished_B, state.alternatives, zeros_B, zeros_B)
    return _add_output(state, 0), out


def _prompt_logprobs(params, config, extras, inputs, cache, target_T, run_config):
    """Prefills a page; `Alternatives` of the token after each position, `target_T`, and the cache."""
    out = apply_model(params, config, inputs, cache, extras, run_config)
    return _target_logprobs(params, config, out.hidden, target_T), out.cache


def _target_logprobs(params, config, hidden_1TD, target_T):
    """`Alternatives` of the token after each position, `target_T`."""

    def part(pair):
        hidden_TD, target_T = pair
        logprobs_TV = jax.nn.log_softmax(head_logits(params, config, hidden_TD), -1)
        top_TA, id_TA = largest_k(logprobs_TV, min(MAX_LOGPROBS, config.vocab_size))
        return id_TA, top_TA, jnp.take_along_axis(logprobs_TV, target_T[:, None], 1)[:, 0]

    parts = hidden_1TD.reshape(-1, _LOGITS_TOKENS, hidden_1TD.shape[-1]), target_T.reshape(-1, _LOGITS_TOKENS)
    found = jax.lax.map(part, parts)
    id_1TA, top_1TA, logprob_1T = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), found)
    return Alternatives(id_1TA, top_1TA, id_1TA, top_1TA, logprob_1T, None)


def _set_logits(params, config, x_11D, logits_B1V, slot):
    """logits_B1V with those of a hidden state before the last norm in a slot."""
    logits_11V = head_logits(params, config, last_norm(params, config, x_11D))
    return jax.lax.dynamic_update_slice_in_dim(logits_B1V, logits_11V, slot, 0)


def _alternatives(logits_B1V, taken_BV, token_B):
    """`Alternatives` of one token of each row; taken_BV: the logits that the tokens were sampled from; None:
    these logits.
    """
    B, _, V = logits_B1V.shape
    logits_BV = logits_B1V[:, 0]
    empty = empty_alternatives(B, 1, min(MAX_LOGPROBS, V), V, False)
    taken_BV = logits_BV if taken_BV is None else taken_BV
    return record_alternatives(empty, np.zeros(B, np.int32), logits_BV, lambda: taken_BV, token_B)


def _processed_logprobs(logits_B1V, taken_BV, token_B):
    """float32 [B, 1]: `processed_BT` of `_alternatives`."""
    taken_BV = logits_B1V[:, 0] if taken_BV is None else taken_BV
    return jnp.take_along_axis(jax.nn.log_softmax(taken_BV), token_B[:, None], 1)


def running_token(lengths, progress, position_B, running_B):
    """What `Executor.forward` takes for one step of the rows that run."""
    active_B = progress.active_B & running_B
    longest_B = None if lengths.longest_B is None else progress.longest_B(position_B)
    length_B = jnp.where(active_B, position_B - 1, 0)
    lengths = dataclasses.replace(lengths, length_B=length_B, longest_B=longest_B)
    return Inputs(progress.token_B[:, None], active_B.astype(jnp.int32)), lengths


def _set_row(rows, slot, row):
    def put(all_rows, of_row):
        return jax.lax.dynamic_update_slice_in_dim(jnp.asarray(all_rows), jnp.asarray(of_row), slot, 0)

    return jax.tree.map(put, rows, row)


def _get_row(rows, slot):
    return jax.tree.map(lambda x: x[slot][None], rows)


def _get_pages(pools, page_N):
    return jax.tree.map(lambda pool: pool[page_N], pools)


def _set_pages(pools, page_N, contents):
    return jax.tree.map(lambda pool, pages: pool.at[page_N].set(pages), pools, contents)


DECODE_STEPS = jax.jit(
    _decode_steps,
    static_argnames=("strategy", "capacity", "run_config"),
    donate_argnames=("rows", "caches"),
    compiler_options=decode_compiler_options(),
)
PROMPT_LOGPROBS = jax.jit(_prompt_logprobs, static_argnames=("config", "run_config"), donate_argnames="cache")
PROMPT_LOOKUP = jax.jit(prompt_lookup, static_argnames="count")
ADD_OUTPUT = jax.jit(_add_output, static_argnames="size")
TAKE_OUTPUT = jax.jit(_take_output)
TARGET_LOGPROBS = jax.jit(_target_logprobs, static_argnames="config")
SET_LOGITS = jax.jit(
    _set_logits,
    static_argnames="config",
    donate_argnames="logits_B1V",
    compiler_options=decode_compiler_options(),
)
ALTERNATIVES = jax.jit(_alternatives)
PROCESSED_LOGPROBS = jax.jit(_processed_logprobs)
SET_ROW = jax.jit(_set_row, donate_argnames="rows")
GET_ROW = jax.jit(_get_row)
GET_PAGES = jax.jit(_get_pages)
SET_PAGES = jax.jit(_set_pages, donate_argnames="pools")
