"""The body of the TPU attention kernel. It moves queries from the order of products, by token and then by
head, to rows of each key head, and the results back. It copies keys and values to on-chip memory, and has the
loops.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..key_layouts import LANES
from .attention_softmax import Keys, Settings, Tile, add_keys, divide, for_each_head, join_scales, reset

_NO_WINDOW = 2**30
_UNROLLED = 8  # tiles of few rows that are not a loop
_FEW_ROWS = 32
_TOGETHER = 4  # tiles of a prompt


class _Item(NamedTuple):
    """A tile of queries of one row, and the positions low … high - 1 that it sees."""

    row: Any
    low: Any
    high: Any

    def blocks(self, block: int) -> tuple[Any, Any]:
        """Returns the first block of positions, and the end. There is at least one block, so that each item
        has a next one.
        """
        first = lax.div(self.low, block)
        return first, jnp.maximum(pl.cdiv(self.high, block), first + 1)


def attention_kernel(*refs: Any, names: tuple[str, ...], settings: Settings) -> None:
    """Computes attention of one tile of queries of one row to the keys that it sees (FlashAttention-2, Dao
    2023).

    Blocks of positions pass through two buffers. While one is read, the next one is copied: the next block of
    this tile, or the first block of the next tile or row. Keys that no query of the tile sees are neither
    copied nor computed.

    The refs, by `names`, are:

    - start_B, length_B and perhaps table_BP, in scalar memory,
    - q [1, tokens, N · H], of several rows if each has one query, or for latents [1, 1, K, R, H],
    - offset_R1, the token of each of the R queries of a key head,
    - perhaps sink_KR1, and near_KCH and angle of a bias of keys,
    - kv and perhaps scale, in HBM,
    - out, in the form of q,
    - scratch: kv_buffer [2, K, block, X], scale_buffer [2, chunks, K, …], flat [rows, 1, N · H], query and
      out_sum [K, R, W], max, sum, query_sum [K, R, 128], semaphores, and the number of blocks so far.

    Args:
        refs: the references.
        names: the names of the refs.
        settings: sizes.
    """
    ref = dict(zip(names, refs, strict=True))
    row = pl.program_id(0)
    tile = pl.program_id(1)
    rows = pl.num_programs(0)
    item = _item(ref, settings, row, tile)
    first, end = item.blocks(settings.block)
    ends_row = tile + 1 == settings.tiles
    next_row = jnp.where(ends_row, jnp.minimum(row + 1, rows - 1), row)
    next_item = _item(ref, settings, next_row, jnp.where(ends_row, 0, tile + 1))
    next_first, _ = next_item.blocks(settings.block)
    is_last_item = ends_row & (row + 1 == rows)

    @pl.when((row == 0) & (tile == 0))
    def _start():
        ref["count"][0] = 0
        _start_copies(ref, settings, item, first, 0)

    _load_queries(ref, settings, row)
    reset(ref)
    done = ref["count"][0]

    def one_block(i, _):
        buffer = lax.rem(done + i - first, 2)
        is_last = i + 1 == end

        @pl.when(jnp.logical_not(is_last))
        def _next_block():
            _start_copies(ref, settings, item, i + 1, 1 - buffer)

        @pl.when(is_last & jnp.logical_not(is_last_item))
        def _next_item():
            _start_copies(ref, settings, next_item, next_first, 1 - buffer)

        _for_each_copy(ref, settings, item, i, buffer, lambda copy: copy.wait())
        steps = settings.block // settings.step
        low = jnp.maximum(lax.div(item.low, settings.step), i * steps)
        high = jnp.minimum(pl.cdiv(item.high, settings.step), (i + 1) * steps)
        one_step = partial(_one_step, ref, settings, item, tile, buffer)
        lax.fori_loop(low, high, lambda j, _: one_step(j, j - i * steps), None)

    lax.fori_loop(first, end, one_block, None)
    ref["count"][0] = done + end - first
    _for_each_tiles(ref, settings, partial(divide, ref))
    _store_queries(ref, settings, row)


def _item(ref, settings: Settings, row, tile) -> _Item:
    stored = ref["length"][row]
    length = stored if settings.ring else jnp.minimum(stored, settings.positions)
    position = ref["start"][row] + tile * settings.tokens
    low = 0 if settings.window is None else position - settings.window + 1
    if settings.ring:
        low = jnp.maximum(low, length - settings.slots)  # earlier ones are overwritten
    high = jnp.minimum(length, position + settings.tokens)
    return _Item(row, jnp.maximum(low, 0), jnp.maximum(high, 0))


def _chunks(settings: Settings, item: _Item, block) -> tuple[Any, Any]:
    """Returns the range of chunks of a block that the item sees."""
    chunks = settings.block // settings.chunk
    first = jnp.maximum(lax.div(item.low, settings.chunk), block * chunks)
    return first, jnp.minimum(pl.cdiv(item.high, settings.chunk), (block + 1) * chunks)


def _start_copies(ref, settings: Settings, item: _Item, block, buffer) -> None:
    _for_each_copy(ref, settings, item, block, buffer, lambda copy: copy.start())


def _for_each_copy(ref, settings: Settings, item: _Item, block, buffer, do: Callable) -> None:
    """Runs `do(copy)` for the copies of a block to a buffer."""
    chunks = settings.block // settings.chunk

    def of_chunk(chunk, _) -> None:
        for copy in _copies(ref, settings, item, chunk, chunk - block * chunks, buffer):
            do(copy)

    lax.fori_loop(*_chunks(settings, item, block), of_chunk, None)


def _copies(ref, settings: Settings, item: _Item, chunk, place, buffer) -> list[Any]:
    """Returns the copies of one chunk of a row to its place among the chunks of a buffer."""
    size = settings.chunk
    owner = item.row
    slot = chunk * size
    if "table" in ref:
        owner = ref["table"][item.row * settings.table_pages + chunk]
        slot = 0
    elif settings.ring:
        slot = lax.rem(slot, settings.slots)
    is_whole = size == settings.slots
    slots = pl.ds(0, size) if is_whole else pl.ds(pl.multiple_of(slot, size), size)
    places = pl.ds(pl.multiple_of(place * size, size), size)
    copy = pltpu.make_async_copy
    copies = [
        copy(
            ref["kv"].at[owner, :, slots], ref["kv_buffer"].at[buffer, :, places], ref["copied"].at[0, buffer]
        )
    ]
    if "scale" in ref:
        to = ref["scale_buffer"].at[buffer, place]
        scale = ref["scale"].at[owner] if is_whole else ref["scale"].at[owner, :, :, slots]
        copies.append(copy(scale, to, ref["copied"].at[1, buffer]))
    return copies


def _for_each_tiles(ref, settings: Settings, function: Callable[[list[Tile]], None]) -> None:
    """Calls a function of one or more tiles, for all of them: the compiler overlaps the operations of one
    call, the products of one tile with the softmax of another, but not the steps of a loop.
    """
    heads, rows, _ = ref["query"].shape
    parts = rows // settings.rows
    count = heads * parts
    if count <= _UNROLLED and settings.rows <= _FEW_ROWS:
        for head, part in (divmod(i, parts) for i in range(count)):
            function([Tile(head, pl.ds(part * settings.rows, settings.rows))])
        return
    together = math.gcd(count, _TOGETHER) if settings.is_prompt else 1

    def tile(i) -> Tile:
        first = pl.multiple_of(lax.rem(i, parts) * settings.rows, settings.rows)
        return Tile(lax.div(i, parts), pl.ds(first, settings.rows))

    @pl.loop(0, count // together)
    def _some(i) -> None:
        function([tile(i * together + j) for j in range(together)])


class _Step(NamedTuple):
    """Keys that the softmax takes at a time."""

    item: _Item
    first_query: Any  # its position
    position: Any  # of the first key
    place: Any  # the step's number in the buffer
    buffer: Any

    def slots(self, size: int) -> Any:
        return pl.ds(pl.multiple_of(self.place * size, size), size)


def _one_step(ref, settings: Settings, item: _Item, tile, buffer, step, place) -> None:
    """Adds the keys of one step to the softmax of each head. place: the step's number in the buffer."""
    size = settings.step
    position = step * size
    first_query = ref["start"][item.row] + tile * settings.tokens
    of_step = _Step(item, first_query, position, place, buffer)
    if "scale" not in ref:  # levels are never NaN

        @pl.when((position < item.low) | (position + size > item.high))
        def _clear():
            _clear_unseen(ref, item, position, buffer, of_step.slots(size))

    def add(is_masked: bool) -> None:
        def of_tiles(tiles: list[Tile]) -> None:
            keys = [_keys(ref, settings, of_step, tile, is_masked) for tile in tiles]
            add_keys(ref, settings, tiles, keys)

        _for_each_tiles(ref, settings, of_tiles)

    if not settings.is_prompt:
        add(True)
        return
    # All queries of a tile see most keys of a prompt.
    low = jnp.maximum(item.low, settings.first_key)
    if settings.window is not None:
        low = jnp.maximum(low, first_query + settings.tokens - settings.window)
    is_masked = (position < low) | (position + size > jnp.minimum(item.high, first_query + 1))
    pl.when(is_masked)(partial(add, True))
    pl.when(jnp.logical_not(is_masked))(partial(add, False))


