"""The two roads from prompts to tokens: the whole model as one program, its loop on the device; and layer by
layer, programs for one or a few of them, called from the host. The room says which is taken when.

Whole:   tokens_BT ─ READ ─► logits_BV ─ _CHOOSE ─► state ─ ADVANCE, the loop ─► state
Layered: tokens_BT ─ _ENTER ─ _LAYERS, again ─► x_BTD ─ _LAST, _HEAD ─► logits_B1V ─ _ANSWER ─► state
         its tokens ─ _ENTER ─ _LAYERS, again, with the head at the end ─► logits_B1V ─ _ANSWER ─► state …
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..cache.kv_cache import KVCache, counted, reorder, truncate, without_layers
from ..cache.quantized import GEAR_TOKENS
from ..config.model_config import ModelConfig
from ..model.decoder import enter, layer_kinds, leave, through_layers, unembed
from ..weights.params import Params, activation_dtype
from ..weights.processor import compiler_options
from .doors import prompt_chunk
from .loop import ADVANCE, HIDDEN, READ, READ_AGAIN, bucket, last, power_of_two
from .programs import Do
from .speculation import (
    SPECULATE,
    Guessing,
    ask_function,
    check,
    draft_choice,
    last_two,
    to_check,
)
from .state import DecodeState, choose_and_note

_Model = tuple[Params, ModelConfig]
_Given = tuple[Any, Any]  # tokens_BT, and how many of each row are real, num_tokens_B

# Layers of a program that decodes. Between programs threads fall asleep: 24 layers of the 0.5B shape one by
# one took 7 ms more a token, of 34 in int8; eight at once take 3, and compile longer.
_AT_ONCE = 8
# Tokens of all rows that are read at a time, and of a row at least. Buffers beyond 32 MiB come from the
# system anew for each program: 512 tokens took half again as long as all layers at once, in int8; 256 do not.
# A prompt of several chunks is cut into equal ones, a multiple of the step each: 300 tokens are two of 160.
_CHUNK = 256
_STEP = 32
_LEAST = 16


class _Road:
    def __init__(self, do: Do, impl: str | None):
        self._do = do
        self._impl = impl


class Whole(_Road):
    """One program reads, one decodes."""

    name = "whole"
    about = "the model is one program, with its loop on the device"

    @staticmethod
    def at_once(longest: int, rows: int) -> int:
        """What the program that reads is compiled for, where the longest of so many rows is given."""
        return bucket(longest)

    def read(self, model: _Model, given: _Given, cache: KVCache | None, donate: bool, chunk: int = 0) -> Any:
        """What `choose` takes, behind each row's last token, and the cache with the tokens appended; without
        a cache the tokens are all there is. chunk: of a row that is read at a time; 0: `at_once`.
        """
        if cache is None:
            return self._do(READ_AGAIN, *model, *given, self._impl), None
        read = READ.donating if donate else READ.keeping
        return self._do(read, *model, *given, cache, self._impl, prompt_chunk(cache))

    def hidden(self, model: _Model, given: _Given) -> jax.Array:
        """`hidden_states` of whole rows, [B, T, D], without a cache."""
        return self._do(HIDDEN, *model, *given, self._impl)

    def choose(self, model: _Model, behind: Any, state: DecodeState) -> DecodeState:
        """The state with each row's next token."""
        return self._do(_CHOOSE, behind, state, self._impl)

    def share(self, cache: KVCache, prompt_R: np.ndarray) -> KVCache:
        """The cache of the prompt that each row continues."""
        return self._do(_SHARE, cache, prompt_R)

    def advance(self, model: _Model, state: DecodeState, cache: KVCache, steps: int) -> Any:
        """State and cache after so many steps, or fewer where all rows end."""
        return self._do(ADVANCE.donating, *model, state, cache, np.int32(steps), self._impl)

    def speculate(self, model: _Model, draft_params: Any, who: Guessing, rows: Any, steps: int) -> Any:
        """The same in steps that check guesses. rows: state, cache and `Speculation`."""
        return self._do(SPECULATE.donating, *model, draft_params, who, *rows, np.int32(steps), self._impl)


