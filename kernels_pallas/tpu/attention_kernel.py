"""The body of the TPU attention kernel: copies of keys and values to on-chip memory, and the softmax."""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..key_layouts import BIAS_STRIDE, LANES
from .rotation import rotate_lanes

LOG2_E = math.log2(math.e)
_MASKED = -1e30  # finite, and far below the first maximum: a query that sees no key gives zeros, not NaN
_LOWEST = -1e29
_NO_WINDOW = 2**30
_UNROLLED = 8  # tiles of few rows that are not a loop
_FEW_ROWS = 32


class Settings(NamedTuple):
    """What is the same for every program."""

    scale: float
    window: int | None
    soft_cap: float | None
    ring: bool
    width: int  # H
    block_rows: int  # of one query each that a block of queries has; 0: it has queries of one row
    tokens: int  # of a tile of queries
    tiles: int
    rows: int  # of queries that the softmax takes at a time
    positions: int  # that the cache of a row holds
    slots: int  # of a row or a page
    table_pages: int  # of a row, 0 without a block table
    chunk: int  # slots of one copy
    step: int  # keys that the softmax takes at a time: a multiple of the chunk
    block: int  # keys in one of the two buffers: a multiple of the step
    pairs: int  # of a head that a bias of keys rotates; 0: there is none


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
        refs: by `names`: start_B, length_B and perhaps table_BP in scalar memory; q [1, tokens, N · H], of
            several rows where each has one query; offset_R1, the token of each of the R queries of a key
            head; perhaps sink_KR1, and near_KCH and angle of a bias of keys; kv and perhaps scale, in HBM;
            out, as q; then scratch: kv_buffer [2, K, block, 2H], scale_buffer [2, chunks, K, …], flat [rows,
            1, N · H], query and out_sum [K, R, W], max, sum, query_sum [K, R, 128], semaphores, and the number
            of blocks so far.
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

    _load_queries(ref, settings, row)
    _reset(ref)
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
    _for_each_tile(ref, settings, lambda *at: _divide(ref, at))
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
        scale = ref["scale"].at[owner] if is_whole else ref["scale"].at[owner, :, :, slots]
        copies.append(copy(scale, to, ref["copied"].at[1, buffer]))
    return copies


def _for_each_head(ref, function) -> None:
    lax.fori_loop(0, ref["query"].shape[0], lambda head, _: function(head) or 0, 0)


