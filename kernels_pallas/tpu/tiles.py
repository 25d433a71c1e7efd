"""The tiles of slots into which an append divides the cache of a row: a copy takes them whole."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..key_layouts import LANES, Latents, SideBySide


class Tiling(NamedTuple):
    """The layout of the tokens of all rows in tiles of one array of the cache. It is the same for every
    program.
    """

    size: int  # slots of a tile
    tiles: int  # that the tokens of a row may touch
    items: int  # tiles of all rows
    slots: int  # of a row or a page
    pages: int  # of a row, 0 without a block table
    ring: bool
    axis: int  # of slots in a tile [K, …]: 1 of keys and values, 2 of their scale

    @property
    def is_whole(self) -> bool:
        """Returns True if a tile has all slots of a row or a page."""
        return self.size == self.slots


class Tile(NamedTuple):
    """A tile of one row."""

    row: Any
    position: Any  # of its first slot
    low: Any  # the first position that the row writes
    high: Any  # the end of these
    is_used: Any  # bool: some of these are in the tile
    is_full: Any  # bool: the tile is written whole, and need not be read
    memory: Any  # a reference to its slots in the cache


class Update(NamedTuple):
    """The change that a program makes to one array of the cache."""

    cache: Any  # a reference to it
    tiles: Any  # on-chip memory for the tiles of this program
    copied: Any  # semaphores [2, tiles], of reads and of writes
    tiling: Tiling
    first: Any  # the number of the program's first tile
    change: Callable[[Any, Tile], None]  # changes tile i of `tiles`


def scale_tile(slots: int) -> int:
    """Returns the slots of a tile of the scale, in a row or a page of `slots` slots."""
    return slots if slots % LANES else LANES


def make_tiling(
    size: int, tokens: int, rows: int, kv: SideBySide | Latents, table_BP: Any, ring: bool, axis: int
) -> Tiling:
    """Returns the tiling of an array for this number of tokens of each row."""
    tiles = pl.cdiv(tokens - 1, size) + 1
    pages = 0 if table_BP is None else table_BP.shape[1]
    return Tiling(size, tiles, rows * tiles, kv.values.shape[2], pages, ring, axis)


def find_tile(scalar_refs: Sequence[Any], cache_ref: Any, tiling: Tiling, number: Any) -> Tile:
    """Returns tile `number` among the tiles of all rows. scalar_refs: start_B, count_B and perhaps
    table_BP.
    """
    start_ref, count_ref, *table_refs = scalar_refs
    row = lax.div(jnp.minimum(number, tiling.items - 1), tiling.tiles)
    low = start_ref[row]
    high = low + count_ref[row]
    position = (lax.div(low, tiling.size) + lax.rem(number, tiling.tiles)) * tiling.size
    owner = row
    slot = position
    if table_refs:
        (table_ref,) = table_refs
        page = jnp.minimum(lax.div(position, tiling.slots), tiling.pages - 1)
        owner = table_ref[row * tiling.pages + page]
    if table_refs or tiling.ring:
        slot = lax.rem(position, tiling.slots)
    slots = slice(None) if tiling.is_whole else pl.ds(pl.multiple_of(slot, tiling.size), tiling.size)
    memory = cache_ref.at[(owner, *[slice(None)] * tiling.axis, slots)]
    is_used = (number < tiling.items) & (low < high) & (position < high)
    is_full = (low <= position) & (position + tiling.size <= high)
    return Tile(row, position, low, high, is_used, is_full, memory)


def update_tiles(scalar_refs: Any, updates: Sequence[Update], compute: Any = None) -> None:
    """Reads tiles, changes and writes them. Tiles of several arrays are handled at once.

    Args:
        scalar_refs: see `find_tile`.
        updates: the update of each array.
        compute: None, or a function that is called while tiles are read.
    """
    for update in updates:
        _each_tile(scalar_refs, update, _start_read)
    if compute is not None:
        compute()
    for update in updates:
        _each_tile(scalar_refs, update, _change)
    for update in updates:
        _each_tile(scalar_refs, update, _wait_write)


def _each_tile(scalar_refs: Any, update: Update, step: Any) -> None:
    @pl.loop(0, update.tiles.shape[0])
    def _one(i: Any) -> None:
        step(update, i, find_tile(scalar_refs, update.cache, update.tiling, update.first + i))


def _read(update: Update, i: Any, tile: Tile) -> Any:
    return pltpu.make_async_copy(tile.memory, update.tiles.at[i], update.copied.at[0, i])


def _write(update: Update, i: Any, tile: Tile) -> Any:
    return pltpu.make_async_copy(update.tiles.at[i], tile.memory, update.copied.at[1, i])


def _start_read(update: Update, i: Any, tile: Tile) -> None:
    pl.when(tile.is_used & jnp.logical_not(tile.is_full))(_read(update, i, tile).start)


def _change(update: Update, i: Any, tile: Tile) -> None:
    pl.when(tile.is_used & jnp.logical_not(tile.is_full))(_read(update, i, tile).wait)

    @pl.when(tile.is_used)
    def _start():
        update.change(i, tile)
        _write(update, i, tile).start()


def _wait_write(update: Update, i: Any, tile: Tile) -> None:
    pl.when(tile.is_used)(_write(update, i, tile).wait)


def select_type(dtype: Any) -> Any:
    """Returns a type of 32 bits for the numbers of a tile: no TPU selects between numbers of 8 bits, and not
    all TPUs select between numbers of 16 bits.
    """
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


def insert(tile_ref: Any, new: jax.Array, tile: Tile, tiling: Tiling, axis: int) -> None:
    """Writes the new numbers of a tile, as far as the row writes there, over the old ones. axis: the axis of
    slots, which the scale may have twice in a row.
    """
    kind = select_type(tile_ref.dtype)
    old = tile_ref[...].astype(kind)
    slot = lax.broadcasted_iota(jnp.int32, old.shape, axis)
    if old.shape[axis] > tiling.size:
        slot = lax.rem(slot, tiling.size)
    position = tile.position + slot
    is_new = (position >= tile.low) & (position < tile.high)
    new = jnp.broadcast_to(new.astype(kind), old.shape)
    tile_ref[...] = jnp.where(is_new, new, old).astype(tile_ref.dtype)