class Layered(_Road):
    """The same from the host, prompts a layer at a time: what is compiled does not grow with the layers."""

    name = "layer by layer"
    about = "programs for one or a few layers, called from the host"

    @staticmethod
    def at_once(longest: int, rows: int) -> int:
        """Tokens of a row to read at a time, where the longest of so many rows is given: one width for the
        whole prompt, so that few programs are compiled, and little padding.
        """
        most, step = (max(_LEAST, size // power_of_two(rows)) for size in (_CHUNK, _STEP))
        chunks = max(1, -(-longest // most))
        return min(bucket(longest), -(-longest // (chunks * step)) * step)

    def read(self, model: _Model, given: _Given, cache: KVCache | None, donate: bool, chunk: int = 0) -> Any:
        if cache is not None and not donate:
            layers = tuple(self._do(_COPY, layer) for layer in cache.layers)
            cache = dataclasses.replace(cache, layers=layers)
        tokens_BT, num_tokens_B = given
        B, T = tokens_BT.shape
        longest = int(num_tokens_B.max())
        # GEAR's directions are those of a row's first tokens: their number must not follow from other rows.
        fixed = GEAR_TOKENS if cache and cache.dtype == "gear" else chunk
        chunk = fixed or self.at_once(longest, B)
        chunk = T if cache is None else min(T, prompt_chunk(cache), chunk)
        padded_BT = np.pad(tokens_BT, ((0, 0), (0, -T % chunk)))
        behind_B1D = np.zeros((B, 1, model[1].hidden_size), activation_dtype(model[0]))
        for first in range(0, longest, chunk):
            part = padded_BT[:, first : first + chunk], np.clip(num_tokens_B - first, 0, chunk)
            x_BTD, cache = self.through(model, _given, part, cache)
            behind_B1D = self._do(_LAST, x_BTD, part[1], behind_B1D)
        return behind_B1D, cache

    def hidden(self, model: _Model, given: _Given) -> jax.Array:
        return self._do(_LEAVE, *_ends(model), self.through(model, _given, given, None)[0])

    def logits(self, model: _Model, behind: Any) -> jax.Array:
        """float32 [B, 1, V] of what `read` gives."""
        return self._do(_HEAD, *_ends(model), behind)

    def choose(self, model: _Model, behind: Any, state: DecodeState) -> DecodeState:
        return self._do(_ANSWER, self.logits(model, behind), state, self._impl)[0]

    def share(self, cache: KVCache, prompt_R: np.ndarray) -> KVCache:
        layers = tuple(self._do(_SHARE_LAYER, layer, prompt_R) for layer in cache.layers)
        return dataclasses.replace(self._do(_SHARE, without_layers(cache), prompt_R), layers=layers)

    def advance(self, model: _Model, state: DecodeState, cache: KVCache, steps: int) -> Any:
        goes_on: Any = True
        for _ in range(steps):
            if not self._do.holds(goes_on):
                break
            logits_B1V, cache = self.through(model, _of_active, (state.turn,), cache)
            state, goes_on = self._do(_ANSWER, logits_B1V, state, self._impl)
        return state, cache

    def speculate(self, model: _Model, draft_params: Any, who: Guessing, rows: Any, steps: int) -> Any:
        (state, cache, draft) = rows
        goes_on = True
        for _ in range(steps):
            if not self._do.holds(goes_on):
                break
            guess_BT, draft_cache = self._guess((draft_params, who.guesser), who, state, draft.cache)
            overflow_B = cache.overflow_B
            logits_BTV, cache = self.through(model, _to_check, (state.turn, guess_BT), cache)
            lengths = dataclasses.replace(without_layers(cache), overflow_B=overflow_B)
            counts = dataclasses.replace(draft, cache=None)
            args = logits_BTV, state, guess_BT, counts, lengths, self._impl
            state, counts, lengths, goes_on = self._do(_CHECK, *args)
            cache = dataclasses.replace(lengths, layers=cache.layers)
            draft = dataclasses.replace(counts, cache=draft_cache)
        return state, cache, draft

    def _guess(self, model: Any, who: Guessing, state: DecodeState, cache: KVCache | None) -> Any:
        """The guesses [B, count], and the draft model's cache."""
        context = state.context
        known: tuple = context.history_BS, context.position_B
        if cache is None:
            return self._do(_ASK_FUNCTION, *who, *known), None
        guess_BT: Any = np.zeros((len(state.token_B), who.per_pass), np.int32)
        ask: Callable = _last_two
        asked = known
        for i in range(who.per_pass):
            logits_BTV, cache = self.through(model, ask, asked, cache)
            args = logits_BTV, state, context, guess_BT, np.int32(i), self._impl
            guess_BT, token_B, context = self._do(_GUESS, *args)
            ask = one_token
            asked = (token_B,)
        return guess_BT, cache

    def through(self, model: _Model, ask: Callable, asked: tuple, cache: KVCache | None) -> Any:
        """Of what `ask` gives (below) logits [B, T, V], or [B, T, D] behind the last layer where prompts are
        read; and the cache with it appended.
        """
        (params, config) = model
        prompt = ask is _given
        lengths, capacity = (None, None) if cache is None else (without_layers(cache), cache.capacity)
        x_BTD, place, lengths = self._do(_ENTER, *_ends(model), ask, asked, lengths, capacity)
        held = (None,) * config.num_hidden_layers if cache is None else cache.layers
        layers = ()
        logits_BTV = None
        end = None if prompt else _ends(model)[0]
        for at in _groups(config, 1 if prompt else _AT_ONCE):
            some = params["layers"][at]
            kinds = layer_kinds(config)[at]
            at_end = at.stop >= len(held)
            args = some, end, np.bool_(at_end), config, kinds, x_BTD, place, held[at], self._impl
            x_BTD, logits_BTV, keys = self._do(_LAYERS, *args)
            layers += keys
        return x_BTD if prompt else logits_BTV, lengths and dataclasses.replace(lengths, layers=layers)


Road = Whole | Layered


@functools.lru_cache(maxsize=64)
def _groups(config: ModelConfig, most: int) -> tuple[slice, ...]:
    """Layers that are one program, so many at most: whole periods of their kinds, all as many if they can be,
    so that there are few programs.
    """
    L = config.num_hidden_layers
    kinds = layer_kinds(config)
    alike = [*zip(kinds, config.layer_experts or (False,) * L, strict=True)]
    period = next(p for p in range(1, L + 1) if all(alike[i] == alike[i % p] for i in range(L)))
    sizes = range(period, most + 1, period)
    largest = max(sizes, default=most)
    size = max((size for size in sizes if L % size == 0 and 2 * size >= largest), default=largest)
    return tuple(slice(first, first + size) for first in range(0, L, size))


def _ends(model: _Model) -> _Model:
    """What comes before the layers and behind them."""
    params, config = model
    return {**params, "layers": ((),) * config.num_hidden_layers}, config


# What a pass reads: (how much rows hold, …) -> tokens [B, T], how many of each row, how much they held.


def _given(lengths, tokens_BT, num_tokens_B):
    return tokens_BT, num_tokens_B, lengths


def _of_active(lengths, turn):
    return turn.token_B[:, None], turn.active_B.astype(jnp.int32), lengths


def _to_check(lengths, turn, guess_BT):
    return *to_check(turn, guess_BT), lengths


def _last_two(lengths, history_BS, length_B):
    return (
        last_two(history_BS, length_B),
        jnp.full(len(length_B), 2, jnp.int32),
        truncate(lengths, length_B - 2),
    )


def one_token(lengths, token_B):
    return token_B[:, None], jnp.ones(len(token_B), jnp.int32), lengths


def _enter(params, config, ask, asked, lengths, capacity):
    tokens_BT, num_tokens_B, lengths = ask(lengths, *asked)
    start_B = None if lengths is None else lengths.length_B
    x_BTD, place = enter(params, config, tokens_BT, start_B, num_tokens_B)
    return x_BTD, place, lengths and counted(lengths, num_tokens_B, capacity)


def _last(x_BTD, num_tokens_B, before_B1D):
    """[B, 1, D]: behind each row's last token; what was before where there is none."""
    return jnp.where((num_tokens_B > 0)[:, None, None], last(x_BTD, num_tokens_B)[:, None], before_B1D)


def _head(params, config, x_BTD):
    return unembed(params, config, leave(params, config, x_BTD))


def _layers(layers, end, at_end, config, kinds, x_BTD, place, keys, impl):  # noqa: PLR0913  as `through_layers`
    """`through_layers`, and what they are the end of as logits: the head alone took 2 ms more a token. It is
    in the program of all layers, so that there is one.
    """
    x_BTD, keys = through_layers(layers, config, kinds, x_BTD, place, keys, impl)
    if end is None:
        return x_BTD, None, keys

    def none():
        return jnp.zeros((*x_BTD.shape[:2], config.vocab_size), jnp.float32)

    logits_BTV = lax.cond(at_end, lambda: _head(end, config, x_BTD), none)
    return x_BTD, logits_BTV, keys


def _share_layer(keys, index_B):
    return keys.reorder(index_B)


def _copy(keys):
    return jax.tree.map(jnp.copy, keys)


def _answer(logits_B1V, state, impl):
    state = choose_and_note(logits_B1V[:, 0], state, impl)
    return state, jnp.any(state.active_B)


def _check(logits_BTV, state, guess_BT, counts, lengths, impl):
    state, counts = check(logits_BTV, state, guess_BT, counts, impl)
    return state, counts, truncate(lengths, state.position_B - 1), jnp.any(state.active_B)


def _guess(logits_BTV, state, context, guess_BT, i, impl):
    token_B, context = draft_choice(logits_BTV[:, -1], state, context, impl)
    return guess_BT.at[:, i].set(token_B), token_B, context


_STATIC = ("config", "impl")
_ENTER = jax.jit(_enter, static_argnames=("config", "ask", "capacity"))
_LAYERS = jax.jit(
    _layers,
    static_argnames=(*_STATIC, "kinds"),
    donate_argnames=("x_BTD", "keys"),
    compiler_options=compiler_options(),
)
_LAST = jax.jit(_last)
_LEAVE = jax.jit(leave, static_argnames="config")
_HEAD = jax.jit(_head, static_argnames="config", compiler_options=compiler_options())
_ANSWER = jax.jit(_answer, static_argnames="impl", donate_argnames="state")
_CHECK = jax.jit(_check, static_argnames="impl", donate_argnames="state")
_GUESS = jax.jit(_guess, static_argnames="impl")
_ASK_FUNCTION = jax.jit(ask_function, static_argnums=(0, 1))
_CHOOSE = jax.jit(choose_and_note, static_argnames="impl")
_SHARE = jax.jit(reorder)
_SHARE_LAYER = jax.jit(_share_layer)
_COPY = jax.jit(_copy)
