"""The compiled programs of an engine, all of fixed shapes: steps of its rows, prompt log-probabilities, and
copies of rows and pages.

Rows between two calls are a `DecodeState` without output: `tokens_BT` and the like have no columns. A call
that samples adds empty columns, and returns them separately from the rows.

A row's bits do not depend on the number of decode steps in a call: its whole state is kept between two calls.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..cache.kv_cache import KVCache
from ..cache.paged import Paged, RoutePages
from ..config.model_config import ModelConfig
from ..generation.executor import Executor
from ..generation.speculation import SpeculationState, Speculative
from ..generation.state import DecodeState, SampledTokens
from ..mixers.mixer import Mixer
from ..model.decoder import head_logits
from ..ops.largest import largest_k
from ..sampling.batched_settings import select_rows
from ..sampling.logprobs import Alternatives, empty_alternatives
from .head_programs import first_unread, head_caches, head_pools
from .pacing import MAX_DECODE_TOKENS

MAX_LOGPROBS = 20  # alternatives of a token
_LOGITS_TOKENS = 16  # tokens of a prompt whose logits exist at the same time


class CacheArrays(NamedTuple):
    """The arrays of which the caches of all slots consist."""

    pools: Any  # (k, v) of each mixer with keys, and of routes if they are recorded
    states: Any  # the cache of each mixer without keys
    head: Any = ()  # (k, v) of each mixer of a draft head, and of its `FeaturePages`


class RowSteps(NamedTuple):
    """The settings by which the rows of an engine sample tokens. They decide on the program."""

    strategy: Any  # `Plain` or `Speculative`
    capacity: int
    recorded: int  # of each token, as `Request.recorded`


class RowsCall(NamedTuple):
    """The arguments that differ between two calls that sample tokens of an engine's rows."""

    running_B: Any  # bool: the rows that take part
    wanted_B: Any  # bool: the rows whose alternatives are recorded
    # To decode:
    tables: Any = ()  # int32 [B, P]: the block table; once for each pool where a step replaces it
    steps: Any = None  # int32: the most steps
    watched_B: Any = None  # bool: the call stops when one of these rows ends
    proposed_BT: Any = None  # int32: draft tokens of a head that the host knows already; -1: none


def paged_cache(
    config: ModelConfig, caches: CacheArrays, tables: Iterable[Any], capacity: int, lengths: tuple
) -> KVCache:
    """Returns a cache of rows over the pools of all pages, the last of routes if they are recorded, and the
    recurrent states of these rows.

    Args:
        tables: the block table, once or for each pool.
        lengths: [B] each: tokens of each row, tokens of its prompt and answer, True if some were dropped.
    """
    states = iter(caches.states)
    pools = zip(caches.pools, itertools.cycle(tables), strict=False)
    length_B, longest_B, overflow_B = lengths

    def layer(mixer: Mixer) -> Any:
        if not mixer.has_keys:
            return next(states)
        (k, v), table_BP = next(pools)
        return Paged(k, v, mixer.window, capacity, table_BP)

    layers = tuple(map(layer, config.cached_mixers))
    routed_experts = next((RoutePages(k, v, None, capacity, table_BP) for (k, v), table_BP in pools), None)
    longest_B = None if config.rope.switches_at is None else longest_B
    return KVCache(layers, length_B, overflow_B, None, longest_B, routed_experts)


def cache_pools(cache: KVCache) -> tuple[tuple[Any, Any], ...]:
    """Returns (k, v) of each layer of a paged cache that has pages, and of its routes if it records them."""
    paged = cache.kv_layers if cache.routed_experts is None else (*cache.kv_layers, cache.routed_experts)
    return tuple((layer.k, layer.v) for layer in paged)


def cache_states(cache: KVCache) -> tuple[Any, ...]:
    """Returns the layers of a cache with recurrent states."""
    return tuple(layer for layer in cache.layers if not layer.has_keys)


def sample_one_token(
    executor: Executor, steps: RowSteps, rows: DecodeState, args: tuple[Any, Any, RowsCall]
) -> tuple[DecodeState, SampledTokens]:
    """Returns the rows of all slots after one token of the running ones, and this token. args: the arguments
    of `sample`, for all slots, the features of the last tokens for a draft head, or None, and the call.
    """
    outputs, features_BX, call = args
    if features_BX is not None:
        old: Any = rows.unread
        rows = dataclasses.replace(rows, unread=first_unread(features_BX, old, call.running_B))
    own, state, _ = _begin(executor, steps, rows, call)
    state, _ = executor.sample(outputs, state)
    return _end(executor, rows, own, state)


