"""The host programs `generate` and `stream`: lists of ids in, lists of ids out, around the jitted doors of
decode.py.

prompts ─ bucket ─► tokens_BT ─ prefill ─► first token of each row ─ decode, a stride at a time ─► ids
"""

import dataclasses
import functools
import math
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

import kernels_pallas

from ..cache.kv_cache import empty_layers, init_cache, truncate
from ..cache.prefix import kept_prefix
from ..cache.quantized import KV_BITS
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..model.attention import attention_impl, check_impl, selected
from ..model.decoder import head
from ..sampling.logprobs import no_alternatives, rows_of_tokens
from ..stats import GenerateStats, Stopwatch, give_back_memory, peak_bytes
from ..weights.params import Params, activation_dtype, cache_dtype, resolve_dtype, tree_bytes
from ..weights.quantized import is_quantized
from .batches import check_room, eos_array, lengths, padded, prompt_context
from .doors import (
    CONTINUE,
    PREFILL,
    RECOMPUTE,
    RECORD,
    Choice,
    DecodeState,
    bucket,
    decode_loop,
    decode_step,
    new_state,
    prefill,
)
from .faults import check_cache, check_chosen
from .options import Call, GenerateOptions, GenerateOutput, checked, chosen_capacity
from .speculation import SPECULATE, Guesser, Guessing, Speculation, look_up

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

_FOLD = jax.jit(
    lambda key_P, j_A: jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, j_A))(key_P).reshape(
        -1
    )
)
# A prompt's logits and cache for each of its answers.
_SHARE = jax.jit(lambda tree, source_B: jax.tree.map(lambda leaf: leaf[source_B], tree))
_SYNC_SECONDS = 0.1  # a stream looks at the device about this often, which costs milliseconds each time …
_MOST_STRIDE = 32  # … but at least every so many tokens


def generate(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions | None = None,
    *,
    key: jax.Array | None = None,
) -> GenerateOutput:
    """Continues every prompt. Rows of a batch may have different lengths; each gives the tokens it would give
    alone.

    Args:
        params, config: the model.
        prompts: token ids, at least one per prompt.
        options: None: `GenerateOptions()`.
        key: one PRNG key (row i then uses `fold_in(key, i)`) or one per prompt; only sampling needs it.

    Raises:
        InputError: a prompt, an option or a key that cannot be served, before anything is traced.
    """
    steps = _steps(checked(params, config, prompts, options, key), sync=False)
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
) -> Generator[list[int | None], bool | None, GenerateOutput]:
    """`generate`, token by token: yields one id per prompt as they come, None for a prompt that has ended.

    Arguments, errors and tokens are those of `generate`; its output is the generator's return value. The host
    looks at the device about every 100 ms, so a fast model brings several tokens at once. `send(True)` ends
    the call after the tokens that were yielded, with the finish_reason "stop"; a generator that is dropped or
    closed costs nothing more.
    """
    call = checked(params, config, prompts, options, key)
    if call.options.best_of not in (None, call.options.n):
        raise InputError(
            f"best_of={call.options.best_of} cannot be streamed: the best are known at the end, use generate"
        )
    return _steps(call, sync=True)


