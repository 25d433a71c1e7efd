"""Turns logits into tokens: `choose_tokens`, `sample_tokens`, and their three stages."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config.run_config import DEFAULT, PLAIN, RunConfig
from ..ops.largest import argmax, largest_k
from ..ops.operation import match_varying_axes, run
from ..registry import plugin
from . import processors
from .batched_settings import has_all_settings
from .context import Context
from .random_keys import DRAW_TOKEN, gumbel_noise
from .sampling_config import SettingsOfRows
from .settings import SETTINGS

NUM_CANDIDATES = processors.FEW  # tokens that are sampled from where top-k keeps fewer
Skippable = list[tuple[Any, Callable[[jax.Array], jax.Array]]]  # bool [B] or bool: who uses it; a processor
_MIN_TEMPERATURE = 1e-30  # logits divided by less would overflow float32


def sample_tokens(
    logits_BV: jax.Array,
    key_B: jax.Array,
    sampling_B: SettingsOfRows,
    context: Context,
    run_config: RunConfig = DEFAULT,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Samples the next token of each row.

    Args:
        logits_BV: float32.
        key_B: one key per row.
        sampling_B: settings from `settings_per_row`.
        context: the state of the logits processors. Random numbers depend only on its `position_B` and the
            key.
        run_config: the implementation of the argmax, and of the pass over the logits on GPUs.

    Returns:
        Tokens, int32 [B], their log-probabilities before any processor, float32 [B], and the logits [B, V]
        that they were sampled from.
    """
    token_B, logprobs, sampled_from = choose_tokens(logits_BV, key_B, sampling_B, context, run_config)
    return token_B, logprobs(token_B), sampled_from()


def choose_tokens(
    logits_BV: jax.Array,
    key_B: jax.Array,
    sampling_B: SettingsOfRows,
    context: Context,
    run_config: RunConfig = DEFAULT,
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array], Callable[[], jax.Array]]:
    """Does the same as `sample_tokens` without the log-probabilities. Its two forms give the same tokens,
    unless a sum of probabilities is within rounding of top-p.

    Returns:
        Three values: tokens, int32 [B], a function of log-probabilities and a function of logits. The first
        function gives the log-probabilities of tokens before any processor, for which GPUs read the logits no
        second time. The second function gives the logits [B, V] that the tokens were sampled from. Call it in
        the branch that needs them: GPUs compute them there, so a step need not write them.
    """
    if context.callers is not None:
        return context.callers.choose(logits_BV, key_B, sampling_B, context, run_config)
    operands = dict(logits_BV=logits_BV, key_B=key_B, sampling_B=sampling_B, context=context)
    plain = partial(_choose_in_branches, run_config=run_config)
    token_B, taken_BV, logsumexp_B = run("choose_tokens", plain, run_config, **operands)

    def logprobs(token_B: jax.Array) -> jax.Array:
        compute = lambda logsumexp_B, logits_BV: logsumexp(logits_BV)  # noqa: E731
        known_B = run("known_logsumexp", compute, logsumexp_B=logsumexp_B, logits_BV=logits_BV)
        return at_token(logits_BV, token_B) - known_B

    def sampled_from() -> jax.Array:
        return run("sampled_from", lambda taken_BV, **_: taken_BV, taken_BV=taken_BV, **operands)

    return token_B, logprobs, sampled_from


def _choose_in_branches(logits_BV, key_B, sampling_B, context, run_config):
    """Does the same as `choose_tokens` on devices on which branches are free: settings that no row needs are
    skipped. A batch of plain greedy rows takes the argmax and nothing else. Returns zeros in place of the
    logsumexp.
    """

    def processed() -> tuple[jax.Array, jax.Array]:
        processed_BV = process_logits(logits_BV, sampling_B, context)

        def sampled() -> tuple[jax.Array, jax.Array]:
            rows = dict(key_B=key_B, sampling_B=sampling_B, position_B=context.position_B)
            return run("sample_rows", sample_rows, processed_BV=processed_BV, **rows)

        return lax.cond(
            all_greedy(sampling_B), lambda: (argmax(processed_BV, run_config), processed_BV), sampled
        )

    plain_greedy = is_plain_greedy(sampling_B, context)
    token_B, taken_BV = lax.cond(plain_greedy, lambda: (argmax(logits_BV, run_config), logits_BV), processed)
    return token_B, taken_BV, match_varying_axes(jnp.zeros(logits_BV.shape[0], jnp.float32), logits_BV)


