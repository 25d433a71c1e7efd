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
from ..cache.kv_cache import KVCache, reorder, reorder_tail
from ..checks import in_order, numbers, whole
from ..config.model_config import ModelConfig
from ..errors import InputError, shown
from ..sampling.choice import DRAW_BEAMS, draw_key, gumbel, is_greedy, process, takes_likeliest, warp
from ..sampling.context import Context
from ..sampling.settings import SamplingConfig
from ..stats import GenerateStats, Stopwatch, peak_bytes
from ..weights.params import Params, tree_bytes
from .batches import check_room, empty_cache, first_state, padded, prompts_of_rows
from .doors import decode_step, prefill
from .faults import check_cache
from .loop import bucket
from .options import Call, GenerateOptions, checked
from .state import DecodeState

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

    rows: DecodeState  # of each prompt: settings, keys, limits, what the processors know of it
    shortest: Any  # int32: tokens of the shortest prompt
    length_penalty: Any  # float32


class _Search(NamedTuple):
    """What the program is compiled for."""

    beams: int
    ends: int  # EOS ids
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
    """What the loop carries: the beams that run, and the best of the sequences that ended."""

    cache: KVCache  # R rows; holds everything but the last token, and its rows still await `parent_R`
    context: Context  # R rows: what the processors know of each beam but for its last token; await too
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
    sampling = SamplingConfig() if sampling is None else sampling
    options = GenerateOptions(
        max_new_tokens, sampling, eos_token_ids, capacity, impl=impl, cache_dtype=cache_dtype
    )
    prompts: Any = [ids] if single else ids
    call = checked(params, config, prompts, options, key)
    beams = whole("num_beams", num_beams, 1)
    returned = beams if num_return_sequences is None else num_return_sequences
    returned = whole("num_return_sequences", returned, 1)
    _check(call, beams, returned, length_penalty, early_stopping)
    new, shortest = call.options.max_new_tokens, min(map(len, call.prompts))
    early_stopping = early_stopping if beams > 1 else True  # one beam ends at its first EOS
    moving = bucket(call.longest - shortest + new)
    kind = _Search(beams, len(call.ending), early_stopping, bucket(new), moving)
    prompt_B = prompts_of_rows(call)
    check_room(call, beams * call.rows)
    with Stopwatch() as setup:
        request = _Request(first_state(call, prompt_B), np.int32(shortest), np.float32(length_penalty))
        tokens_BT, num_tokens_B = padded(call.prompts, call.capacity, call.rows)
        cache = empty_cache(call, params, call.config, call.capacity, call.rows)
        cache_bytes = beams * tree_bytes((cache.k, cache.v))
    with Stopwatch() as prefilling:
        read = prefill(params, call.config, tokens_BT, num_tokens_B, cache, donate=True, impl=impl)
        logits_BV, cache = jax.block_until_ready(read)
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


