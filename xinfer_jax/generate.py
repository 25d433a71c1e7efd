"""Generation: the jitted doors `prefill`, `decode_step` and `decode_loop`, and the host programs `generate` and `stream` around them.

prompts ─ bucket ─► tokens_BT ─ prefill ─► (logits_BV, cache) ─ choose ─► while_loop: write K/V → attend → logits → choose
"""

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .cache import KVCache, init_cache
from .config import ModelConfig
from .errors import InputError
from .model import hidden_states, unembed
from .params import Params, tree_bytes
from .sampling import SamplingConfig, choose, per_row, row_keys
from .stats import GenerateStats, Stopwatch, peak_bytes

PREFILL_CHUNK = 512  # longer prompts pass through the model this many tokens at a time
_LEAST_BUCKET = 16
_SYNC_SECONDS = 0.05  # a stream looks at the device about this often …
_MOST_STRIDE = 32  # … but at least every so many tokens


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """What `generate` and `stream` do beyond the prompts."""

    max_new_tokens: int = 128
    sampling: SamplingConfig | Sequence[SamplingConfig] = SamplingConfig()  # for all prompts, or one per prompt
    eos_token_ids: Sequence[int] = ()  # any of them ends a row; none: never stop early
    capacity: int | None = None  # of the cache, in tokens; None: what the call needs, rounded up
    use_cache: bool = True  # False: recompute the whole sequence for every token, to compare


@dataclasses.dataclass
class GenerateOutput:
    tokens: list[list[int]]  # new ids per prompt, EOS not included
    logprobs: list[list[float]]  # the model's log-probability of each (before any processor), with the EOS entry last if there was one
    finish_reason: list[str]  # "eos" or "length"
    stats: GenerateStats


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


# --- the doors: arrays in, arrays out, usable inside a caller's jit --------------------------------------------------------


def prefill(
    params: Params, config: ModelConfig, tokens_BT: jax.Array, num_tokens_B: jax.Array, cache: KVCache, *, donate: bool = False
) -> tuple[jax.Array, KVCache]:
    """Appends a prompt, or what follows one, to the cache; long ones in chunks of `PREFILL_CHUNK`, skipping chunks that are all padding.

    Args:
        params, config: the model.
        tokens_BT: int32 token ids, padded on the right.
        num_tokens_B: int32, how many of each row are real.
        cache: holds what comes before.
        donate: lets the call reuse the cache's memory; the caller's `cache` is gone afterwards.

    Returns:
        float32 logits [B, V] after each row's last real token, and the cache.
    """
    return _PREFILL[donate](params, config, tokens_BT, num_tokens_B, cache)


def decode_step(
    params: Params, config: ModelConfig, token_B: jax.Array, cache: KVCache, *, donate: bool = False
) -> tuple[jax.Array, KVCache]:
    """Appends one token per row. Returns float32 logits [B, V] and the cache; `donate` as in `prefill`."""
    return _DECODE_STEP[donate](params, config, token_B, cache)


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
        output_size: T of the results; None: max_new_tokens, which then must not be traced by the caller.
        donate: as in `prefill`.

    Returns:
        The state: tokens_BT, logprobs_BT, length_B (all three with the EOS token), finished_B, and cache, which holds every
        token but the last one chosen.
    """
    B = logits_BV.shape[0]
    if output_size is None and isinstance(max_new_tokens, jax.core.Tracer):
        raise InputError("decode_loop with a traced max_new_tokens needs output_size, the static size of its results")
    size = int(max_new_tokens) if output_size is None else output_size
    limit = np.int32(max_new_tokens) if output_size is None else max_new_tokens
    seen_BV = np.zeros(logits_BV.shape, bool) if seen_BV is None else seen_BV
    row_key_B, sampling_B, eos_E = row_keys(row_key_B, B), per_row(sampling_B, B), jnp.asarray(eos_ids, jnp.int32)
    state = _DECODE_LOOP[donate](params, config, logits_BV, cache, row_key_B, sampling_B, eos_E, limit, seen_BV, bucket(size))
    return dataclasses.replace(state, tokens_BT=state.tokens_BT[:, :size], logprobs_BT=state.logprobs_BT[:, :size])


def _prefill(params, config, tokens_BT, num_tokens_B, cache):
    B, T = tokens_BT.shape

    def chunk(tokens_BT, num_tokens_B, cache, before_BD):
        """The chunk's last real hidden state of each row, or the one before where the row has no token in it."""
        hidden_BTD, cache = hidden_states(params, config, tokens_BT, cache, num_tokens_B)
        last_BD = jnp.take_along_axis(hidden_BTD, jnp.maximum(num_tokens_B - 1, 0)[:, None, None], 1)[:, 0]
        return jnp.where((num_tokens_B > 0)[:, None], last_BD, before_BD), cache

    none_BD = jnp.zeros((B, config.hidden_size), params["embed"]["weight"].dtype)
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


