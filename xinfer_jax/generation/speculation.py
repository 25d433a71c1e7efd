"""Speculative decoding (Leviathan et al. 2023): a proposer drafts tokens, and one forward pass of the model
verifies several of them.

The token at a position is a function of the model's logits there and of the row's key (sampling/sampler.py).
A draft token is accepted if it equals the token that the model samples itself. So the tokens equal the tokens
of plain decoding with the same key, greedy or sampled, and so does their distribution. A draft model or head
samples with the same noise, which makes its tokens agree more often.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cache.draft_prefix import FeatureRows
from ..cache.kv_cache import KVCache, without_layers
from ..cache.paged import FeaturePages
from ..cache.truncation import truncate
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..model.decoder import Inputs
from ..ops.operation import run
from ..sampling.caller_processors import end_rows
from .executor import Executor, RunnableModel
from .loop import Hidden, to_logits
from .proposers import Proposer, append_unread_features, unread_features
from .state import DecodeState, RowProgress, sample_and_append
from .strategies import Carry, Strategy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculationState:
    """The part of the carry of `Speculative` that is neither the state nor the cache of the model."""

    cache: KVCache | None  # of the draft model or head; None: the proposer has none
    passes_B: jax.Array  # int32: forward passes of the model that each row took part in
    accepted_BT: jax.Array  # int32: how often the draft token at each place of a step was accepted
    # For a head, if there are pages, or if the call keeps a prefix.
    features: FeaturePages | FeatureRows | None = None
    # int32: draft tokens of a head that the host knows before the step, for its masks; -1: none.
    proposed_BT: Any = None

    @staticmethod
    def of_rows(
        rows: int, count: int, cache: KVCache | None = None, features: Any = None
    ) -> "SpeculationState":
        """Returns the state before the first step. count: draft tokens per step."""
        passes_B: Any = np.zeros(rows, np.int32)
        accepted_BT: Any = np.zeros((rows, count), np.int32)
        proposed_BT: Any = np.full((rows, count), -1, np.int32)
        return SpeculationState(cache, passes_B, accepted_BT, features, proposed_BT)


@dataclasses.dataclass(frozen=True)
class Speculative(Strategy):
    """A strategy in which several draft tokens of each row are verified per step, so a step may append
    several tokens.

    - constants: the parameters of the model, the rows' `Extras`, and the parameters of the proposer (None for
      a function).
    - carry: the state, with `context.history_BS`, the model's cache, and a `SpeculationState`.
    """

    config: ModelConfig
    proposer: Proposer
    num_draft_tokens: int  # per step; 0: a step is a plain one, which keeps what a draft head needs later
    stop: Callable[[DecodeState], jax.Array] | None = None  # see `Plain`

    def step(self, executor: Executor, constants: tuple, carry: Carry) -> tuple[Carry, Any]:
        params, extras, _ = constants
        state, cache, drafts = carry
        draft_BT, draft_cache = self.propose(executor, constants, carry)
        if state.unread is not None:  # within a trace
            proposed_BT = drafts.proposed_BT
            draft_BT = jnp.where(proposed_BT < 0, draft_BT, proposed_BT)
            drafts = dataclasses.replace(drafts, proposed_BT=jnp.full_like(proposed_BT, -1))
        overflow_B = cache.overflow_B
        model = RunnableModel(params, self.config, self.proposer.extras(extras))
        out = executor.forward(model, last_and_draft_tokens, (state.progress, draft_BT), cache, None)
        # A draft token past the capacity is dropped. Its logits come after the row's last token.
        lengths = dataclasses.replace(without_layers(out.cache), overflow_B=overflow_B)
        counts = dataclasses.replace(drafts, cache=None, features=None)
        args = state, draft_BT, counts, lengths, executor.run_config, self.stop
        before_B = state.position_B
        state, counts, lengths, continues = executor.call(_VERIFY, out.hidden, *args, takes_hidden=True)
        cache = dataclasses.replace(lengths, layers=out.cache.layers, routed_experts=out.cache.routed_experts)
        state, pages = self._with_features(constants, out, before_B, state, drafts.features)
        return (state, cache, dataclasses.replace(counts, cache=draft_cache, features=pages)), continues

    def propose(self, executor: Executor, constants: tuple, carry: Carry) -> tuple[Any, Any]:
        """Returns the draft tokens of the next step, int32 [B, num_draft_tokens], and the proposer's
        cache.
        """
        state, cache, drafts = carry
        params, _, own = constants
        caches = drafts.cache, cache
        return self.proposer.propose(executor, (own, params), state, caches, self.num_draft_tokens)

    def _with_features(
        self, constants: tuple, out: Any, before_B: Any, state: DecodeState, pages: Any
    ) -> tuple[DecodeState, Any]:
        """Returns the state and the pages with the features of tokens that are certain now, if the proposer
        needs them. before_B: `position_B` before the step.
        """
        if state.unread is None:
            return state, pages
        params, _, own = constants
        hidden = out.hidden.states if isinstance(out.hidden, Hidden) else out.hidden
        count_B = state.position_B - before_B
        features_BTX = self.proposer.features((own, params), hidden, out.reads)
        waits = not self.num_draft_tokens and pages is not None
        add = append_unread_features if waits else unread_features
        state = dataclasses.replace(state, unread=add(features_BTX, count_B, state.unread))
        return state, pages and pages.record(features_BTX, before_B - 1, count_B)


def propose(
    executor: Executor, strategy: Speculative, drafts: SpeculationState, args: tuple
) -> tuple[Any, SpeculationState]:
    """Returns the draft tokens of the next step, and the state of the proposer, for a host that needs the
    draft tokens first. args: the constants, the state, and the cache of the model.
    """
    constants, state, model_cache = args
    draft_BT, cache = strategy.propose(executor, constants, (state, model_cache, drafts))
    if state.unread is not None:
        drafts = dataclasses.replace(drafts, proposed_BT=draft_BT)
    return draft_BT, dataclasses.replace(drafts, cache=cache)


# For `Executor.forward`.


def last_and_draft_tokens(
    cache: KVCache, progress: RowProgress, draft_BT: jax.Array
) -> tuple[Inputs, KVCache]:
    """Returns the last token of each row, and its draft tokens, [B, 1 + count]. A row that has ended has
    none.
    """
    tokens_BT = jnp.concatenate([progress.token_B[:, None], draft_BT], 1)
    return Inputs(tokens_BT, tokens_BT.shape[1] * progress.active_B.astype(jnp.int32)), cache


def verify(
    outputs: Any,
    state: DecodeState,
    draft_BT: jax.Array,
    counts: SpeculationState,
    run_config: RunConfig,
    stop: Callable[[DecodeState], jax.Array] | None = None,
) -> tuple[DecodeState, SpeculationState]:
    """Appends the tokens that the model samples itself as long as they equal the draft tokens, and one more.
    outputs: logits [B, T, V], or `Hidden` [B, T, D], of the last token and the T - 1 tokens of draft_BT.
    """
    active_B = state.active_B
    length_B = state.length_B
    plain = functools.partial(_verify_in_turn, outputs, run_config, stop)
    if stop is None:
        static = dict(outputs=outputs)
        state = run("verify", plain, run_config, static=static, state=state, draft_BT=draft_BT)
    else:  # it sees the state after each token
        state = plain(state, draft_BT)
    num_accepted_B = jnp.maximum(state.length_B - length_B - 1, 0)
    accepted_BT = counts.accepted_BT + (jnp.arange(draft_BT.shape[1]) < num_accepted_B[:, None])
    return state, dataclasses.replace(counts, passes_B=counts.passes_B + active_B, accepted_BT=accepted_BT)


def _verify_in_turn(outputs, run_config, stop, state, draft_BT):
    """Returns the state after `verify`. Each token is sampled after the one before it was appended."""
    logits_BTV = to_logits(outputs)
    count = draft_BT.shape[1]
    accepted_B = state.active_B
    for i in range(count + 1):  # the token after i draft tokens, all accepted
        state = sample_and_append(logits_BTV[:, i], state, run_config, accepted_B)
        if stop is not None:
            state = end_rows(stop, state)
        if i < count:
            accepted_B = accepted_B & (state.token_B == draft_BT[:, i])
    return state


def _verify(outputs, state, draft_BT, counts, lengths, run_config, stop):
    state, counts = verify(outputs, state, draft_BT, counts, run_config, stop)
    return state, counts, truncate(lengths, state.position_B - 1), jnp.any(state.active_B)


_VERIFY = jax.jit(_verify, static_argnames=("run_config", "stop"), donate_argnames="state")
