"""Decoding strategies: the interface, and plain decoding, the simplest one.

A strategy says which model runs on which tokens, and how the logits are used. It is written once, over an
`Executor`:

- The traced executor makes one program of all steps of the strategy, with the loop on the device.
- The layerwise executor calls compiled programs from the host.

A strategy has only static fields, so it can be a static argument of jit. All arrays are in `constants`, which
a step reads, and in `carry`, which a step replaces.

The other strategies are `speculation.Speculative` and `beam_steps.BeamSearch`. `BeamSearch` also has an
`init`, because its first step turns prompts into beams.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..cache.kv_cache import KVCache
from ..config.model_config import ModelConfig
from ..model.decoder import Inputs
from .executor import Executor, RunnableModel
from .state import DecodeState, RowProgress

# What a step takes and replaces: the state, the cache, and what else a strategy keeps.
Carry = tuple[Any, ...]


class Strategy(abc.ABC):
    """A decoding strategy: `Plain`, `Speculative` or `BeamSearch`.

    Attributes:
        steps_ahead: the number of steps that may run after the last row has ended. They change nothing.
    """

    steps_ahead: ClassVar[int] = 0

    @abc.abstractmethod
    def step(self, executor: Executor, constants: tuple, carry: Carry) -> tuple[Carry, Any]:
        """Takes a step. Returns the next carry, and the result of `active` for it, which is None within a
        trace.
        """

    def active(self, constants: tuple, carry: Carry) -> Any:
        """Returns bool [B]: the rows that continue. carry: first the state."""
        return carry[0].active_B


@dataclasses.dataclass(frozen=True)
class Plain(Strategy):
    """A strategy that takes one token of each active row per step.

    - constants: the parameters, and the rows' `Extras`.
    - carry: the state and the cache, and the routes of sampled tokens if a traced executor records them.
    """

    steps_ahead = 1
    config: ModelConfig
    stop: Callable[[DecodeState], jax.Array] | None = None  # ends rows beside their EOS tokens

    def step(self, executor: Executor, constants: tuple, carry: Carry) -> tuple[Carry, Any]:
        params, extras = constants
        state, cache, *routed_experts = carry
        model = RunnableModel(params, self.config, extras)
        out = executor.forward(model, last_token, (state.progress,), cache, 0)
        if routed_experts:
            last = jnp.arange(len(state.token_B)), state.length_B - 1
            used_BTLU: Any = out.routed_experts
            routed_experts = [routed_experts[0].at[last].set(used_BTLU[:, 0], mode="drop")]
        state, active_B = executor.sample(out.hidden, state)
        return (self.ended(state), out.cache, *routed_experts), active_B

    def ended(self, state: DecodeState) -> DecodeState:
        """Returns the state in which rows have ended as `stop` says. It is only for a trace."""
        if self.stop is None:
            return state
        from ..sampling.caller_processors import end_rows  # optional: functions of callers

        return end_rows(self.stop, state)


def goes_on(active_B: Any, watched_B: Any = None) -> Any:
    """Returns True if a call takes another step: a row is active, and no watched row has ended. It also works
    on the host. watched_B: bool, or None if no row is watched.
    """
    any_active = active_B.any()
    return any_active if watched_B is None else any_active & ~(watched_B & ~active_B).any()


# For `Executor.forward`: (cache, …) -> `Inputs`, and the cache to append them to.


def last_token(cache: KVCache, progress: RowProgress) -> tuple[Inputs, KVCache]:
    """Returns the last token of each row. A row that has ended has none."""
    return Inputs(progress.token_B[:, None], progress.active_B.astype(jnp.int32)), cache
