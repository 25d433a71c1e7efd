"""`DraftPrefix`: the part of a `Prefix` that belongs to a draft head."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from ..errors import ShortRepr
from .kv_cache import KVCache
from .truncation import truncate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class FeatureRows(ShortRepr):
    """The features that a draft head has of all tokens of each row. A later call can go on after any token,
    and needs the features of that token.
    """

    features_BSX: jax.Array  # of token s in slot s

    @staticmethod
    def empty(rows: int, capacity: int, size: int, dtype: str) -> "FeatureRows":
        """Returns zeros. size: X."""
        return FeatureRows(jnp.zeros((rows, capacity, size), dtype))

    def record(self, features_BTX: jax.Array, start_B: jax.Array, num_tokens_B: jax.Array) -> Self:
        """Returns the rows with the features of `num_tokens_B` tokens from position `start_B` on."""
        B, T, _ = features_BTX.shape
        index_T = jnp.arange(T)
        is_real_BT = index_T < num_tokens_B[:, None]
        slot_BT = jnp.where(is_real_BT, start_B[:, None] + index_T, self.features_BSX.shape[1])
        row_B1 = jnp.arange(B)[:, None]
        features_BTX = features_BTX.astype(self.features_BSX.dtype)
        return dataclasses.replace(
            self, features_BSX=self.features_BSX.at[row_B1, slot_BT].set(features_BTX, mode="drop")
        )

    def before(self, start_B: jax.Array) -> jax.Array:
        """Returns the features [B, X] of the token before each position. They are zeros for position 0."""
        slot_B11 = jnp.maximum(start_B - 1, 0)[:, None, None]
        before_BX = jnp.take_along_axis(self.features_BSX, slot_B11, 1)[:, 0]
        return jnp.where(start_B[:, None] > 0, before_BX, 0)


@dataclasses.dataclass(frozen=True, repr=False)
class DraftPrefix(ShortRepr):
    """The data of a draft head for the tokens of a `Prefix`.

    Attributes:
        model: the `draft_fingerprint` of the head.
        cache: the cache of the head. None: the head has no cache.
        features: the features of the tokens. X numbers of a token are D numbers for most heads, in the dtype
            of the activations.
    """

    model: str
    cache: KVCache | None
    features: FeatureRows

    def emptied(self) -> "DraftPrefix":
        """Returns the data without tokens."""
        return dataclasses.replace(self, cache=self.cache and truncate(self.cache, 0))
