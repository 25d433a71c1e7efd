"""The jitted doors: `prefill`, `decode_step`, `decode_loop`. Arrays in, arrays out, usable inside a caller's
own jit.

tokens_BT ─ prefill ─► (logits_BV, cache) ─ choose ─► while_loop: write K/V → attend → logits → choose
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas import varying_as

from ..brief import Brief
from ..cache.kv_cache import LARGEST_CALL, KVCache
from ..checks import array_of, token_ids, traced, whole, within
from ..config.model_config import ModelConfig
from ..errors import InputError, shown
from ..model.attention import check_impl
from ..model.decoder import hidden_states, unembed
from ..model.greedy import fuses_head, greedy
from ..sampling.choice import Context, SamplingConfig, choose, draw, per_row, plain, process, row_keys, warp
from ..sampling.logprobs import Alternatives, note
from ..weights.params import AnyArray, Params, activation_dtype

PREFILL_CHUNK = LARGEST_CALL  # longer prompts pass through the model this many tokens at a time
_LEAST_BUCKET = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class DecodeState(Brief):
    """What the decode loop carries, and its result."""

    cache: KVCache | None  # holds everything but the last token; None without a cache
    token_B: jax.Array  # int32: the last token chosen
    position_B: jax.Array  # int32: position of the next token to choose, which is the row's length
    step: jax.Array  # int32: tokens chosen so far
    tokens_BT: jax.Array  # int32: tokens chosen, EOS included, 0 behind a row's end
    logprobs_BT: jax.Array  # float32: their log-probabilities before any processor
    length_B: jax.Array  # int32: how many each row chose, EOS included
    finished_B: jax.Array  # bool: the row chose an EOS token
    context: Context  # what the processors look at
    alternatives: Alternatives | None = None  # noted where asked for


class Choice(NamedTuple):
    """How each row's tokens are chosen, and when it ends."""

    row_key_B: jax.Array  # one PRNG key per row
    sampling_B: SamplingConfig  # from `per_row`
    eos_E: jax.Array  # int32: ids that end a row
    limit: jax.Array  # int32: tokens that no row exceeds


