"""What the processors look at: a row's tokens so far, how many, what ends it, what it may choose."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import traced
from .settings import SamplingConfig, is_full


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Rows in front; None where the plain settings have no use for it."""

    position_B: jax.Array  # int32: tokens of the row, the prompt's too; the next one has this position
    chosen_B: jax.Array  # int32: how many of them the row chose, EOS included
    eos_BE: jax.Array  # int32: ids that end the row; below 0: none
    seen_BV: jax.Array  # bool: which tokens the row holds
    count_BV: jax.Array | None  # int32: how often the row chose each token
    history_BS: jax.Array | None  # int32: the row's tokens in order; None: nobody asked for their order
    allowed_bits: jax.Array | None  # uint32 [B, ceil(V/32)]: bit v % 32 of word v // 32: v is allowed

    def advance(self, token_B: jax.Array, active_B: jax.Array) -> "Context":
        """With the token that each active row chose; the others stay as they are."""
        row_B = jnp.arange(len(token_B))
        one_B = active_B.astype(jnp.int32)
        history_BS = self.history_BS
        if history_BS is not None:
            at_B = jnp.where(active_B, self.position_B, history_BS.shape[1])
            history_BS = jnp.asarray(history_BS).at[row_B, at_B].set(token_B, mode="drop")
        count_BV = None if self.count_BV is None else jnp.asarray(self.count_BV).at[row_B, token_B].add(one_B)
        return dataclasses.replace(
            self,
            position_B=self.position_B + one_B,
            chosen_B=self.chosen_B + one_B,
            seen_BV=jnp.asarray(self.seen_BV).at[row_B, token_B].max(active_B),
            count_BV=count_BV,
            history_BS=history_BS,
        )

    def reorder(self, index_B: jax.Array) -> "Context":
        """Row b of the result is row index_B[b]."""
        return jax.tree.map(lambda leaf: leaf[index_B], self)


def start(
    sampling_B: SamplingConfig, position_B: Any, eos_BE: Any, seen_BV: Any, history_BS: Any = None
) -> Context:
    """What these settings (from `per_row`) look at before the first choice; every token is allowed.

    Args:
        sampling_B: one setting per row.
        position_B: int32, tokens of each row's prompt.
        eos_BE: int32, ids that end each row.
        seen_BV: bool, which tokens the prompts hold.
        history_BS: int32, the prompts' tokens in order, with room for those to come.
    """
    (B, V) = seen_BV.shape
    full = is_full(sampling_B)
    xp: Any = jnp if traced(position_B) else np  # on the host nothing is compiled
    return Context(
        position_B,
        xp.zeros(B, np.int32),
        eos_BE,
        seen_BV,
        xp.zeros((B, V), np.int32) if full else None,
        history_BS,
        xp.full((B, -(-V // 32)), 2**32 - 1, np.uint32) if full else None,
    )
