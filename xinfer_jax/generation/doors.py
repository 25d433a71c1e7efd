"""The jitted doors: `prefill`, `decode_step`, `decode_loop`. Arrays in, arrays out, usable inside a caller's
own jit. What a caller gives is checked here; loop.py does the work.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cache.kv_cache import KVCache
from ..checks import array_of, token_ids, traced, whole, within
from ..config.model_config import ModelConfig
from ..errors import InputError, shown
from ..model.attention import check_impl
from ..model.decoder import hidden_states, unembed
from ..sampling.choice import row_keys
from ..sampling.context import start
from ..sampling.settings import SamplingConfig, is_full, per_row
from ..weights.params import AnyArray, Params
from .loop import READ, advance, bucket, power_of_two, program
from .state import DecodeState, choose_and_note, new_state

# Tokens of a row that pass through the model at a time: few keep scores and activations small. On a GPU all
# rows together have more: 512 queries of the 0.5B shape fill 56 of an H200's 132 multiprocessors.
_CHUNK = 512
_CHUNK_OF_GPU = 2048


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Decoded(DecodeState):
    """What `decode_loop` gives: the rows' state, and their keys and values."""

    cache: KVCache | None = None  # holds everything but each row's last token


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
    """Appends a prompt, or what follows one, to the cache; long ones in chunks, without those of padding.

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
    _check_capacity(impl, cache, num_tokens_B)
    read = READ.donating if donate else READ.keeping
    return read(params, config, tokens_BT, num_tokens_B, cache, impl, prompt_chunk(cache))


def decode_step(
    params: Params,
    config: ModelConfig,
    token_B: AnyArray,
    cache: KVCache,
    *,
    donate: bool = False,
    impl: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """Appends one token per row: float32 logits [B, V] and the cache; `donate` and `impl` as in `prefill`.

    Nothing waits for the device here: a token past the capacity is dropped and flagged in the cache's
    `overflow_B`, and ids are not looked at.

    Raises:
        InputError: tokens of another shape or type, a cache of another model, or such an impl.
    """
    check_impl(impl)
    array_of("token_B", token_B, np.integer, "rows")
    _check_cache(config, cache, len(token_B))
    step = _STEP.donating if donate else _STEP.keeping
    return step(params, config, token_B, cache, impl)


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
) -> Decoded:
    """Chooses tokens on the device until every row has met an EOS id or has max_new_tokens.

    Args:
        params, config: the model.
        logits_BV: float32, of the last token in the cache (from `prefill`).
        cache: holds the prompt.
        row_key_B: one PRNG key per row.
        sampling_B: settings as numbers or arrays [B].
        eos_ids: int32 [E], may be empty.
        max_new_tokens: at least 1. Traced: another number compiles nothing where output_size stays; one below
            1, traced by the caller, counts as 1.
        seen_BV: bool, tokens that the repetition penalty counts as present; None: only those that this call
            chooses.
        history_BS: int32, each row's tokens in order up to the cache's `length_B`, with room for those to
            come: `no_repeat_ngram_size` and `bad_words_ids` look at them.
        output_size: T of the results, and the most tokens; None: max_new_tokens, which then must not be
            traced by the caller.
        donate, impl: as in `prefill`.

    Returns:
        The rows' state (tokens_BT, logprobs_BT, length_B, all three with the EOS token, finished_B) and
        cache, which holds every token but the last one chosen. A log-probability that is not finite says that
        the model's numbers are broken: nobody looks at it here, nor at the cache's `overflow_B`.

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
    _check_capacity(impl, cache, limit - 1)
    key_B = row_keys(row_key_B, B)
    sampling_B = per_row(sampling_B, B, V)
    if history_BS is None and is_full(sampling_B):
        sizes_B = sampling_B.no_repeat_ngram_size
        if traced(sizes_B) or np.any(np.asarray(sizes_B)):
            raise InputError("no_repeat_ngram_size needs history_BS, the tokens that each row already holds")
        words_BWL = sampling_B.bad_words_ids
        if traced(words_BWL) or np.any(np.asarray(words_BWL)[..., :-1] >= 0):
            raise InputError("bad_words_ids of several tokens need history_BS, the tokens that rows hold")
    loop = _LOOP.donating if donate else _LOOP.keeping
    state, cache = loop(
        params, config, logits_BV, cache, key_B, sampling_B, jnp.asarray(eos_ids, jnp.int32), limit,
        np.zeros((B, V), bool) if seen_BV is None else seen_BV, history_BS, bucket(size), impl,
    )  # fmt: skip
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    cut = dict(tokens_BT=state.tokens_BT[:, :size], logprobs_BT=state.logprobs_BT[:, :size])
    return Decoded(**fields | cut, cache=cache)


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
        return size, jnp.clip(max_new_tokens.astype(jnp.int32), 1, size)
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
    if (held := cache.fits) != wanted:
        raise InputError(
            f"a cache of {held[0]} layers, {held[1]} key heads of width {held[2]} for a model of {wanted[0]},"
            f" {wanted[1]} and {wanted[2]}: init_cache takes the model's config"
        )


def _check_capacity(impl: str | None, cache: KVCache, more_B: Any) -> None:
    """Raises InputError where impl or more_B further tokens cannot be served, as far as that is known."""
    check_impl(impl)
    if traced(cache.length_B) or traced(more_B):
        return
    need = int(np.max(np.asarray(cache.length_B) + np.asarray(more_B)))
    if need > cache.capacity:
        raise InputError(
            f"{need} tokens exceed the cache's capacity {cache.capacity}: raise capacity or shorten the"
            " prompt"
        )


def prompt_chunk(cache: KVCache) -> int:
    """Tokens of a prompt to read at a time: by the device where it is known, at most what the cache takes."""
    length_B = cache.length_B
    platform = jax.default_backend()  # of shapes
    if traced(length_B):
        platform = "unknown"
    elif isinstance(length_B, jax.Array):
        platform = next(iter(length_B.devices())).platform
    on_gpu = platform == "gpu"
    chunk = max(_CHUNK, on_gpu * _CHUNK_OF_GPU // power_of_two(len(cache.length_B)))
    return min(chunk, cache.most_at_once)


def _decode_step(params, config, token_B, cache, impl):
    hidden_BTD, cache = hidden_states(params, config, token_B[:, None], cache, impl=impl)
    return unembed(params, config, hidden_BTD[:, 0]), cache


def _decode_loop(  # noqa: PLR0913  what `decode_loop` was given, checked
    params, config, logits_BV, cache, key_B, sampling_B, eos_E, limit, seen_BV, history_BS, size, impl
):
    B = len(logits_BV)
    eos_BE = jnp.broadcast_to(eos_E, (B, len(eos_E)))
    limit_B = jnp.full(B, limit)
    context = start(sampling_B, cache.length_B, eos_BE, seen_BV, history_BS)
    state = new_state(key_B, sampling_B, limit_B, context, size)
    return advance(params, config, choose_and_note(logits_BV, state, impl), cache, size, impl)


_STEP = program(_decode_step)
_LOOP = program(_decode_loop, "size")
