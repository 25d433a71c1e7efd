"""`Proposer`: the source of the draft tokens that `Speculative` verifies. Functions, draft models and draft
heads are proposers.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..cache.kv_cache import KVCache
from ..cache.truncation import truncate
from ..config.model_config import ModelConfig
from ..draft_heads.draft_head import DraftCall, DraftHead, HeadParams, UnreadTokens, head_run_config
from ..errors import InputError, format_value
from ..model.decoder import Inputs
from ..model.extras import Extras
from ..model.taps import Tap
from ..sampling.sampler import sample_tokens
from .executor import Executor, RunnableModel
from .state import DecodeState, UnreadFeatures

# (history_BS, length_B, count) -> int32 [B, count]; traced.
DraftFunction = Callable[[jax.Array, jax.Array, int], jax.Array]

_MAX_MATCH = 4  # tokens that prompt look-up compares at most


class Proposer(abc.ABC):
    """A source of draft tokens. It is static. A step asks it for draft tokens, and then tells it which tokens
    are certain.
    """

    def extras(self, extras: Extras) -> Extras:
        """Returns the extras with which the target runs."""
        return extras

    @abc.abstractmethod
    def propose(
        self, executor: Executor, params: tuple[Any, Any], state: DecodeState, caches: tuple, count: int
    ) -> tuple[Any, Any]:
        """Returns draft tokens, int32 [B, count], and the proposer's cache. It may be called again before the
        step: the result is the same.

        Args:
            executor: runs the models.
            params: the parameters of the proposer and those of the target.
            state: the rows.
            caches: the cache of the proposer, None if it has none, and the target's.
            count: the number of draft tokens. 0: a draft head does not read its unread tokens.
        """

    def features(self, params: tuple[Any, Any], hidden_BTD: Any, reads: Any) -> Any:
        """Returns the features of the target's tokens, [B, T, X], that the next call of `propose` needs.
        None: it needs none.

        Args:
            params: as for `propose`.
            hidden_BTD: the target's hidden states after its final norm.
            reads: the outputs of the layers that `extras` taps, by layer.
        """
        return None


@dataclasses.dataclass(frozen=True)
class FunctionProposer(Proposer):
    """A function of the rows' tokens that proposes."""

    function: DraftFunction

    def propose(self, executor, params, state, caches, count):
        known = state.context.history_BS, state.position_B
        if not count:
            return np.zeros((len(state.token_B), 0), np.int32), None
        return executor.call(_CALL_DRAFT_FUNCTION, self.function, count, *known), None


@dataclasses.dataclass(frozen=True)
class ModelProposer(Proposer):
    """A second model that proposes. It samples with the noise of the target."""

    config: ModelConfig

    def propose(self, executor, params, state, caches, count):
        context = state.context
        model = RunnableModel(params[0], self.config)

        def add_token(inputs, i, carry):
            draft_BT, args, context, cache = carry
            out = executor.forward(model, inputs, args, cache, -1)
            args = state, context, draft_BT, i, executor.run_config
            draft_BT, token_B, context = executor.call(_ADD_DRAFT_TOKEN, out.hidden, *args)
            return draft_BT, (token_B,), context, out.cache

        # First the last two tokens: the draft model has not seen the last but one if all were accepted.
        none_BT: Any = np.zeros((len(state.token_B), count), np.int32)
        known = context.history_BS, context.position_B
        carry = add_token(last_two_tokens, np.int32(0), (none_BT, known, context, caches[0]))
        draft_BT, _, _, cache = executor.repeat(1, count, functools.partial(add_token, one_token), carry)
        return draft_BT, cache


