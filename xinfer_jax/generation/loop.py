"""Three verbs: `read` (prompts into the cache), `admit` (the numbers of rows that join) and `advance` (the
one loop, `until_ended`, which speculation takes in larger steps). Jitted here, once, for all who call them.

tokens_BT ─ read ─► logits_BV ─ choose ─► advance: while_loop: write K/V → attend → logits → choose → note
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import varying_as

from ..cache.kv_cache import KVCache
from ..config.model_config import ModelConfig
from ..errors import InputError
from ..model.decoder import hidden_states, unembed
from ..model.greedy import fuses_head, greedy
from ..sampling.choice import choose, takes_likeliest
from ..weights.params import Params, activation_dtype
from ..weights.processor import compiler_options
from .state import DecodeState, choose_and_note, note

_LEAST_BUCKET = 16


def read(
    params: Params,
    config: ModelConfig,
    tokens_BT: jax.Array,
    num_tokens_B: jax.Array,
    cache: KVCache,
    impl: str | None,
    chunk: int,
) -> tuple[jax.Array, KVCache]:
    """Logits [B, V] after each row's last token, and the cache with the tokens appended: `chunk` of them at a
    time, without the chunks that are all padding. A row of no tokens stays as it is.
    """
    B, T = tokens_BT.shape

    def part(tokens_BT, num_tokens_B, cache, before_BD):
        """Each row's last hidden state in the part, or the one before where the part is all padding."""
        hidden_BTD, cache = hidden_states(params, config, tokens_BT, cache, num_tokens_B, impl=impl)
        last_BD = last(hidden_BTD, num_tokens_B)
        return jnp.where((num_tokens_B > 0)[:, None], last_BD, before_BD), cache

    none_BD = jnp.zeros((B, config.hidden_size), activation_dtype(params))
    if T <= chunk:
        last_BD, cache = part(tokens_BT, num_tokens_B, cache, none_BD)
        return unembed(params, config, last_BD), cache
    padded_BT = jnp.pad(tokens_BT, ((0, 0), (0, -T % chunk)))

    def body(i, carry):
        last_BD, cache = carry
        tokens = lax.dynamic_slice_in_dim(padded_BT, i * chunk, chunk, 1)
        return part(tokens, jnp.clip(num_tokens_B - i * chunk, 0, chunk), cache, last_BD)

    parts = -(-jnp.max(num_tokens_B) // chunk)
    carry = varying_as((none_BD, cache), params, tokens_BT, num_tokens_B, cache)
    last_BD, cache = lax.fori_loop(0, parts, body, carry)
    return unembed(params, config, last_BD), cache


def read_again(
    params: Params, config: ModelConfig, tokens_BT: jax.Array, num_tokens_B: jax.Array, impl: str | None
) -> jax.Array:
    """Logits [B, V] after each row's last token, without a cache."""
    hidden_BTD, _ = hidden_states(params, config, tokens_BT, None, num_tokens_B, impl=impl)
    return unembed(params, config, last(hidden_BTD, num_tokens_B))


def hidden(
    params: Params, config: ModelConfig, tokens_BT: jax.Array, num_tokens_B: jax.Array, impl: str | None
) -> jax.Array:
    """Hidden states [B, T, D] of whole rows, without a cache."""
    return hidden_states(params, config, tokens_BT, None, num_tokens_B, impl=impl)[0]


def last(hidden_BTD: jax.Array, num_tokens_B: jax.Array) -> jax.Array:
    """[B, D]: behind each row's last token; of a row without any the first."""
    return jnp.take_along_axis(hidden_BTD, jnp.maximum(num_tokens_B - 1, 0)[:, None, None], 1)[:, 0]


def admit(state: DecodeState, slot_R: Any, rows: DecodeState) -> DecodeState:
    """The state with rows that join it: numbers only. The keys and values of a row's prompt were read into
    that row of the cache.

    Args:
        state: of all rows.
        slot_R: int32, the place of each new row; one past the end is dropped.
        rows: R rows as `choose_and_note` gives them, with settings of the same structure and as much room.

    Raises:
        InputError: rows of another structure or size.
    """
    one, other = (jax.tree.map(lambda x: x.shape[1:], tree) for tree in (state, rows))
    if one != other:
        raise InputError(
            "rows that join must have settings of the same structure (plain or full), and room for as many"
            " tokens, EOS ids and alternatives, as the rows that are there"
        )
    return jax.tree.map(lambda old, new: jnp.asarray(old).at[slot_R].set(new, mode="drop"), state, rows)


def advance(
    params: Params,
    config: ModelConfig,
    state: DecodeState,
    cache: KVCache,
    steps: Any,
    impl: str | None,
) -> tuple[DecodeState, KVCache]:
    """`until_ended` by a token of each active row at a time."""

    def step(state, cache):
        token_BT = state.token_B[:, None]
        num_tokens_B = state.active_B.astype(jnp.int32)
        hidden_BTD, cache = hidden_states(params, config, token_BT, cache, num_tokens_B, impl=impl)
        return choose_behind(params, config, hidden_BTD[:, 0], state, impl), cache

    return until_ended(step, steps, *varying_as((state, cache), (state, cache), params))


def until_ended(step: Any, steps: Any, state: DecodeState, *more: Any, enough: Any = None) -> tuple:
    """The one loop: `step` takes the state and what comes with it and gives them anew, until every row has
    ended or so many steps (int32) are taken; or where `enough` says so of a state.
    """
    _, *carry = lax.while_loop(
        lambda carry: (
            (carry[0] < steps) & jnp.any(carry[1].active_B) & (True if enough is None else ~enough(carry[1]))
        ),
        lambda carry: (carry[0] + 1, *step(*carry[1:])),
        (jnp.int32(0), state, *more),
    )
    return tuple(carry)


def choose_behind(params, config, hidden_BD, state, impl):
    """`choose_and_note` behind hidden states: rows that take the likeliest token need no logits if a kernel
    serves.
    """
    if state.alternatives is not None or not fuses_head(params, hidden_BD, impl):
        return choose_and_note(unembed(params, config, hidden_BD), state, impl)

    def by_logits():
        logits_BV = unembed(params, config, hidden_BD)
        return choose(logits_BV, state.key_B, state.sampling_B, state.context, impl)[:2]

    likeliest = takes_likeliest(state.sampling_B)
    return note(state, *lax.cond(likeliest, lambda: greedy(params, config, hidden_BD, impl), by_logits))


class Program(NamedTuple):
    """A function jitted twice: as it is, and so that it reuses the memory of what it changes."""

    keeping: Any
    donating: Any


def program(
    function: Any, *static: str, donates: str | tuple[str, ...] = "cache", options: Any = None
) -> Program:
    """options: for the compiler; then it can have no place in a caller's jit."""
    jit = partial(jax.jit, static_argnames=("config", "impl", *static), compiler_options=options)
    return Program(jit(function), jit(function, donate_argnames=donates))


READ = program(read, "chunk")
HIDDEN = jax.jit(hidden, static_argnames=("config", "impl"))
READ_AGAIN = jax.jit(read_again, static_argnames=("config", "impl"))
ADVANCE = program(advance, donates=("state", "cache"), options=compiler_options())


def bucket(size: int) -> int:
    """The power of two, at least 16, that lengths are rounded up to, so that few programs are compiled."""
    return max(_LEAST_BUCKET, power_of_two(size))


def power_of_two(size: int) -> int:
    """The least that is not below it."""
    return 1 << (size - 1).bit_length()