def decode_rows(
    executor: Executor, steps: RowSteps, arrays: tuple[DecodeState, CacheArrays], args: tuple
) -> tuple[DecodeState, CacheArrays, SampledTokens]:
    """Returns the rows of all slots and their caches after the steps of a call, and the tokens that the
    running rows sampled. args: the parameters, the rows' `Extras`, the parameters of a draft head, and a
    `RowsCall`.
    """
    rows, caches = arrays
    *constants, call = args
    own, state, lengths = _begin(executor, steps, rows, call)
    carry = _carry(steps, caches, state, lengths, call)
    constants = constants[: len(carry)]  # plain decoding has no head
    state, cache, *drafts = executor.decode(
        steps.strategy, tuple(constants), carry, call.steps, call.watched_B
    )
    rows, out = _end(executor, rows, own, state, *drafts)
    pools = head_pools(drafts[0].cache, drafts[0].features) if drafts else ()
    return rows, CacheArrays(cache_pools(cache), cache_states(cache), pools), out


def propose_rows(executor: Executor, steps: RowSteps, pools: Any, args: tuple) -> tuple[Any, jax.Array]:
    """Returns `CacheArrays.head`, and the draft tokens of the running rows in the next step, int32
    [B, draft tokens]. args: the rows, the other caches, and the arguments of `decode_rows`.
    """
    rows, caches, *constants, call = args
    _, state, lengths = _begin(executor, steps, rows, call)
    carry = _carry(steps, caches._replace(head=pools), state, lengths, call)
    draft_BT, cache = steps.strategy.propose(executor, tuple(constants), carry)
    return head_pools(cache, carry[2].features), draft_BT


def _carry(steps: RowSteps, caches: CacheArrays, state: DecodeState, lengths: Any, call: RowsCall) -> tuple:
    """Returns the carry of the strategy for rows over pages."""
    strategy: Any = steps.strategy
    cache = paged_cache(strategy.config, caches, call.tables, steps.capacity, lengths)
    if not isinstance(strategy, Speculative):
        return state, cache
    of_head: tuple = None, None
    if state.unread is not None:
        length_B = jnp.where(state.active_B, state.position_B, 0)
        table_BP = jnp.asarray(call.tables[0])
        proposer: Any = strategy.proposer
        of_head = head_caches(proposer.head, caches.head, table_BP, steps.capacity, length_B)
    drafts = SpeculationState.of_rows(len(call.running_B), strategy.num_draft_tokens, *of_head)
    if call.proposed_BT is not None:
        drafts = dataclasses.replace(drafts, proposed_BT=call.proposed_BT)
    return state, cache, drafts


def _begin(executor: Executor, steps: RowSteps, rows: DecodeState, call: RowsCall) -> tuple[Any, Any, Any]:
    """Begins a call. Returns three values:

    - the leaves of the rows that `_end` puts back, by index,
    - the state of a call, in which the rows that do not run are inactive, with columns for the output,
    - the `lengths` of a cache.
    """
    leaves, output, lengths = executor.call(_BEGIN, rows, call.running_B, call.wanted_B, steps.recorded)
    own = {i: x for i, x in enumerate(jax.tree.leaves(rows)) if i in leaves}
    return own, dataclasses.replace(_with_leaves(rows, leaves), **output), lengths


def _end(
    executor: Executor, rows: DecodeState, own: Any, state: DecodeState, counts: Any = None
) -> tuple[DecodeState, SampledTokens]:
    """Returns the rows without output, and the output. The host reads only the output: an array of the rows
    that the host has a view of could not be donated. counts: `SpeculationState`.
    """
    count_B, finished_B = executor.call(_END, state.length_B, state.output_start_B, state.finished_B)
    drafts = () if counts is None else (counts.passes_B, counts.accepted_BT)
    columns = state.tokens_BT, state.logprobs_BT
    out = SampledTokens(*columns, count_B, finished_B, state.alternatives, *drafts)
    empty: Any = dict(tokens_BT=rows.tokens_BT, logprobs_BT=rows.logprobs_BT)
    state = dataclasses.replace(state, alternatives=None, output_start_B=None, **empty)
    return _with_leaves(state, own), out