def _decode_step(params, config, token_B, cache, num_tokens_B=None):
    hidden_BTD, cache = hidden_states(params, config, token_B[:, None], cache, num_tokens_B)
    return unembed(params, hidden_BTD[:, 0]), cache


def _recompute(params, config, tokens_BT, num_tokens_B):
    """Logits [B, V] after each row's last token, from the tokens alone."""
    hidden_BTD, _ = hidden_states(params, config, tokens_BT, None, num_tokens_B)
    return unembed(params, jnp.take_along_axis(hidden_BTD, (num_tokens_B - 1)[:, None, None], 1)[:, 0])


def _record(logits_BV, state, row_key_B, sampling_B, eos_E):
    """Chooses each row's next token and notes it down; finished rows stay as they are."""
    alive_B = ~state.finished_B
    token_B = jnp.where(alive_B, choose(logits_BV, row_key_B, state.position_B, sampling_B, state.seen_BV), 0)
    rows = jnp.arange(len(token_B))
    logprob_B = jnp.where(alive_B, logits_BV[rows, token_B] - jax.nn.logsumexp(logits_BV, -1), 0)
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
        seen_BV=state.seen_BV.at[rows, token_B].max(alive_B),
    )


def _continue(params, config, state, row_key_B, sampling_B, eos_E, limit):
    """Decodes until `limit` tokens are chosen or every row has finished: the one loop behind `decode_loop`, `generate` and `stream`."""

    def body(state):
        logits_BV, cache = _decode_step(params, config, state.token_B, state.cache, (~state.finished_B).astype(jnp.int32))
        return _record(logits_BV, dataclasses.replace(state, cache=cache), row_key_B, sampling_B, eos_E)

    return lax.while_loop(lambda s: (s.step < limit) & ~jnp.all(s.finished_B), body, state)


def _decode_loop(params, config, logits_BV, cache, row_key_B, sampling_B, eos_E, max_new_tokens, seen_BV, size):
    state = _record(logits_BV, _new_state(cache, cache.length_B, seen_BV, size), row_key_B, sampling_B, eos_E)
    return _continue(params, config, state, row_key_B, sampling_B, eos_E, max_new_tokens)


def _new_state(cache: KVCache | None, position_B: Any, seen_BV: Any, size: int) -> DecodeState:
    B = len(position_B)
    zeros_B, zeros_BT = np.zeros(B, np.int32), np.zeros((B, size), np.int32)
    return DecodeState(cache, zeros_B, position_B, np.int32(0), zeros_BT, zeros_BT.astype(np.float32), zeros_B, np.zeros(B, bool), seen_BV)


def _jitted(function: Any, *static: str) -> dict[bool, Any]:
    """The function jitted without and with donation of its cache."""
    return {donate: jax.jit(function, static_argnames=static, donate_argnames="cache" if donate else ()) for donate in (False, True)}


_PREFILL = _jitted(_prefill, "config")
_DECODE_STEP = _jitted(_decode_step, "config")
_DECODE_LOOP = _jitted(_decode_loop, "config", "size")
_CONTINUE = jax.jit(_continue, static_argnames="config", donate_argnames="state")
_RECORD = jax.jit(_record)
_RECOMPUTE = jax.jit(_recompute, static_argnames="config")


# --- host programs: lists of ids in, lists of ids out ------------------------------------------------------------------------


