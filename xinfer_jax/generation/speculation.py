"""Speculative decoding (Leviathan et al. 2023): tokens are guessed cheaply, and several checked in one pass.

The token at a position is a function of the model's logits there and of the row's key (sampling/choice.py).
So a guess is checked by choosing the model's own token and comparing: greedy or sampled, the tokens are those
of plain decoding with the same key, and so is their distribution. A draft model draws with the same noise,
which makes it guess alike.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..cache.kv_cache import KVCache, truncate
from ..config.model_config import ModelConfig
from ..errors import InputError, shown
from ..model.decoder import hidden_states, unembed
from ..sampling.choice import choose
from ..sampling.context import Context
from ..weights.params import Params
from .loop import program, until_ended
from .state import DecodeState, Turn, choose_and_note

# (history_BS, length_B, count) -> int32 [B, count]; traced.
Guesser = Callable[[jax.Array, jax.Array, int], jax.Array]

MOST_GUESSES = 16  # per pass: each is a part of the program, which takes long to compile
_LONGEST_MATCH = 4  # tokens that a look-up compares at most


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Speculation:
    """What the loop carries beyond `DecodeState`."""

    cache: KVCache | None  # of the draft model; None where a function guesses
    passes_B: jax.Array  # int32: passes of the model that each row took part in
    accepted_B: jax.Array  # int32: guesses that were right


class Guessing(NamedTuple):
    """Who guesses: the configuration of the draft model, or a function; and how many tokens per pass."""

    guesser: ModelConfig | Guesser
    per_pass: int


def speculate(  # noqa: PLR0913  `advance`, and who guesses
    params: Params,
    config: ModelConfig,
    draft_params: Params | None,
    guessing: Guessing,
    state: DecodeState,
    cache: KVCache,
    draft: Speculation,
    steps: jax.Array,
    impl: str | None,
) -> tuple[DecodeState, KVCache, Speculation]:
    """`advance` by as many passes of the model, each of which may give a row several tokens.

    Args:
        params, config: the model.
        draft_params: of the draft model; None where a function guesses.
        guessing: who guesses, and how much.
        state: with `context.history_BS`.
        cache: of the model.
        draft: what the guesses start from.
        steps: int32.
        impl: as in `prefill`.
    """

    def step(state, cache, draft):
        guess_BT, draft_cache = _guess(draft_params, guessing, state, draft.cache, impl)
        overflow_B = cache.overflow_B
        (tokens_BT, num_tokens_B) = to_check(state.turn, guess_BT)
        hidden_BTD, cache = hidden_states(params, config, tokens_BT, cache, num_tokens_B, impl=impl)
        checked, draft = check(unembed(params, config, hidden_BTD), state, guess_BT, draft, impl)
        # What a guess writes past the capacity is dropped, and its logits are behind the last token.
        cache = truncate(dataclasses.replace(cache, overflow_B=overflow_B), checked.position_B - 1)
        return checked, cache, dataclasses.replace(draft, cache=draft_cache)

    return until_ended(step, steps, state, cache, draft)


def to_check(turn: Turn, guess_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a pass reads of each row, [B, 1 + count], and how much of it: the last token, and the guesses."""
    tokens_BT = jnp.concatenate([turn.token_B[:, None], guess_BT], 1)
    return tokens_BT, tokens_BT.shape[1] * turn.active_B.astype(jnp.int32)


def check(
    logits_BTV: jax.Array, state: DecodeState, guess_BT: jax.Array, draft: Speculation, impl: str | None
) -> tuple[DecodeState, Speculation]:
    """Chooses the model's own tokens as far as the guesses were right, and one more."""
    active_B = state.active_B
    before_B = state.length_B
    count = guess_BT.shape[1]
    right_B = active_B
    for i in range(count + 1):  # the token behind the first i guesses, which were right
        state = choose_and_note(logits_BTV[:, i], state, impl, right_B)
        right_B = right_B & (state.token_B == guess_BT[:, min(i, count - 1)])
    accepted_B = draft.accepted_B + jnp.maximum(state.length_B - before_B - 1, 0)
    return state, Speculation(draft.cache, draft.passes_B + active_B, accepted_B)


SPECULATE = program(speculate, "guessing", donates=("state", "cache", "draft"))


