"""The body of the TPU attention kernel: copies of keys and values to on-chip memory, and the softmax."""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
LOG2_E = math.log2(math.e)
_MASKED = -1e30  # finite, and far below the first maximum: a query that sees no key gives zeros, not NaN
_LOWEST = -1e29
_NO_WINDOW = 2**30
_UNROLLED = 8  # tiles of few rows that are not a loop
_FEW_ROWS = 32
_TOGETHER = 4  # tiles of a prompt


class Settings(NamedTuple):
    """What is the same for every program."""

    scale: float
    window: int | None
    soft_cap: float | None
    ring: bool
    is_prompt: bool  # q is [B, T, N · H]
    width: int  # H
    tokens: int  # of a tile of queries
    tiles: int
    rows: int  # of queries that the softmax takes at a time
    positions: int  # that the cache of a row holds
    slots: int  # of a row or a page
    table_pages: int  # of a row, 0 without a block table
    chunk: int  # slots of one copy
    step: int  # keys that the softmax takes at a time: a multiple of the chunk
    block: int  # keys in one of the two buffers: a multiple of the step


class _Item(NamedTuple):
    """A tile of queries of one row, and the positions low … high - 1 that it sees."""

    row: Any
    low: Any
    high: Any

    def blocks(self, block: int) -> tuple[Any, Any]:
        """The first block of positions, and the end: at least one, so that each item has a next one."""
        first = lax.div(self.low, block)
        return first, jnp.maximum(pl.cdiv(self.high, block), first + 1)