def _keys(ref, settings: Settings, step: _Step, tile: Tile, is_masked: bool) -> Keys:
    """Returns the keys of a step for a tile. is_masked: some query of the tile does not see some of them."""
    size = settings.step
    item = step.item
    key_1S = step.position + lax.broadcasted_iota(jnp.int32, (1, size), 1)
    scale_4S = visible_RS = None
    if "scale" in ref:
        count = size // settings.chunk
        parts = [ref["scale_buffer"][step.buffer, step.place * count + i, tile.head] for i in range(count)]
        is_copied_1S = (key_1S >= item.low) & (key_1S < item.high)
        scale_4S = [jnp.where(is_copied_1S, x, 0) for x in join_scales(parts, settings.chunk)]
    if is_masked:
        # Of a prompt a tile is one head: the compiler then computes the mask once for several.
        rows = pl.ds(0, settings.rows) if settings.is_prompt else tile.rows
        query_R1 = step.first_query + ref["offset"][rows]
        visible_RS = key_1S <= jnp.minimum(query_R1, item.high - 1)
        if settings.window is not None or settings.ring:
            window = _NO_WINDOW if settings.window is None else settings.window
            visible_RS &= key_1S > jnp.maximum(query_R1 - window, item.low - 1)
        if settings.first_key:
            visible_RS &= key_1S >= jnp.minimum(query_R1, settings.first_key)
    kv_SX = ref["kv_buffer"][step.buffer, tile.head, step.slots(size)]
    return Keys(step.position, kv_SX, scale_4S, visible_RS)