def prefill(
    params: Params,
    config: ModelConfig,
    tokens_BT: AnyArray,
    num_tokens_B: AnyArray,
    cache: KVCache,
    *,
    donate: bool = False,
    impl: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """Appends a prompt, or what follows one, to the cache; long ones in chunks of `PREFILL_CHUNK`, skipping
    chunks that are all padding.

    Args:
        params, config: the model.
        tokens_BT: int32 token ids, padded on the right.
        num_tokens_B: int32, how many of each row are real.
        cache: holds what comes before.
        donate: lets the call reuse the cache's memory; the caller's `cache` is gone afterwards.
        impl: of attention and argmax: None (what suits the device), "mosaic", "triton" or "xla".

    Returns:
        float32 logits [B, V] after each row's last real token, and the cache.

    Raises:
        InputError: arrays of another shape or type, ids outside the vocabulary, a cache of another model; the
            tokens exceed its capacity (under a caller's jit: they are dropped and flagged in `overflow_B`);
            an impl that this machine lacks, or that cannot serve the call. What is traced is checked by its
            shape alone.
    """
    array_of("tokens_BT", tokens_BT, np.integer, "rows", "tokens")
    B, T = tokens_BT.shape
    if not T:
        raise InputError("tokens_BT holds no token: give each row one at least")
    array_of("num_tokens_B", num_tokens_B, np.integer, B)
    _check_cache(config, cache, B)
    within("tokens_BT: token id", tokens_BT, 0, config.vocab_size - 1)
    within("num_tokens_B:", num_tokens_B, 0, T)
    _check_room(impl, cache, num_tokens_B)
    return PREFILL[donate](params, config, tokens_BT, num_tokens_B, cache, impl)


def decode_step(
    params: Params,
    config: ModelConfig,
    token_B: AnyArray,
    cache: KVCache,
    *,
    donate: bool = False,
    impl: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """Appends one token per row. Returns float32 logits [B, V] and the cache; `donate` and `impl` as in
    `prefill`.

    Nothing waits for the device here: a token past the capacity is dropped and flagged in the cache's
    `overflow_B`, and ids are not looked at.

    Raises:
        InputError: tokens of another shape or type, a cache of another model, or such an impl.
    """
    check_impl(impl)
    array_of("token_B", token_B, np.integer, "rows")
    _check_cache(config, cache, len(token_B))
    return _DECODE_STEP[donate](params, config, token_B, cache, impl=impl)


def decode_loop(  # noqa: PLR0913  a door
    params: Params,
    config: ModelConfig,
    logits_BV: AnyArray,
    cache: KVCache,
    row_key_B: jax.Array,
    sampling_B: SamplingConfig,
    eos_ids: AnyArray,
    max_new_tokens: int | AnyArray,
    *,
    seen_BV: AnyArray | None = None,
    history_BS: AnyArray | None = None,
    output_size: int | None = None,
    donate: bool = False,
    impl: str | None = None,
) -> DecodeState:
    """Chooses tokens on the device until every row has met an EOS id or has max_new_tokens.

    Args:
        params, config: the model.
        logits_BV: float32, of the last token in the cache (from `prefill`).
        cache: holds the prompt.
        row_key_B: one PRNG key per row.
        sampling_B: settings as numbers or arrays [B].
        eos_ids: int32 [E], may be empty.
        max_new_tokens: at least 1. Traced: another number below the same power of two compiles nothing; one
            below 1, traced by the caller, counts as 1.
        seen_BV: bool, tokens that the repetition penalty counts as present; None: only those that this call
            chooses.
        history_BS: int32, each row's tokens in order up to the cache's `length_B`, with room for those to
            come: `no_repeat_ngram_size` looks at them.
        output_size: T of the results, and the most tokens; None: max_new_tokens, which then must not be
            traced by the caller.
        donate, impl: as in `prefill`.

    Returns:
        The state: tokens_BT, logprobs_BT, length_B (all three with the EOS token), finished_B, and cache,
        which holds every token but the last one chosen. A log-probability that is not finite says that the
        model's numbers are broken: nobody looks at it here, nor at the cache's `overflow_B`.

    Raises:
        InputError: an argument of another shape, type or range, a cache of another model; the tokens may
            exceed the cache's capacity (under a caller's jit: they are dropped and flagged in `overflow_B`).
            What is traced is checked by its shape alone.
    """
    array_of("logits_BV", logits_BV, np.floating, "rows", config.vocab_size)
    B, V = logits_BV.shape
    _check_cache(config, cache, B)
    if isinstance(eos_ids, list | tuple):
        eos_ids = np.array(token_ids("eos_ids", eos_ids), np.int32)
    array_of("eos_ids", eos_ids, np.integer, "ids")
    within("eos_ids: token id", eos_ids, -1, V - 1)
    if seen_BV is not None:
        array_of("seen_BV", seen_BV, np.bool_, B, V)
    if history_BS is not None:
        array_of("history_BS", history_BS, np.integer, B, "tokens")
    size, limit = _size(max_new_tokens, output_size)
    _check_room(impl, cache, limit - 1)
    row_key_B, eos_E = row_keys(row_key_B, B), jnp.asarray(eos_ids, jnp.int32)
    sampling_B = per_row(sampling_B, B, V)
    if sampling_B.no_repeat_ngram_size is not None and history_BS is None:
        raise InputError("no_repeat_ngram_size needs history_BS, the tokens that each row already holds")
    context = new_context(
        sampling_B, np.zeros(logits_BV.shape, bool) if seen_BV is None else seen_BV, history_BS
    )
    choice = Choice(row_key_B, sampling_B, eos_E, limit)
    state = _DECODE_LOOP[donate](params, config, logits_BV, cache, choice, context, bucket(size), impl)
    return dataclasses.replace(
        state, tokens_BT=state.tokens_BT[:, :size], logprobs_BT=state.logprobs_BT[:, :size]
    )


def _size(max_new_tokens: Any, output_size: Any) -> tuple[int, Any]:
    """T of the results, and the most tokens, which may be traced."""
    size = None if output_size is None else whole("output_size", output_size, 1)
    if traced(max_new_tokens):
        if size is None:
            raise InputError(
                "decode_loop with a traced max_new_tokens needs output_size, the static size of its results"
            )
        if max_new_tokens.shape or not jnp.issubdtype(max_new_tokens.dtype, np.integer):
            raise InputError(f"max_new_tokens must be a whole number of at least 1, got {max_new_tokens!r}")
        return size, jnp.minimum(max_new_tokens, size)
    most = whole("max_new_tokens", max_new_tokens, 1)
    return size or most, np.int32(min(most, size or most))


def _check_cache(config: ModelConfig, cache: KVCache, rows: int) -> None:
    """Raises InputError for a cache of other rows or of another model, as far as shapes tell."""
    if not isinstance(cache, KVCache):
        raise InputError(f"cache must come from init_cache, got {shown(cache)}")
    if isinstance(cache.length_B, jax.Array) and not traced(cache.length_B) and cache.length_B.is_deleted():
        raise InputError("the cache was donated to an earlier call: go on with the one that it returned")
    if len(cache.length_B) != rows:
        raise InputError(f"a cache of {len(cache.length_B)} rows for {rows}: init_cache takes their number")
    wanted = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    held = len(cache.k), *(cache.k[0].shape[i] for i in (1, 3))
    if held != wanted:
        raise InputError(
            f"a cache of {held[0]} layers, {held[1]} key heads of width {held[2]} for a model of {wanted[0]},"
            f" {wanted[1]} and {wanted[2]}: init_cache takes the model's config"
        )


def _check_room(impl: str | None, cache: KVCache, more_B: Any) -> None:
    """Raises InputError where impl or more_B further tokens cannot be served, as far as that is known outside
    a trace.
    """
    check_impl(impl)
    if traced(cache.length_B) or traced(more_B):
        return
    need = int(np.max(np.asarray(cache.length_B) + np.asarray(more_B)))
    if need > cache.capacity:
        raise InputError(
            f"{need} tokens exceed the cache's capacity {cache.capacity}: raise capacity or shorten the"
            " prompt"
        )


def _prefill(params, config, tokens_BT, num_tokens_B, cache, impl):
    B, T = tokens_BT.shape

    def chunk(tokens_BT, num_tokens_B, cache, before_BD):
        """The chunk's last real hidden state of each row, or the one before where the row has no token
        in it.
        """
        hidden_BTD, cache = hidden_states(params, config, tokens_BT, cache, num_tokens_B, impl=impl)
        last_BD = jnp.take_along_axis(hidden_BTD, jnp.maximum(num_tokens_B - 1, 0)[:, None, None], 1)[:, 0]
        return jnp.where((num_tokens_B > 0)[:, None], last_BD, before_BD), cache

    none_BD = jnp.zeros((B, config.hidden_size), activation_dtype(params))
    if T <= PREFILL_CHUNK:
        last_BD, cache = chunk(tokens_BT, num_tokens_B, cache, none_BD)
        return unembed(params, config, last_BD), cache
    padded = jnp.pad(tokens_BT, ((0, 0), (0, -T % PREFILL_CHUNK)))

    def body(i, carry):
        last_BD, cache = carry
        first = i * PREFILL_CHUNK
        tokens = lax.dynamic_slice_in_dim(padded, first, PREFILL_CHUNK, 1)
        return chunk(tokens, jnp.clip(num_tokens_B - first, 0, PREFILL_CHUNK), cache, last_BD)

    chunks = -(-jnp.max(num_tokens_B) // PREFILL_CHUNK)
    start = varying_as((none_BD, cache), params, tokens_BT, num_tokens_B, cache)
    last_BD, cache = lax.fori_loop(0, chunks, body, start)
    return unembed(params, config, last_BD), cache


def _decode_step(params, config, token_B, cache, impl):
    hidden_BD, cache = _next_hidden(params, config, token_B, cache, None, impl)
    return unembed(params, config, hidden_BD), cache


def _next_hidden(params, config, token_B, cache, num_tokens_B, impl):
    hidden_BTD, cache = hidden_states(params, config, token_B[:, None], cache, num_tokens_B, impl=impl)
    return hidden_BTD[:, 0], cache


def _recompute(params, config, tokens_BT, num_tokens_B, impl):
    """Logits [B, V] after each row's last token, from the tokens alone."""
    hidden_BTD, _ = hidden_states(params, config, tokens_BT, None, num_tokens_B, impl=impl)
    return unembed(
        params, config, jnp.take_along_axis(hidden_BTD, (num_tokens_B - 1)[:, None, None], 1)[:, 0]
    )


def _next_token(params, config, hidden_BD, state, choice, impl):
    """The state with each row's next token; rows that just take the likeliest one need no logits, where a
    kernel serves.
    """
    if state.alternatives is not None or not fuses_head(params, hidden_BD, impl):
        return record(unembed(params, config, hidden_BD), state, choice, impl)

    def by_logits():
        return _choose(unembed(params, config, hidden_BD), state, choice, impl)

    chosen = lax.cond(plain(choice.sampling_B), lambda: greedy(params, config, hidden_BD, impl), by_logits)
    return _note(*chosen, state, choice.eos_E)


def context_now(state: DecodeState, eos_E: jax.Array) -> Context:
    """What the processors look at, with what the state itself says."""
    return dataclasses.replace(state.context, chosen_B=state.length_B, eos_E=eos_E)


def _choose(logits_BV, state, choice, impl):
    context = context_now(state, choice.eos_E)
    token_B = choose(logits_BV, choice.row_key_B, state.position_B, choice.sampling_B, context, impl)
    return token_B, _logprob(logits_BV, token_B)


def _logprob(logits_BV, token_B):
    return logits_BV[jnp.arange(len(token_B)), token_B] - jax.nn.logsumexp(logits_BV, -1)


def record(logits_BV, state, choice, impl, active_B=True):
    """The state with the next token of each row that is active, chosen from logits, and its alternatives
    where they are asked for.
    """
    if state.alternatives is None:
        return _note(*_choose(logits_BV, state, choice, impl), state, choice.eos_E, active_B)
    context, position_B = context_now(state, choice.eos_E), state.position_B
    warped_BV = warp(process(logits_BV, position_B, choice.sampling_B, context), choice.sampling_B)
    token_B = draw(choice.row_key_B, position_B, warped_BV, choice.sampling_B)
    noted = note(state.alternatives, _column(state, active_B), logits_BV, warped_BV, token_B)
    state = dataclasses.replace(state, alternatives=noted)
    return _note(token_B, _logprob(logits_BV, token_B), state, choice.eos_E, active_B)


def _column(state, active_B):
    """Where each row's next token is noted; past the end where it gets none."""
    return jnp.where(~state.finished_B & active_B, state.length_B, state.tokens_BT.shape[1])


def _note(token_B, logprob_B, state, eos_E, active_B=True):
    """Notes each row's next token down; rows that have finished or are not active stay as they are."""
    alive_B = ~state.finished_B & active_B
    one_B, row_B, column_B, old = (
        alive_B.astype(jnp.int32),
        jnp.arange(len(token_B)),
        _column(state, active_B),
        state.context,
    )
    history_BS = old.history_BS
    if history_BS is not None:
        slot_B = jnp.where(alive_B, state.position_B, history_BS.shape[1])
        history_BS = history_BS.at[row_B, slot_B].set(token_B, mode="drop")
    context = dataclasses.replace(
        old,
        seen_BV=old.seen_BV.at[row_B, token_B].max(alive_B),
        count_BV=None if old.count_BV is None else old.count_BV.at[row_B, token_B].add(one_B),
        history_BS=history_BS,
    )
    return dataclasses.replace(
        state,
        token_B=jnp.where(alive_B, token_B, state.token_B),
        position_B=state.position_B + one_B,
        step=state.step + 1,
        tokens_BT=jnp.asarray(state.tokens_BT).at[row_B, column_B].set(token_B, mode="drop"),
        logprobs_BT=jnp.asarray(state.logprobs_BT).at[row_B, column_B].set(logprob_B, mode="drop"),
        length_B=state.length_B + one_B,
        finished_B=state.finished_B | (alive_B & jnp.any(token_B[:, None] == eos_E, -1)),
        context=context,
    )


def _continue(params, config, state, choice, impl):
    """Decodes until `choice.limit` tokens are chosen or every row has finished: the one loop behind
    `decode_loop`, `generate` and `stream`.
    """

    def body(state):
        alive_B = (~state.finished_B).astype(jnp.int32)
        hidden_BD, cache = _next_hidden(params, config, state.token_B, state.cache, alive_B, impl)
        return _next_token(params, config, hidden_BD, dataclasses.replace(state, cache=cache), choice, impl)

    state = varying_as(state, state, params, choice)
    return lax.while_loop(lambda s: (s.step < choice.limit) & ~jnp.all(s.finished_B), body, state)


def _decode_loop(params, config, logits_BV, cache, choice, context, size, impl):
    state = record(logits_BV, new_state(cache, cache.length_B, context, size), choice, impl)
    return _continue(params, config, state, choice, impl)


def new_state(cache: KVCache | None, position_B: Any, context: Context, size: int) -> DecodeState:
    B = len(position_B)
    zeros_B, zeros_BT = np.zeros(B, np.int32), np.zeros((B, size), np.int32)
    return DecodeState(
        cache,
        zeros_B,
        position_B,
        np.int32(0),
        zeros_BT,
        zeros_BT.astype(np.float32),
        zeros_B,
        np.zeros(B, bool),
        context,
    )


def new_context(sampling: SamplingConfig, seen_BV: Any, history_BS: Any) -> Context:
    """What the processors of these settings (from `per_row`) will look at; history_BS may be None where
    `no_repeat_ngram_size` is.
    """
    counts = sampling.presence_penalty is not None or sampling.frequency_penalty is not None
    count_BV = np.zeros(np.shape(seen_BV), np.int32) if counts else None
    return Context(seen_BV, count_BV, history_BS)


def _jitted(function: Any, *static: str) -> dict[bool, Any]:
    """The function jitted without and with donation of its cache."""
    return {
        donate: jax.jit(function, static_argnames=static, donate_argnames="cache" if donate else ())
        for donate in (False, True)
    }


PREFILL = _jitted(_prefill, "config", "impl")
_DECODE_STEP = _jitted(_decode_step, "config", "impl")
_DECODE_LOOP = _jitted(_decode_loop, "config", "size", "impl")
CONTINUE = jax.jit(_continue, static_argnames=("config", "impl"), donate_argnames="state")
RECORD = jax.jit(record, static_argnames="impl")
RECOMPUTE = jax.jit(_recompute, static_argnames=("config", "impl"))


def bucket(size: int) -> int:
    """The power of two, at least 16, that array sizes are rounded up to, so that few programs are
    compiled.
    """
    return max(_LEAST_BUCKET, 1 << (size - 1).bit_length())
