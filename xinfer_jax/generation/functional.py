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
    """The result of `decode_loop`: the state of the rows, and their KV cache. T is `output_size`.

    Attributes:
        token_B: int32: the last sampled token of each row.
        key_B: the PRNG keys of the rows.
        sampling_B: the settings of each row.
        limit_B: int32: the most tokens of each answer.
        finished_B: bool: the row has sampled an EOS token, or `stop` has ended it.
        context: the data that the logits processors need.
        tokens_BT: int32: the sampled tokens, the EOS token included. Entries after the end of a row are 0.
        logprobs_BT: float32: the log-probabilities of these tokens before any logits processor.
        alternatives: more arrays, if you pass `logprobs=k` to `decode_loop`. `processed_logprobs_BT` has the
            log-probability of each token after all processors. `id_BTA` and `logprobs_BTA` have the k most
            likely tokens before the processors, and `processed_id_BTA` and `processed_logprobs_BTA` after
            them. With `return_support` there is also `support_BTW`, uint32 [B, T, ceil(V/32)]: if id v was
            allowed, bit `v % 32` of word `v // 32` is set. None: you did not ask for them.
        output_start_B: always None, because the arrays have all sampled tokens.
        unread: the values that a draft head needs next. None: no head drafts.
        cache: the KV cache with all tokens except the last one of each row.
        at_capacity_B: bool: the row ended before its limit, because the cache has no space for more tokens.
        routed_experts: int32 [B, T, L, U]: the experts of the sampled tokens (see `run_model`), if you asked
            for them. Entries are -1 from a row's last token on, because the model has not run on it.
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
    """Appends a prompt, or a part of one, to the KV cache, and returns the next logits.

    Long prompts are prefilled in chunks, and chunks that have only padding are skipped. The function works
    inside your own `jit`. Only the shapes of traced values are checked there, and tokens beyond the capacity
    are dropped and flagged in `overflow_B`.

    Example:
        >>> import jax.numpy as jnp
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> tokens_BT = jnp.array([[5, 6, 7], [8, 9, 0]])  # the second prompt has one token of padding
        >>> cache = xj.init_cache(model.config, rows=2, capacity=64)
        >>> logits_BV, cache = xj.prefill(model.params, model.config, tokens_BT, jnp.array([3, 2]), cache)
        >>> logits_BV.shape, cache.length_B.tolist()
        ((2, 1920), [3, 2])

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        tokens_BT: int32 token ids, padded on the right.
        num_tokens_B: int32 [B]: the number of real tokens in each row.
        cache: the KV cache with the tokens before these, from `init_cache` or an earlier call.
        inputs_BTD: inputs of the first layer in place of embeddings (see `run_model`). None embeds the
            tokens.
        taps: edits of the residual stream (see `run_model`). No tap may read, because only `run_model`
            returns the hidden states that taps read.
        donate: True lets the call reuse the memory of `cache`. Your `cache` is deleted then.
        impl: the implementation of the operations: "xla", or the name of a kernel, for example "triton". None
            chooses the one that suits the device.

    Returns:
        float32 logits [B, V] after each row's last real token, and the cache with the tokens appended.

    Raises:
        InputError: arrays have a wrong shape or type, or ids are outside the vocabulary.
        InputError: the cache belongs to another model, or the tokens exceed its capacity.
        InputError: this machine lacks the `impl`, or it cannot serve the call.
        InputError: taps read, or are invalid (see `run_model`).
        InputError: you differentiate several chunks in reverse mode.
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
    """Appends one token per row to the KV cache, and returns the logits for the next token.

    Use it if you write your own decoding loop. The call does not wait for the device, so it does not check
    ids. A token beyond the capacity is dropped, and flagged in the cache's `overflow_B`.

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        token_B: int32 [B]: the token to append to each row.
        cache: the KV cache with the tokens before these.
        donate: True lets the call reuse the memory of `cache`. Your `cache` is deleted then.
        impl: the implementation of the operations (see `prefill`). None chooses the one that suits the
            device.

    Returns:
        float32 logits [B, V], and the cache with the tokens appended.

    Raises:
        InputError: the tokens have a wrong shape or type, the cache belongs to another model, or `impl` is
            invalid.
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
    """Samples tokens in one loop on the device, until every row has an EOS id or max_tokens.

    Call it after `prefill`. It works inside your own `jit`, for example in the rollout of a trainer.
    `generate` does all of this for you if you do not need your own program. Under your `jit` only the shapes
    of traced values are checked, and tokens beyond the capacity are dropped and flagged in `overflow_B`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> ids = xj.encode_prompt(model, "What is the capital of France?")
        >>> cache = xj.init_cache(model.config, rows=1, capacity=64)
        >>> logits_BV, cache = xj.prefill(
        ...     model.params, model.config, jnp.array([ids]), jnp.array([len(ids)]), cache
        ... )
        >>> eos_ids = jnp.array(model.config.eos_token_ids)
        >>> out = xj.decode_loop(
        ...     model.params, model.config, logits_BV, cache, jax.random.key(0), xj.SamplingConfig(), eos_ids,
        ...     max_tokens=16,
        ... )
        >>> model.tokenizer.decode(out.tokens_BT[0, : out.length_B[0]].tolist())
        'The capital of France is Paris.'

    Args:
        params: the parameter tree of the model.
        config: the config of the model.
        logits_BV: float32 logits after the last token in the cache, from `prefill`.
        cache: the KV cache with the prompt.
        row_key_B: one PRNG key per row, or one key that is split for the rows.
        sampling_B: the sampling settings: a `SamplingConfig` of numbers, or of arrays [B].
        eos_ids: int32 [E]: ids that end a row. The array may be empty.
        max_tokens: the most tokens of each answer, at least 1: a number, or int32 [B]. It is traced, so
            another value compiles nothing if `output_size` stays the same. If you trace the number yourself,
            a value below 1 counts as 1.
        seen_BV: bool: the tokens that the repetition penalty counts as present. None counts only the tokens
            that this call samples.
        history_BS: int32: each row's tokens in order up to the cache's `length_B`, with space for the new
            ones. The settings `no_repeat_ngram_size`, `dry_multiplier` and `bad_words_ids` need it.
        output_size: T of the results, which is also the most tokens. None takes `max_tokens`, which you must
            not trace then.
        logprobs: the number k of alternatives. The result then has `alternatives`: the log-probability of
            each token after the logits processors (`alternatives.processed_logprobs_BT`), and the k most
            likely tokens before and after them. k may be 0. None returns no `alternatives`.
        grammar: an automaton from `xj.grammar.compile_dfa` for all rows, or a list with one (or None) per
            row. You may trace it. A row can end only at a point at which its automaton may end, by one of
            `eos_ids`. If the settings leave no token that the automaton allows, the row ends too, and its
            text does not match.
        processors: logits processors that you wrote: a list of pairs of a `LogitsProcessor` and its
            arguments. The arguments are a pytree of numbers, or of arrays with rows in front. You may trace
            them.
        sample: a function `(key_B, logits_BV, context) -> int32 [B]` that samples the tokens, also in greedy
            rows. It gets the logits after all processors and filters. It must not choose a logit of -inf. Ids
            outside the vocabulary are clipped. None samples by `sampling_B`.
        stop: a function `(state) -> bool [B]` that is called after each token. It says which rows end, in
            addition to rows with an EOS id. None ends no further rows.
        return_routed_experts: True adds `routed_experts` to the result: the experts of each token of a
            mixture-of-experts model.
        return_support: True adds `alternatives.support_BTW` to the result: the sampling mask of each token,
            as `score` takes it, with the ids that processors and filters left. `logprobs` is then at least 0.
        taps: edits of the residual stream (see `run_model`). No tap may read. A tap gets the hidden states of
            one token of each row.
        donate: True lets the call reuse the memory of `cache`. Your `cache` is deleted then.
        impl: the implementation of the operations (see `prefill`). None chooses the one that suits the
            device.

    Returns:
        A `Decoded`. It has the state of the rows (`tokens_BT`, `logprobs_BT` and `length_B`, all three with
        the EOS token, and `finished_B`) and the cache with all tokens except the last one of each row. If the
        cache has no more space for a row, the row ends (`at_capacity_B`). The function does not check whether
        log-probabilities are finite. Check them yourself if weights may be broken or values may overflow.

    Raises:
        InputError: an argument has a wrong shape, type or range.
        InputError: the cache belongs to another model, or the tokens may exceed its capacity.
        InputError: your function returns wrong shapes or dtypes.
        InputError: taps read, or are invalid (see `run_model`).
        InputError: you differentiate through log-probabilities or the cache in reverse mode.
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