def generate(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions | None = None,
    *,
    key: jax.Array | None = None,
) -> GenerateOutput:
    """Continues every prompt. Rows of a batch may have different lengths; each gives the tokens it would give alone.

    Args:
        params, config: the model.
        prompts: token ids, at least one per prompt.
        options: None: `GenerateOptions()`.
        key: one PRNG key (row i then uses `fold_in(key, i)`) or one per prompt; only sampling needs it.

    Raises:
        InputError: a prompt, an option or a key that cannot be served, before anything is traced.
    """
    steps = _steps(*_checked(params, config, prompts, options, key), sync=False)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def stream(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions | None = None,
    *,
    key: jax.Array | None = None,
) -> Generator[list[int | None], None, GenerateOutput]:
    """`generate`, token by token: yields one id per prompt as they come, None for a prompt that has ended.

    Arguments, errors and tokens are those of `generate`; its output is the generator's return value. The host looks at the
    device about every 50 ms, so a fast model brings several tokens at once.
    """
    return _steps(*_checked(params, config, prompts, options, key), sync=True)


def bucket(size: int) -> int:
    """The power of two, at least 16, that array sizes are rounded up to, so that few programs are compiled."""
    return max(_LEAST_BUCKET, 1 << (size - 1).bit_length())


def _checked(params, config, prompts, options, key):
    """The arguments of `_steps`, or an InputError."""
    options = options or GenerateOptions()
    check_prompts(config, prompts)
    longest, new = max(map(len, prompts)), options.max_new_tokens
    if isinstance(new, bool) or not isinstance(new, int | np.integer) or new < 1:
        raise InputError(f"max_new_tokens must be a whole number of at least 1, got {new!r}")
    sampling_B = per_row(options.sampling, len(prompts)).validate()
    for limit, name, remedy in (
        (config.context_length, "the model's context limit", "shorten the prompt or generate fewer tokens"),
        (options.capacity, "the capacity", "raise capacity or shorten the prompt"),
    ):
        if limit is not None and longest + new > limit:
            dynamic = " (rope type 'dynamic' changes its frequencies there)" if config.rope.rope_type == "dynamic" else ""
            raise InputError(f"prompt of {longest} tokens + max_new_tokens {new} exceeds {name} {limit}{dynamic}: {remedy}")
    for token in options.eos_token_ids:
        if not 0 <= token < config.vocab_size:
            raise InputError(f"EOS token id {token} is outside the vocabulary of {config.vocab_size}")
    if key is None and np.any(sampling_B.temperature > 0):
        raise InputError("sampling needs a PRNG key: give key=jax.random.key(seed), or temperature 0")
    row_key_B = row_keys(jax.random.key(0) if key is None else key, len(prompts))
    return params, config, [list(map(int, p)) for p in prompts], options, sampling_B, row_key_B


def check_prompts(config: ModelConfig, prompts: Sequence[Sequence[int]]) -> None:
    """Raises InputError unless prompts are non-empty lists of ids inside the vocabulary."""
    if not len(prompts):
        raise InputError("no prompts: give at least one list of token ids")
    for i, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"prompt {i} must be a non-empty list of token ids, got {prompt!r}")
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            bad = ids[(ids < 0) | (ids >= config.vocab_size)][0]
            raise InputError(f"prompt {i} holds token id {bad}, outside the vocabulary of {config.vocab_size}")