def _guess(params: Params | None, guessing: Guessing, state: DecodeState, cache: Any, impl: str | None):
    """The guesses [B, count], and the draft model's cache."""
    (guesser, count) = guessing
    history_BS = state.context.history_BS
    if not isinstance(guesser, ModelConfig):
        return ask_function(guesser, count, history_BS, state.position_B), None

    def guess(tokens_BT, context, cache):
        hidden_BTD, cache = hidden_states(params, guesser, tokens_BT, cache, None, impl=impl)
        logits_BV = unembed(params, guesser, hidden_BTD[:, -1])
        return *draft_choice(logits_BV, state, context, impl), cache

    def step(i, carry):
        guess_BT, token_B, context, cache = carry
        token_B, context, cache = guess(token_B[:, None], context, cache)
        return guess_BT.at[:, i].set(token_B), token_B, context, cache

    # The last two tokens: where every guess was right, the draft has not seen the last one but one.
    last_BT = last_two(history_BS, state.position_B)
    token_B, context, cache = guess(last_BT, state.context, truncate(cache, state.position_B - 2))
    guess_BT = jnp.zeros((len(token_B), count), jnp.int32).at[:, 0].set(token_B)
    guess_BT, _, _, cache = lax.fori_loop(1, count, step, (guess_BT, token_B, context, cache))
    return guess_BT, cache


def ask_function(guesser: Guesser, count: int, history_BS: Any, length_B: jax.Array) -> jax.Array:
    """int32 [B, count]."""
    return jnp.asarray(guesser(history_BS, length_B, count), jnp.int32)


def last_two(history_BS: Any, length_B: jax.Array) -> jax.Array:
    """int32 [B, 2]: each row's last tokens."""
    return jnp.take_along_axis(history_BS, length_B[:, None] + jnp.array([-2, -1]), 1)


def draft_choice(
    logits_BV: Any, state: DecodeState, context: Context, impl: str | None
) -> tuple[jax.Array, Context]:
    """A guess per row, int32 [B], drawn with the noise that the model itself will draw with."""
    token_B, *_ = choose(logits_BV, state.key_B, state.sampling_B, context, impl)
    return token_B, context.advance(token_B, state.active_B)


def check_guesser(guesser: Guesser, count: int, rows: int, room: int) -> None:
    """Raises InputError for a function that cannot be traced, or gives anything but `count` ids a row."""
    try:
        guess = _traced_guess(guesser, count, rows, room)
    except Exception as error:
        raise InputError(f"the draft function cannot be traced: {type(error).__name__}: {error}") from error
    shape: Any = getattr(guess, "shape", None)
    dtype: Any = getattr(guess, "dtype", None)
    if shape != (rows, count) or not jnp.issubdtype(dtype, np.integer):
        got = shown(guess) if shape is None else f"{dtype} of {list(shape)}"
        raise InputError(f"the draft function must give int32 ids of the shape [{rows}, {count}], got {got}")


@functools.lru_cache(maxsize=64)
def _traced_guess(guesser, count, rows, room):
    history_BS, length_B = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((rows, room), (rows,)))
    return jax.eval_shape(lambda *known: guesser(*known, count), history_BS, length_B)


def look_up(history_BS: jax.Array, length_B: jax.Array, count: int) -> jax.Array:
    """What followed the last tokens where they occurred before (prompt look-up, Saxena 2023).

    Of all places the one that agrees over the most tokens (up to 4), of these the latest; where it runs into
    the end, it repeats.

    Args:
        history_BS: int32, each row's tokens in order.
        length_B: int32, how many they are.
        count: tokens to guess.

    Returns:
        int32 [B, count].
    """
    slot_S = jnp.arange(history_BS.shape[1])
    length_B1 = length_B[:, None]

    def grow(k, carry):
        same_BS, run_BS = carry
        last_B1 = jnp.take_along_axis(history_BS, jnp.maximum(length_B1 - k, 0), 1)
        same_BS &= (slot_S >= k) & (jnp.roll(history_BS, k, 1) == last_B1)
        return same_BS, run_BS + same_BS

    inside_BS = (slot_S < length_B1) & (slot_S >= 1)
    _, run_BS = lax.fori_loop(
        1, _LONGEST_MATCH + 1, grow, (inside_BS, jnp.zeros(history_BS.shape, jnp.int32))
    )
    at_B1 = jnp.argmax(run_BS * len(slot_S) + jnp.where(inside_BS, slot_S, 0), 1)[:, None]
    return jnp.take_along_axis(history_BS, at_B1 + jnp.arange(count) % jnp.maximum(length_B1 - at_B1, 1), 1)
