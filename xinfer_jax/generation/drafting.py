"""`Drafting`: the parts of a call of `generate` or `stream` that plain decoding does not have, for draft
tokens.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cache.draft_prefix import DraftPrefix, FeatureRows
from ..cache.fingerprint import draft_fingerprint
from ..cache.kv_cache import KVCache
from ..cache.prefix import Prefix
from ..cache.truncation import truncate
from ..config.model_config import with_fixed_rope
from ..config.run_config import RunConfig
from ..errors import ContextLengthError
from ..model.extras import NO_EXTRAS
from ..ops.operation import over_any_mesh
from ..stats import GenerateStats
from ..weights.params import activation_dtype
from .batch_arrays import new_cache, pad_prompts
from .draft_sources import DraftSource, PrefillSizes, checked_draft, chunk_of_caches, with_draft_slots
from .executor import Executor, PaddedTokens, RunnableModel, inline
from .head_prefill import BoundHead, Prefilled
from .loop import TracedExecutor
from .options import GenerateOptions
from .proposers import check_draft_function
from .speculation import SpeculationState, Speculative, propose
from .state import DecodeState
from .validation import ValidatedCall


class Drafting:
    """The proposer of a call, whose draft `check` returned.

    Attributes:
        constants, strategy: see `Speculative`.
        head: the draft head that proposes. None: a draft model or a function does. Calls with a head are run
            by the traced executor.
    """

    def __init__(self, call: ValidatedCall):
        self._call = call
        self._source = DraftSource.of_draft(call.options.draft)
        self.head = self._source.head
        self.constants = call.params, NO_EXTRAS, self._source.params
        self.strategy = Speculative(call.config, self._source.proposer, call.num_draft_tokens)

    @staticmethod
    def check(call: ValidatedCall) -> GenerateOptions:
        """Returns the options of a call with its draft, checked, and with the part of its prefix for the
        draft.
        """
        options = call.options
        draft = _check(call)
        prefix: Any = options.prefix
        if prefix and isinstance(draft, BoundHead):
            prefix.check_draft(draft_fingerprint(draft.head, draft.params))
        elif prefix:
            prefix = dataclasses.replace(prefix, draft=None)
        return dataclasses.replace(options, draft=draft, prefix=prefix)

    def new_caches(self, num_cached_B: np.ndarray) -> tuple[KVCache | None, FeatureRows | None]:
        """Returns a cache for the draft model or head, or None without one, and the features of a head, or
        None if the call has no prefixes. num_cached_B: the tokens of each prompt in the prefix.
        """
        call = self._call
        config: Any = self._source.config
        options = call.options
        prefix = options.prefix.draft if options.prefix else None
        cache = features = None
        if prefix is not None:  # the call copies the prefix, because its loops reuse the memory
            features = jax.tree.map(jnp.copy, prefix.features)
        elif self.head and options.keep_prefix:
            sizes = call.prompt_rows, call.capacity, self.head.feature_size
            features = FeatureRows.empty(*sizes, activation_dtype(call.params))
        if prefix is not None and prefix.cache is not None:
            cache = jax.tree.map(jnp.copy, truncate(prefix.cache, num_cached_B))
        elif self._source.has_cache:
            capacity = min(call.capacity, config.context_length)  # draft tokens beyond are dropped
            params = call.params if self.head else self._source.params
            cache = new_cache(call, params, config, capacity, call.prompt_rows)
        return cache, features

    def prefill(
        self,
        executor: Executor,
        model: RunnableModel,
        tokens: PaddedTokens,
        cache: KVCache,
        draft_caches: Any,
    ) -> Prefilled:
        """Prefills the prompts.

        Args:
            executor: runs the models.
            model: the model of the call.
            tokens: the tokens of the prompts that its cache lacks.
            cache: its cache.
            draft_caches: the result of `new_caches`.
        """
        call = self._call
        draft_cache, features = draft_caches
        whole = None
        if not self.head and draft_cache is not None:
            whole = pad_prompts(call.prompts, draft_cache.capacity, call.prompt_rows)
        sizes = PrefillSizes(chunk_of_caches(cache, draft_cache), 1 + call.num_draft_tokens, whole)
        return self._source.prefill(executor, model, tokens, (cache, draft_cache, features), sizes)

    def add_to_prefix(self, prefix: Prefix, state: DecodeState, drafts: SpeculationState) -> Prefix:
        """Returns the prefix after a call with the data of the draft head, if there is one."""
        if self.head is None:
            return prefix
        source = self._source
        cache = drafts.cache
        if cache is not None:
            own = source.params, self._call.params
            cache = _READ(source.proposer, own, state, cache, RunConfig(self._call.options.impl))
            length_B = jnp.minimum(prefix.cache.length_B, cache.capacity)
            cache = dataclasses.replace(cache, length_B=length_B)
        features: Any = drafts.features
        model = draft_fingerprint(self.head, source.params)
        return dataclasses.replace(prefix, draft=DraftPrefix(model, cache, features))

    def start(
        self, executor: Executor, cache: Any, draft_cache: KVCache | None, features: FeatureRows | None
    ) -> tuple[Any, SpeculationState]:
        """Returns the model's cache with space for draft tokens, and the other parts of the strategy's
        carry.
        """
        call = self._call
        if cache is not None and not all(layer.has_keys for layer in cache.layers):
            cache = executor.run(_ADD_DRAFT_SLOTS, cache, 1 + call.num_draft_tokens)
        return cache, SpeculationState.of_rows(call.rows, call.num_draft_tokens, draft_cache, features)

    def propose(
        self, executor: Executor, constants: tuple, state: DecodeState, rest: list[Any]
    ) -> tuple[np.ndarray, list[Any]]:
        """Returns the draft tokens of the next step, int32 [B, draft tokens], and the parts of the carry
        after the state. rest: these parts.
        """
        cache, drafts = rest
        draft_BT, drafts = executor.run_steps(propose, self.strategy, drafts, (constants, state, cache))
        return np.asarray(draft_BT), [cache, drafts]

    def count(self, state: SpeculationState, stats: GenerateStats, rows: int) -> None:
        """Writes the number of accepted draft tokens of the first rows into the statistics."""
        passes_R = np.asarray(state.passes_B)[:rows]
        accepted_RT = np.asarray(state.accepted_BT)[:rows]
        stats.passes = passes_R.tolist()
        stats.drafted = np.tile(passes_R[:, None], self._call.num_draft_tokens).tolist()
        possible_R = np.maximum(passes_R, 1) * self._call.num_draft_tokens
        stats.accepted = accepted_RT.tolist()
        stats.acceptance = (accepted_RT.sum(1) / possible_R).tolist()


def _check(call: ValidatedCall) -> Any:
    """Returns the draft of a call. A draft model with longrope gets the factors of the longest sequence from
    the start: its tokens are only proposals, so the result stays.
    """
    options = call.options
    size = call.num_draft_tokens
    draft = checked_draft(options.draft, call.params, call.config, size, options.cache_dtype)
    if callable(draft):
        check_draft_function(draft, size, call.rows, call.history_size)
    if isinstance(draft, str | BoundHead) or callable(draft):
        return draft
    longest = call.longest
    new = options.max_tokens
    if draft.config.context_length < longest + new:
        need = f"prompt of {longest} tokens + max_tokens {new}"
        raise ContextLengthError(f"{need} exceeds the draft's context limit {draft.config.context_length}")
    fixed = with_fixed_rope(draft.config, longest + new, longest + new)
    return draft if fixed is draft.config else dataclasses.replace(draft, config=fixed)


@over_any_mesh
def _read(proposer, params, state, cache, run_config):
    return proposer.read(TracedExecutor(run_config, inline), params, state, cache)


_READ = jax.jit(_read, static_argnames=("proposer", "run_config"))
_ADD_DRAFT_SLOTS = jax.jit(with_draft_slots, static_argnames="tokens")