def attention_kernel(*refs: Any, names: tuple[str, ...], settings: Settings) -> None:
    """Attention of one tile of queries of one row to the keys that it sees (FlashAttention-2, Dao 2023).

    Blocks of positions pass through two buffers. While one is read, the next one is copied: of this tile, or
    the first of the next tile or row. What no query of the tile sees is neither copied nor computed.

    Args:
        refs: by `names`: start_B, length_B and perhaps table_BP in scalar memory; q and out, [1, K, R, W],
            whose R rows are tokens and the query heads that share a key head, or of a prompt [1, R, N · H],
            whose rows are tokens; offset_R1, the token of each row; perhaps sink, [K, R, 1] or [N, 1, 1]; kv
            and perhaps scale, in HBM; then scratch: kv_buffer [2, K, block, 2H], scale_buffer
            [2, chunks, K, 4, chunk], perhaps wide_q [N, R, W], max, sum, query_sum [K or N, R, 128], out_sum
            [K or N, R, W], semaphores, and the number of blocks so far.
        names: of the refs.
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

    _reset(ref, settings)
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

        _wait_copies(ref, settings, item, i, buffer)
        steps = settings.block // settings.step
        low = jnp.maximum(lax.div(item.low, settings.step), i * steps)
        high = jnp.minimum(pl.cdiv(item.high, settings.step), (i + 1) * steps)
        lax.fori_loop(
            low, high, lambda j, _: _one_step(ref, settings, item, tile, j, j - i * steps, buffer), 0
        )
        return 0

    lax.fori_loop(first, end, one_block, 0)
    ref["count"][0] = done + end - first
    _store(ref, settings)


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
    """The range of chunks of a block that the item sees."""
    chunks = settings.block // settings.chunk
    first = jnp.maximum(lax.div(item.low, settings.chunk), block * chunks)
    return first, jnp.minimum(pl.cdiv(item.high, settings.chunk), (block + 1) * chunks)


def _start_copies(ref, settings: Settings, item: _Item, block, buffer) -> None:
    _for_each_copy(ref, settings, item, block, buffer, lambda copy: copy.start())


def _wait_copies(ref, settings: Settings, item: _Item, block, buffer) -> None:
    _for_each_copy(ref, settings, item, block, buffer, lambda copy: copy.wait())


def _for_each_copy(ref, settings: Settings, item: _Item, block, buffer, do: Callable) -> None:  # noqa: PLR0913
    """`do(copy)` for the copies of a block to a buffer."""
    chunks = settings.block // settings.chunk

    def of_chunk(chunk, _):
        for copy in _copies(ref, settings, item, chunk, chunk - block * chunks, buffer):
            do(copy)
        return 0

    lax.fori_loop(*_chunks(settings, item, block), of_chunk, 0)


def _copies(ref, settings: Settings, item: _Item, chunk, place, buffer) -> list[Any]:  # noqa: PLR0913
    """The copies of one chunk of a row to its place among the chunks of a buffer."""
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
        copies.append(copy(ref["scale"].at[owner, :, :, slots], to, ref["copied"].at[1, buffer]))
    return copies


def _for_each(count: int, function: Callable) -> None:
    lax.fori_loop(0, count, lambda i, _: function(i) or 0, 0)


class _Tile(NamedTuple):
    """Some rows of queries of a head of the sums; of a prompt a query head, else a key head."""

    head: Any
    rows: Any


def _for_each_tiles(ref, settings: Settings, function: Callable[[list[_Tile]], None]) -> None:
    """Calls a function of one or more tiles, for all of them: the compiler overlaps what one call does, the
    products of one tile with the softmax of another, but not what steps of a loop do.
    """
    heads, rows, _ = ref["max"].shape
    parts = rows // settings.rows
    count = heads * parts
    if count <= _UNROLLED and settings.rows <= _FEW_ROWS:
        for head, part in (divmod(i, parts) for i in range(count)):
            function([_Tile(head, pl.ds(part * settings.rows, settings.rows))])
        return
    together = math.gcd(count, _TOGETHER) if settings.is_prompt else 1

    def tile(i) -> _Tile:
        first = pl.multiple_of(lax.rem(i, parts) * settings.rows, settings.rows)
        return _Tile(lax.div(i, parts), pl.ds(first, settings.rows))

    _for_each(count // together, lambda i: function([tile(i * together + j) for j in range(together)]))


def _reset(ref, settings: Settings) -> None:
    def one_head(head) -> None:
        ref["out_sum"][head] = jnp.zeros(ref["out_sum"].shape[1:], jnp.float32)
        shape = ref["max"].shape[1:]
        if "sink" in ref:  # a score of weight 1 without a value; the sum is over lanes
            ref["max"][head] = jnp.broadcast_to(ref["sink"][head] * LOG2_E, shape)
            is_first = lax.broadcasted_iota(jnp.int32, shape, 1) == 0
            ref["sum"][head] = is_first.astype(jnp.float32)
        else:
            ref["max"][head] = jnp.full(shape, _LOWEST)
            ref["sum"][head] = jnp.zeros(shape, jnp.float32)
        if "query_sum" in ref:
            q_RW = _queries(ref, settings, _Tile(head, slice(None)))
            sums = q_RW.astype(jnp.float32).sum(-1, keepdims=True)
            ref["query_sum"][head] = jnp.broadcast_to(sums, shape)

    if "wide_q" in ref:
        _for_each(ref["wide_q"].shape[0] // 2, lambda pair: _widen(ref, pair))
    _for_each(ref["max"].shape[0], one_head)


def _widen(ref, pair) -> None:
    """Queries of two heads of width 64, each with zeros in place of the other."""
    q_RL = ref["q"][0, :, _lanes(pair, LANES)].astype(jnp.float32)
    is_first = lax.broadcasted_iota(jnp.int32, q_RL.shape, 1) < LANES // 2
    for i, own_RL in enumerate((q_RL, pltpu.roll(q_RL, LANES // 2, 1))):
        ref["wide_q"][2 * pair + i] = jnp.where(is_first, own_RL, 0).astype(ref["wide_q"].dtype)


def _lanes(head, width: int) -> Any:
    return pl.ds(pl.multiple_of(head * width, LANES), width)


def _queries(ref, settings: Settings, tile: _Tile) -> jax.Array:  # [R, W]
    if not settings.is_prompt:
        return ref["q"][0, tile.head, tile.rows]
    if "wide_q" in ref:
        return ref["wide_q"][tile]
    return ref["q"][0, tile.rows, _lanes(tile.head, settings.width)]


class _Step(NamedTuple):
    """Keys that the softmax takes at a time."""

    item: _Item
    first_query: Any  # its position
    position: Any  # of the first key
    place: Any  # the step's number in the buffer
    buffer: Any

    def slots(self, size: int) -> Any:
        return pl.ds(pl.multiple_of(self.place * size, size), size)


def _one_step(ref, settings: Settings, item: _Item, tile, step, place, buffer) -> int:  # noqa: PLR0913
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
        def of_tiles(tiles: list[_Tile]) -> None:
            _add_keys(
                ref, settings, [(tile, _keys(ref, settings, of_step, tile, is_masked)) for tile in tiles]
            )

        _for_each_tiles(ref, settings, of_tiles)

    if not settings.is_prompt:
        add(True)
        return 0
    # All queries of a tile see most keys of a prompt.
    low = item.low
    if settings.window is not None:
        low = jnp.maximum(low, first_query + settings.tokens - settings.window)
    is_masked = (position < low) | (position + size > jnp.minimum(item.high, first_query + 1))
    pl.when(is_masked)(partial(add, True))
    pl.when(jnp.logical_not(is_masked))(partial(add, False))
    return 0


def _keys(ref, settings: Settings, step: _Step, tile: _Tile, is_masked: bool) -> "_Keys":
    """The keys of a step for a tile. is_masked: some query of the tile does not see some of them."""
    size = settings.step
    item = step.item
    scale_4S = visible_RS = None
    key_head = lax.div(tile.head, ref["max"].shape[0] // ref["kv_buffer"].shape[1])
    key_1S = step.position + lax.broadcasted_iota(jnp.int32, (1, size), 1)
    if "scale" in ref:
        count = size // settings.chunk
        parts = [ref["scale_buffer"][step.buffer, step.place * count + i, key_head] for i in range(count)]
        is_copied_1S = (key_1S >= item.low) & (key_1S < item.high)
        scale_4S = jnp.where(is_copied_1S, jnp.concatenate(parts, -1), 0)
    if is_masked:
        query_R1 = step.first_query + ref["offset"][tile.rows]
        visible_RS = key_1S <= jnp.minimum(query_R1, item.high - 1)
        if settings.window is not None or settings.ring:
            window = _NO_WINDOW if settings.window is None else settings.window
            visible_RS &= key_1S > jnp.maximum(query_R1 - window, item.low - 1)
    return _Keys(ref["kv_buffer"][step.buffer, key_head, step.slots(size)], scale_4S, visible_RS)


def _clear_unseen(ref, item: _Item, position, buffer, slots) -> None:
    """Zeros in place of keys and values that no query of the tile sees, which may be NaN: the weight 0 would
    not remove that.
    """

    def clear(head) -> None:
        kv_SX = ref["kv_buffer"][buffer, head, slots]
        key_SX = position + lax.broadcasted_iota(jnp.int32, kv_SX.shape, 0)
        is_seen = (key_SX >= item.low) & (key_SX < item.high)
        cleared = jnp.where(is_seen, kv_SX.astype(jnp.float32), 0)
        ref["kv_buffer"][buffer, head, slots] = cleared.astype(kv_SX.dtype)

    _for_each(ref["kv_buffer"].shape[1], clear)


class _Keys(NamedTuple):
    """Keys and values of a step for some rows of queries."""

    kv_SX: jax.Array
    scale_4S: jax.Array | None
    visible_RS: jax.Array | None  # None: all

    def split(self, width: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Keys and values [S, W]; both in one vector where they are narrow."""
        kv_SX = self.kv_SX if self.scale_4S is None else self.kv_SX.astype(dtype)
        return (kv_SX, kv_SX) if width % LANES else (kv_SX[:, :width], kv_SX[:, width:])


