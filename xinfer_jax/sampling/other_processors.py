"""Processors of settings that are not plain, each logits_BV -> logits_BV, as transformers defines them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..registry import plugin
from .context import ALL_BITS, Context
from .sampling_config import SettingsOfRows
from .settings import SETTINGS


def other_processors(s: SettingsOfRows, c: Context) -> list[tuple[Any, Callable[[jax.Array], jax.Array]]]:
    """Returns pairs of a processor and the rows that use it: bool [B], and the processor. s: all settings. c:
    the context.
    """
    bits_BW = c.allowed_bits[:, 0]
    penalties = s.presence_penalty, s.frequency_penalty, c.count_BV
    penalized_B = (s.presence_penalty != 0) | (s.frequency_penalty != 0)
    words = s.bad_words_ids, c.history_BS, c.position_B, c.eos_BE
    least = s.min_tokens, c.num_generated_B, c.eos_BE
    ngrams = s.no_repeat_ngram_size, c.history_BS, c.position_B
    found = [
        (penalized_B, lambda x: presence_frequency(x, *penalties)),
        (jnp.any(s.bad_words_ids >= 0, (1, 2)), lambda x: bad_words(x, *words)),
        (c.num_generated_B < s.min_tokens, lambda x: min_tokens(x, *least)),
        (jnp.any(bits_BW != ALL_BITS, -1), lambda x: allowed(x, bits_BW)),
    ]
    if c.history_BS is not None:
        found.append((s.no_repeat_ngram_size > 0, lambda x: no_repeat_ngram(x, *ngrams)))
    for setting in SETTINGS.values():
        has_state = c.history_BS is not None or not setting.history
        if has_state and (processor := plugin("processor", setting.processor)):
            uses_B = getattr(s, setting.name) != setting.default
            found.append((uses_B, partial(processor, settings=s, context=c)))
    return found


def no_repeat_ngram(
    logits_BV: jax.Array, size_B: jax.Array, history_BS: jax.Array, length_B: jax.Array
) -> jax.Array:
    """Forbids tokens that would repeat an n-gram of the row. Size 0 forbids none.

    Args:
        logits_BV: float32.
        size_B: int32, n.
        history_BS: int32, the row's tokens in order.
        length_B: int32, the number of these tokens.
    """
    slot_S = jnp.arange(history_BS.shape[1])

    def compare(k, same_BS):  # also checks that the token k places before equals the row's k-th last token
        last_B1 = jnp.take_along_axis(history_BS, jnp.maximum(length_B - k, 0)[:, None], 1)
        return same_BS & ((k >= size_B[:, None]) | (jnp.roll(history_BS, k, 1) == last_B1))

    inside_BS = (slot_S >= size_B[:, None] - 1) & (slot_S < length_B[:, None]) & (size_B[:, None] > 0)
    most = jnp.max(jnp.where(size_B <= length_B, size_B, 1))  # a row shorter than n has no n-gram
    completes_BS = lax.fori_loop(1, jnp.maximum(most, 1), compare, inside_BS)
    row_B1 = jnp.arange(len(size_B))[:, None]
    banned_BV = jnp.zeros(logits_BV.shape, bool).at[row_B1, history_BS].max(completes_BS)
    return jnp.where(banned_BV, -jnp.inf, logits_BV)


def bad_words(
    logits_BV: jax.Array, words_BWL: jax.Array, history_BS: jax.Array | None, length_B: jax.Array,
    eos_BE: jax.Array,
) -> jax.Array:  # fmt: skip
    """Forbids the last token of each sequence whose other tokens the row ends with.

    A single EOS id forbids nothing, as in transformers. transformers also forbids nothing before the row is
    as long as the whole sequence. Here a row as long as the other tokens is enough.

    Args:
        logits_BV: float32.
        words_BWL: int32, W sequences of each row, each at the end of its L places. The other places are
            negative.
        history_BS: int32, the row's tokens in order. None: no sequence has more than one token.
        length_B: int32, the number of these tokens.
        eos_BE: int32, ids that end the row.
    """
    (B, V) = logits_BV.shape
    before_BWL = words_BWL[..., :-1]
    token_BW = words_BWL[..., -1]
    single_BW = jnp.all(before_BWL < 0, -1)
    ends_BW = single_BW & jnp.any(token_BW[..., None] == eos_BE[:, None], -1)
    same_BW = single_BW & ~ends_BW
    if history_BS is not None:
        at_BL = length_B[:, None] + jnp.arange(-before_BWL.shape[-1], 0)
        last_BL = jnp.take_along_axis(history_BS, jnp.maximum(at_BL, 0), 1)
        last_BL = jnp.where(at_BL < 0, -1, last_BL)
        found_BW = jnp.all((before_BWL < 0) | (before_BWL == last_BL[:, None]), -1)
        same_BW |= found_BW & ~single_BW
    at_BW = jnp.where(same_BW & (token_BW >= 0), token_BW, V)
    banned_BV = jnp.zeros((B, V), bool).at[jnp.arange(B)[:, None], at_BW].set(True, mode="drop")
    return jnp.where(banned_BV, -jnp.inf, logits_BV)


def min_tokens(
    logits_BV: jax.Array, least_B: jax.Array, num_generated_B: jax.Array, eos_BE: jax.Array
) -> jax.Array:
    """Forbids EOS ids while the answer has fewer than min_tokens tokens. Negative ids are ignored."""
    (B, V) = logits_BV.shape
    at_BE = jnp.where(eos_BE < 0, logits_BV.shape[1], eos_BE)
    end_BV = jnp.zeros((B, V), bool).at[jnp.arange(B)[:, None], at_BE].set(True, mode="drop")
    return jnp.where(end_BV & (num_generated_B < least_B)[:, None], -jnp.inf, logits_BV)


def allowed(logits_BV: jax.Array, allowed_bits: jax.Array) -> jax.Array:
    """Forbids the tokens whose bit is 0: token v has bit v % 32 of word v // 32, uint32 [B, ceil(V/32)]."""
    token_V = jnp.arange(logits_BV.shape[1], dtype=jnp.uint32)
    bit_BV = jnp.asarray(allowed_bits)[:, token_V // 32] >> (token_V % 32) & 1
    return jnp.where(bit_BV == 1, logits_BV, -jnp.inf)


def presence_frequency(
    logits_BV: jax.Array, presence_B: jax.Array, frequency_B: jax.Array, count_BV: jax.Array
) -> jax.Array:
    """Subtracts `presence` + `frequency` * count from logits of tokens that occur in the answer (OpenAI)."""
    return logits_BV - presence_B[:, None] * (count_BV > 0) - frequency_B[:, None] * count_BV
