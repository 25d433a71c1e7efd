"""The runner of the whole model as one program, which takes prompts to tokens by any strategy.

tokens_BT ─ PREFILL ─► logits_BV ─ _SAMPLE ─► state ─ _DECODE, the loop ─► state

On one CPU `layerwise.runner.LayerwiseRunner` takes its place: the host calls programs of a few layers.
"""

from typing import Any

import jax
import numpy as np

from .. import plugin
from ..cache.kv_cache import KVCache, reorder
from ..weights.params import Params
from .executor import Executor, bucket
from .functional import prefill_chunk_size
from .loop import (
    DECODE_PLAIN,
    PREFILL,
    TracedOperations,
    decode,
    hidden_uncached,
    jit_variants,
    prefill_uncached,
)
from .state import DecodeState, sample_and_append
from .strategies import Carry, ParamsAndConfig, Plain, Strategy

# tokens_BT, and how many of each row are real, num_tokens_B
PaddedTokens = tuple[Any, Any]


class Runner:
    """What runners have in common."""

    def __init__(self, executor: Executor, impl: str | None, greedy: bool = False):
        """greedy: no row uses a sampling setting; layer by layer, no sampler is compiled then."""
        self._executor = executor
        self._greedy = greedy
        self.impl = impl


class WholeModelRunner(Runner):
    """One program prefills, one decodes."""

    name = "whole"
    about = "the model is one program, with its loop on the device"

    @staticmethod
    def prefill_width(longest: int, rows: int) -> int:
        """Tokens of a row that the prefill program is compiled for; longest: tokens of the longest row."""
        return bucket(longest)

    def prefill(
        self,
        model: ParamsAndConfig,
        tokens: PaddedTokens,
        cache: KVCache | None,
        donate: bool,
        chunk: int = 0,
    ) -> Any:
        """The outputs of each row's last token, which `sample` takes, and the cache with the tokens appended.
        Without a cache the tokens are the whole rows. chunk: tokens of a row per forward pass; 0:
        `prefill_width`.
        """
        if cache is None:
            return self._executor(_PREFILL_UNCACHED, *model, *tokens, self.impl), None
        prefill = PREFILL.donating if donate else PREFILL.keeping
        return self._executor(prefill, *model, *tokens, cache, self.impl, prefill_chunk_size(cache))

    def hidden(self, model: ParamsAndConfig, tokens: PaddedTokens) -> jax.Array:
        """`hidden_states` of whole rows, [B, T, D], without a cache."""
        return self._executor(_HIDDEN_UNCACHED, *model, *tokens, self.impl)

    def sample(self, model: ParamsAndConfig, outputs: Any, state: DecodeState) -> DecodeState:
        """The state with each row's next token; outputs: of `prefill`."""
        return self._executor(_SAMPLE, outputs, state, self.impl)

    def reorder(self, cache: KVCache, prompt_R: np.ndarray) -> KVCache:
        """Row r of the result is row prompt_R[r]."""
        return self._executor(REORDER, cache, prompt_R)

    def decode(self, strategy: Strategy, constants: tuple, carry: Carry, steps: int) -> Carry:
        """The carry after so many steps of the strategy, or fewer where all rows end."""
        program = DECODE_PLAIN if isinstance(strategy, Plain) else _DECODE
        return self._executor(program.donating, strategy, constants, carry, np.int32(steps), self.impl)

    def search(self, strategy: Any, constants: tuple, outputs: Any, cache: KVCache, steps: int) -> Any:
        """The results of a strategy that runs from the outputs of `prefill` to its end, at most `steps`
        steps.
        """
        return self._executor(_SEARCH, strategy, constants, outputs, cache, self.impl)


def runner_class(params: Params) -> Any:
    """The runner that prefills prompts and decodes streams: one that is plugged in for the devices of the
    parameters, or `WholeModelRunner`. The parameters may be shapes.
    """
    choice = plugin("runner", "choice")
    return choice and choice(params) or WholeModelRunner


def _search(strategy, constants, logits_BV, cache, impl):
    carry, _ = strategy.init(TracedOperations(impl), constants, logits_BV, cache)
    return strategy.results(decode(strategy, constants, carry, None, impl))


_STATIC = ("config", "impl")
_PREFILL_UNCACHED = jax.jit(prefill_uncached, static_argnames=_STATIC)
_HIDDEN_UNCACHED = jax.jit(hidden_uncached, static_argnames=_STATIC)
_SAMPLE = jax.jit(sample_and_append, static_argnames="impl")
_DECODE = jit_variants(decode, "strategy", "impl", donates="carry")
REORDER = jax.jit(reorder)
_SEARCH = jax.jit(_search, static_argnames=("strategy", "impl"))
