"""A cache that outlives its call: what rows have read and written, so that the next reads what is new."""

import dataclasses
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from ..brief import counted
from ..config.model_config import ModelConfig
from ..errors import InputError, few
from ..weights.params import Params
from .fingerprint import fingerprint
from .kv_cache import KVCache, remembered, truncate

_Rows = Sequence[Sequence[int]]  # of token ids


@dataclasses.dataclass(frozen=True, repr=False)
class Prefix:
    """A cache and the tokens in it, row by row.

    `generate` makes one, with keep_prefix; by hand, of what `prefill` filled, it need not say whose it is.

    Attributes:
        tokens: of each row, the ids whose keys and values the cache holds.
        cache: theirs, and perhaps of further rows that hold nothing.
        model: whose keys and values they are: its `fingerprint`; None: the caller vouches.
        factors: longrope's, by which the keys are rotated; () for other models.
    """

    tokens: list[list[int]]
    cache: KVCache
    model: str | None = None
    factors: tuple[float, ...] = ()

    def __repr__(self) -> str:
        return f"Prefix({counted(self.tokens, 'row')}, {self.cache!r})"

    def shared(self, prompts: _Rows) -> np.ndarray:
        """How many tokens at the start of each prompt the cache holds, int32 [B].

        All but the last at most, whose logits are wanted; none where a ring forgot what the next token sees.

        Raises:
            InputError: another number of prompts than rows.
        """
        if len(prompts) != len(self.tokens):
            raise InputError(
                f"{len(prompts)} prompts for a prefix of {len(self.tokens)} rows: give one prompt per row"
            )

        def common(held: Sequence[int], prompt: Sequence[int]) -> int:
            most = min(len(held), len(prompt) - 1)
            return next((i for i in range(most) if held[i] != prompt[i]), most)

        shared_B = _by_row(self.cache, map(common, self.tokens, prompts))
        return np.where(remembered(self.cache, shared_B), shared_B, 0)[: len(prompts)]

    def usable(self, params: Params, config: ModelConfig) -> "Prefix":
        """What a call can build on: this prefix, or an empty one where its keys are rotated by other longrope
        factors than the call's. config: with the factors fixed.

        Raises:
            InputError: as `check`.
        """
        self.check(params, config)
        if self.factors == config.rope.short_factor:
            return self
        return dataclasses.replace(self, tokens=[[] for _ in self.tokens], cache=truncate(self.cache, 0))

    def check(self, params: Params, config: ModelConfig) -> None:
        """Raises InputError where it is another model's, or its tokens are not as many as its cache holds."""
        lengths = [len(row) for row in self.tokens]
        ours = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        if self.cache.fits != ours or self.model not in (None, fingerprint(params, config)):
            raise InputError(
                "the prefix was read by another model, or before these parameters changed: read its prompts"
                " anew, without it"
            )
        held = self.cache.length_B.tolist()
        if held != [*lengths, *[0] * (len(held) - len(lengths))] or self.cache.overflow_B.any():
            raise InputError(
                f"the prefix names {few(lengths)} tokens of rows of which its cache holds {few(held)}: give"
                " the tokens that were read, all of which fit the cache"
            )


def kept_prefix(params: Params, config: ModelConfig, prompts: _Rows, chosen: _Rows, cache: KVCache) -> Prefix:
    """What a call leaves behind: of each row everything but the last token, which was chosen and not read.
    config: with longrope's factors fixed; cache: of as many rows as prompts, or more.
    """
    tokens = [[*prompt, *ids][:-1] for prompt, ids in zip(prompts, chosen, strict=True)]
    cache = dataclasses.replace(cache, length_B=jnp.asarray(_by_row(cache, map(len, tokens))))
    return Prefix(tokens, cache, fingerprint(params, config), config.rope.short_factor)


def _by_row(cache: KVCache, counts: Iterable[int]) -> np.ndarray:
    """int32 [B]: a count for each of the first rows of a cache, 0 for the others."""
    counts_B = np.zeros(len(cache.length_B), np.int32)
    given = list(counts)
    counts_B[: len(given)] = given
    return counts_B
