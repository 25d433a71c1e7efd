"""`Drafting`: the parts of a call of `generate` or `stream` that plain decoding does not have, for draft
tokens.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from ..cache.kv_cache import KVCache
from ..cache.stored_kv import check_head_dim
from ..config.model_config import ModelConfig, with_fixed_rope
from ..config.unsupported import check_supported
from ..draft_heads.draft import Draft
from ..draft_heads.draft_head import DraftHead
from ..errors import ContextLengthError, InputError, format_value
from ..model.extras import NO_EXTRAS
from ..stats import GenerateStats
from .batch_arrays import new_cache, pad_prompts
from .executor import Executor, PaddedTokens, RunnableModel, prefill_chunk_size
from .head_prefill import BoundHead, bound_head, prefill_with_head
from .proposers import (
    FunctionProposer,
    HeadProposer,
    ModelProposer,
    Proposer,
    check_draft_function,
    prompt_lookup,
)
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
        draft: Any = call.options.draft
        self.head: DraftHead | None = None
        self._config: ModelConfig | None = None
        self._params: Any = None
        proposer: Proposer
        if isinstance(draft, BoundHead):
            self.head = draft.head
            self._config = draft.head.config
            self._params = draft.params
            proposer = HeadProposer(draft.head)
        elif hasattr(draft, "params"):
            self._config = draft.config
            self._params = draft.params
            proposer = ModelProposer(draft.config)
        else:
            proposer = FunctionProposer(prompt_lookup if isinstance(draft, str) else draft)
        self.constants = call.params, NO_EXTRAS, self._params
        self.strategy = Speculative(call.config, proposer, call.num_draft_tokens)

    @staticmethod
    def check(call: ValidatedCall) -> Any:
        """Returns the draft of a call. A draft model with longrope gets the factors of the longest sequence
        from the start: its tokens are only proposals, so the result stays.
        """
        draft: Any = call.options.draft
        if isinstance(draft, str) and draft == "lookup":
            return draft
        if isinstance(draft, Draft) or isinstance(draft, str) and draft == "mtp":
            return bound_head(draft, call.params, call.config, call.num_draft_tokens)
        if callable(draft):
            check_draft_function(draft, call.num_draft_tokens, call.rows, call.history_size)
            return draft
        if not (hasattr(draft, "params") and isinstance(getattr(draft, "config", None), ModelConfig)):
            allowed = "a model from load_model, a head from load_draft, 'lookup', 'mtp', or a function"
            raise InputError(f"draft must be {allowed}, got {format_value(draft)}")
        return _check_model(draft, call)

    def new_cache(self) -> KVCache | None:
        """Returns an empty cache for the draft model or head, or None without one."""
        call = self._call
        config = self._config
        if config is None or self.head and not self.head.has_cache:
            return None
        capacity = min(call.capacity, config.context_length)  # draft tokens beyond are dropped
        params = call.params if self.head else self._params
        return new_cache(call, params, config, capacity, call.prompt_rows)

    def prefill(
        self, executor: Executor, model: RunnableModel, tokens: PaddedTokens, cache: KVCache, draft_cache: Any
    ) -> tuple[Any, KVCache, Any, Any]:
        """Prefills the prompts.

        Args:
            executor: runs the models.
            model: the model of the call.
            tokens: the tokens of the prompts that its cache lacks.
            cache: its cache.
            draft_cache: the result of `new_cache`.

        Returns:
            The outputs of the last tokens, the cache, the cache of the proposer, and `DecodeState.unread`.
        """
        if self.head:
            static = self.head, model.config, prefill_chunk_size(cache), 1 + self._call.num_draft_tokens
            params = model.params, model.extras
            args = params, self._params, tokens
            return executor.run_steps(prefill_with_head, static, (cache, draft_cache), args)
        outputs, cache, *_ = executor.prefill(model, tokens, cache)
        if draft_cache is not None:
            own: Any = self._config
            whole = pad_prompts(self._call.prompts, draft_cache.capacity, self._call.prompt_rows)
            draft_cache = executor.prefill(RunnableModel(self._params, own), whole, draft_cache).cache
        return outputs, cache, draft_cache, None

    def start(
        self, executor: Executor, cache: Any, draft_cache: KVCache | None
    ) -> tuple[Any, SpeculationState]:
        """Returns the model's cache with space for draft tokens, and the other parts of the strategy's
        carry.
        """
        call = self._call
        if cache is not None and not all(layer.has_keys for layer in cache.layers):
            cache = executor.run(_ADD_DRAFT_SLOTS, cache, 1 + call.num_draft_tokens)
        return cache, SpeculationState.of_rows(call.rows, call.num_draft_tokens, draft_cache)

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


def _check_model(draft: Any, call: ValidatedCall) -> Any:
    config = draft.config
    longest = call.longest
    new = call.options.max_tokens
    remedy = "its state cannot go back from rejected tokens: give another draft model, or 'lookup'"
    check_supported(config, "draft model", "a draft model is", remedy)
    if config.vocab_size != call.config.vocab_size:
        own = call.config.vocab_size
        raise InputError(f"the draft's vocabulary of {config.vocab_size} is not the model's of {own}")
    for width in config.head_widths:
        check_head_dim(width, call.options.cache_dtype)
    if config.context_length < longest + new:
        need = f"prompt of {longest} tokens + max_tokens {new}"
        raise ContextLengthError(f"{need} exceeds the draft's context limit {config.context_length}")
    fixed = with_fixed_rope(config, longest + new, longest + new)
    return draft if fixed is config else dataclasses.replace(draft, config=fixed)


def with_draft_slots(cache: KVCache, tokens: int) -> KVCache:
    """Returns a cache whose rows can go back by as many tokens as one call of `tokens` appends."""
    layers = tuple(layer.with_draft_slots(tokens, cache.length_B) for layer in cache.layers)
    return dataclasses.replace(cache, layers=layers)


_ADD_DRAFT_SLOTS = jax.jit(with_draft_slots, static_argnames="tokens")
