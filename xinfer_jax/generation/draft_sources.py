"""`DraftSource`: a proposer with its model, and the checks of the argument `draft`."""

import dataclasses
from typing import Any, NamedTuple

from ..cache.kv_cache import KVCache
from ..cache.stored_kv import check_head_dim
from ..config.model_config import ModelConfig
from ..config.unsupported import check_supported
from ..draft_heads.draft import Draft
from ..draft_heads.draft_head import DraftHead
from ..errors import InputError, format_value
from ..weights.params import Params
from .executor import Executor, PaddedTokens, RunnableModel, prefill_chunk_size
from .head_prefill import BoundHead, Prefilled, bound_head, prefill_with_head
from .proposers import FunctionProposer, HeadProposer, ModelProposer, Proposer, prompt_lookup


class PrefillSizes(NamedTuple):
    """Values of a prefill that only some proposers need."""

    chunk: int  # tokens of a row in a prefill chunk, for a head
    most_unread: int  # tokens that a head has not read before a step, at most
    whole: PaddedTokens | None  # the whole prompts, for a draft model


class DraftSource(NamedTuple):
    """A proposer, and its model."""

    proposer: Proposer
    config: ModelConfig | None = None  # of the draft model, or of the head's own layers
    params: Any = None  # of the draft model or head

    @staticmethod
    def of_draft(draft: Any) -> "DraftSource":
        """Returns the proposer of a checked draft: a `BoundHead`, a model, a function or "lookup"."""
        if isinstance(draft, BoundHead):
            return DraftSource(HeadProposer(draft.head), draft.config, draft.params)
        if hasattr(draft, "params"):
            return DraftSource.of_model(draft.config, draft.params)
        return DraftSource(FunctionProposer(prompt_lookup if isinstance(draft, str) else draft))

    @staticmethod
    def of_model(config: ModelConfig, params: Params) -> "DraftSource":
        """Returns the proposer of a draft model."""
        return DraftSource(ModelProposer(config), config, params)

    @property
    def head(self) -> DraftHead | None:
        """The draft head that proposes. None: a draft model or a function does."""
        return self.proposer.head if isinstance(self.proposer, HeadProposer) else None

    @property
    def has_cache(self) -> bool:
        """True if the proposer has a cache of its own."""
        return self.head.has_cache if self.head else self.config is not None

    def prefill(
        self,
        executor: Executor,
        model: RunnableModel,
        tokens: PaddedTokens,
        caches: tuple,
        sizes: PrefillSizes,
    ) -> Prefilled:
        """Prefills prompts into the caches of the model and of the proposer.

        Args:
            executor: runs the models.
            model: the model that the proposer drafts for.
            tokens: the tokens of the prompts that its cache lacks. A draft model takes `sizes.whole`.
            caches: the cache of the model, the cache of the proposer, and `FeatureRows` or None.
            sizes: the further values.
        """
        if self.head:
            static = self.head, model.config, sizes.chunk, sizes.most_unread
            args = (model.params, model.extras), self.params, tokens
            return executor.run_steps(prefill_with_head, static, caches, args)
        cache, draft_cache, _ = caches
        outputs, cache, *_ = executor.prefill(model, tokens, cache)
        if draft_cache is not None:
            own: Any = self.config
            draft_cache = executor.prefill(RunnableModel(self.params, own), sizes.whole, draft_cache).cache
        return Prefilled(outputs, cache, draft_cache, None, None)


def checked_draft(
    draft: Any, params: Params, config: ModelConfig, count: int, cache_dtype: Any = None
) -> Any:
    """Returns a draft for a model: "lookup", a function, a `BoundHead` or a draft model. Raises InputError
    for anything else, and for a head or draft model that does not fit the model.
    """
    if isinstance(draft, str) and draft == "lookup":
        return draft
    if isinstance(draft, Draft) or isinstance(draft, str) and draft == "mtp":
        return bound_head(draft, params, config, count)
    if callable(draft):
        return draft
    own = getattr(draft, "config", None)
    if not (hasattr(draft, "params") and isinstance(own, ModelConfig)):
        allowed = "a model from load_model, a head from load_draft, 'lookup', 'mtp', or a function"
        raise InputError(f"draft must be {allowed}, got {format_value(draft)}")
    remedy = "its state cannot go back from rejected tokens: give another draft model, or 'lookup'"
    check_supported(own, "draft model", "a draft model is", remedy)
    if own.vocab_size != config.vocab_size:
        raise InputError(
            f"the draft's vocabulary of {own.vocab_size} is not the model's of {config.vocab_size}"
        )
    for width in own.head_widths:
        check_head_dim(width, cache_dtype)
    return draft


def chunk_of_caches(cache: KVCache, draft_cache: KVCache | None) -> int:
    """Returns the tokens of a row in a prefill chunk that both caches allow."""
    chunk = prefill_chunk_size(cache)
    return chunk if draft_cache is None else min(chunk, draft_cache.most_at_once)


def with_draft_slots(cache: KVCache, tokens: int) -> KVCache:
    """Returns a cache whose rows can go back by as many tokens as one call of `tokens` appends."""
    layers = tuple(layer.with_draft_slots(tokens, cache.length_B) for layer in cache.layers)
    return dataclasses.replace(cache, layers=layers)
