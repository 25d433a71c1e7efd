"""The host programs `generate` and `stream`: lists of ids in, lists of ids out, around the jitted doors of decode.py.

prompts ─ bucket ─► tokens_BT ─ prefill ─► first token of each row ─ decode, a stride at a time ─► ids
"""

import dataclasses
import functools
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

import kernels_pallas

from .attention import check_impl, selected
from .cache import init_cache
from .config import ModelConfig
from .decode import CONTINUE, PREFILL, RECOMPUTE, RECORD, DecodeState, bucket, decode_loop, decode_step, new_state, prefill
from .errors import InputError
from .model import head
from .params import Params, activation_dtype, cache_dtype, tree_bytes
from .quantization import is_quantized
from .sampling import SamplingConfig, per_row, row_keys
from .stats import GenerateStats, Stopwatch, peak_bytes

__all__ = [
    "GenerateOptions",
    "GenerateOutput",
    "GenerateStats",
    "decode_loop",
    "decode_step",
    "generate",
    "kernels_used",
    "prefill",
    "stream",
]

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
    impl: str | None = None  # of attention and argmax: None (what suits the device), "mosaic", "triton" or "xla"


@dataclasses.dataclass
class GenerateOutput:
    """What `generate` returns."""

    tokens: list[list[int]]  # new ids per prompt, EOS not included
    logprobs: list[list[float]]  # the model's log-probability of each (before any processor), with the EOS entry last if there was one
    finish_reason: list[str]  # "eos" or "length"
    stats: GenerateStats


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


def kernels_used(params: Params, config: ModelConfig, impl: str | None = None, rows: int = 1) -> dict[str, kernels_pallas.Selection]:
    """Which implementation serves each kernel in a `generate` call, and why.

    Rows that are sampled take logits, not `lm_head_argmax`; so does a quantized vocabulary matrix.

    Args:
        params, config: the model.
        impl: as in `GenerateOptions`.
        rows: prompts in the call.

    Raises:
        InputError: the named impl does not serve this model, or this machine lacks it.
    """
    check_impl(impl)
    dtype, weight = activation_dtype(params), head(params)["weight"]
    query = jax.ShapeDtypeStruct((rows, 1, config.num_attention_heads, config.head_dim), dtype)
    keys = jax.ShapeDtypeStruct((rows, config.num_key_value_heads, 1, config.head_dim), cache_dtype(params))
    arguments = {
        "prefill_attention": (query, keys, keys),
        "decode_attention": (query, keys, keys),
        "argmax": (jax.ShapeDtypeStruct((rows, config.vocab_size), np.float32),),
        "lm_head_argmax": (jax.ShapeDtypeStruct((rows, config.hidden_size), dtype), weight),
    }
    if is_quantized(weight):
        del arguments["lm_head_argmax"]
    return {kernel: selected(kernel, impl, *args) for kernel, args in arguments.items()}


def _checked(params, config, prompts, options, key):
    """The arguments of `_steps`, or an InputError."""
    options = options or GenerateOptions()
    check_impl(options.impl)
    check_prompts(config, prompts)
    longest, new = max(map(len, prompts)), options.max_new_tokens
    if isinstance(new, bool) or not isinstance(new, int | np.integer) or new < 1:
        raise InputError(f"max_new_tokens must be a whole number of at least 1, got {new!r}")
    for sampling in [options.sampling] if isinstance(options.sampling, SamplingConfig) else options.sampling:
        sampling.validate()
    sampling_B = per_row(options.sampling, len(prompts))
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
    if key is None:  # nothing will be drawn: any keys do, and making these compiles nothing
        key = jax.random.wrap_key_data(np.zeros((len(prompts), 2), np.uint32), impl="threefry2x32")
    row_key_B = row_keys(key, len(prompts))
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
    impl, choice = options.impl, (row_key_B, sampling_B, _eos_array(options.eos_token_ids))
    longest = max(map(len, prompts))
    capacity = options.capacity or min(bucket(longest) + bucket(new), config.context_length)
    with Stopwatch() as setup:
        tokens_BT, num_tokens_B = _padded(prompts, capacity)
        cache = init_cache(config, B, capacity, cache_dtype(params)) if options.use_cache else None
        state = new_state(None, num_tokens_B, _seen(prompts, config.vocab_size), bucket(new))
    started = time.perf_counter()
    if sync and cache:
        _compile_side_by_side(params, config, tokens_BT, state, cache, choice, impl)
    compile_seconds = time.perf_counter() - started
    with Stopwatch() as prefilling:
        if options.use_cache:
            logits_BV, cache = prefill(params, config, tokens_BT, num_tokens_B, cache, donate=True, impl=impl)
        else:
            logits_BV = RECOMPUTE(params, config, tokens_BT, num_tokens_B, impl)
        logits_BV.block_until_ready()
    with Stopwatch() as choosing:
        state = dataclasses.replace(RECORD(logits_BV, state, *choice, impl), cache=cache)
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
                state = CONTINUE(params, config, state, *choice, np.int32(min(step + stride, new)), impl)
            else:
                chosen = [p + seen.tokens_BT[i, : seen.length_B[i]].tolist() for i, p in enumerate(prompts)]
                state = RECORD(RECOMPUTE(params, config, *_padded(chosen, config.context_length), impl), state, *choice, impl)
            seen = _look(state)
        watches.append(decoding)
        stats.decode_seconds += decoding.seconds
        stats.decode_steps = int(seen.step) - 1
        if sync:
            yield from _ids(seen, step, options.eos_token_ids)
    stats.generated_tokens = int(seen.length_B.sum())
    stats.compile_seconds = compile_seconds + sum(w.compile_seconds for w in watches)
    stats.total_seconds = stats.compile_seconds + sum(w.seconds for w in watches)
    stats.peak_bytes = peak_bytes()
    return _output(seen, np.asarray(state.logprobs_BT), stats)


def _compile_side_by_side(params, config, tokens_BT, state, cache, choice, impl) -> None:
    """Compiles the three programs of a stream at once, for whoever waits for a first answer."""
    leaves, tree = jax.tree.flatten((params, tokens_BT, state, cache, choice))
    shardings = (x.sharding if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1 else None for x in leaves)
    _compile(config, impl, tree, tuple((x.shape, x.dtype, sharding) for x, sharding in zip(leaves, shardings, strict=True)))


@functools.lru_cache(maxsize=256)  # once for each kind of call: looking the programs up again takes milliseconds
def _compile(config, impl, tree, kinds) -> None:
    structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in kinds]
    params, tokens_BT, state, cache, choice = jax.tree.unflatten(tree, structs)
    calls = (
        (CONTINUE, params, config, dataclasses.replace(state, cache=cache), *choice, np.int32(0), impl),
        (RECORD, jax.ShapeDtypeStruct(state.seen_BV.shape, np.float32), state, *choice, impl),
        (PREFILL[True], params, config, tokens_BT, state.position_B, cache, impl),
    )
    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(lambda call: call[0].lower(*call[1:]).compile(), calls))


def _look(state: DecodeState) -> DecodeState:
    """The small fields of the state, on the host."""
    small = dataclasses.replace(state, cache=None, seen_BV=None, logprobs_BT=None)
    return jax.device_get(small)


def _ids(seen: DecodeState, first: int, eos_token_ids: Sequence[int]) -> Iterator[list[int | None]]:
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
