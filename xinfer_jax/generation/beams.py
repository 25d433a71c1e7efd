"""Beam search and beam sampling: one loop on the device that follows `num_beams` continuations of each prompt
side by side.

prompts ─ prefill, once each ─► W beams a prompt ─► while_loop: score → pick C candidates → set aside what
ended → write K/V → attend

Letters beyond the usual ones: W beams (the width), C candidates of a step, R = B · W rows of the model.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..brief import counted
from ..cache.kv_cache import KVCache, init_cache, reorder, reorder_tail
from ..checks import in_order, numbers, whole
from ..config.model_config import ModelConfig
from ..errors import InputError, shown
from ..sampling.choice import DRAW_BEAMS, Context, SamplingConfig, draw_key, gumbel, narrow, plain, process
from ..stats import GenerateStats, Stopwatch, peak_bytes
from ..weights.params import Params, cache_dtype as default_cache_dtype, tree_bytes
from .batches import check_room, lengths, padded, prompt_context
from .doors import Choice, bucket, decode_step, prefill
from .faults import check_cache
from .options import Call, GenerateOptions, checked

_MOST_DIGITS = 30  # of a length to the power of the penalty: float32 has 38, and sums take some


@dataclasses.dataclass(repr=False)
class BeamOutput:
    """What `beam_search` returns: the best first; one list per prompt where it was given several.

    Attributes:
        sequences: new ids, EOS not included.
        scores: sum of log-probabilities / (new tokens, EOS included) ** length_penalty.
        stats: what the call cost. Rows are prompts, tokens those of each prompt's best sequence, none of
            which is known before the end.
    """

    sequences: list[list[int]] | list[list[list[int]]]
    scores: list[float] | list[list[float]]
    stats: GenerateStats = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        several = bool(self.scores) and isinstance(self.scores[0], list)
        prompts = [f"{len(self.scores)} prompts"] if several else []
        sequences = list(itertools.chain(*self.sequences)) if several else self.sequences
        return f"BeamOutput({', '.join([*prompts, counted(sequences, 'sequence')])})"


class _Request(NamedTuple):
    """What is searched for, traced."""

    choice: Choice  # of each prompt
    context: Context  # what the processors know of the prompts
    prompt_B: Any  # int32: tokens of each prompt
    length_penalty: Any  # float32


class _Search(NamedTuple):
    """What the program is compiled for."""

    beams: int
    early_stopping: bool | str
    size: int  # most tokens of a sequence
    moving: int  # most positions in which the beams of a prompt may differ


class _Found(NamedTuple):
    """Of the fields of `_State` those that the host looks at."""

    ended_BWT: Any
    length_BW: Any
    final_BW: Any
    score_BW: Any
    step: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """What the loop carries: the beams that run, and the best sequences that ended, which wait beside
    them.
    """

    cache: KVCache  # R rows; holds everything but the last token, and its rows still await `parent_R`
    step: jax.Array  # int32: tokens chosen so far
    token_R: jax.Array  # int32: the last token of each beam
    parent_R: jax.Array  # int32: the row that each beam continues
    tokens_BWT: jax.Array  # int32: tokens of the running beams
    score_BW: jax.Array  # float32: sums of their log-probabilities, best first; -inf: no such beam
    ended_BWT: jax.Array  # int32: tokens of the sequences that ended, EOS included
    length_BW: jax.Array  # int32: how many of them
    final_BW: jax.Array  # float32: their scores, best first; -inf: none yet
    open_B: jax.Array  # bool: the prompt's result may still improve


def beam_search(  # noqa: PLR0913  a door
    params: Params,
    config: ModelConfig,
    ids: Sequence[int] | Sequence[Sequence[int]],
    *,
    num_beams: int = 4,
    num_return_sequences: int | None = None,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    max_new_tokens: int = 32,
    eos_token_ids: Sequence[int] | None = None,
    sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
    key: jax.Array | None = None,
    capacity: int | None = None,
    impl: str | None = None,
    cache_dtype: str | None = None,
) -> BeamOutput:
    """The likeliest continuations that a search `num_beams` wide finds; those of transformers 5. Each
    prompt's are what it gives alone.

    Args:
        params, config: the model.
        ids: one prompt as a list of token ids, or a list of prompts, of any lengths.
        num_beams: continuations followed side by side; 1: the greedy one, which ends at its first EOS
            whatever early_stopping says.
        num_return_sequences: how many of them to return, at most num_beams; None: all.
        length_penalty: the exponent of the length that scores are divided by; above 0 favours long sequences,
            below 0 short ones.
        early_stopping: True: stop at num_beams ended sequences; False: when the best beam, scored at its
            present length, is no better than the worst of them; "never": when it could not become better at
            any length.
        max_new_tokens: traced, like length_penalty: another number below the same power of two compiles
            nothing.
        eos_token_ids: any of them ends a sequence; None: the model's own; (): none.
        sampling: None: `SamplingConfig()`. Each beam's log-probabilities pass the processors, which look at
            the prompt and at what that beam chose; scores are sums of what comes out. A temperature above 0
            means beam sampling: candidates are drawn without replacement from the softmax of beam score +
            processed log-probability.
        key: one PRNG key (prompt i then uses `fold_in(key, i)`) or one per prompt; only sampling needs it.
        capacity, impl, cache_dtype: as in `GenerateOptions`.

    Returns:
        Sequences and scores, num_return_sequences a prompt (fewer where the settings leave no more, none
        where every beam ran out of tokens that it may choose).

    Raises:
        InputError: a prompt, a setting or a key that cannot be served, before anything is traced.

    Source: `GenerationMixin._beam_search` of transformers 5; drawing by Gumbel noise: Kool et al. 2019.
    """
    single = in_order(ids) and len(ids) > 0 and np.ndim(ids[0]) == 0
    options = GenerateOptions(
        max_new_tokens,
        SamplingConfig() if sampling is None else sampling,
        eos_token_ids,
        capacity,
        impl=impl,
        cache_dtype=cache_dtype,
    )
    prompts: Any = [ids] if single else ids
    call = checked(params, config, prompts, options, key)
    beams = whole("num_beams", num_beams, 1)
    returned = num_beams if num_return_sequences is None else num_return_sequences
    returned = whole("num_return_sequences", returned, 1)
    _check(call, beams, returned, length_penalty, early_stopping)
    # One beam ends at its first EOS.
    early_stopping, size = early_stopping if beams > 1 else True, bucket(call.options.max_new_tokens)
    kind = _Search(beams, early_stopping, size, _moving(call))
    check_room(call, beams * len(call.prompts))
    with Stopwatch() as setup:
        request = _request(call, length_penalty)
        tokens_BT, num_tokens_B = padded(call.prompts, call.capacity)
        dtype = cache_dtype or default_cache_dtype(params)
        cache = init_cache(call.config, len(call.prompts), call.capacity, dtype)
        cache_bytes = beams * tree_bytes((cache.k, cache.v))
    with Stopwatch() as prefilling:
        logits_BV, cache = prefill(
            params, call.config, tokens_BT, num_tokens_B, cache, donate=True, impl=impl
        )
        logits_BV.block_until_ready()
    with Stopwatch() as searching:
        found = jax.device_get(_SEARCH(params, call.config, logits_BV, cache, request, kind, impl))
    check_cache(call, cache)  # the beams' own length is known: at most the prompt's and max_new_tokens
    sequences, scores, longest = _lists(call, found, returned)
    stats = GenerateStats(len(call.prompts), sum(map(len, call.prompts)), tree_bytes(params), cache_bytes)
    stats.prefill_seconds, stats.decode_seconds = prefilling.seconds, searching.seconds
    stats.ttft_seconds = setup.seconds + prefilling.seconds + searching.seconds
    stats.generated_tokens, stats.decode_steps = longest, int(found.step) - 1
    stats.count(setup, prefilling, searching)
    stats.peak_bytes = peak_bytes()
    return BeamOutput(sequences[0], scores[0], stats) if single else BeamOutput(sequences, scores, stats)


def _request(call: Call, length_penalty: float) -> _Request:
    options, sampling_B = call.options, call.sampling_B
    eos_E = np.array(list(dict.fromkeys(options.eos_token_ids)), np.int32)
    room = None if sampling_B.no_repeat_ngram_size is None else call.room
    return _Request(
        Choice(call.row_key_B, sampling_B, eos_E, np.int32(options.max_new_tokens)),
        prompt_context(call.prompts, sampling_B, call.config.vocab_size, room),
        lengths(call.prompts),
        np.float32(length_penalty),
    )


def _moving(call: Call) -> int:
    return bucket(call.longest - min(map(len, call.prompts)) + call.options.max_new_tokens)


def _check(call: Call, num_beams: int, returned: int, length_penalty: Any, early_stopping: Any) -> None:
    """Raises InputError for what only a beam search can get wrong."""
    options, vocab_size, ends = call.options, call.config.vocab_size, len(set(call.options.eos_token_ids))
    if returned > num_beams:
        raise InputError(
            f"num_return_sequences {returned} exceeds num_beams {num_beams}: raise num_beams or ask for fewer"
            " sequences"
        )
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise InputError(f"early_stopping must be True, False or 'never', got {shown(early_stopping)}")
    penalty = numbers(length_penalty)
    if penalty is None or penalty.ndim or not np.isfinite(penalty):
        raise InputError(f"length_penalty must be a finite number, got {shown(length_penalty)}")
    if abs(penalty) * math.log10(options.max_new_tokens) > _MOST_DIGITS:
        raise InputError(
            f"length_penalty {length_penalty} of {options.max_new_tokens} tokens leaves float32: bring it"
            " nearer to 0"
        )
    if num_beams == 1 and np.any(call.sampling_B.temperature > 0):
        raise InputError(
            "num_beams 1 with a temperature above 0 is plain sampling: use generate, or raise num_beams"
        )
    possible = _possible(vocab_size, ends, options.max_new_tokens, num_beams)
    if possible < num_beams:
        raise InputError(
            f"num_beams {num_beams} exceeds the {possible} different sequences that max_new_tokens"
            f" {options.max_new_tokens} and a vocabulary of {vocab_size} with {ends} EOS ids allow: lower"
            " num_beams or raise max_new_tokens"
        )


def _possible(vocab_size: int, ends: int, max_new_tokens: int, enough: int) -> int:
    """How many different sequences there are, or `enough` where there are more."""
    ended, running = 0, 1
    for _ in range(max_new_tokens):
        if ended + running >= enough:
            return enough
        ended, running = ended + running * ends, running * (vocab_size - ends)
    return ended + running


def _lists(call: Call, found: _Found, returned: int) -> tuple[list, list, int]:
    """Sequences without their EOS, and scores, nested lists; and the tokens of the best ones together.

    Raises:
        InputError: the model's numbers are broken.
    """
    sequences, scores, longest = [], [], 0
    for b, final_W in enumerate(found.final_BW):
        if np.isnan([*final_W, *found.score_BW[b]]).any():
            raise InputError(f"row {b}, step {found.step - 1}: the scores are nan: {call.broken}")
        kept = [w for w in range(returned) if np.isfinite(final_W[w])]
        rows = [found.ended_BWT[b, w, : found.length_BW[b, w]].tolist() for w in kept]
        longest += len(rows[0]) if rows else 0
        sequences.append([row[:-1] if row[-1] in call.ending else row for row in rows])
        scores.append(final_W[kept].tolist())
    return sequences, scores, longest


def _search(params, config, logits_BV, cache, request, kind, impl):
    """The sequences that ended, best first, and where the search stopped."""
    (B, V), W, prompt_B, choice = logits_BV.shape, kind.beams, request.prompt_B, request.choice
    zeros_BW, none_BW = jnp.zeros((B, W), jnp.int32), jnp.full((B, W), -jnp.inf)
    tokens_BWT, row_R = jnp.zeros((B, W, kind.size), jnp.int32), jnp.repeat(jnp.arange(B), W)
    # All beams start as the same prompt: the first one alone may be continued, or they would stay the same.
    state = _State(
        reorder(cache, row_R), jnp.int32(0), row_R, row_R, tokens_BWT, none_BW.at[:, 0].set(0),
        tokens_BWT, zeros_BW, none_BW, jnp.ones(B, bool),
    )  # fmt: skip

    least = max(2, 1 + len(choice.eos_E))  # so many candidates a beam leave one that goes on, or two

    def choose(logits_BWV, state):
        score_BF = _scores(logits_BWV, state, request, least).reshape(B, W * V)
        candidates = _candidates(score_BF, state, request, V, min(least * W, W * V))
        return _advance(candidates, state, request, kind.early_stopping)

    def body(state):
        cache = reorder_tail(state.cache, state.parent_R, jnp.min(prompt_B), kind.moving)
        logits_RV, cache = decode_step(params, config, state.token_R, cache, impl=impl)
        return choose(logits_RV.reshape(B, W, V), dataclasses.replace(state, cache=cache))

    state = choose(jnp.broadcast_to(logits_BV[:, None], (B, W, V)), state)
    state = lax.while_loop(lambda s: (s.step < choice.limit) & jnp.any(s.open_B), body, state)
    return _Found(state.ended_BWT, state.length_BW, state.final_BW, state.score_BW, state.step)


def _scores(logits_BWV, state, request, least):
    """Each beam's score plus the processed log-probability of every next token; a sampled beam keeps `least`
    tokens at least.
    """
    (B, W, V), sampling_B = logits_BWV.shape, request.choice.sampling_B
    logprobs_RV = jax.nn.log_softmax(logits_BWV, -1).reshape(B * W, V)

    def processed():
        sampling_R, context_R, prompt_R = jax.tree.map(
            lambda x: jnp.repeat(x, W, 0), (sampling_B, request.context, request.prompt_B)
        )
        context_R = _with_chosen(context_R, state, prompt_R, request.choice.eos_E)
        kept_RV = process(logprobs_RV, prompt_R + state.step, sampling_R, context_R)
        greedy_R1 = sampling_R.temperature[:, None] <= 0

        def sampled():
            scaled_RV = kept_RV / jnp.where(
                greedy_R1, 1.0, jnp.maximum(sampling_R.temperature[:, None], 1e-30)
            )
            return jnp.where(greedy_R1, kept_RV, narrow(scaled_RV, sampling_R, least))

        return lax.cond(jnp.all(greedy_R1), lambda: kept_RV, sampled)

    logprobs_RV = lax.cond(plain(sampling_B), lambda: logprobs_RV, processed)
    return logprobs_RV.reshape(B, W, V) + state.score_BW[..., None]


def _with_chosen(context: Context, state: _State, prompt_R: jax.Array, eos_E: jax.Array) -> Context:
    """What the processors know of each beam: of its prompt, which `context` holds, and of the tokens that the
    beam chose.
    """
    (R, V), T = context.seen_BV.shape, state.tokens_BWT.shape[2]
    row_R1, step_T, token_RT = jnp.arange(R)[:, None], jnp.arange(T), state.tokens_BWT.reshape(R, T)
    chosen_RT = jnp.where(step_T < state.step, token_RT, V)  # V is no token: what is written there is dropped
    count, history = context.count_BV, context.history_BS
    return Context(
        seen_BV=context.seen_BV.at[row_R1, chosen_RT].set(True, mode="drop"),
        count_BV=None if count is None else count.at[row_R1, chosen_RT].add(1, mode="drop"),
        history_BS=None if history is None else history.at[row_R1, prompt_R[:, None] + step_T].set(token_RT),
        chosen_B=jnp.full(R, state.step),
        eos_E=eos_E,
    )


def _candidates(score_BF, state, request, V, C):
    """The C best, or C drawn without replacement in the order drawn: their scores, beams, tokens, and
    sequences [B, C, T].
    """

    (row_key_B, sampling_B, *_), position_B = request.choice, request.prompt_B + state.step

    def drawn():
        noise_BF = jax.vmap(
            lambda key, position: gumbel(draw_key(key, position, DRAW_BEAMS), score_BF.shape[1])
        )(row_key_B, position_B)
        return score_BF + jnp.where(sampling_B.temperature[:, None] > 0, noise_BF, 0)

    order_BF = lax.cond(jnp.all(sampling_B.temperature <= 0), lambda: score_BF, drawn)
    _, index_BC = lax.top_k(order_BF, C)
    beam_BC, token_BC = index_BC // V, index_BC % V
    tokens_BCT = _take(state.tokens_BWT, beam_BC).at[:, :, state.step].set(token_BC)
    return _take(score_BF, index_BC), beam_BC, token_BC, tokens_BCT


def _advance(candidates, state, request, early_stopping):
    """The next state: the best candidates that go on run, those among the first W that end are set aside if
    they are good enough.
    """
    score_BC, beam_BC, token_BC, tokens_BCT = candidates
    (_, _, eos_E, limit), length_penalty = request.choice, request.length_penalty
    (B, W), length = state.score_BW.shape, state.step + 1
    ends_BC = jnp.any(token_BC[..., None] == eos_E, -1) | (length >= limit)
    score_BW, run_BW = lax.top_k(jnp.where(ends_BC, -jnp.inf, score_BC), W)
    # Those behind the first W are there to go on where others end: a sequence so unlikely must not end a
    # search.
    counts_BC = ends_BC & (jnp.arange(score_BC.shape[1]) < W) & state.open_B[:, None]
    final_BC = jnp.where(counts_BC, score_BC / _divisor(length, length_penalty), -jnp.inf)
    final_BW, kept_BW = lax.top_k(jnp.concatenate([state.final_BW, final_BC], 1), W)
    horizon = jnp.where((length_penalty > 0) & (early_stopping == "never"), limit, length)
    open_B = state.open_B & (score_BW[:, 0] / _divisor(horizon, length_penalty) > final_BW[:, -1])
    if early_stopping is True:
        open_B &= final_BW[:, -1] == -jnp.inf
    return dataclasses.replace(
        state,
        step=length,
        token_R=_take(token_BC, run_BW).reshape(-1),
        parent_R=(_take(beam_BC, run_BW) + W * jnp.arange(B)[:, None]).reshape(-1),
        tokens_BWT=_take(tokens_BCT, run_BW),
        score_BW=score_BW,
        ended_BWT=_take(jnp.concatenate([state.ended_BWT, tokens_BCT], 1), kept_BW),
        length_BW=_take(jnp.concatenate([state.length_BW, jnp.full_like(token_BC, length)], 1), kept_BW),
        final_BW=final_BW,
        open_B=open_B,
    )


def _divisor(length: jax.Array, length_penalty: jax.Array) -> jax.Array:
    return length.astype(jnp.float32) ** length_penalty


def _take(x_BC: Any, index_BW: jax.Array) -> jax.Array:
    """x[b, index[b, w]] for every b and w, whatever axes follow."""
    return x_BC[jnp.arange(len(index_BW))[:, None], index_BW]


_SEARCH = jax.jit(_search, static_argnames=("config", "kind", "impl"))