def kernels_used(
    params: Params,
    config: ModelConfig,
    impl: str | None = None,
    rows: int = 1,
    kv_dtype: Any = None,
    capacity: int | None = None,
) -> dict[str, kernels_pallas.Selection]:
    """Which implementation serves each kernel in a `generate` call, and why.

    Rows that are sampled take logits, not `lm_head_argmax`; so does a quantized vocabulary matrix. Layers
    whose sliding window is so much shorter than the capacity that they keep a ring attend by plain jnp: the
    reason says how many.

    Args:
        params, config: the model.
        impl: as in `GenerateOptions`.
        rows: prompts in the call.
        kv_dtype: `GenerateOptions.cache_dtype`.
        capacity: `GenerateOptions.capacity`; None: what `generate` chooses for a short prompt and its default
            number of new tokens (`chosen_capacity` says it for others).

    Raises:
        InputError: the named impl does not serve this model, or this machine lacks it.
    """
    check_impl(impl)
    capacity = capacity or chosen_capacity(config, 1, GenerateOptions.max_new_tokens)
    dtype, leaf = activation_dtype(params), head(params)
    query = jax.ShapeDtypeStruct((rows, 1, config.num_attention_heads, config.head_dim), dtype)
    held = kv_dtype if kv_dtype in KV_BITS else resolve_dtype(kv_dtype or cache_dtype(params))
    layers = jax.eval_shape(lambda: empty_layers(config, rows, capacity, held))
    used = {
        kernel: _by_layer(kernel, impl, query, layers) for kernel in ("prefill_attention", "decode_attention")
    }
    used["argmax"] = selected("argmax", impl, jax.ShapeDtypeStruct((rows, config.vocab_size), np.float32))
    hidden = jax.ShapeDtypeStruct((rows, config.hidden_size), dtype)
    if not is_quantized(leaf["weight"]) and "bias" not in leaf:
        used["lm_head_argmax"] = selected("lm_head_argmax", impl, hidden, leaf["weight"])
    return used


def _by_layer(kernel: str, impl: str | None, query, layers) -> kernels_pallas.Selection:
    """One for all layers: that of those whose keys are in order, with a word about the others where they
    differ.
    """
    of_layer = [attention_impl(kernel, impl, query, keys) for keys in layers]
    common = next((s for s, keys in zip(of_layer, layers, strict=True) if keys.in_order), of_layer[0])
    others = [s for s in of_layer if s.impl != common.impl]
    if not others:
        return common
    some = f"{len(others)} of {len(layers)} layers by {others[0].impl}: {others[0].reason}"
    return common._replace(reason=f"{common.reason}; {some}")


def _steps(call: Call, *, sync: bool):
    """Yields the new ids of each step and returns the output; with `sync` it looks at the device often, else
    once at the end.
    """
    options, new, ending = call.options, call.options.max_new_tokens, call.ending
    rows, choice, state, guessing, seen, stats = _begin(call, sync)
    told = (yield from _ids(seen, 0, ending)) if sync else None
    while not told and (step := int(seen.step)) < new and not seen.finished_B.all():
        stride = (
            min(_MOST_STRIDE, math.ceil(_SYNC_SECONDS / (stats.tpot_seconds or _SYNC_SECONDS)))
            if sync
            else new
        )
        with Stopwatch() as decoding:
            state, guessing = _go_on(call, rows, choice, state, guessing, seen, min(step + stride, new))
            seen = _look(call, state)
        stats.count(decoding)
        stats.decode_seconds += decoding.seconds
        stats.decode_steps = int(seen.step) - 1
        told = (yield from _ids(seen, step, ending)) if sync else None
    check_cache(call, state.cache)
    if told:  # what was chosen ahead of the caller's word does not count
        ended_B = seen.finished_B & (seen.length_B <= told)
        seen = dataclasses.replace(seen, length_B=np.minimum(seen.length_B, told), finished_B=ended_B)
    stats.generated_tokens, stats.peak_bytes = int(seen.length_B.sum()), peak_bytes()
    if guessing is not None:
        stats.passes = np.asarray(guessing.passes_B).tolist()
        guesses_B = np.maximum(guessing.passes_B, 1) * call.guesses
        stats.acceptance = (np.asarray(guessing.accepted_B) / guesses_B).tolist()
    out = _output(seen, state, options, bool(told), stats)
    if options.keep_prefix:
        chosen = [seen.tokens_BT[i, :n].tolist() for i, n in enumerate(seen.length_B)]
        out.prefix = kept_prefix(call.params, call.config, rows, chosen, state.cache)
    return out if options.best_of in (None, options.n) else out.best(options.n, options.best_of)