@dataclasses.dataclass(frozen=True)
class HeadProposer(Proposer):
    """A draft head that proposes, within a trace. `DecodeState.unread` has the features of the tokens that it
    has not read.
    """

    head: DraftHead

    def extras(self, extras):
        if not self.head.taps:
            return extras
        return extras._replace(taps={layer: Tap(read=True) for layer in self.head.taps})

    def propose(self, executor, params, state, caches, count):
        head_cache, target_cache = caches
        run_config = head_run_config(executor.run_config)
        if not count:  # the head reads nothing: `append_unread_features`
            return jnp.zeros((len(state.token_B), 0), jnp.int32), head_cache
        read_B = jnp.where(state.active_B, state.unread.count_B, 0)
        unread, head_cache = _unread_tokens(state, head_cache, read_B)
        if head_cache is not None:  # there may be space for more tokens, which is empty now
            unread = UnreadTokens(*(x[:, : 1 + count] for x in unread[:2]), read_B)
        params = HeadParams(*params)

        sample = functools.partial(_sample_draft_token, state, run_config)
        call = DraftCall(unread, head_cache, target_cache, state.context, sample, run_config)
        return self.head.draft(params, call, count)

    def read(
        self, executor: Executor, params: tuple[Any, Any], state: DecodeState, head_cache: KVCache
    ) -> KVCache:
        """Returns the head's cache with the unread tokens except the last one, also of rows that have ended.
        So it has as many tokens as the cache of the target.
        """
        known: Any = state.unread
        unread, cache = _unread_tokens(state, head_cache, known.count_B - 1)
        own = HeadParams(*params)
        return self.head.read(own, unread, cache, head_run_config(executor.run_config))  # type: ignore[arg-type]

    def features(self, params, hidden_BTD, reads):
        of_taps = tuple(reads[layer] for layer in self.head.taps)
        return self.head.features(HeadParams(*params), hidden_BTD, of_taps)


def _unread_tokens(
    state: DecodeState, head_cache: KVCache | None, count_B: jax.Array
) -> tuple[UnreadTokens, KVCache | None]:
    """Returns the first `count_B` unread tokens of each row, and the head's cache with the tokens before."""
    unread: Any = state.unread
    first_B = state.position_B - unread.count_B
    index_BT = first_B[:, None] + jnp.arange(unread.features_BTX.shape[1])
    tokens_BT = jnp.take_along_axis(state.context.history_BS, jnp.maximum(index_BT, 0), 1, mode="clip")
    if head_cache is not None:
        head_cache = truncate(head_cache, jnp.maximum(first_B, 0))
    return UnreadTokens(tokens_BT, unread.features_BTX, count_B), head_cache


def unread_features(features_BTX: jax.Array, count_B: Any, old: UnreadFeatures) -> UnreadFeatures:
    """Returns the features of the tokens that are certain since the last step. Rows whose count is 0 keep
    theirs.
    """
    old_BTX = jnp.asarray(old.features_BTX)
    T = features_BTX.shape[1]
    stepped_B = count_B > 0
    kept_BTX = jnp.where(stepped_B[:, None, None], features_BTX.astype(old_BTX.dtype), old_BTX[:, :T])
    return UnreadFeatures(old_BTX.at[:, :T].set(kept_BTX), jnp.where(stepped_B, count_B, old.count_B))


def append_unread_features(features_BTX: jax.Array, count_B: Any, old: UnreadFeatures) -> UnreadFeatures:
    """Returns the unread features with those of the tokens of a step in which the head did not read."""
    T = features_BTX.shape[1]
    U = old.features_BTX.shape[1]
    row_B1 = jnp.arange(len(old.count_B))[:, None]
    at_BT = old.count_B[:, None] + jnp.arange(T)
    at_BT = jnp.where(jnp.arange(T) < count_B[:, None], at_BT, U)
    new_BTX = features_BTX.astype(old.features_BTX.dtype)
    appended_BTX = jnp.asarray(old.features_BTX).at[row_B1, at_BT].set(new_BTX, mode="drop")
    return UnreadFeatures(appended_BTX, old.count_B + count_B)


# For `Executor.forward`.


def one_token(cache: KVCache, token_B: Any) -> tuple[Inputs, KVCache]:
    """Returns this token of each row."""
    return Inputs(token_B[:, None], jnp.ones(token_B.shape[0], jnp.int32)), cache


def logits_at(logits: jax.Array, position: int) -> jax.Array:
    """Returns [B, V] of logits [B, T, V]. Logits [B, V] belong to that position already."""
    return logits if logits.ndim == 2 else logits[:, position]


