"""The cache of a layer with a sliding window: a ring buffer, if that is shorter than the capacity."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from .contiguous import Contiguous

# One call can append as many tokens to a ring, and `truncate` go back by as many.
RING_SLACK = 512
_RING_MULTIPLE = 64  # a ring's slots are a multiple of it, so that blocks of keys stay aligned
_MULTIPLE = 8  # of slots, as the bulk copies of Hopper's kernels need it; else they would pad in every step
_TPU_MULTIPLE = 128  # of slots side by side: what one copy of TPU kernels takes, of rows and of rings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Ring(Contiguous):
    """Position p is in slot p % S: a new token overwrites one that no later query can see."""

    @property
    def most_at_once(self) -> int:
        """More tokens would overwrite keys that the first of them sees."""
        window: Any = self.window  # every ring has one
        return self.slots - window + 1

    def _write(self, old_BKSH, new_BKTH, start_B, num_tokens_B):
        t_T = jnp.arange(new_BKTH.shape[2])
        position_BT = start_B[:, None] + t_T
        kept_BT = (t_T < num_tokens_B[:, None]) & (position_BT < self.capacity)
        slot_BT = jnp.where(kept_BT, position_BT % self.slots, self.slots)
        row_B1 = jnp.arange(old_BKSH.shape[0])[:, None]
        return self._scatter(old_BKSH, row_B1, slot_BT, jnp.swapaxes(new_BKTH, 1, 2))

    @property
    def limits(self) -> tuple:
        return self.slots, self.window

    def describe_limits(self) -> str:
        return f"its sliding-window layers can go back by at most {self.most_at_once}"

    def kernel_options(self) -> dict[str, Any]:
        return {"ring": True}

    def _positions(self, slot_S: jax.Array, last_B1: jax.Array) -> jax.Array:
        # The latest position in the slot: at most S - 1 before the last one.
        return last_B1 - (last_B1 - slot_S) % self.slots

    def visible_blocks(
        self, width: int, start_B: jax.Array, count: int, length_B: jax.Array
    ) -> tuple[Any, Any]:
        """Returns the range (first, end) of blocks that queries can see: all blocks once the ring is full."""
        high = super().visible_blocks(width, start_B, count, length_B)[1]
        return 0, jnp.minimum(high, self.block_layout(width)[1])

    def can_truncate(self, length_B: Any, reached_B: jax.Array) -> Any:
        """Returns true unless later writes have overwritten keys within the window."""
        return jnp.maximum(length_B + self.most_at_once, self.slots) >= reached_B

    def reorder_tail(self, index_B: jax.Array, first: jax.Array, count: int) -> Self:
        """Reorders all slots: a ring is short, and these positions may wrap around its end."""
        return self._map(lambda x: x[index_B])


def num_slots(window: int | None, capacity: int, side_by_side: bool = False) -> int:
    """Returns S of a layer with that sliding window. If it is less than the capacity, the cache is a ring.
    side_by_side: keys and values are side by side, as in `SideBySideKV`.
    """
    (multiple, of_ring) = (_TPU_MULTIPLE, _TPU_MULTIPLE) if side_by_side else (_MULTIPLE, _RING_MULTIPLE)
    all_slots = -(-capacity // multiple) * multiple
    if window is None:
        return all_slots
    return min(all_slots, -(-(window + RING_SLACK - 1) // of_ring) * of_ring)
