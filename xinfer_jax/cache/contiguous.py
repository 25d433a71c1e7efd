"""The cache of one layer in which each position has its own slot: the base of `Ring` and `Paged`."""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .layer_cache import LayerCache
from .stored_kv import Stored, dequantize_kv, dtype_name, encode_new, map_slots, slice_slots


class Block(NamedTuple):
    """Keys and values of one block of slots, for every row. Invalid ones may be anything, even NaN."""

    k_BKSH: jax.Array
    v_BKSH: jax.Array
    position_BS: jax.Array  # int32; [1, S] where all rows have the same
    valid_BS: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Contiguous(LayerCache):
    """A cache in which position p is in slot p. S is the capacity rounded up. Further slots stay empty.
    Values may have another width than keys.
    """

    # Keys and values [B, K, S, H]; or k has both, and v is None (see stored_kv.py).
    k: Stored
    v: Any
    # Sliding window: the most keys that a query sees, its own included; None: all up to its own.
    window: int | None = dataclasses.field(metadata=dict(static=True))
    capacity: int = dataclasses.field(metadata=dict(static=True))  # tokens that a row can hold
    # A function of positions, int32 [B or 1, S]: the bias [B or 1, K, S, H] that is added to keys when they
    # are read. Attention sets it for a call; in a stored cache it is None.
    key_bias_fn: Any = dataclasses.field(default=None, kw_only=True)

    @property
    def slots(self) -> int:
        return self.k.shape[2]

    @property
    def dtype_name(self) -> str:
        """The dtype of keys and values, by the name that `init_cache` takes."""
        return dtype_name(self.k)

    @property
    def value_width(self) -> int:
        """The width of values. The width of keys is `k.shape[3]`."""
        return getattr(self.k, "value_width", None) or (self.k if self.v is None else self.v).shape[3]

    @property
    def fits(self) -> tuple[int, ...]:
        """The number of key heads and their width, and the width of values if it is another."""
        _, heads, _, width = self.k.shape
        return (heads, width) if self.value_width == width else (heads, width, self.value_width)

    def append(self, k_BTKH, v_BTKH, start_B: jax.Array, num_tokens_B: jax.Array) -> Self:
        """Writes the first num_tokens_B[b] of T keys and values from position start_B[b] on. Drops tokens
        beyond the capacity.
        """
        if self.slots > self.capacity:
            num_tokens_B = jnp.minimum(num_tokens_B, self.capacity - start_B)

        def append(old: Any, *x_BTKH: jax.Array) -> Any:
            new = encode_new(old, *x_BTKH, start_B=start_B, num_tokens_B=num_tokens_B)
            return map_slots(lambda x, y: self._write(y, x.astype(y.dtype), start_B, num_tokens_B), new, old)

        if self.v is None:
            return dataclasses.replace(self, k=append(self.k, k_BTKH, v_BTKH))
        return dataclasses.replace(self, k=append(self.k, k_BTKH), v=append(self.v, v_BTKH))

    def _write(self, old_BKSH, new_BKTH, start_B, num_tokens_B):
        if start_B.shape[0] == 1:  # one row needs no scatter
            return _write_row(old_BKSH[0], new_BKTH[0], start_B[0], num_tokens_B[0])[None]
        if new_BKTH.shape[2] > 1:
            return jax.vmap(_write_row)(old_BKSH, new_BKTH, start_B, num_tokens_B)
        slot_B = jnp.where(num_tokens_B > 0, start_B, self.slots)
        return self._scatter(old_BKSH, jnp.arange(slot_B.shape[0]), slot_B, new_BKTH[:, :, 0])

    def _scatter(self, old_BKSH, row, slot, new_KH):
        """Writes vectors [..., K, H] to these rows and slots, both [...]. Vectors of a slot past the end are
        dropped.
        """
        if self.v is not None:
            return old_BKSH.at[row, :, slot].set(new_KH, mode="drop")
        # All heads of a slot at once make XLA keep them together on TPUs: it would copy the cache into that
        # layout before a loop, and back after it.
        head_K = jnp.arange(old_BKSH.shape[1])
        return old_BKSH.at[row[..., None], head_K, slot[..., None]].set(new_KH, mode="drop")

    def stored_length(self, length_B: jax.Array) -> jax.Array:
        """Returns, int32 [B], the lengths without tokens that had no slot. In a ring later tokens overwrite
        earlier ones instead.
        """
        return jnp.minimum(length_B, self.capacity) if self.slots > self.capacity else length_B

    def block_layout(self, max_width: int) -> tuple[int, int]:
        """Returns the number of keys in a block, at most max_width, and the number of blocks. Slots whose
        number is symbolic are one block.
        """
        if not isinstance(self.slots, int):
            return self.slots, 1
        width = min(self.slots, max_width)
        return width, -(-self.slots // width)

    def get_block(self, i: Any, width: int, length_B: jax.Array, row: Any = None) -> Block:
        """Returns block i of rows of these lengths, dequantized. row: the row to return alone. None: all
        rows.
        """
        # The last block overlaps the one before it where the width does not divide S.
        first = i * width
        last_B1 = length_B[:, None] - 1
        at = jnp.minimum(first, self.slots - width)
        slot_S = at + jnp.arange(width)
        position_BS = self._positions(slot_S, last_B1)
        valid_BS = (slot_S >= first) & (position_BS >= 0) & (position_BS <= last_B1)
        stored: Any = self._cut(self.k, at, width, row)
        if self.v is None:
            k, v = stored.decode()
        else:
            k, v = map(dequantize_kv, (stored, self._cut(self.v, at, width, row)))
        if self.key_bias_fn is not None:
            k = k + self.key_bias_fn(position_BS)
        return Block(k, v, position_BS, valid_BS)

    def kernel_options(self) -> dict[str, Any]:
        """Returns the arguments of attention kernels that give the places of a row's keys."""
        return {}

    def _cut(self, x: Any, at: Any, width: int, row: Any) -> Any:
        """Returns keys or values in `width` slots from slot `at` on, as they are stored."""
        return slice_slots(x, at, width, row)

    def _positions(self, slot_S: jax.Array, last_B1: jax.Array) -> jax.Array:
        """Returns, [B or 1, S], the positions in these slots, in rows whose last position is last_B1. Below
        0: the slot has none.
        """
        return slot_S[None]

    def visible_blocks(
        self, width: int, start_B: jax.Array, count: int, length_B: jax.Array
    ) -> tuple[Any, Any]:
        """Returns the range (first, end) of blocks that `count` queries from position start_B on can see."""
        high = -(-jnp.minimum(jnp.max(length_B), jnp.max(start_B) + count) // width)
        low = 0 if self.window is None else jnp.maximum(jnp.min(start_B) - self.window + 1, 0) // width
        return low, high

    def reorder_tail(self, index_B: jax.Array, first: jax.Array, count: int) -> Self:
        def move(x_BKSH: jax.Array) -> jax.Array:
            # A slice beyond the end is moved back, onto positions where the rows are equal.
            tail = lax.dynamic_slice_in_dim(x_BKSH, first, min(count, self.capacity), 2)
            return lax.dynamic_update_slice_in_dim(x_BKSH, tail[index_B], first, 2)

        return self._map(move)

    def used_arrays(self, tokens: int) -> tuple[Any, Any]:
        used: Any = self._map(lambda x: x[:, :, :tokens])
        return used.k.separate() if self.v is None else (used.k, used.v)

    def fill(self, k: Any, v: Any) -> Self:
        def pad(x: Any) -> Any:
            return np.pad(x, [(0, 0), (0, 0), (0, self.slots - x.shape[2]), (0, 0)])

        stored: Any = self.k
        k, v = (stored.join(k, v), None) if self.v is None else (k, v)
        k, v = jax.tree.map(jnp.asarray, [map_slots(pad, x) for x in (k, v)])
        return dataclasses.replace(self, k=k, v=v)

    def _map(self, function: Any) -> Self:
        return dataclasses.replace(self, k=map_slots(function, self.k), v=map_slots(function, self.v))


def uncached_kv(k_BKSH: jax.Array, v_BKSH: jax.Array, window: int | None = None) -> Contiguous:
    """Returns keys and values in order of position as a layer cache, for attention without a cache."""
    return Contiguous(k_BKSH, v_BKSH, window, k_BKSH.shape[2])


def _write_row(old_KSH: jax.Array, new_KTH: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    # dynamic_update_slice moves a slice that would leave the array back to its end. Rolling the new tokens by
    # the same distance puts each into its slot.
    slots = old_KSH.shape[1]
    tokens = new_KTH.shape[1]
    at = jnp.minimum(start, slots - tokens)
    slot_T = (at + jnp.arange(tokens))[:, None]
    old = lax.dynamic_slice_in_dim(old_KSH, at, tokens, 1)
    rolled = new_KTH if tokens == 1 else jnp.roll(new_KTH, start - at, 1)
    written = jnp.where((slot_T >= start) & (slot_T < start + count), rolled, old)
    return lax.dynamic_update_slice_in_dim(old_KSH, written, at, 1)
