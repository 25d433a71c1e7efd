"""What a decoding strategy is, and plain decoding, the simplest one.

A strategy says which model runs on which tokens, and what is made of the logits. It is written once. Two
runners (runners.py) execute it: `WholeModelRunner` traces all its steps into one program, with the loop on
the device; `LayerwiseRunner` calls a compiled program for each operation from the host.

A strategy has only static fields, so it can be a static argument of jit. All arrays are in `constants`, which
a step reads, and in `carry`, which a step replaces. The other strategies are `speculation.Speculative` and
`beam_steps.BeamSearch`; the latter also has an `init`, because its first step turns prompts into beams.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from ..cache.kv_cache import KVCache
from ..config.model_config import ModelConfig
from ..weights.params import Params
from .state import DecodeState, RowProgress

# A model's parameters and its configuration.
ParamsAndConfig = tuple[Params, ModelConfig]
# What a step takes and replaces: the state, the cache, and what else a strategy keeps.
Carry = tuple[Any, ...]


class Operations(Protocol):
    """What the steps of a strategy are written in. `loop.TracedOperations` and `LayerwiseRunner` have
    them.
    """

    impl: str | None

    def forward(
        self, model: ParamsAndConfig, inputs: Callable, args: tuple, cache: KVCache, position: int | None
    ) -> tuple[Any, KVCache]:
        """Runs the model on the tokens of `inputs(cache, *args)`: tokens [B, T], how many of each row are
        real, and the cache to append to.

        Args:
            position: whose logits are used: 0, -1, or None for all.

        Returns:
            The outputs, which `append_sample` and `call` take, and the cache with the tokens appended.
        """

    def append_sample(self, outputs: Any, state: DecodeState) -> tuple[DecodeState, Any]:
        """The state with the next token of each active row; and whether any row continues."""

    def call(self, function: Any, *args: Any, takes_hidden: bool = False) -> Any:
        """`function(*args)` of a jitted function without layers. Outputs of `forward` become logits, unless
        the function takes `loop.Hidden` too, which they are within a trace.
        """

    def repeat(self, first: int, end: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """`carry = body(i, carry)` for i from `first` to `end` - 1."""

    def repeat_rows(self, cache: KVCache, times: int) -> KVCache:
        """A cache with so many copies of each row; the copies of a row are consecutive."""

    def reorder_tail(self, cache: KVCache, index_B: Any, first: Any, count: int) -> KVCache:
        """`kv_cache.reorder_tail`."""


class Strategy(abc.ABC):
    """How tokens are decoded: `Plain`, `Speculative` or `BeamSearch`.

    Attributes:
        steps_ahead: steps that may run after the last row has ended; they change nothing.
    """

    steps_ahead: ClassVar[int] = 0

    @abc.abstractmethod
    def step(self, ops: Operations, constants: tuple, carry: Carry) -> tuple[Carry, Any]:
        """The next carry, and whether any row continues."""

    def continues(self, constants: tuple, carry: Carry) -> Any:
        """bool: whether any row continues; carry: first the state."""
        return jnp.any(carry[0].active_B)


@dataclasses.dataclass(frozen=True)
class Plain(Strategy):
    """One token of each active row per step. constants: the parameters; carry: the state and the cache."""

    steps_ahead = 1
    config: ModelConfig

    def step(self, ops: Operations, constants: tuple, carry: Carry) -> tuple[Carry, Any]:
        (params,) = constants
        state, cache = carry
        outputs, cache = ops.forward((params, self.config), last_token, (state.progress,), cache, 0)
        state, continues = ops.append_sample(outputs, state)
        return (state, cache), continues


# Inputs of `Operations.forward`: (cache, …) -> tokens [B, T], how many of each row are real, the cache.


def last_token(cache: KVCache, progress: RowProgress) -> tuple[Any, Any, KVCache]:
    """The last token of each row; none of a row that has ended."""
    return progress.token_B[:, None], progress.active_B.astype(jnp.int32), cache


def one_token(cache: KVCache, token_B: Any) -> tuple[Any, Any, KVCache]:
    """This token of each row."""
    return token_B[:, None], jnp.ones(len(token_B), jnp.int32), cache


def logits_at(logits: jax.Array, position: int) -> jax.Array:
    """[B, V] of logits [B, T, V]; logits [B, V] are of that position already."""
    return logits if logits.ndim == 2 else logits[:, position]