def _add_keys(ref, settings: Settings, of_tiles: list[tuple[_Tile, _Keys]]) -> None:
    """One step of the online softmax (Milakov & Gimelshein 2018) for some tiles. Nothing is stored before all
    is read, so that nothing waits for a store.
    """
    scores = [_scores(ref, settings, *of_tile) for of_tile in of_tiles]
    sums = [_added(ref, settings, *of_tile, x_RS) for of_tile, x_RS in zip(of_tiles, scores, strict=True)]
    for (tile, _), of_tile in zip(of_tiles, sums, strict=True):
        for name, x in zip(("max", "sum", "out_sum"), of_tile, strict=True):
            ref[name][tile] = x


def _scores(ref, settings: Settings, tile: _Tile, keys: _Keys) -> jax.Array:  # [R, S]
    q_RW = _queries(ref, settings, tile)
    scores_RS = _dot(q_RW, keys.split(settings.width, q_RW.dtype)[0], (1, 1))
    if keys.scale_4S is None:
        return scores_RS
    sums_RS = _to_lanes(ref["query_sum"][tile], scores_RS.shape[1])
    return scores_RS * keys.scale_4S[0:1] + sums_RS * keys.scale_4S[1:2]


def _added(ref, settings: Settings, tile: _Tile, keys: _Keys, scores_RS) -> tuple[jax.Array, ...]:
    """The tile's `max`, `sum` and `out_sum` with these keys. Scores are in units of log 2. The largest score
    of a row is in all lanes of `max`; the sum of its weights is the sum over the lanes of `sum`.
    """
    if settings.soft_cap is None:
        scores_RS *= settings.scale * LOG2_E
    else:
        cap = settings.soft_cap
        scores_RS = cap * LOG2_E * jnp.tanh(scores_RS * (settings.scale / cap))
    if keys.visible_RS is not None:
        scores_RS = jnp.where(keys.visible_RS, scores_RS, _MASKED)
    max_RL = ref["max"][tile]
    new_max_RL = jnp.maximum(max_RL, scores_RS.max(-1, keepdims=True))
    weight_RS = jnp.exp2(scores_RS - _to_lanes(new_max_RL, scores_RS.shape[1]))
    shrink_RL = jnp.exp2(max_RL - new_max_RL)
    sum_RL = ref["sum"][tile] * shrink_RL + _sum_to_lanes(weight_RS)
    out_RW = ref["out_sum"][tile]
    out_RW *= _to_lanes(shrink_RL, out_RW.shape[1])
    if keys.scale_4S is not None:
        out_RW += (weight_RS * keys.scale_4S[3:4]).sum(-1, keepdims=True)
        weight_RS *= keys.scale_4S[2:3]
    dtype = ref["q"].dtype
    v_SW = keys.split(settings.width, dtype)[1]
    return new_max_RL, sum_RL, out_RW + _dot(weight_RS.astype(dtype), v_SW, (1, 0))