def _clear_unseen(ref, item: _Item, position, buffer, slots) -> None:
    """Writes zeros in place of keys and values that no query of the tile sees. They may be NaN, which the
    weight 0 would not remove.
    """

    def clear(head) -> None:
        kv_SX = ref["kv_buffer"][buffer, head, slots]
        key_SX = position + lax.broadcasted_iota(jnp.int32, kv_SX.shape, 0)
        is_seen = (key_SX >= item.low) & (key_SX < item.high)
        cleared = jnp.where(is_seen, kv_SX.astype(jnp.float32), 0)
        ref["kv_buffer"][buffer, head, slots] = cleared.astype(kv_SX.dtype)

    for_each_head(ref, clear)


# --- queries and results ------------------------------------------------------------------------------------


def _heads(ref, settings: Settings) -> list[tuple[int, Any]]:
    """Returns the key head and the rows in `query` of each query head."""
    heads = ref["query"].shape[0]
    group = ref["q"].shape[-1] // settings.width // heads
    return [(i // group, pl.ds(i % group * settings.tokens, settings.tokens)) for i in range(heads * group)]


def _load_queries(ref, settings: Settings, row) -> None:
    """Puts the queries of each key head into rows, with zeros next to queries that do not fill lanes."""
    if settings.rank:
        ref["query"][...] = ref["q"][0, 0].astype(ref["query"].dtype)
        return
    H = settings.width
    flat_ref = ref["q"].at[0]
    if settings.block_rows:
        in_block = lax.rem(row, settings.block_rows)

        @pl.when(in_block == 0)
        def _unpack():
            block = ref["q"][0].astype(jnp.float32)
            for i in range(settings.block_rows):
                ref["flat"][i] = block[i : i + 1]

        flat_ref = ref["flat"].at[in_block]
    for i, at in enumerate(_heads(ref, settings)):
        x = flat_ref[:, i * H : (i + 1) * H].astype(jnp.float32)
        if H % LANES:
            x = jnp.concatenate([x, jnp.zeros((len(x), LANES - H), jnp.float32)], -1)
        ref["query"][at] = x.astype(ref["query"].dtype)


def _store_queries(ref, settings: Settings, row) -> None:
    """Stores the results, as the reverse of `_load_queries`. With a width below 128 it stores the second
    half, p · v.
    """
    if settings.rank:
        ref["out"][0, 0] = ref["out_sum"][...].astype(ref["out"].dtype)
        return
    H = settings.width
    in_block = lax.rem(row, settings.block_rows) if settings.block_rows else 0
    out_ref = ref["flat"].at[in_block] if settings.block_rows else ref["out"].at[0]
    for i, at in enumerate(_heads(ref, settings)):
        out_ref[:, i * H : (i + 1) * H] = ref["out_sum"][at][:, -H:].astype(out_ref.dtype)
    if settings.block_rows:

        @pl.when((in_block == settings.block_rows - 1) | (row + 1 == pl.num_programs(0)))
        def _pack():
            rows = [ref["flat"][i] for i in range(settings.block_rows)]
            ref["out"][0] = jnp.concatenate(rows, 0).astype(ref["out"].dtype)
