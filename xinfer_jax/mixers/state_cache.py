"""`StateCache`: the cache of a layer with a state of fixed size in place of keys and values.

It is the state after a row's last token, so a row can go back only to 0 tokens. With P draft slots a row can
also go back to any length since the last call began. A call of at most P tokens then leaves the state as it
was and stores the tokens next to it. The next call first applies the tokens that were accepted.
"""

from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ..cache.layer_cache import LayerCache
from ..errors import InputError


class StateCache(LayerCache):
    """The state of each row, float32 whatever the dtype of keys and values. A kind is a subclass."""

    has_keys = False
    limits = ("state",)
    layer_kind: ClassVar[str]  # the layers that have it, in words, for errors
    base_B: jax.Array | None  # int32: tokens in the state; None: no draft slots

    @property
    def draft_slots(self) -> int:
        """P."""
        raise NotImplementedError

    def describe_limits(self) -> str:
        return f"its {self.layer_kind} have no state of that length"

    def can_truncate(self, length_B: Any, reached_B: jax.Array) -> Any:
        return length_B >= (reached_B if self.base_B is None else jnp.minimum(self.base_B, reached_B))

    def holds_drafts(self, tokens: int) -> bool:
        """Returns True if a call with this number of tokens is stored in the draft slots. A call with a
        single token never is.
        """
        return 1 < tokens <= self.draft_slots

    def has_draft_slots(self, count: int) -> bool:
        """Returns True if the cache has this number of draft slots. Raises InputError if it has some, but
        fewer.
        """
        if self.draft_slots and self.draft_slots < count:
            raise InputError(
                f"this cache has {self.draft_slots} draft slots, {count} are needed: prefill again"
            )
        return self.draft_slots >= count

    def check_without_drafts(self) -> None:
        """Raises InputError if it has draft slots: accepted tokens are not in the state yet."""
        if self.base_B is not None:
            raise InputError(
                "the state of a call with draft tokens cannot be saved: make the prefix without them"
            )

    def updated(self, new: Self, num_tokens_B: jax.Array) -> Self:
        """Returns the new cache, in which rows without tokens are as they were."""
        has_tokens_B = num_tokens_B > 0

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(has_tokens_B.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        return jax.tree.map(choose, new, self)
