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
from ..errors import ContextLengthError, InputError, format_value
from ..model.extras import NO_EXTRAS
from ..stats import GenerateStats
from .batch_arrays import new_cache, pad_prompts
from .executor import Executor, RunnableModel
from .speculation import SpeculationState, Speculative, check_draft_function, prompt_lookup
from .validation import ValidatedCall


class Drafting:
    """The draft model or function of a call, whose draft `check` returned. params: the parameters of the
    draft model. None: a function proposes.
    """

    def __init__(self, call: ValidatedCall):
        self._call = call
        draft: Any = call.options.draft
        proposer = prompt_lookup if isinstance(draft, str) else draft
        self._config = None
        self.params = None
        if not callable(draft) and not isinstance(draft, str):
            self.params = draft.params
            self._config = proposer = draft.config
        self.constants = call.params, NO_EXTRAS, self.params
        self.strategy = Speculative(call.config, proposer, call.num_draft_tokens)

    @staticmethod
    def check(call: ValidatedCall) -> Any:
        """Returns the draft of a call. A draft model with longrope gets the factors of the longest sequence
        from the start: its tokens are only proposals, so the result stays.
        """
        draft: Any = call.options.draft
        if isinstance(draft, str) and draft == "lookup":
            return draft
        if callable(draft):
            check_draft_function(draft, call.num_draft_tokens, call.rows, call.history_size)
            return draft
        if not (hasattr(draft, "params") and isinstance(getattr(draft, "config", None), ModelConfig)):
            allowed = "a model from load_model, or 'lookup', or a function"
            raise InputError(f"draft must be {allowed}, got {format_value(draft)}")
        return _check_model(draft, call)

    def new_cache(self) -> KVCache | None:
        """Returns an empty cache for the draft model, or None without one."""
        call = self._call
        if self._config is None:
            return None
        capacity = min(call.capacity, self._config.context_length)  # draft tokens beyond are dropped
        return new_cache(call, self.params, self._config, capacity, call.prompt_rows)

    def prefill(self, executor: Executor, cache: KVCache) -> KVCache:
        """Returns the draft model's cache with the prompts. cache: the result of `new_cache`."""
        tokens = pad_prompts(self._call.prompts, cache.capacity, self._call.prompt_rows)
        return executor.prefill(RunnableModel(self.params, self._config), tokens, cache).cache

    def start(
        self, executor: Executor, cache: Any, draft_cache: KVCache | None
    ) -> tuple[Any, SpeculationState]:
        """Returns the model's cache with space for draft tokens, and the other parts of the strategy's
        carry.
        """
        call = self._call
        if cache is not None and not all(layer.has_keys for layer in cache.layers):
            cache = executor.run(_ADD_DRAFT_SLOTS, cache, 1 + call.num_draft_tokens)
        return cache, SpeculationState.of_rows(call.rows, draft_cache)

    def count(self, state: SpeculationState, stats: GenerateStats, rows: int) -> None:
        """Writes the number of accepted draft tokens of the first rows into the statistics."""
        passes_R = np.asarray(state.passes_B)[:rows]
        accepted_R = np.asarray(state.accepted_B)[:rows]
        stats.passes = passes_R.tolist()
        possible_R = np.maximum(passes_R, 1) * self._call.num_draft_tokens
        stats.acceptance = (accepted_R / possible_R).tolist()


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
