"""The kinds of cache that one layer's keys and values are kept in, with the same operations on each."""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..brief import Brief
from .quantized import QuantizedKV, by_slot, part, quantize, widen

RING_SLACK = 512  # tokens that a ring keeps beyond its window: as many can come at once, or be forgotten
_RING_MULTIPLE = 64  # slots of a ring: blocks of keys stay aligned
_MULTIPLE = 8  # of slots: what the bulk copies of Hopper's kernels take; others they would pad in every step


class Block(NamedTuple):
    """Some keys and values of every row; what is not valid may be anything, NaN included."""

    k_BKSH: jax.Array
    v_BKSH: jax.Array
    position_BS: jax.Array  # int32; [1, S] where it is the same in every row
    valid_BS: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Contiguous(Brief):
    """Position p lies in slot p. S is the capacity rounded up; slots beyond it stay empty."""

    k: jax.Array | QuantizedKV  # [B, K, S, H]
    v: jax.Array | QuantizedKV  # [B, K, S, H]
    # How many keys a query sees at most, itself included; None: all up to its own.
    window: int | None = dataclasses.field(metadata=dict(static=True))
    capacity: int = dataclasses.field(metadata=dict(static=True))  # tokens that a row can hold
    # What a reader adds to keys at positions, int32 [B or 1, S] -> [B or 1, K, S, H]; None: nothing. A cache
    # that is kept has none.
    added: Any = dataclasses.field(default=None, kw_only=True)
    in_order: ClassVar[bool] = True  # whether it has what kernels read

    @property
    def slots(self) -> int:
        return self.k.shape[2]

    @property
    def most_at_once(self) -> int:
        """Tokens of a row that one call may append."""
        return self.capacity

    def append(self, k_BTKH, v_BTKH, start_B: jax.Array, num_tokens_B: jax.Array) -> Self:
        """Writes the first num_tokens_B[b] of T keys and values at start_B[b] and on, within the capacity."""
        if self.slots > self.capacity:
            num_tokens_B = jnp.minimum(num_tokens_B, self.capacity - start_B)

        def stored(old: Any, new_BTKH: jax.Array) -> Any:
            new: Any = jnp.swapaxes(new_BTKH, 1, 2)
            if isinstance(old, QuantizedKV):
                new = quantize(new, old, jnp.where(start_B == 0, num_tokens_B, 0))
            return by_slot(lambda x, y: self._write(y, x.astype(y.dtype), start_B, num_tokens_B), new, old)

        return dataclasses.replace(self, k=stored(self.k, k_BTKH), v=stored(self.v, v_BTKH))

    def _write(self, old_BKSH, new_BKTH, start_B, num_tokens_B):
        if len(start_B) == 1:  # one row needs no scatter
            return _write_row(old_BKSH[0], new_BKTH[0], start_B[0], num_tokens_B[0])[None]
        if new_BKTH.shape[2] > 1:
            return jax.vmap(_write_row)(old_BKSH, new_BKTH, start_B, num_tokens_B)
        slot_B = jnp.where(num_tokens_B > 0, start_B, self.slots)
        return old_BKSH.at[jnp.arange(len(slot_B)), :, slot_B].set(new_BKTH[:, :, 0], mode="drop")

    def held(self, length_B: jax.Array) -> jax.Array:
        """int32 [B]: the length of rows without what was dropped."""
        return jnp.minimum(length_B, self.capacity) if self.slots > self.capacity else length_B

    def blocks(self, most: int) -> tuple[int, int]:
        """How many keys a block has, at most so many, and how many blocks there are."""
        width = min(self.slots, most)
        return width, -(-self.slots // width)

    def block(self, i: Any, width: int, length_B: jax.Array, row: Any = None) -> Block:
        """Block i of rows of that length, or of one row alone; quantized keys and values are widened."""
        # The last block overlaps the one before it where the width does not divide S.
        first = i * width
        last_B1 = length_B[:, None] - 1
        at = jnp.minimum(first, self.slots - width)
        slot_S = at + jnp.arange(width)
        position_BS = self._positions(slot_S, last_B1)
        valid_BS = (slot_S >= first) & (position_BS >= 0) & (position_BS <= last_B1)
        k, v = (widen(self._cut(x, at, width, row)) for x in (self.k, self.v))
        return Block(k if self.added is None else k + self.added(position_BS), v, position_BS, valid_BS)

    def ordered(self) -> tuple[Any, Any]:
        """Keys and values as kernels read them, [B, K, S, H]; of a kind that is `in_order`."""
        return self.k, self.v

    def _cut(self, x: Any, at: Any, width: int, row: Any) -> Any:
        """Keys or values in `width` slots from one on, as they are kept."""
        return part(x, at, width, row)

    def _positions(self, slot_S: jax.Array, last_B1: jax.Array) -> jax.Array:
        """[B or 1, S]: what slots hold in rows whose last position is last_B1; below 0: nothing."""
        return slot_S[None]

    def span(self, width: int, start_B: jax.Array, count: int, length_B: jax.Array) -> tuple[Any, Any]:
        """Which blocks, from one to before another, hold what `count` queries from start_B on see."""
        high = -(-jnp.minimum(jnp.max(length_B), jnp.max(start_B) + count) // width)
        low = 0 if self.window is None else jnp.maximum(jnp.min(start_B) - self.window + 1, 0) // width
        return low, high

    def remembers(self, length_B: Any, reached_B: jax.Array) -> Any:
        """bool [B]: whether rows once reached_B long, cut to length_B, hold all that the next tokens see."""
        return True

    def reorder(self, index_B: jax.Array) -> Self:
        """Row b of the result is row index_B[b]."""
        return jax.tree.map(lambda leaf: leaf[index_B], self)

    def reorder_tail(self, index_B: jax.Array, first: jax.Array, count: int) -> Self:
        """`reorder` for rows like row index_B[b] but at positions first … first + count - 1."""

        def move(x_BKSH: jax.Array) -> jax.Array:
            # A part that would leave the cache is moved back, onto positions that agree anyway.
            tail = lax.dynamic_slice_in_dim(x_BKSH, first, min(count, self.capacity), 2)
            return lax.dynamic_update_slice_in_dim(x_BKSH, tail[index_B], first, 2)

        return self._map(move)

    def in_use(self, tokens: int) -> tuple[Any, Any]:
        """Keys and values that rows of at most so many tokens have written: what files keep."""
        part = self._map(lambda x: x[:, :, :tokens])
        return part.k, part.v

    def filled(self, k: Any, v: Any) -> Self:
        """A layer of this shape that begins with these arrays of NumPy, which `in_use` gave."""

        def padded(x: np.ndarray, like: jax.Array) -> jax.Array:
            return jnp.asarray(np.pad(x, [(0, n - m) for n, m in zip(like.shape, x.shape, strict=True)]))

        k, v = jax.tree.map(padded, (k, v), (self.k, self.v))
        return dataclasses.replace(self, k=k, v=v)

    def _map(self, function: Any) -> Self:
        return dataclasses.replace(self, k=by_slot(function, self.k), v=by_slot(function, self.v))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Ring(Contiguous):
    """Position p lies in slot p % S: a new token takes the place of one that no query will see any more."""

    in_order: ClassVar[bool] = False

    @property
    def most_at_once(self) -> int:
        """More would overwrite what the first of them sees."""
        window: Any = self.window  # every ring has one
        return self.slots - window + 1

    def _write(self, old_BKSH, new_BKTH, start_B, num_tokens_B):
        t_T = jnp.arange(new_BKTH.shape[2])
        position_BT = start_B[:, None] + t_T
        kept_BT = (t_T < num_tokens_B[:, None]) & (position_BT < self.capacity)
        slot_BT = jnp.where(kept_BT, position_BT % self.slots, self.slots)
        row_B1 = jnp.arange(len(old_BKSH))[:, None]
        return old_BKSH.at[row_B1, :, slot_BT].set(jnp.swapaxes(new_BKTH, 1, 2), mode="drop")

    def _positions(self, slot_S: jax.Array, last_B1: jax.Array) -> jax.Array:
        # The latest position that falls into the slot: the last one, or as much before it as the slot is.
        return last_B1 - (last_B1 - slot_S) % self.slots

    def span(self, width: int, start_B: jax.Array, count: int, length_B: jax.Array) -> tuple[Any, Any]:
        """Once it is full, all of them."""
        high = super().span(width, start_B, count, length_B)[1]
        return 0, jnp.minimum(high, self.blocks(width)[1])

    def remembers(self, length_B: Any, reached_B: jax.Array) -> Any:
        """As far as what was written since did not take the place of what the window reaches back to."""
        return jnp.maximum(length_B + self.most_at_once, self.slots) >= reached_B

    def reorder_tail(self, index_B: jax.Array, first: jax.Array, count: int) -> Self:
        """All of it: a ring is short, and the part might run over its end."""
        return self._map(lambda x: x[index_B])


def slots_of(window: int | None, capacity: int) -> int:
    """S of a layer with that sliding window; fewer than the capacity: it is a ring."""
    all_slots = -(-capacity // _MULTIPLE) * _MULTIPLE
    if window is None:
        return all_slots
    return min(all_slots, -(-(window + RING_SLACK - 1) // _RING_MULTIPLE) * _RING_MULTIPLE)


def fresh(k_BKSH: jax.Array, v_BKSH: jax.Array, window: int | None = None) -> Contiguous:
    """Keys and values that no cache keeps, in order of position."""
    return Contiguous(k_BKSH, v_BKSH, window, k_BKSH.shape[2])


def _write_row(old_KSH: jax.Array, new_KTH: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    # dynamic_update_slice moves a slice that would leave the array: new tokens move along, to their slots.
    slots = old_KSH.shape[1]
    tokens = new_KTH.shape[1]
    at = jnp.minimum(start, slots - tokens)
    slot_T = (at + jnp.arange(tokens))[:, None]
    kept = lax.dynamic_slice_in_dim(old_KSH, at, tokens, 1)
    moved = new_KTH if tokens == 1 else jnp.roll(new_KTH, start - at, 1)
    written = jnp.where((slot_T >= start) & (slot_T < start + count), moved, kept)
    return lax.dynamic_update_slice_in_dim(old_KSH, written, at, 1)