def _check(call: Call, num_beams: int, returned: int, length_penalty: Any, early_stopping: Any) -> None:
    """Raises InputError for what only a beam search can get wrong."""
    new, vocab_size, ends = call.options.max_new_tokens, call.config.vocab_size, len(call.ending)
    if returned > num_beams:
        remedy = "raise num_beams or ask for fewer sequences"
        raise InputError(f"num_return_sequences {returned} exceeds num_beams {num_beams}: {remedy}")
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise InputError(f"early_stopping must be True, False or 'never', got {shown(early_stopping)}")
    penalty = numbers(length_penalty)
    if penalty is None or penalty.ndim or not np.isfinite(penalty):
        raise InputError(f"length_penalty must be a finite number, got {shown(length_penalty)}")
    if abs(penalty) * math.log10(new) > _MOST_DIGITS:
        power = f"length_penalty {length_penalty} of {new} tokens"
        raise InputError(f"{power} leaves float32: bring it nearer to 0")
    if num_beams == 1 and np.any(call.sampling_B.temperature > 0):
        raise InputError(
            "num_beams 1 with a temperature above 0 is plain sampling: use generate, or raise num_beams"
        )
    possible = _possible(vocab_size, ends, new, num_beams)
    if possible < num_beams:
        asked_for = f"max_new_tokens {new} and a vocabulary of {vocab_size} with {ends} EOS ids"
        raise InputError(
            f"num_beams {num_beams} exceeds the {possible} different sequences that {asked_for} allow: lower"
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
    for b, final_W in enumerate(found.final_BW[: len(call.prompts)]):
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
    (B, V), W, rows = logits_BV.shape, kind.beams, request.rows
    zeros_BW, none_BW = jnp.zeros((B, W), jnp.int32), jnp.full((B, W), -jnp.inf)
    tokens_BWT, row_R = jnp.zeros((B, W, kind.size), jnp.int32), jnp.repeat(jnp.arange(B), W)
    # All beams start as the same prompt: the first one alone may be continued, or they would stay the same.
    state = _State(
        reorder(cache, row_R), rows.context.reorder(row_R), jnp.int32(0), row_R, row_R, tokens_BWT,
        none_BW.at[:, 0].set(0), tokens_BWT, zeros_BW, none_BW, rows.active_B,
    )  # fmt: skip

    least = max(2, 1 + kind.ends)  # so many candidates a beam leave one that goes on, or two

    def choose(logits_BWV, state):
        score_BWV = _scores(logits_BWV, state, rows.sampling_B, least)
        candidates = _candidates(score_BWV, state, rows, min(least * W, W * V))
        return _advance(candidates, state, request, kind.early_stopping)

    def body(state):
        cache = reorder_tail(state.cache, state.parent_R, request.shortest, kind.moving)
        context = state.context.reorder(state.parent_R).advance(state.token_R, jnp.ones(B * W, bool))
        logits_RV, cache = decode_step(params, config, state.token_R, cache, impl=impl)
        state = dataclasses.replace(state, cache=cache, context=context)
        return choose(logits_RV.reshape(B, W, V), state)

    state = choose(jnp.broadcast_to(logits_BV[:, None], (B, W, V)), state)
    most = jnp.max(rows.limit_B)
    state = lax.while_loop(lambda s: (s.step < most) & jnp.any(s.open_B), body, state)
    return _Found(state.ended_BWT, state.length_BW, state.final_BW, state.score_BW, state.step)


def _scores(logits_BWV, state, sampling_B, least):
    """Each beam's score plus the processed log-probability of every next token, [B, W, V]; a sampled beam
    keeps `least` tokens at least.
    """
    B, W, V = logits_BWV.shape
    logprobs_RV = jax.nn.log_softmax(logits_BWV, -1).reshape(B * W, V)

    def processed():
        sampling_R = jax.tree.map(lambda setting_B: jnp.repeat(setting_B, W, 0), sampling_B)
        kept_RV = process(logprobs_RV, sampling_R, state.context)
        return lax.cond(is_greedy(sampling_B), lambda: kept_RV, lambda: warp(kept_RV, sampling_R, 0.0, least))

    logprobs_RV = lax.cond(takes_likeliest(sampling_B), lambda: logprobs_RV, processed)
    return logprobs_RV.reshape(B, W, V) + state.score_BW[..., None]


def _candidates(score_BWV, state, rows, C):
    """The C best, or C drawn without replacement in the order drawn: their scores, beams, tokens, and
    sequences [B, C, T].
    """
    B, W, V = score_BWV.shape

    def drawn():
        noise_BWV = jax.vmap(
            lambda key, position: gumbel(draw_key(key, position, DRAW_BEAMS), W * V).reshape(W, V)
        )(rows.key_B, rows.position_B + state.step)
        return score_BWV + jnp.where(rows.sampling_B.temperature[:, None, None] > 0, noise_BWV, 0)

    order_BWV = lax.cond(is_greedy(rows.sampling_B), lambda: score_BWV, drawn)
    _, index_BC = lax.top_k(order_BWV.reshape(B, W * V), C)
    beam_BC, token_BC = index_BC // V, index_BC % V
    tokens_BCT = _take(state.tokens_BWT, beam_BC).at[:, :, state.step].set(token_BC)
    return _take(score_BWV.reshape(B, W * V), index_BC), beam_BC, token_BC, tokens_BCT


def _advance(candidates, state, request, early_stopping):
    """The next state: the best candidates that go on run, those among the first W that end are set aside if
    they are good enough.
    """
    score_BC, beam_BC, token_BC, tokens_BCT = candidates
    length_penalty, limit_B = request.length_penalty, request.rows.limit_B
    (B, W), length = state.score_BW.shape, state.step + 1
    is_eos_BC = jnp.any(token_BC[..., None] == request.rows.context.eos_BE[:, None], -1)
    ends_BC = is_eos_BC | (length >= limit_B)[:, None]
    score_BW, run_BW = lax.top_k(jnp.where(ends_BC, -jnp.inf, score_BC), W)
    # Those behind the first W are there to go on where others end: a sequence so unlikely must not end a
    # search.
    counts_BC = ends_BC & (jnp.arange(score_BC.shape[1]) < W) & state.open_B[:, None]
    final_BC = jnp.where(counts_BC, score_BC / _divisor(length, length_penalty), -jnp.inf)
    final_BW, kept_BW = lax.top_k(jnp.concatenate([state.final_BW, final_BC], 1), W)
    horizon = jnp.where((length_penalty > 0) & (early_stopping == "never"), limit_B, length)
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