def token_logprobs(logits_BV: jax.Array, token_B: jax.Array) -> jax.Array:
    """Returns float32 [B]: the log-probability of each row's token."""
    return at_token(logits_BV, token_B) - run("logsumexp", logsumexp, logits_BV=logits_BV)


def logsumexp(logits_BV: jax.Array) -> jax.Array:
    """Returns float32 [B]."""
    return jax.nn.logsumexp(logits_BV, axis=-1)


def at_token(logits_BV: jax.Array, token_B: jax.Array) -> jax.Array:
    """Returns, float32 [B], the logit of each row's token, or NaN for an id below 0."""
    at = jnp.asarray(logits_BV).at[jnp.arange(token_B.shape[0]), token_B]
    return at.get(mode="fill", wrap_negative_indices=False)


def top_candidates(processed_BV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest logits, float32 [B, A], and their tokens, int32 [B, A]."""
    return largest_k(processed_BV, min(NUM_CANDIDATES, processed_BV.shape[1]))


def sample_rows(processed_BV, key_B, sampling_B, position_B):
    """Returns a token of each row, and the logits that it was sampled from.

    Rows whose top-k leaves only the A largest logits are sampled from these candidates, the others from the
    whole vocabulary. The path depends only on the row, so other rows cannot change its bits.
    """
    rest = key_B, sampling_B, position_B
    (_, V) = processed_BV.shape
    token_B, kept, valid_B = sample_candidates(*top_candidates(processed_BV), *rest, V)

    def taken() -> jax.Array:
        return _logits_kept(processed_BV, sampling_B, *kept)

    def from_all() -> tuple[jax.Array, jax.Array]:
        drawn_B, warped_BV = sample_from_all(processed_BV, *rest)
        return jnp.where(valid_B, token_B, drawn_B), jnp.where(valid_B[:, None], taken(), warped_BV)

    return lax.cond(jnp.all(valid_B), lambda: (token_B, taken()), from_all)


def sample_candidates(candidates_BA, index_BA, key_B, sampling_B, position_B, V):
    """Samples a token of each row from its A largest logits. Returns the token, then the largest of these
    logits, and the smallest and the largest logit that the row keeps, each [B, 1]. Also returns the rows for
    which this is valid: the rows that keep no other token.
    """
    # max and min, not the first and the last: with those XLA would sort the whole vocabulary.
    largest_B1 = jnp.max(candidates_BA, -1, keepdims=True)
    greedy_B = sampling_B.temperature <= 0
    scaled_BA = _scaled(candidates_BA, sampling_B, largest_B1)
    k_B = jnp.where(greedy_B, 1, sampling_B.top_k)
    last_B = jnp.min(scaled_BA, -1)
    at_B1 = jnp.clip(k_B - 1, 0, candidates_BA.shape[1] - 1)[:, None]
    no_tie_B = jnp.take_along_axis(scaled_BA, at_B1, 1)[:, 0] > last_B  # of the k-th logit and the last
    valid_B = (k_B > 0) & (k_B <= candidates_BA.shape[1]) & (no_tie_B | (last_B == -jnp.inf))
    valid_B &= jnp.isfinite(largest_B1[:, 0])
    warped_BA = warp_logits(candidates_BA, sampling_B, largest_B1, draw=(key_B, position_B))
    token_B = draw_tokens(warped_BA, key_B, sampling_B, position_B, index_BA, V)
    kept_BA = warped_BA > -jnp.inf
    lowest_B1 = jnp.min(jnp.where(kept_BA, candidates_BA, jnp.inf), -1, keepdims=True)
    highest_B1 = jnp.max(jnp.where(kept_BA, candidates_BA, -jnp.inf), -1, keepdims=True)
    return token_B, (largest_B1, lowest_B1, highest_B1), valid_B


def _logits_kept(processed_BV, sampling_B, largest_B1, lowest_B1, highest_B1):
    """Returns the logits [B, V] that a token of the candidates is sampled from: from the lowest to the
    highest one that is kept.
    """
    kept_BV = (processed_BV >= lowest_B1) & (processed_BV <= highest_B1)
    warped_BV = jnp.where(kept_BV, _scaled(processed_BV, sampling_B, largest_B1), -jnp.inf)
    return jnp.where((sampling_B.temperature <= 0)[:, None], processed_BV, warped_BV)


def sample_from_all(processed_BV, key_B, sampling_B, position_B):
    # Logits relative to the largest, so that small temperatures do not overflow them.
    largest_B1 = jnp.max(processed_BV, -1, keepdims=True)
    warped_BV = warp_logits(processed_BV, sampling_B, largest_B1, draw=(key_B, position_B))
    return draw_tokens(warped_BV, key_B, sampling_B, position_B, None, processed_BV.shape[1]), warped_BV


def all_greedy(sampling_B: SettingsOfRows) -> jax.Array:
    """Returns True if every row has temperature 0."""
    return jnp.all(sampling_B.temperature <= 0)


def is_plain_greedy(sampling_B: SettingsOfRows, context: Context | None = None) -> jax.Array:
    """Returns True if every row takes its most likely token, without any logits processor."""
    has_functions = context is not None and (context.automata is not None or context.callers is not None)
    if has_all_settings(sampling_B) or has_functions:
        return jnp.bool_(False)
    return all_greedy(sampling_B) & jnp.all(sampling_B.repetition_penalty == 1)


def process_logits(logits_BV: jax.Array, sampling_B: SettingsOfRows, context: Context) -> jax.Array:
    """Applies the processors that greedy rows have too: biases, penalties, forbidden tokens."""
    logits_BV = bias_and_repeat(logits_BV, sampling_B, context)
    return _apply_used(skippable_processors(sampling_B, context), logits_BV)


def skippable_processors(sampling_B: SettingsOfRows, context: Context) -> Skippable:
    """Returns the processors of `process_logits` that are not always applied, and which rows use each."""
    found: Skippable = []
    if has_all_settings(sampling_B):
        from .other_processors import other_processors  # optional: other settings

        found = other_processors(sampling_B, context)
    if context.automata is not None:
        found.append((context.automata.used_B, context.automata.mask))
    return found


def bias_and_repeat(logits_BV, sampling_B, context):
    """Returns the logits with bias and repetition penalty. These processors are applied even if no row uses
    them.
    """
    if has_all_settings(sampling_B):
        logits_BV = logits_BV + sampling_B.logit_bias
    return processors.repetition_penalty(logits_BV, sampling_B.repetition_penalty, context.seen_BV)


def _apply_used(optional: Skippable, logits_BV: jax.Array) -> jax.Array:
    """Applies the processors that a row uses, each of which leaves the other rows as they are. A branch costs
    a copy of the logits: one is around all. To few logits they are always applied, which costs less.
    """

    def if_used(uses_B: Any, processor: Callable, x_BV: jax.Array) -> jax.Array:
        return processor(x_BV) if few else lax.cond(jnp.any(uses_B), processor, lambda x_BV: x_BV, x_BV)

    few = logits_BV.shape[1] <= processors.FEW
    if len(optional) == 1:
        return if_used(*optional[0], logits_BV)

    def each(x_BV: jax.Array) -> jax.Array:
        for uses_B, processor in optional:
            x_BV = if_used(uses_B, processor, x_BV)
        return x_BV

    return if_used(sum(uses_B for uses_B, _ in optional), each, logits_BV) if optional else logits_BV


def warp_logits(
    logits_BV: jax.Array, sampling_B: SettingsOfRows, zero_B1: jax.Array | float, min_tokens_to_keep: int = 1,
    draw: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:  # fmt: skip
    """Applies temperature, top-k, top-p, min-p, typical-p and XTC: logits that they remove become -inf.

    Args:
        logits_BV: float32. Rows at temperature 0 are returned unchanged.
        sampling_B: settings from `settings_per_row`.
        zero_B1: subtracted from each row's logits before the division by the temperature.
        min_tokens_to_keep: number of tokens of each row that stay in any case (transformers' name).
        draw: keys and positions of the rows, by which XTC draws. None: without XTC.
    """
    s = sampling_B
    scaled_BV = _scaled(logits_BV, sampling_B, zero_B1)
    k_B = jnp.where(s.top_k > 0, jnp.maximum(s.top_k, min_tokens_to_keep), 0)
    filters: Skippable = [((k_B > 0) | (s.top_p < 1), lambda x: processors.top_k_top_p(x, k_B, s.top_p))]
    if has_all_settings(s):
        filters.append((s.min_p > 0, lambda x: processors.min_p(x, s.min_p)))
    if min_tokens_to_keep > 1:  # the filters above guarantee only one token
        least = lambda: processors.top_k(scaled_BV, jnp.full_like(k_B, min_tokens_to_keep))  # noqa: E731
        filters.append((True, lambda x: jnp.maximum(least(), x)))
    if has_all_settings(s):
        filters.append((s.typical_p < 1, lambda x: processors.typical_p(x, s.typical_p, min_tokens_to_keep)))
        for setting in SETTINGS.values():
            if draw and (warper := plugin("processor", setting.warper)):
                rest = dict(logits_BV=logits_BV, settings=s, key_B=draw[0], position_B=draw[1])
                filters.append((getattr(s, setting.name) != setting.default, partial(warper, **rest)))
    kept_BV = _apply_used(filters, scaled_BV)
    return jnp.where((s.temperature <= 0)[:, None], logits_BV, kept_BV)


def _scaled(logits_BV: jax.Array, sampling_B: SettingsOfRows, zero_B1: jax.Array | float) -> jax.Array:
    """Returns (logits - zero) / temperature, or at temperature 0 only the difference."""
    temperature_B1 = sampling_B.temperature[:, None]
    divisor_B1 = jnp.where(temperature_B1 <= 0, 1.0, jnp.maximum(temperature_B1, _MIN_TEMPERATURE))
    return (logits_BV - zero_B1) / divisor_B1


def draw_tokens(
    warped_BA: jax.Array, key_B: jax.Array, sampling_B: SettingsOfRows, position_B: jax.Array,
    index_BA: jax.Array | None, size: int,
) -> jax.Array:  # fmt: skip
    """Draws from softmax(warped): it takes the largest logit + Gumbel noise. Rows at temperature 0 take the
    argmax.

    Args:
        warped_BA: float32, logits of the candidates (all others have probability 0), or of the vocabulary.
        key_B: one key per row.
        sampling_B: settings from `settings_per_row`.
        position_B: int32, the position of the token that is drawn.
        index_BA: int32, ids of the candidates. None: the whole vocabulary.
        size: V.
    """
    every_BA = jnp.broadcast_to(jnp.arange(size), (key_B.shape[0], size)) if index_BA is None else index_BA
    noise_BA = jax.vmap(gumbel_noise, (0, 0, None, 0))(key_B, position_B, DRAW_TOKEN, every_BA)
    drawn_BA = jnp.where((sampling_B.temperature <= 0)[:, None], warped_BA, warped_BA + noise_BA)
    if index_BA is None:
        return argmax(drawn_BA, PLAIN)
    # The lowest id of equal logits, as `argmax` does.
    return jnp.min(jnp.where(drawn_BA == jnp.max(drawn_BA, -1, keepdims=True), index_BA, size), -1)