def last_two_tokens(cache: KVCache, history_BS: Any, length_B: jax.Array) -> tuple[Inputs, KVCache]:
    """Returns each row's last two tokens, and the cache without them."""
    tokens_BT = jnp.take_along_axis(history_BS, length_B[:, None] + jnp.array([-2, -1]), 1)
    return Inputs(tokens_BT, jnp.full(len(length_B), 2, jnp.int32)), truncate(cache, length_B - 2)


def _call_draft_function(proposer: DraftFunction, count: int, history_BS: Any, length_B: jax.Array) -> Any:
    """Returns int32 [B, count]."""
    return jnp.asarray(proposer(history_BS, length_B, count), jnp.int32)


def _sample_draft_token(state, run_config, logits_BV, context):
    """Returns the next draft token of each row, sampled with the noise that the model itself will sample
    with, and the context with it.
    """
    token_B, *_ = sample_tokens(logits_BV, state.key_B, state.sampling_B, context, run_config)
    return token_B, context.append_token(token_B, state.active_B)


def _add_draft_token(logits, state, context, draft_BT, i, run_config):
    """Returns the draft tokens with one more, that token, and the context with it."""
    token_B, context = _sample_draft_token(state, run_config, logits_at(logits, -1), context)
    return jnp.asarray(draft_BT).at[:, i].set(token_B), token_B, context


_ADD_DRAFT_TOKEN = jax.jit(_add_draft_token, static_argnames="run_config")
_CALL_DRAFT_FUNCTION = jax.jit(_call_draft_function, static_argnums=(0, 1))


def check_draft_function(proposer: DraftFunction, count: int, rows: int, history_size: int) -> None:
    """Raises InputError for a function that cannot be traced, or gives anything but `count` ids a row."""
    try:
        draft = _traced_draft(proposer, count, rows, history_size)
    except Exception as error:
        raise InputError(f"the draft function cannot be traced: {type(error).__name__}: {error}") from error
    shape: Any = getattr(draft, "shape", None)
    dtype: Any = getattr(draft, "dtype", None)
    if shape != (rows, count) or not jnp.issubdtype(dtype, np.integer):
        got = format_value(draft) if shape is None else f"{dtype} of {list(shape)}"
        raise InputError(f"the draft function must give int32 ids of the shape [{rows}, {count}], got {got}")


@functools.lru_cache(maxsize=64)
def _traced_draft(proposer, count, rows, history_size):
    history_BS, length_B = (
        jax.ShapeDtypeStruct(shape, np.int32) for shape in ((rows, history_size), (rows,))
    )
    return jax.eval_shape(lambda *known: proposer(*known, count), history_BS, length_B)


def prompt_lookup(history_BS: jax.Array, length_B: jax.Array, count: int) -> jax.Array:
    """Returns the tokens that followed an earlier occurrence of the last tokens (prompt look-up, Saxena
    2023).

    It takes the earlier place that agrees over the most tokens (up to 4), and the latest of such places. If
    the tokens after it are fewer than `count`, they repeat.

    Args:
        history_BS: int32, each row's tokens in order.
        length_B: int32, the number of these tokens.
        count: the number of draft tokens.

    Returns:
        int32 [B, count].
    """
    slot_S = jnp.arange(history_BS.shape[1])
    length_B1 = length_B[:, None]

    def extend(k, carry):
        same_BS, matched_BS = carry
        last_B1 = jnp.take_along_axis(history_BS, jnp.maximum(length_B1 - k, 0), 1)
        same_BS &= (slot_S >= k) & (jnp.roll(history_BS, k, 1) == last_B1)
        return same_BS, matched_BS + same_BS

    inside_BS = (slot_S < length_B1) & (slot_S >= 1)
    _, matched_BS = lax.fori_loop(
        1, _MAX_MATCH + 1, extend, (inside_BS, jnp.zeros(history_BS.shape, jnp.int32))
    )
    best_B1 = jnp.argmax(matched_BS * len(slot_S) + jnp.where(inside_BS, slot_S, 0), 1)[:, None]
    index_BT = best_B1 + jnp.arange(count) % jnp.maximum(length_B1 - best_B1, 1)
    return jnp.take_along_axis(history_BS, index_BT, 1)
