"""Speculative decoding (Leviathan et al. 2023): a draft model or a function proposes tokens, and one forward
pass of the model verifies several of them.

The token at a position is a function of the model's logits there and of the row's key (sampling/sampler.py).
A draft token is accepted if it equals the token that the model samples itself. So the tokens equal the tokens
of plain decoding with the same key, greedy or sampled, and so does their distribution. A draft model samples
with the same noise, which makes its tokens agree more often.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..cache.kv_cache import KVCache, without_layers
from ..cache.truncation import truncate
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..errors import InputError, format_value
from ..model.decoder import Inputs
from ..ops.operation import run
from ..sampling.context import Context
from ..sampling.sampler import sample_tokens
from .executor import Executor, RunnableModel
from .loop import to_logits
from .state import DecodeState, RowProgress, sample_and_append
from .strategies import Carry, Strategy

# (history_BS, length_B, count) -> int32 [B, count]; traced.
DraftFunction = Callable[[jax.Array, jax.Array, int], jax.Array]

_MAX_MATCH = 4  # tokens that prompt look-up compares at most


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculationState:
    """The part of the carry of `Speculative` that is neither the state nor the cache of the model."""

    cache: KVCache | None  # of the draft model; None where a function proposes
    passes_B: jax.Array  # int32: forward passes of the model that each row took part in
    accepted_B: jax.Array  # int32: draft tokens that were accepted

    @staticmethod
    def of_rows(rows: int, cache: KVCache | None = None) -> "SpeculationState":
        """Returns the state before the first step."""
        zeros_B: Any = np.zeros(rows, np.int32)
        return SpeculationState(cache, zeros_B, zeros_B)


@dataclasses.dataclass(frozen=True)
class Speculative(Strategy):
    """A strategy in which several draft tokens of each row are verified per step, so a step may append
    several tokens.

    - constants: the parameters of the model, the rows' `Extras`, and the parameters of the draft model (None
      for a function).
    - carry: the state, with `context.history_BS`, the model's cache, and a `SpeculationState`.
    """

    config: ModelConfig
    proposer: ModelConfig | DraftFunction  # the configuration of the draft model, or a function
    num_draft_tokens: int  # per step

    def step(self, executor: Executor, constants: tuple, carry: Carry) -> tuple[Carry, Any]:
        params, extras, draft_params = constants
        state, cache, draft = carry
        draft_BT, draft_cache = self._propose(executor, draft_params, state, draft.cache)
        overflow_B = cache.overflow_B
        model = RunnableModel(params, self.config, extras)
        out = executor.forward(model, last_and_draft_tokens, (state.progress, draft_BT), cache, None)
        # A draft token past the capacity is dropped. Its logits come after the row's last token.
        lengths = dataclasses.replace(without_layers(out.cache), overflow_B=overflow_B)
        counts = dataclasses.replace(draft, cache=None)
        args = state, draft_BT, counts, lengths, executor.run_config
        state, counts, lengths, continues = executor.call(_VERIFY, out.hidden, *args, takes_hidden=True)
        cache = dataclasses.replace(lengths, layers=out.cache.layers, routed_experts=out.cache.routed_experts)
        return (state, cache, dataclasses.replace(counts, cache=draft_cache)), continues

    def draft_call(self, context: Context) -> tuple[Any, ...]:
        """Returns the program of a function that proposes, and its arguments."""
        count = self.num_draft_tokens
        return _CALL_DRAFT_FUNCTION, self.proposer, count, context.history_BS, context.position_B

    def _propose(self, executor: Executor, draft_params: Any, state: DecodeState, cache: Any) -> Any:
        """Returns the draft tokens [B, num_draft_tokens], and the draft model's cache."""
        context = state.context
        count = self.num_draft_tokens
        known = context.history_BS, context.position_B
        if not isinstance(self.proposer, ModelConfig):
            return executor.call(*self.draft_call(context)), None
        model = RunnableModel(draft_params, self.proposer)

        def propose(inputs, i, carry):
            draft_BT, args, context, cache = carry
            out = executor.forward(model, inputs, args, cache, -1)
            args = state, context, draft_BT, i, executor.run_config
            draft_BT, token_B, context = executor.call(_ADD_DRAFT_TOKEN, out.hidden, *args)
            return draft_BT, (token_B,), context, out.cache

        # First the last two tokens: the draft model has not seen the last but one if all were accepted.
        none_BT: Any = np.zeros((len(state.token_B), count), np.int32)
        carry = propose(last_two_tokens, np.int32(0), (none_BT, known, context, cache))
        draft_BT, _, _, cache = executor.repeat(1, count, functools.partial(propose, one_token), carry)
        return draft_BT, cache


# For `Executor.forward`.


def last_and_draft_tokens(
    cache: KVCache, progress: RowProgress, draft_BT: jax.Array
) -> tuple[Inputs, KVCache]:
    """Returns the last token of each row, and its draft tokens, [B, 1 + count]. A row that has ended has
    none.
    """
    tokens_BT = jnp.concatenate([progress.token_B[:, None], draft_BT], 1)
    return Inputs(tokens_BT, tokens_BT.shape[1] * progress.active_B.astype(jnp.int32)), cache


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


def verify(
    outputs: Any, state: DecodeState, draft_BT: jax.Array, counts: SpeculationState, run_config: RunConfig
) -> tuple[DecodeState, SpeculationState]:
    """Appends the tokens that the model samples itself as long as they equal the draft tokens, and one more.
    outputs: logits [B, T, V], or `Hidden` [B, T, D], of the last token and the T - 1 tokens of draft_BT.
    """
    active_B = state.active_B
    length_B = state.length_B
    plain = functools.partial(_verify_in_turn, outputs, run_config)
    state = run("verify", plain, run_config, static=dict(outputs=outputs), state=state, draft_BT=draft_BT)
    num_accepted_B = counts.accepted_B + jnp.maximum(state.length_B - length_B - 1, 0)
    return state, SpeculationState(counts.cache, counts.passes_B + active_B, num_accepted_B)


def _verify_in_turn(outputs, run_config, state, draft_BT):
    """Returns the state after `verify`. Each token is sampled after the one before it was appended."""
    logits_BTV = to_logits(outputs)
    count = draft_BT.shape[1]
    accepted_B = state.active_B
    for i in range(count + 1):  # the token after i draft tokens, all accepted
        state = sample_and_append(logits_BTV[:, i], state, run_config, accepted_B)
        accepted_B = accepted_B & (state.token_B == draft_BT[:, min(i, count - 1)])
    return state


def _verify(outputs, state, draft_BT, counts, lengths, run_config):
    state, counts = verify(outputs, state, draft_BT, counts, run_config)
    return state, counts, truncate(lengths, state.position_B - 1), jnp.any(state.active_B)


def _call_draft_function(proposer: DraftFunction, count: int, history_BS: Any, length_B: jax.Array) -> Any:
    """Returns int32 [B, count]."""
    return jnp.asarray(proposer(history_BS, length_B, count), jnp.int32)


def _add_draft_token(logits, state, context, draft_BT, i, run_config):
    """Returns the draft tokens with one more, sampled with the noise that the model itself will sample
    with.
    """
    logits_BV = logits_at(logits, -1)
    token_B, *_ = sample_tokens(logits_BV, state.key_B, state.sampling_B, context, run_config)
    context = context.append_token(token_B, state.active_B)
    return jnp.asarray(draft_BT).at[:, i].set(token_B), token_B, context


_VERIFY = jax.jit(_verify, static_argnames="run_config", donate_argnames="state")
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