def _for_each_tile(ref, settings: Settings, function) -> None:
    """Calls a function of a head and a slice of its rows of queries, for all of them: many are a loop, few
    are not, since the compiler can overlap what is not in a loop.
    """
    heads, rows, _ = ref["query"].shape
    parts = rows // settings.rows
    if heads * parts <= _UNROLLED and settings.rows <= _FEW_ROWS:
        for i in range(heads * parts):
            function(i // parts, pl.ds(i % parts * settings.rows, settings.rows))
    else:

        def one(i: Any, _: Any) -> int:
            first = pl.multiple_of(lax.rem(i, parts) * settings.rows, settings.rows)
            function(lax.div(i, parts), pl.ds(first, settings.rows))
            return 0

        lax.fori_loop(0, heads * parts, one, 0)


def _heads(ref, settings: Settings) -> list[tuple[int, Any]]:
    """The key head and the rows in `query` of each query head."""
    heads = ref["query"].shape[0]
    group = ref["q"].shape[-1] // settings.width // heads
    return [(i // group, pl.ds(i % group * settings.tokens, settings.tokens)) for i in range(heads * group)]


def _load_queries(ref, settings: Settings, row) -> None:
    """Puts the queries of each key head into rows, and zeros beside those that do not fill lanes."""
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
        ref["query"][at] = x


def _store_queries(ref, settings: Settings, row) -> None:
    """The reverse of `_load_queries`, of the results: with a width below 128 the second half, p · v."""
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


def _reset(ref) -> None:
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
            sums = ref["query"][head].sum(-1, keepdims=True)
            ref["query_sum"][head] = jnp.broadcast_to(sums, shape)

    _for_each_head(ref, one_head)


def _one_step(ref, settings: Settings, item: _Item, tile, step, place, buffer) -> int:  # noqa: PLR0913
    """Adds the keys of one step to the softmax of each head. place: the step's number in the buffer."""
    size = settings.step
    position = step * size
    slots = pl.ds(pl.multiple_of(place * size, size), size)

    if "scale" not in ref:  # levels are never NaN

        @pl.when((position < item.low) | (position + size > item.high))
        def _clear():
            _clear_unseen(ref, item, position, buffer, slots)

    key_1S = position + lax.broadcasted_iota(jnp.int32, (1, size), 1)
    first_query = ref["start"][item.row] + tile * settings.tokens

    def one_tile(head, rows) -> None:
        scale_4S = None
        if "scale" in ref:
            count = size // settings.chunk
            parts = [ref["scale_buffer"][buffer, place * count + i, head] for i in range(count)]
            is_copied_1S = (key_1S >= item.low) & (key_1S < item.high)
            scale_4S = [jnp.where(is_copied_1S, x, 0) for x in _scale_rows(parts, settings.chunk)]
        query_R1 = first_query + ref["offset"][rows]
        visible_RS = key_1S <= jnp.minimum(query_R1, item.high - 1)
        if settings.window is not None or settings.ring:
            window = _NO_WINDOW if settings.window is None else settings.window
            visible_RS &= key_1S > jnp.maximum(query_R1 - window, item.low - 1)
        kv_SX = ref["kv_buffer"][buffer, head, slots]
        _add_keys(ref, settings, (head, rows), position, kv_SX, scale_4S, visible_RS)

    _for_each_tile(ref, settings, one_tile)
    return 0


def _scale_rows(parts: list[jax.Array], chunk: int) -> list[jax.Array]:
    """Step and low of keys and of values, [1, S] each, of chunks in the form of `SideBySide.scale`."""
    rows, lanes = parts[0].shape
    columns = [jnp.concatenate([x[:, i : i + chunk] for x in parts], -1) for i in range(0, lanes, chunk)]
    return [x[i : i + 1] for i in range(rows) for x in columns]


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

    _for_each_head(ref, clear)


def _add_keys(ref, settings: Settings, at, position, kv_SX, scale_4S, visible_RS) -> None:  # noqa: PLR0913
    """One step of the online softmax (Milakov & Gimelshein 2018) for some rows of a head.

    Scores are in units of log 2. The largest score of a row is in all lanes of `max`; the sum of its weights
    is the sum over the lanes of `sum`.
    """
    H = settings.width
    q_RW = ref["query"][at].astype(ref["q"].dtype)
    if scale_4S is not None:
        kv_SX = kv_SX.astype(q_RW.dtype)
    is_wide = H % LANES == 0
    k_SW = kv_SX[:, :H] if is_wide else kv_SX
    v_SW = kv_SX[:, H:] if is_wide else kv_SX
    scores_RS = _dot(q_RW, k_SW, (1, 1))
    if scale_4S is not None:
        sums_RS = _to_lanes(ref["query_sum"][at], scores_RS.shape[1])
        scores_RS = scores_RS * scale_4S[0] + sums_RS * scale_4S[1]
    if settings.pairs:
        scores_RS += _bias_scores(ref, settings, at, position, scores_RS.shape[1])
    if settings.soft_cap is None:
        scores_RS *= settings.scale * LOG2_E
    else:
        cap = settings.soft_cap
        scores_RS = cap * LOG2_E * jnp.tanh(scores_RS * (settings.scale / cap))
    scores_RS = jnp.where(visible_RS, scores_RS, _MASKED)
    max_RL = ref["max"][at]
    new_max_RL = jnp.maximum(max_RL, scores_RS.max(-1, keepdims=True))
    weight_RS = jnp.exp2(scores_RS - _to_lanes(new_max_RL, scores_RS.shape[1]))
    shrink_RL = jnp.exp2(max_RL - new_max_RL)
    ref["max"][at] = new_max_RL
    ref["sum"][at] = ref["sum"][at] * shrink_RL + _sum_to_lanes(weight_RS)
    out_RW = ref["out_sum"][at]
    out_RW *= _to_lanes(shrink_RL, out_RW.shape[1])
    if scale_4S is not None:
        out_RW += (weight_RS * scale_4S[3]).sum(-1, keepdims=True)
        weight_RS *= scale_4S[2]
    ref["out_sum"][at] = out_RW + _dot(weight_RS.astype(v_SW.dtype), v_SW, (1, 0))


def _bias_scores(ref, settings: Settings, at, position, count: int) -> jax.Array:  # noqa: PLR0913
    """The scores of the bias of keys. Queries are rotated back, not keys forth."""
    query_RW = ref["query"][at]
    near_CH = ref["near"][at[0]]
    last = ref["angle"].shape[0] - 1  # a ring may go on past the capacity
    scores = []
    for i in range(pl.cdiv(count, BIAS_STRIDE)):
        far = jnp.minimum(lax.div(position, BIAS_STRIDE) + i, last)
        factors = jnp.split(ref["angle"][pl.ds(far, 1)], 3, -1)
        q_RW = rotate_lanes(query_RW, (factors[0], factors[1], factors[2]), settings.pairs)
        q_RH = q_RW[:, : settings.width].astype(near_CH.dtype)
        scores.append(_dot(q_RH, near_CH[: count - i * BIAS_STRIDE], (1, 1)))
    return jnp.concatenate(scores, -1)


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


def _divide(ref, at) -> None:
    sum_R1 = jnp.maximum(ref["sum"][at].sum(-1, keepdims=True), 1e-30)
    ref["out_sum"][at] = ref["out_sum"][at] / sum_R1
