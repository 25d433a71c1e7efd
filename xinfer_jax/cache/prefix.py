"""A cache that later calls reuse: they prefill only the tokens that it does not have."""

import dataclasses
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from ..config.model_config import ModelConfig
from ..errors import InputError, format_names, format_token_counts
from ..weights.params import Params
from .draft_prefix import DraftPrefix
from .fingerprint import fingerprint
from .kv_cache import KVCache, expected_fits
from .stored_kv import cache_dtype_of, resolve_cache_dtype
from .truncation import can_truncate, truncate

_Rows = Sequence[Sequence[int]]  # of token ids


@dataclasses.dataclass(frozen=True, repr=False)
class Prefix:
    """A KV cache and the tokens in it, for reuse in a later call.

    `generate` with `keep_prefix=True` returns one, and `GenerateOptions(prefix=…)` takes it. You can also
    make one from a cache that `prefill` filled: it needs no `model`.

    Attributes:
        tokens: for each row, the ids whose keys and values the cache has.
        cache: the KV cache. It may have further rows, which are empty. After an answer that was stopped
            early, a recurrent state may include more tokens. `shared` detects this, and the functional API
            does not.
        model: the `fingerprint` of the model that computed the cache. None: not checked.
        factors: the longrope factors that rotated the keys. `()` for other models.
        draft: the data of the draft head of the call. None: no head drafted.
    """

    tokens: list[list[int]]
    cache: KVCache
    model: str | None = None
    factors: tuple[float, ...] = ()
    draft: DraftPrefix | None = None

    def __repr__(self) -> str:
        return f"Prefix({format_token_counts(self.tokens, 'row')}, {self.cache!r})"

    def shared(self, prompts: _Rows) -> np.ndarray:
        """Returns the number of tokens at the start of each prompt that the cache has, int32 [B].

        It is at most the length of the prompt minus 1, since a call needs the logits of the last token. It is
        0 if a ring has lost keys that the next token sees, or if a recurrent state includes more tokens. The
        cache of a draft head counts too.

        Args:
            prompts: the token ids of each row.

        Raises:
            InputError: the number of prompts differs from the number of rows.
        """
        if len(prompts) != len(self.tokens):
            raise InputError(
                f"{len(prompts)} prompts for a prefix of {len(self.tokens)} rows: give one prompt per row"
            )

        def common(cached: Sequence[int], prompt: Sequence[int]) -> int:
            limit = min(len(cached), len(prompt) - 1)
            return next((i for i in range(limit) if cached[i] != prompt[i]), limit)

        shared_B = _pad_rows(self.cache, map(common, self.tokens, prompts))
        caches = [self.cache]
        if self.draft is not None and self.draft.cache is not None:
            caches.append(self.draft.cache)
        for cache in caches:
            shared_B = np.where(can_truncate(cache, shared_B), shared_B, 0)
        return shared_B[: len(prompts)]

    def check_call(self, prompts: _Rows, capacity: int | None, dtype: str | None) -> None:
        """Raises `InputError` if these prompts, or a cache of this capacity and dtype, do not fit."""
        self.shared(prompts)
        cache = self.cache
        if capacity not in (None, cache.capacity):
            raise InputError(
                f"capacity={capacity}, but the prefix has a cache of {cache.capacity}: leave it out"
            )
        named = None if dtype is None else cache_dtype_of(resolve_cache_dtype(dtype)).name
        if named not in (None, cache.dtype):
            raise InputError(f"cache_dtype={dtype!r}, but the prefix is in {cache.dtype}: leave it out")

    def usable(self, params: Params, config: ModelConfig, keeps_draft: bool = False) -> "Prefix":
        """Returns this prefix, or an empty one if other longrope factors than the factors of the call rotated
        its keys.

        Args:
            params: the parameter tree of the model.
            config: the config of the model, with fixed factors.
            keeps_draft: False leaves out the data of a draft head.

        Raises:
            InputError: `check` raises it.
        """
        self.check(params, config)
        draft = self.draft if keeps_draft else None
        if self.factors == config.rope.short_factor:
            return dataclasses.replace(self, draft=draft)
        cache = truncate(self.cache, 0)
        draft = draft and draft.emptied()
        return dataclasses.replace(self, tokens=[[] for _ in self.tokens], cache=cache, draft=draft)

    def check_draft(self, model: str) -> None:
        """Raises `InputError` if the prefix lacks the data of the draft head of this `draft_fingerprint`."""
        if self.draft is None or self.draft.model != model:
            found = "no data of a draft head" if self.draft is None else "data of another draft head"
            raise InputError(
                f"the prefix has {found}: make it by a call with keep_prefix=True and the same draft, or"
                " leave out draft"
            )

    def check(self, params: Params, config: ModelConfig) -> None:
        """Raises `InputError` if another model computed the prefix, or if its tokens do not match its cache's
        lengths.
        """
        lengths = [len(row) for row in self.tokens]
        if self.cache.fits != expected_fits(config) or self.model not in (None, fingerprint(params, config)):
            raise InputError(
                "the prefix was computed by another model, or before these parameters changed: prefill its"
                " prompts again, without it"
            )
        cached = self.cache.length_B.tolist()
        if cached != [*lengths, *[0] * (len(cached) - len(lengths))] or self.cache.overflow_B.any():
            raise InputError(
                f"the prefix has {format_names(lengths)} tokens for rows of which its cache holds"
                f" {format_names(cached)}: give the tokens that were prefilled, all of which fit the cache"
            )


def make_prefix(
    params: Params, config: ModelConfig, prompts: _Rows, sampled: _Rows, cache: KVCache
) -> Prefix:
    """Returns the prefix after a call: all tokens of each row except the last one, which was sampled and is
    not in the cache. config: the config with longrope's factors fixed. cache: a cache with as many rows as
    prompts, or more.
    """
    tokens = [[*prompt, *ids][:-1] for prompt, ids in zip(prompts, sampled, strict=True)]
    cache = dataclasses.replace(cache, length_B=jnp.asarray(_pad_rows(cache, map(len, tokens))))
    return Prefix(tokens, cache, fingerprint(params, config), config.rope.short_factor)


def _pad_rows(cache: KVCache, counts: Iterable[int]) -> np.ndarray:
    """Returns int32 [B]: these counts for the first rows of a cache, 0 for the others."""
    counts_B = np.zeros(len(cache.length_B), np.int32)
    first = list(counts)
    counts_B[: len(first)] = first
    return counts_B