def _begin(call: Call, sync: bool):
    """Up to the first token of every row: the prompts row by row, how tokens are chosen, the state and what
    the host sees of it.
    """
    params, config, prompts, options = call.params, call.config, call.prompts, call.options
    row_key_B, sampling_B, capacity = call.row_key_B, call.sampling_B, call.capacity
    new, impl, answers = options.max_new_tokens, options.impl, call.answers
    check_room(call, answers * len(prompts))
    with Stopwatch() as setup:
        rows, held_B, cache = prompts, np.zeros(len(prompts), np.int32), None
        if options.prefix is not None:
            held_B = options.prefix.shared(prompts)
            cache = truncate(options.prefix.cache, held_B)
        elif options.use_cache:
            cache = init_cache(config, len(prompts), capacity, options.cache_dtype or cache_dtype(params))
        tokens_BT, num_tokens_B = padded(
            [prompt[held:] for prompt, held in zip(prompts, held_B, strict=True)], capacity
        )
        if answers > 1:
            row_key_B = _FOLD(row_key_B, np.arange(answers))
            source_B = np.repeat(np.arange(len(prompts)), answers)  # which prompt each row continues
            rows, sampling_B = [prompts[i] for i in source_B], jax.tree.map(lambda x: x[source_B], sampling_B)
        choice = Choice(row_key_B, sampling_B, eos_array(call.ending), np.int32(new))
        wanted = sampling_B.no_repeat_ngram_size is not None or options.draft is not None
        context = prompt_context(rows, sampling_B, config.vocab_size, call.room if wanted else None)
        state = new_state(None, lengths(rows), context, bucket(new))
        if options.logprobs or options.logits:
            nothing = no_alternatives(
                len(rows), bucket(new), options.logprobs, config.vocab_size, options.logits
            )
            state = dataclasses.replace(state, alternatives=nothing)
    started = time.perf_counter()
    if sync and cache and answers == 1 and options.draft is None and options.prefix is None:
        _compile_side_by_side(params, config, tokens_BT, state, cache, choice, impl)
    compiling = time.perf_counter() - started
    with Stopwatch() as prefilling:
        if options.use_cache:
            logits_BV, cache = prefill(
                params, config, tokens_BT, num_tokens_B, cache, donate=options.prefix is None, impl=impl
            )
        else:
            logits_BV = RECOMPUTE(params, config, tokens_BT, num_tokens_B, impl)
        guessing = _start_draft(call)
        if answers > 1:
            logits_BV, cache, guessing = _SHARE((logits_BV, cache, guessing), source_B)
        logits_BV.block_until_ready()
    with Stopwatch() as choosing:
        state = dataclasses.replace(RECORD(logits_BV, state, choice, impl), cache=cache)
        seen = _look(call, state)
    stats = GenerateStats(
        len(rows), sum(map(len, prompts)), tree_bytes(params), tree_bytes((cache.k, cache.v)) if cache else 0
    )
    stats.reused_tokens, stats.prefill_seconds = int(held_B.sum()), prefilling.seconds
    stats.ttft_seconds = setup.seconds + prefilling.seconds + choosing.seconds
    stats.compile_seconds = stats.total_seconds = compiling
    stats.count(setup, prefilling, choosing)
    return rows, choice, state, guessing, seen, stats


def _go_on(call: Call, rows, choice: Choice, state, guessing, seen, until: int):
    """The state, and what guesses for it, once every row that runs has `until` tokens (without a cache: one
    more).
    """
    params, config, options = call.params, call.config, call.options
    if options.draft is not None:
        draft_params, guesser = _draft(options)
        who = Guessing(guesser, call.guesses)
        return SPECULATE(
            params, config, draft_params, who, (state, guessing), choice, np.int32(until), options.impl
        )
    if options.use_cache:
        return CONTINUE(params, config, state, choice._replace(limit=np.int32(until)), options.impl), None
    chosen = [row + seen.tokens_BT[i, : seen.length_B[i]].tolist() for i, row in enumerate(rows)]
    logits_BV = RECOMPUTE(params, config, *padded(chosen, config.context_length), options.impl)
    return RECORD(logits_BV, state, choice, options.impl), None


