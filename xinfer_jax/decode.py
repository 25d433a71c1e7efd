"""The jitted doors: `prefill`, `decode_step`, `decode_loop`. Arrays in, arrays out, usable inside a caller's own jit.

tokens_BT ─ prefill ─► (logits_BV, cache) ─ choose ─► while_loop: write K/V → attend → logits → choose
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .attention import check_impl
from .cache import KVCache
from .config import ModelConfig
from .errors import InputError
from .greedy import fuses_head, greedy
from .model import hidden_states, unembed
from .params import Params, activation_dtype
from .sampling import SamplingConfig, choose, per_row, plain, row_keys

PREFILL_CHUNK = 512  # longer prompts pass through the model this many tokens at a time
_LEAST_BUCKET = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """What the decode loop carries, and its result."""

    cache: KVCache | None  # holds everything but the last token; None without a cache
    token_B: jax.Array  # int32: the last token chosen
    position_B: jax.Array  # int32: position of the next token to choose, which is the row's length
    step: jax.Array  # int32: tokens chosen so far
    tokens_BT: jax.Array  # int32: tokens chosen, EOS included, 0 behind a row's end
    logprobs_BT: jax.Array  # float32: their log-probabilities before any processor
    length_B: jax.Array  # int32: how many each row chose, EOS included
    finished_B: jax.Array  # bool: the row chose an EOS token
    seen_BV: jax.Array  # bool: tokens present in each row, for the repetition penalty


def prefill(
    params: Params,
    config: ModelConfig,
    tokens_BT: jax.Array,
    num_tokens_B: jax.Array,
    cache: KVCache,
    *,
    donate: bool = False,
    impl: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """Appends a prompt, or what follows one, to the cache; long ones in chunks of `PREFILL_CHUNK`, skipping chunks that are all padding.

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
        InputError: the tokens exceed the cache's capacity (under a caller's jit: they are dropped and flagged in `overflow_B`);
            an impl that this machine lacks, or that cannot serve the call.
    """
    _check(impl, cache, num_tokens_B)
    return PREFILL[donate](params, config, tokens_BT, num_tokens_B, cache, impl)


def decode_step(
    params: Params, config: ModelConfig, token_B: jax.Array, cache: KVCache, *, donate: bool = False, impl: str | None = None
) -> tuple[jax.Array, KVCache]:
    """Appends one token per row. Returns float32 logits [B, V] and the cache; `donate` and `impl` as in `prefill`.

    Nothing waits for the device here: a token past the capacity is dropped and flagged in the cache's `overflow_B`.
    """
    check_impl(impl)
    return _DECODE_STEP[donate](params, config, token_B, cache, impl=impl)


def decode_loop(
    params: Params,
    config: ModelConfig,
    logits_BV: jax.Array,
    cache: KVCache,
    row_key_B: jax.Array,
    sampling_B: SamplingConfig,
    eos_ids: jax.Array,
    max_new_tokens: int | jax.Array,
    *,
    seen_BV: jax.Array | None = None,
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
        max_new_tokens: traced: another number below the same power of two compiles nothing.
        seen_BV: bool, tokens that the repetition penalty counts as present; None: only those that this call chooses.
        output_size: T of the results, and the most tokens; None: max_new_tokens, which then must not be traced by the caller.
        donate, impl: as in `prefill`.

    Returns:
        The state: tokens_BT, logprobs_BT, length_B (all three with the EOS token), finished_B, and cache, which holds every
        token but the last one chosen.

    Raises:
        InputError: the tokens may exceed the cache's capacity (under a caller's jit: they are dropped and flagged in `overflow_B`).
    """
    B = logits_BV.shape[0]
    if output_size is None and isinstance(max_new_tokens, jax.core.Tracer):
        raise InputError("decode_loop with a traced max_new_tokens needs output_size, the static size of its results")
    size = int(max_new_tokens) if output_size is None else output_size
    limit = np.int32(max_new_tokens) if output_size is None else jnp.minimum(max_new_tokens, output_size)
    _check(impl, cache, limit - 1)
    seen_BV = np.zeros(logits_BV.shape, bool) if seen_BV is None else seen_BV
    row_key_B, sampling_B, eos_E = row_keys(row_key_B, B), per_row(sampling_B, B), jnp.asarray(eos_ids, jnp.int32)
    state = _DECODE_LOOP[donate](params, config, logits_BV, cache, row_key_B, sampling_B, eos_E, limit, seen_BV, bucket(size), impl)
    return dataclasses.replace(state, tokens_BT=state.tokens_BT[:, :size], logprobs_BT=state.logprobs_BT[:, :size])