def _steps(params, config, prompts, options, sampling_B, row_key_B, *, sync):
    """Yields the new ids of each step and returns the output; with `sync` it looks at the device often, else once at the end."""
    B, new = len(prompts), int(options.max_new_tokens)
    choice = (row_key_B, sampling_B, _eos_array(options.eos_token_ids))
    longest = max(map(len, prompts))
    capacity = options.capacity or min(bucket(longest) + bucket(new), config.context_length)
    with Stopwatch() as setup:
        tokens_BT, num_tokens_B = _padded(prompts, capacity)
        cache = init_cache(config, B, capacity, params["embed"]["weight"].dtype) if options.use_cache else None
        state = _new_state(None, num_tokens_B, _seen(prompts, config.vocab_size), bucket(new))
    with Stopwatch() as prefilling:
        if options.use_cache:
            logits_BV, cache = prefill(params, config, tokens_BT, num_tokens_B, cache, donate=True)
        else:
            logits_BV = _RECOMPUTE(params, config, tokens_BT, num_tokens_B)
        logits_BV.block_until_ready()
    with Stopwatch() as choosing:
        state = dataclasses.replace(_RECORD(logits_BV, state, *choice), cache=cache)
        seen = _look(state)
    cache_bytes = tree_bytes((cache.k, cache.v)) if cache else 0
    del cache, logits_BV
    stats = GenerateStats(B, sum(map(len, prompts)), tree_bytes(params), cache_bytes, prefill_seconds=prefilling.seconds)
    stats.ttft_seconds = setup.seconds + prefilling.seconds + choosing.seconds
    watches = [setup, prefilling, choosing]
    if sync:
        yield from _ids(seen, 0, options.eos_token_ids)
    while (step := int(seen.step)) < new and not seen.finished_B.all():
        stride = min(_MOST_STRIDE, max(1, round(_SYNC_SECONDS / (stats.tpot_seconds or _SYNC_SECONDS)))) if sync else new
        with Stopwatch() as decoding:
            if options.use_cache:
                state = _CONTINUE(params, config, state, *choice, np.int32(min(step + stride, new)))
            else:
                chosen = [p + seen.tokens_BT[i, : seen.length_B[i]].tolist() for i, p in enumerate(prompts)]
                state = _RECORD(_RECOMPUTE(params, config, *_padded(chosen, config.context_length)), state, *choice)
            seen = _look(state)
        watches.append(decoding)
        stats.decode_seconds += decoding.seconds
        stats.decode_steps = int(seen.step) - 1
        if sync:
            yield from _ids(seen, step, options.eos_token_ids)
    stats.generated_tokens = int(seen.length_B.sum())
    stats.compile_seconds = sum(w.compile_seconds for w in watches)
    stats.total_seconds = sum(w.compile_seconds + w.seconds for w in watches)
    stats.peak_bytes = peak_bytes()
    return _output(seen, np.asarray(state.logprobs_BT), stats)


def _look(state: DecodeState) -> DecodeState:
    """The small fields of the state, on the host."""
    small = dataclasses.replace(state, cache=None, seen_BV=None, logprobs_BT=None)
    return jax.device_get(small)


def _ids(seen: DecodeState, first: int, eos_token_ids: Sequence[int]) -> Generator[list[int | None]]:
    """The ids chosen from step `first` on, a list with one per row for each step."""
    for step in range(first, int(seen.step)):
        column = seen.tokens_BT[:, step].tolist()
        ids = [t if step < n and t not in eos_token_ids else None for t, n in zip(column, seen.length_B, strict=True)]
        if any(t is not None for t in ids):
            yield ids


def _output(seen: DecodeState, logprobs_BT: np.ndarray, stats: GenerateStats) -> GenerateOutput:
    rows = list(zip(seen.length_B, seen.finished_B, strict=True))
    return GenerateOutput(
        tokens=[seen.tokens_BT[i, : n - done].tolist() for i, (n, done) in enumerate(rows)],
        logprobs=[logprobs_BT[i, :n].tolist() for i, (n, _) in enumerate(rows)],
        finish_reason=["eos" if done else "length" for _, done in rows],
        stats=stats,
    )


def _padded(prompts: Sequence[Sequence[int]], most: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, T] padded on the right to a bucket (or to `most`, if that is less), and their numbers [B]."""
    num_tokens_B = np.array([len(p) for p in prompts], np.int32)
    tokens_BT = np.zeros((len(prompts), min(bucket(int(num_tokens_B.max())), most)), np.int32)
    for row, prompt in zip(tokens_BT, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens_BT, num_tokens_B


def _seen(prompts: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    seen_BV = np.zeros((len(prompts), vocab_size), bool)
    for row, prompt in zip(seen_BV, prompts, strict=True):
        row[prompt] = True
    return seen_BV


def _eos_array(eos_token_ids: Sequence[int]) -> np.ndarray:
    """Padded to a multiple of 4 with an id that no token has, so that another number of them compiles nothing."""
    ids = list(eos_token_ids)
    return np.array(ids + [-1] * (-len(ids) % 4 if ids else 4), np.int32)