def _start_draft(call: Call) -> Speculation | None:
    """What guesses start from: the draft model has read the prompts."""
    options, prompts = call.options, call.prompts
    if options.draft is None:
        return None
    nothing_B, cache = np.zeros(len(prompts), np.int32), None
    params, config = _draft(options)
    if isinstance(config, ModelConfig):
        capacity = min(call.capacity, config.context_length)  # guesses beyond are dropped
        cache = init_cache(config, len(prompts), capacity, options.cache_dtype or cache_dtype(params))
        cache = prefill(params, config, *padded(prompts, capacity), cache, donate=True, impl=options.impl)[1]
    return Speculation(cache, nothing_B, nothing_B)


def _draft(options: GenerateOptions) -> tuple[Params | None, ModelConfig | Guesser]:
    if options.draft == "lookup" or callable(options.draft):
        return None, look_up if options.draft == "lookup" else options.draft
    return options.draft.params, options.draft.config


def _compile_side_by_side(params, config, tokens_BT, state, cache, choice, impl) -> None:
    """Compiles the three programs of a stream at once, for whoever waits for a first answer."""
    leaves, tree = jax.tree.flatten((params, tokens_BT, state, cache, choice))
    shardings = (
        x.sharding if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1 else None for x in leaves
    )
    _compile(
        config,
        impl,
        tree,
        tuple((x.shape, x.dtype, sharding) for x, sharding in zip(leaves, shardings, strict=True)),
    )


# Once for each kind of call: looking the programs up again takes milliseconds.
@functools.lru_cache(maxsize=256)
def _compile(config, impl, tree, kinds) -> None:
    structs = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in kinds]
    params, tokens_BT, state, cache, choice = jax.tree.unflatten(tree, structs)
    calls = (
        (CONTINUE, params, config, dataclasses.replace(state, cache=cache), choice, impl),
        (RECORD, jax.ShapeDtypeStruct(state.context.seen_BV.shape, np.float32), state, choice, impl),
        (PREFILL[True], params, config, tokens_BT, state.position_B, cache, impl),
    )
    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(lambda call: call[0].lower(*call[1:]).compile(), calls))
    give_back_memory()


def _look(call: Call, state: DecodeState) -> DecodeState:
    """What the host wants of the state, once it is checked; each array costs some microseconds."""
    unseen = dict.fromkeys(("cache", "context", "alternatives", "token_B", "position_B"))
    seen = jax.device_get(dataclasses.replace(state, **unseen))
    check_chosen(call, seen)
    return seen


def _ids(
    seen: DecodeState, first: int, ending: Sequence[int]
) -> Generator[list[int | None], bool | None, int | None]:
    """The ids chosen from step `first` on, a list with one per row for each step. Returns how many steps were
    taken if told to stop.
    """
    for step in range(first, int(seen.step)):
        column = seen.tokens_BT[:, step].tolist()
        ids = [
            t if step < n and t not in ending else None for t, n in zip(column, seen.length_B, strict=True)
        ]
        if any(t is not None for t in ids) and (yield ids):
            return step + 1
    return None


def _output(
    seen: DecodeState, state: DecodeState, options: GenerateOptions, told: bool, stats: GenerateStats
) -> GenerateOutput:
    rows, logprobs_BT = list(zip(seen.length_B, seen.finished_B, strict=True)), seen.logprobs_BT

    def reason(i: int, n: int, done: bool) -> str:
        if done:
            return "stop" if seen.tokens_BT[i, n - 1] in options.stop_token_ids else "eos"
        return "stop" if told else "length"

    out = GenerateOutput(
        tokens=[seen.tokens_BT[i, : n - done].tolist() for i, (n, done) in enumerate(rows)],
        logprobs=[logprobs_BT[i, :n].tolist() for i, (n, _) in enumerate(rows)],
        finish_reason=[reason(i, n, done) for i, (n, done) in enumerate(rows)],
        stats=stats,
    )
    if options.logprobs and state.alternatives:
        out.alternatives = rows_of_tokens(state.alternatives, seen.tokens_BT, logprobs_BT, seen.length_B)
    if options.logits and state.alternatives:
        out.logits = [
            np.asarray(row_TV[:n])
            for row_TV, n in zip(state.alternatives.logits_BTV, seen.length_B, strict=True)
        ]
    return out