def _check(impl: str | None, cache: KVCache, more_B: Any) -> None:
    """Raises InputError where impl or more_B further tokens cannot be served, as far as that is known outside a trace."""
    check_impl(impl)
    if any(isinstance(x, jax.core.Tracer) for x in (cache.length_B, more_B)):
        return
    need = int(np.max(np.asarray(cache.length_B) + np.asarray(more_B)))
    if need > cache.capacity:
        raise InputError(f"{need} tokens exceed the cache's capacity {cache.capacity}: raise capacity or shorten the prompt")


def _prefill(params, config, tokens_BT, num_tokens_B, cache, impl):
    B, T = tokens_BT.shape

    def chunk(tokens_BT, num_tokens_B, cache, before_BD):
        """The chunk's last real hidden state of each row, or the one before where the row has no token in it."""
        hidden_BTD, cache = hidden_states(params, config, tokens_BT, cache, num_tokens_B, impl=impl)
        last_BD = jnp.take_along_axis(hidden_BTD, jnp.maximum(num_tokens_B - 1, 0)[:, None, None], 1)[:, 0]
        return jnp.where((num_tokens_B > 0)[:, None], last_BD, before_BD), cache

    none_BD = jnp.zeros((B, config.hidden_size), activation_dtype(params))
    if T <= PREFILL_CHUNK:
        last_BD, cache = chunk(tokens_BT, num_tokens_B, cache, none_BD)
        return unembed(params, last_BD), cache
    padded = jnp.pad(tokens_BT, ((0, 0), (0, -T % PREFILL_CHUNK)))

    def body(i, carry):
        last_BD, cache = carry
        first = i * PREFILL_CHUNK
        tokens = lax.dynamic_slice_in_dim(padded, first, PREFILL_CHUNK, 1)
        return chunk(tokens, jnp.clip(num_tokens_B - first, 0, PREFILL_CHUNK), cache, last_BD)

    chunks = -(-jnp.max(num_tokens_B) // PREFILL_CHUNK)
    last_BD, cache = lax.fori_loop(0, chunks, body, (none_BD, cache))
    return unembed(params, last_BD), cache


def _decode_step(params, config, token_B, cache, impl):
    hidden_BD, cache = _next_hidden(params, config, token_B, cache, None, impl)
    return unembed(params, hidden_BD), cache


def _next_hidden(params, config, token_B, cache, num_tokens_B, impl):
    hidden_BTD, cache = hidden_states(params, config, token_B[:, None], cache, num_tokens_B, impl=impl)
    return hidden_BTD[:, 0], cache


def _recompute(params, config, tokens_BT, num_tokens_B, impl):
    """Logits [B, V] after each row's last token, from the tokens alone."""
    hidden_BTD, _ = hidden_states(params, config, tokens_BT, None, num_tokens_B, impl=impl)
    return unembed(params, jnp.take_along_axis(hidden_BTD, (num_tokens_B - 1)[:, None, None], 1)[:, 0])


def _next_token(params, hidden_BD, state, row_key_B, sampling_B, impl):
    """Each row's next token and its log-probability; rows that just take the likeliest one need no logits, where a kernel serves."""

    def by_logits():
        return _choose(unembed(params, hidden_BD), state, row_key_B, sampling_B, impl)

    if not fuses_head(params, hidden_BD, impl):
        return by_logits()
    return lax.cond(plain(sampling_B), lambda: greedy(params, hidden_BD, impl), by_logits)


def _choose(logits_BV, state, row_key_B, sampling_B, impl):
    token_B = choose(logits_BV, row_key_B, state.position_B, sampling_B, state.seen_BV, impl)
    return token_B, logits_BV[jnp.arange(len(token_B)), token_B] - jax.nn.logsumexp(logits_BV, -1)


def _note(token_B, logprob_B, state, eos_E):
    """Notes each row's next token down; finished rows stay as they are."""
    alive_B = ~state.finished_B
    token_B, logprob_B = jnp.where(alive_B, token_B, 0), jnp.where(alive_B, logprob_B, 0)
    one_B = alive_B.astype(jnp.int32)
    return dataclasses.replace(
        state,
        token_B=token_B,
        position_B=state.position_B + one_B,
        step=state.step + 1,
        tokens_BT=lax.dynamic_update_slice(state.tokens_BT, token_B[:, None], (0, state.step)),
        logprobs_BT=lax.dynamic_update_slice(state.logprobs_BT, logprob_B[:, None], (0, state.step)),
        length_B=state.length_B + one_B,
        finished_B=state.finished_B | (alive_B & jnp.any(token_B[:, None] == eos_E, -1)),
        seen_BV=state.seen_BV.at[jnp.arange(len(token_B)), token_B].max(alive_B),
    )


def _record(logits_BV, state, row_key_B, sampling_B, eos_E, impl):
    return _note(*_choose(logits_BV, state, row_key_B, sampling_B, impl), state, eos_E)


def _continue(params, config, state, row_key_B, sampling_B, eos_E, limit, impl):
    """Decodes until `limit` tokens are chosen or every row has finished: the one loop behind `decode_loop`, `generate` and `stream`."""

    def body(state):
        alive_B = (~state.finished_B).astype(jnp.int32)
        hidden_BD, cache = _next_hidden(params, config, state.token_B, state.cache, alive_B, impl)
        chosen = _next_token(params, hidden_BD, state, row_key_B, sampling_B, impl)
        return _note(*chosen, dataclasses.replace(state, cache=cache), eos_E)

    return lax.while_loop(lambda s: (s.step < limit) & ~jnp.all(s.finished_B), body, state)


def _decode_loop(params, config, logits_BV, cache, row_key_B, sampling_B, eos_E, max_new_tokens, seen_BV, size, impl):
    state = _record(logits_BV, new_state(cache, cache.length_B, seen_BV, size), row_key_B, sampling_B, eos_E, impl)
    return _continue(params, config, state, row_key_B, sampling_B, eos_E, max_new_tokens, impl)


def new_state(cache: KVCache | None, position_B: Any, seen_BV: Any, size: int) -> DecodeState:
    B = len(position_B)
    zeros_B, zeros_BT = np.zeros(B, np.int32), np.zeros((B, size), np.int32)
    return DecodeState(cache, zeros_B, position_B, np.int32(0), zeros_BT, zeros_BT.astype(np.float32), zeros_B, np.zeros(B, bool), seen_BV)


def _jitted(function: Any, *static: str) -> dict[bool, Any]:
    """The function jitted without and with donation of its cache."""
    return {donate: jax.jit(function, static_argnames=static, donate_argnames="cache" if donate else ()) for donate in (False, True)}


PREFILL = _jitted(_prefill, "config", "impl")
_DECODE_STEP = _jitted(_decode_step, "config", "impl")
_DECODE_LOOP = _jitted(_decode_loop, "config", "size", "impl")
CONTINUE = jax.jit(_continue, static_argnames=("config", "impl"), donate_argnames="state")
RECORD = jax.jit(_record, static_argnames="impl")
RECOMPUTE = jax.jit(_recompute, static_argnames=("config", "impl"))


def bucket(size: int) -> int:
    """The power of two, at least 16, that array sizes are rounded up to, so that few programs are compiled."""
    return max(_LEAST_BUCKET, 1 << (size - 1).bit_length())
