"""The functional API: `prefill`, `decode_step`, `decode_loop`. Arrays in, arrays out. All three work inside a
caller's jit. This module checks the arguments, and loop.py has the loops.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..cache.kv_cache import KVCache, describe_fits, expected_fits
from ..checks import array_module, check_array, check_integer, check_range, check_token_ids, is_traced
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..config.unsupported import check_causal
from ..errors import ContextLengthError, InputError, format_value
from ..model.decoder import Inputs, apply_model, head_logits
from ..model.extras import NO_EXTRAS, Extras
from ..modes import in_default_modes
from ..old_names import OldAttribute, renamed_arguments
from ..ops.operation import check_impl, over_any_mesh, without_gradient
from ..sampling.batched_settings import has_all_settings, settings_per_row
from ..sampling.context import init_context
from ..sampling.random_keys import row_keys
from ..sampling.sampling_config import SamplingConfig
from ..weights.params import AnyArray, Params
from .executor import bucket, prefill_chunk_size
from .loop import PREFILL, decode, jit_variants
from .state import DecodeState, new_state, sample_and_append
from .strategies import Plain

if TYPE_CHECKING:
    from ..grammar.automaton import Dfa
    from ..model.taps import Taps
    from ..sampling.caller_processors import LogitsProcessor, SamplingContext


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Decoded(DecodeState):
    """What `decode_loop` returns: the state of the rows, and their KV cache. T: `output_size`.

    Attributes:
        token_B: int32: the last token sampled.
        key_B: PRNG keys.
        sampling_B: settings of each row.
        limit_B: int32: the most tokens of the answer.
        finished_B: bool: the row has sampled an EOS token, or `stop` has ended it.
        context: what the logits processors need.
        tokens_BT: int32: tokens sampled, EOS included; 0 after the end of a row.
        logprobs_BT: float32: their log-probabilities before any logits processor.
        alternatives: `logprobs=k`: `processed_logprobs_BT`, the log-probabilities after all processors; and
            of the k most likely tokens `id_BTA` and `logprobs_BTA` before them, `processed_id_BTA` and
            `processed_logprobs_BTA` after them. With `return_support` also `support_BTW`, uint32
            [B, T, ceil(V/32)]: if id v was left, bit v % 32 of word v // 32 is set. None: not asked for.
        output_start_B: None.
        cache: with all tokens but the last one of each row.
        at_capacity_B: bool: the row ended before its limit, since the cache has no space for more.
        routed_experts: int32 [B, T, L, U], if asked for: experts of the sampled tokens, as in `run_model`; -1
            from a row's last token on, on which the model has not run.
    """

    cache: KVCache = None  # type: ignore[assignment]  # fields before it have defaults
    at_capacity_B: jax.Array = None  # type: ignore[assignment]
    routed_experts: jax.Array | None = None
    routes = OldAttribute("routed_experts")


class _LoopArrays(NamedTuple):
    """The arrays of the rows that `decode_loop` gets in addition to logits and cache."""

    key_B: Any
    sampling_B: SamplingConfig
    eos_E: Any  # ends all rows
    limit: Any  # of all rows, or of each
    seen_BV: Any
    history_BS: Any
    automata: Any  # of grammars; None: there are none
    callers: Any  # `Callers` of the caller's processors and `sample`; None: there are none
    extras: Extras


@in_default_modes
def prefill(  # noqa: PLR0913  a public function
    params: Params,
    config: ModelConfig,
    tokens_BT: AnyArray,
    num_tokens_B: AnyArray,
    cache: KVCache,
    *,
    inputs_BTD: AnyArray | None = None,
    taps: "Taps | None" = None,
    donate: bool = False,
    impl: str | None = None,
) -> tuple[jax.Array, KVCache]:
    """Appends a prompt, or more tokens of one, to the cache. Long prompts are prefilled in chunks; chunks of
    padding are skipped.

    Args:
        params, config: the model.
        tokens_BT: int32 token ids, padded on the right.
        num_tokens_B: int32, how many of each row are real.
        cache: with the tokens before these.
        inputs_BTD, taps: as in `run_model`, which also returns experts and what taps read.
        donate: the call may reuse the cache's memory; the caller's `cache` is deleted.
        impl: of the operations: None (what suits the device), "xla", or a kernel's name, as "triton".

    Returns:
        float32 logits [B, V] after each row's last real token, and the cache.

    Raises:
        InputError: arrays of another shape or type, ids outside the vocabulary, a cache of another model; the
            tokens exceed its capacity (under a caller's jit: they are dropped and flagged in `overflow_B`);
            an impl that this machine lacks, or that cannot serve the call; taps that read, or as in
            `run_model`; reverse mode of several chunks. Of traced values only the shapes are checked.
    """
    check_array("tokens_BT", tokens_BT, np.integer, "rows", "tokens")
    B, T = tokens_BT.shape
    if not T:
        raise InputError("tokens_BT has no tokens: give each row at least one")
    check_array("num_tokens_B", num_tokens_B, np.integer, B)
    _check_cache(config, cache, B)
    check_range("tokens_BT: token id", tokens_BT, 0, config.vocab_size - 1)
    check_range("num_tokens_B:", num_tokens_B, 0, T)
    _check_capacity(impl, cache, num_tokens_B)
    if taps is not None:
        from ..model.taps import check_edits  # optional: taps

        taps = check_edits(taps, config, "prefill")
    append = PREFILL.donating if donate else PREFILL.keeping
    inputs = Inputs(tokens_BT, num_tokens_B, inputs_BTD)
    out = append(params, config, inputs, Extras(taps=taps), cache, prefill_chunk_size(cache), RunConfig(impl))
    return out.hidden, out.cache


@in_default_modes
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

    The call does not wait for the device: a token past the capacity is dropped and flagged in the cache's
    `overflow_B`, and ids are not checked.

    Raises:
        InputError: tokens of another shape or type, a cache of another model, or an invalid impl.
    """
    check_impl(impl)
    check_array("token_B", token_B, np.integer, "rows")
    _check_cache(config, cache, token_B.shape[0])
    step = _STEP.donating if donate else _STEP.keeping
    return step(params, config, token_B, cache, RunConfig(impl))


@renamed_arguments(max_new_tokens="max_tokens", return_routes="return_routed_experts")
@in_default_modes
def decode_loop(  # noqa: PLR0913  a public function
    params: Params,
    config: ModelConfig,
    logits_BV: AnyArray,
    cache: KVCache,
    row_key_B: jax.Array,
    sampling_B: SamplingConfig,
    eos_ids: AnyArray,
    max_tokens: int | AnyArray,
    *,
    seen_BV: AnyArray | None = None,
    history_BS: AnyArray | None = None,
    output_size: int | None = None,
    logprobs: int | None = None,
    grammar: "Dfa | Sequence[Dfa | None] | None" = None,
    processors: "Sequence[tuple[LogitsProcessor, Any]] | None" = None,
    sample: "Callable[[jax.Array, jax.Array, SamplingContext], jax.Array] | None" = None,
    stop: Callable[[DecodeState], jax.Array] | None = None,
    return_routed_experts: bool = False,
    return_support: bool = False,
    taps: "Taps | None" = None,
    donate: bool = False,
    impl: str | None = None,
) -> Decoded:
    """Samples tokens on the device until every row has an EOS id or max_tokens.

    Args:
        params, config: the model.
        logits_BV: float32, of the last token in the cache (from `prefill`).
        cache: with the prompt.
        row_key_B: one PRNG key per row, or one that is split for them.
        sampling_B: settings as numbers or arrays [B].
        eos_ids: int32 [E], may be empty.
        max_tokens: at least 1: a number, or int32 [B]. Traced: others compile nothing if output_size is
            the same. A number below 1 that the caller traces counts as 1.
        seen_BV: bool, tokens that the repetition penalty counts as present; None: only those that this call
            samples.
        history_BS: int32, each row's tokens in order up to the cache's `length_B`, with space for the new
            ones. `no_repeat_ngram_size`, `dry_multiplier` and `bad_words_ids` need it.
        output_size: T of the results, and the most tokens; None: max_tokens, which then must not be
            traced by the caller.
        logprobs: k: the results have `alternatives`: the log-probability of each token after the logits
            processors, and before and after them the k most likely tokens, which may be none. None: they
            have not.
        grammar: from `compile_dfa`, for all rows or one (or None) per row; traced or not. A row ends where
            the automaton may end, by one of `eos_ids`. Settings that leave no token of it end the row as
            well: its text does not match then.
        processors: logits processors of yours, each with the arguments of its rows: a pytree of numbers, or
            of arrays with rows in front, which may be traced.
        sample: f(key_B, logits_BV, context) -> int32 [B] in place of the draw, of greedy rows too, after all
            processors and filters. It must not choose a logit of -inf; ids are clipped to the vocabulary.
        stop: f(state) -> bool [B], called after each token: which rows end beside those with an EOS id.
        return_routed_experts: the results have `routed_experts`, the experts of the tokens of a model with
            mixtures.
        return_support: `alternatives.support_BTW` has the sampling mask of each token, as `score` takes it:
            which ids the processors and filters left. `logprobs` is then at least 0.
        taps, donate, impl: as in `prefill`; a tap gets the hidden states of one token of each row.

    Returns:
        The rows' state (tokens_BT, logprobs_BT, length_B, all three with the EOS token, finished_B) and
        cache, with all tokens but the last one of each row. A row for which the cache has no more space ends
        (`at_capacity_B`). This function does not check that log-probabilities are finite; others show broken
        weights or an overflow.

    Raises:
        InputError: an argument of another shape, type or range, a cache of another model; the tokens may
            exceed the cache's capacity (under a caller's jit: they are dropped and flagged in `overflow_B`);
            a caller's function returns other shapes or dtypes; taps as in `prefill`; reverse mode through
            log-probabilities or cache. Of traced values only the shapes are checked.
    """
    check_array("logits_BV", logits_BV, np.floating, "rows", config.vocab_size)
    B, V = logits_BV.shape
    _check_cache(config, cache, B)
    if isinstance(eos_ids, list | tuple):
        eos_ids = np.array(check_token_ids("eos_ids", eos_ids), np.int32)
    check_array("eos_ids", eos_ids, np.integer, "ids")
    check_range("eos_ids: token id", eos_ids, -1, V - 1)
    if seen_BV is not None:
        check_array("seen_BV", seen_BV, np.bool_, B, V)
    if history_BS is not None:
        check_array("history_BS", history_BS, np.integer, B, "tokens")
        history_BS = history_BS.astype(np.int32)
    size, limit = _size(max_tokens, output_size, B)
    _check_capacity(impl, cache, limit - 1)
    recorded: Any = None
    if return_support or logprobs is not None:
        recorded = check_integer("logprobs", 0 if logprobs is None else logprobs, 0, V), bool(return_support)
    key_B = row_keys(row_key_B, B)
    sampling_B = settings_per_row(sampling_B, B, V)
    if history_BS is None and has_all_settings(sampling_B):
        from ..sampling.used_settings import check_history  # optional: other settings

        check_history(sampling_B)
    automata = None
    if grammar is not None:
        from ..grammar.automaton import automata_of_call  # optional: grammars

        automata = automata_of_call(grammar, B, V, eos_ids)
    if taps is not None:
        from ..model.taps import check_edits  # optional: taps

        taps = check_edits(taps, config, "decode_loop")
    callers = None
    loop = _LOOP.donating if donate else _LOOP.keeping
    if any(given is not None for given in (processors, sample, stop, taps)):
        from ..sampling.caller_processors import callers_of_call, guarded  # optional: functions of callers

        callers = callers_of_call(processors, sample, stop, B)
        loop = guarded(loop, callers, stop, taps)
    seen_BV = array_module(B).zeros((B, V), bool) if seen_BV is None else seen_BV
    eos_E = jnp.asarray(eos_ids, jnp.int32)
    tokens = seen_BV, history_BS
    rows = _LoopArrays(key_B, sampling_B, eos_E, limit, *tokens, automata, callers, Extras(taps=taps))
    run_config = RunConfig(impl, return_routed_experts=return_routed_experts)
    state, cache, at_capacity_B, routed_experts = loop(
        params, Plain(config, stop), logits_BV, cache, rows, bucket(size), recorded, run_config
    )
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    of_tokens = {name: fields[name] for name in ("tokens_BT", "logprobs_BT", "alternatives")}
    cut = jax.tree.map(lambda x_BT: x_BT[:, :size], of_tokens | dict(routed_experts=routed_experts))
    return Decoded(**fields | cut, cache=cache, at_capacity_B=at_capacity_B)


def _size(max_tokens: Any, output_size: Any, rows: int) -> tuple[int, Any]:
    """Returns T of the results, and the limit of new tokens: of all rows or of each, which may be traced."""
    size = None if output_size is None else check_integer("output_size", output_size, 1)
    if is_traced(max_tokens):
        if size is None:
            raise InputError(
                "decode_loop with a traced max_tokens needs output_size, the static size of its results"
            )
        has_shape = max_tokens.shape in ((), (rows,))
        if not has_shape or not jnp.issubdtype(max_tokens.dtype, np.integer):
            what = f"a whole number of at least 1, or one for each of {rows} rows"
            raise InputError(f"max_tokens must be {what}, got {max_tokens!r}")
        return size, jnp.clip(max_tokens.astype(jnp.int32), 1, size)
    if np.ndim(max_tokens):
        check_array("max_tokens", max_tokens, np.integer, rows)
        limit_B = np.asarray(max_tokens, np.int32)
        check_range("max_tokens:", limit_B, 1, 2**31 - 1)
        size = size or int(limit_B.max())
        return size, np.minimum(limit_B, size)
    most = check_integer("max_tokens", max_tokens, 1)
    return size or most, np.int32(min(most, size or most))


def _check_cache(config: ModelConfig, cache: KVCache, rows: int) -> None:
    """Raises InputError for a cache of another number of rows or of another model, judged by its shapes."""
    if not isinstance(cache, KVCache):
        raise InputError(f"cache must come from init_cache, got {format_value(cache)}")
    check_causal(config, "a KV cache")
    length_B = cache.length_B
    if isinstance(length_B, jax.Array) and not is_traced(length_B) and length_B.is_deleted():
        raise InputError("the cache was donated to an earlier call: use the one that it returned")
    if length_B.shape[0] != rows:
        raise InputError(f"a cache of {length_B.shape[0]} rows for {rows}: init_cache takes their number")
    if (actual := cache.fits) != (wanted := expected_fits(config)):
        raise InputError(
            f"a cache of {describe_fits(actual)} for a model of {describe_fits(wanted)}: init_cache takes the"
            " model's config"
        )


def _check_capacity(impl: str | None, cache: KVCache, more_B: Any) -> None:
    """Raises InputError for an invalid impl, or if more_B further tokens exceed the capacity, as far as it is
    known.
    """
    check_impl(impl)
    if is_traced(cache.length_B) or is_traced(more_B):
        return
    need = int(np.max(np.asarray(cache.length_B) + np.asarray(more_B)))
    if need > cache.capacity:
        raise ContextLengthError(
            f"{need} tokens exceed the cache's capacity {cache.capacity}: raise capacity or shorten the"
            " prompt"
        )


@over_any_mesh
def _decode_step(params, config, token_B, cache, run_config):
    out = apply_model(params, config, Inputs(token_B[:, None]), cache, NO_EXTRAS, run_config)
    return head_logits(params, config, out.hidden[:, 0]), out.cache


@over_any_mesh
def _decode_loop(params, plain, logits_BV, cache, rows: _LoopArrays, size, recorded, run_config):
    B, V = logits_BV.shape
    eos_BE = jnp.broadcast_to(rows.eos_E, (B, len(rows.eos_E)))
    # The last token is not appended.
    limit_B = jnp.minimum(jnp.broadcast_to(rows.limit, (B,)), cache.capacity - cache.length_B + 1)
    tokens = rows.seen_BV, rows.history_BS
    context = init_context(rows.sampling_B, cache.length_B, eos_BE, *tokens, automata=rows.automata)
    if rows.callers is not None:
        context = dataclasses.replace(context, callers=rows.callers.start(context, rows.key_B))
    state = new_state(rows.key_B, rows.sampling_B, limit_B, context, size)
    if recorded is not None:
        from ..sampling.logprobs import empty_alternatives  # optional: alternatives

        count, has_support = recorded
        alternatives = empty_alternatives(B, size, count, V, support=has_support)
        state = dataclasses.replace(state, alternatives=alternatives)
    state = plain.ended(sample_and_append(logits_BV, state, run_config))
    routed_experts = []
    if run_config.return_routed_experts:
        from ..model.routes import free_routes  # optional: routes

        routed_experts = [free_routes(plain.config, (B, size))]
    state, cache, *routed_experts = decode(
        plain, (params, rows.extras), (state, cache, *routed_experts), size, run_config
    )
    at_capacity_B = (limit_B < rows.limit) & ~state.finished_B & (state.length_B >= limit_B)
    results = state, cache, at_capacity_B, routed_experts[0] if routed_experts else None
    remedy = "compute the log-probabilities of its tokens by score"
    return without_gradient(results, "decode_loop", remedy)


_STEP = jit_variants(_decode_step, "config", "run_config")
_LOOP = jit_variants(_decode_loop, "plain", "size", "recorded", "run_config")