def _with_leaves(rows: DecodeState, leaves: dict[int, Any]) -> DecodeState:
    """Returns the rows with these leaves, by index, in place of their own."""
    old, tree = jax.tree.flatten(rows)
    return jax.tree.unflatten(tree, [leaves.get(i, x) for i, x in enumerate(old)])


def _begin_call(rows, running_B, wanted_B, recorded):
    """Returns the leaves that `_begin` needs, in arrays of their own. The other leaves of the rows stay where
    they are.
    """
    (B, V) = rows.context.seen_BV.shape
    active_B = rows.active_B & running_B
    selected = dataclasses.replace(
        rows,
        limit_B=jnp.where(running_B, rows.limit_B, 0),
        sampling_B=select_rows(rows.sampling_B, running_B),
        context=rows.context.select_rows(running_B),
    )
    pairs = enumerate(zip(jax.tree.leaves(rows), jax.tree.leaves(selected), strict=True))
    leaves = {i: new for i, (old, new) in pairs if new is not old}
    alternatives = None
    if recorded:
        count = min(MAX_LOGPROBS, V)
        empty = empty_alternatives(B, MAX_DECODE_TOKENS, count, V, support=recorded > 2)
        alternatives = empty.sampled_only
        if recorded > 1:
            alternatives = dataclasses.replace(empty, wanted_B=wanted_B)
    output = dict(
        tokens_BT=jnp.zeros((B, MAX_DECODE_TOKENS), jnp.int32),
        logprobs_BT=jnp.zeros((B, MAX_DECODE_TOKENS), jnp.float32),
        alternatives=alternatives,
        output_start_B=rows.length_B,
    )
    length_B = jnp.where(active_B, rows.position_B - 1, 0)
    lengths = length_B, rows.progress.longest_B(rows.position_B), jnp.zeros(B, bool)
    return leaves, output, lengths


def _end_call(length_B, start_B, finished_B):
    return length_B - start_B, finished_B


def _target_logprobs(params, config, hidden_1TD, target_T):
    """Returns `Alternatives` of the token after each position, `target_T`."""

    def part(pair):
        hidden_TD, target_T = pair
        logprobs_TV = jax.nn.log_softmax(head_logits(params, config, hidden_TD), -1)
        top_TA, id_TA = largest_k(logprobs_TV, min(MAX_LOGPROBS, config.vocab_size))
        return id_TA, top_TA, jnp.take_along_axis(logprobs_TV, target_T[:, None], 1)[:, 0]

    parts = hidden_1TD.reshape(-1, _LOGITS_TOKENS, hidden_1TD.shape[-1]), target_T.reshape(-1, _LOGITS_TOKENS)
    found = jax.lax.map(part, parts)
    id_1TA, top_1TA, logprob_1T = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), found)
    return Alternatives(id_1TA, top_1TA, id_1TA, top_1TA, logprob_1T, None)


def _repeat_row(row: Any, rows: int) -> Any:
    return jax.tree.map(lambda x_1: jnp.repeat(x_1, rows, 0), row)


def _set_row(rows, slot, row):
    def put(all_rows, of_row):
        return jax.lax.dynamic_update_slice_in_dim(jnp.asarray(all_rows), jnp.asarray(of_row), slot, 0)

    return jax.tree.map(put, rows, row)


def _set_rows(rows, slot_F, rows_F):
    return jax.tree.map(lambda all_rows, of_rows: all_rows.at[slot_F].set(of_rows), rows, rows_F)


def _get_row(rows, slot):
    return jax.tree.map(lambda x: x[slot][None], rows)


def _get_pages(pools, page_N):
    return jax.tree.map(lambda pool: pool[page_N], pools)


def _set_pages(pools, page_N, contents):
    return jax.tree.map(lambda pool, pages: pool.at[page_N].set(pages), pools, contents)


_BEGIN = jax.jit(_begin_call, static_argnames="recorded")
_END = jax.jit(_end_call)
TARGET_LOGPROBS = jax.jit(_target_logprobs, static_argnames="config")
REPEAT_ROW = jax.jit(_repeat_row, static_argnames="rows")
SET_ROW = jax.jit(_set_row, donate_argnames="rows")
SET_ROWS = jax.jit(_set_rows, donate_argnames="rows")
GET_ROW = jax.jit(_get_row)
GET_PAGES = jax.jit(_get_pages)
SET_PAGES = jax.jit(_set_pages, donate_argnames="pools")