def _to_lanes(x_RL: jax.Array, width: int) -> jax.Array:
    """[R, width] of numbers that are the same in all lanes of a row."""
    if width % LANES:
        return jnp.broadcast_to(x_RL[:, :1], (len(x_RL), width))
    return jnp.concatenate([x_RL] * (width // LANES), -1)


def _sum_to_lanes(x_RS: jax.Array) -> jax.Array:
    """[R, 128], whose lanes have the same sum as the row."""
    S = x_RS.shape[1]
    if S % LANES:
        is_first = lax.broadcasted_iota(jnp.int32, (len(x_RS), LANES), 1) == 0
        return jnp.where(is_first, x_RS.sum(-1, keepdims=True), 0)
    return reduce(jnp.add, [x_RS[:, i : i + LANES] for i in range(0, S, LANES)])


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """a · b in float32. float32 operands are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _store(ref, settings: Settings) -> None:
    def result(at: _Tile) -> jax.Array:  # float32 [R, W]
        sum_R1 = jnp.maximum(ref["sum"][at].sum(-1, keepdims=True), 1e-30)
        return ref["out_sum"][at] / sum_R1

    def store(tiles: list[_Tile]) -> None:
        for head, rows in tiles:
            at = (rows, _lanes(head, settings.width)) if settings.is_prompt else (head, rows)
            ref["out"][0, *at] = result(_Tile(head, rows)).astype(ref["out"].dtype)

    def store_pair(pair) -> None:  # the values of each are in the second half
        first_RL, second_RL = (result(_Tile(2 * pair + i, slice(None))) for i in (0, 1))
        is_first = lax.broadcasted_iota(jnp.int32, first_RL.shape, 1) < LANES // 2
        out_RL = jnp.where(is_first, pltpu.roll(first_RL, LANES // 2, 1), second_RL)
        ref["out"][0, :, _lanes(pair, LANES)] = out_RL.astype(ref["out"].dtype)

    if "wide_q" in ref:
        _for_each(ref["wide_q"].shape[0] // 2, store_pair)
    else:
        _for_each_tiles(ref, settings, store)
