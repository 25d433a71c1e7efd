"""The program of flash attention: one tile of queries, one key head, and a share of the blocks of keys.

The keys of a block are one slice of slots, because the size of a block divides a page and a ring.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..key_layouts import BIAS_STRIDE
from .parts import LOG2_E, LOWEST, dot, exp2, outer, tile_size

Refs = dict[str, Any]


class Settings(NamedTuple):
    """Settings of attention that are the same for every program."""

    scale: float
    window: int | None
    soft_cap: float | None
    ring: bool
    rank: int  # of `Latents`, whose first numbers are the values; 0: values are other numbers
    T: int  # queries of a row
    slots: int  # of a row without a block table; of a page with one
    positions: int  # of a row that its slots hold; a ring has no limit
    parts: int  # of a head: 2 where a byte has two numbers
    columns: int  # of a part
    rows: int  # of a tile of queries
    keys: int  # of a block
    warps: int
    stages: int  # of the loop over blocks
    splits: int  # programs that share the blocks of a row
    interpret: bool
    first_key: int = 0  # no query sees a key before it, except its own

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return tile_size(self.columns)

    @property
    def part_columns(self) -> list[tuple[int, int]]:
        """The first column of each part of a head, and its number of columns. Latents have two parts: the
        value, and the rest of the key.
        """
        if self.rank:
            return [(0, self.rank), (self.rank, self.columns - self.rank)]
        return [(part * self.columns, self.columns) for part in range(self.parts)]

    @property
    def block_columns(self) -> int:
        """Columns of a block of queries: the tiles of all parts are within it."""
        return max(first + tile_size(count) for first, count in self.part_columns)


class _Queries(NamedTuple):
    """A tile of queries. A row of it is one head of one query: the G heads that share these keys fill the
    tile even if T is small.
    """

    parts: list[jax.Array]  # each [R, W]
    across: list[jax.Array]  # the other number of each rotated pair, negative in the pair's second half
    sum_R: jax.Array
    first_R: jax.Array | None  # the first position that a query sees; None: 0
    end_R: jax.Array


def attention_kernel(*refs, names: tuple[str, ...], settings: Settings):
    """Writes the outputs of a tile. If the keys are split, it writes a partial result and the base-2
    logarithm of its sum of weights. This is `LOWEST` for a share without keys, whose values are not written.
    refs: the inputs, by their names, then the outputs.
    """
    ref = dict(zip(names, refs, strict=False))
    out_refs = refs[len(names) :]
    rows = settings.rows
    G = ref["q"].shape[1]
    # The last queries see the most keys, so they start first.
    first_row = (pl.num_programs(3) - 1 - pl.program_id(3)) * rows
    t_R, g_R = (op(first_row + jnp.arange(rows), G) for op in (lax.div, lax.rem))
    real_R = t_R < settings.T
    columns = [
        (first + jnp.arange(tile_size(W)), jnp.arange(tile_size(W)) < W) for first, W in settings.part_columns
    ]

    def at(column_W: jax.Array) -> tuple[jax.Array, ...]:  # these columns of the queries
        shape = rows, len(column_W)
        return tuple(jnp.broadcast_to(x, shape) for x in (t_R[:, None], g_R[:, None], column_W))

    def load_q(column_W: jax.Array, mask_W: jax.Array) -> jax.Array:
        return pltriton.load(ref["q"].at[at(column_W)], mask=real_R[:, None] & mask_W, other=0)

    position_R = ref["start"][0] + t_R
    parts = [load_q(*of_part) for of_part in columns]
    queries = _Queries(
        parts,
        [_across(load_q, *of_part, ref["cos"].shape[1]) for of_part in columns if "near" in ref],
        sum((part.astype(jnp.float32).sum(1) for part in parts), jnp.zeros(rows, jnp.float32)),
        _first_key(position_R, settings),
        jnp.minimum(position_R + 1, _length(ref, settings)),
    )
    begin, stop = _share(ref, first_row, G, settings)
    sums, max_R, sum_R = _attend(queries, ref, begin, stop, settings)

    if "sink" in ref:
        sink_R = pltriton.load(ref["sink"].at[g_R], mask=real_R, other=0) * LOG2_E
        new_R = jnp.maximum(max_R, sink_R)
        shrink_R = exp2(max_R - new_R, settings.interpret)
        sum_R = sum_R * shrink_R + exp2(sink_R - new_R, settings.interpret)
        sums = [sums_RW * shrink_R[:, None] for sums_RW in sums]
    divisor_R = jnp.where(sum_R == 0, 1, sum_R)
    for (column_W, real_W), sums_RW in zip(columns, sums, strict=False):  # of latents the values alone
        out_RW = sums_RW * (1 / divisor_R)[:, None]
        real_RW = real_R[:, None] & real_W
        if settings.splits == 1:
            pltriton.store(out_refs[0].at[at(column_W)], out_RW.astype(out_refs[0].dtype), mask=real_RW)
        else:
            tile = outer(jnp.arange(rows), column_W)
            pltriton.store(out_refs[0].at[tile], out_RW, mask=real_RW & (stop > begin))
    if settings.splits > 1:
        lse_R = jnp.where(sum_R == 0, LOWEST / 2, max_R + jnp.log2(divisor_R))
        pltriton.store(out_refs[1], jnp.where(stop > begin, lse_R, LOWEST), mask=real_R)


def _first_key(position_R: jax.Array, settings: Settings) -> jax.Array | None:
    """Returns the first key that the queries at these positions see. None: all see the first key."""
    window = settings.window
    first_R = None if window is None else position_R - window + 1
    if not settings.first_key:
        return first_R
    least_R = jnp.minimum(position_R, settings.first_key)
    return least_R if first_R is None else jnp.maximum(first_R, least_R)


def _across(load_q, column_W: jax.Array, real_W: jax.Array, pairs: int) -> jax.Array:
    """Returns float32: for each column of a rotated pair the other one, negative for the pair's second
    half.
    """
    first_W = column_W < pairs
    other_W = jnp.where(first_W, column_W + pairs, column_W - pairs)
    across_RW = load_q(other_W, real_W & (column_W < 2 * pairs))
    return across_RW.astype(jnp.float32) * jnp.where(first_W, 1.0, -1.0)


def _length(ref: Refs, settings: Settings):
    """Returns valid keys of the row: tokens beyond its slots were dropped."""
    return jnp.minimum(ref["length"][0], settings.positions)


def _share(ref: Refs, first_row, G: int, settings: Settings):
    """Returns the blocks that any query of the tile sees, or this program's share of them."""
    keys = settings.keys
    splits = settings.splits
    start = ref["start"][0]
    last_t = jnp.minimum(lax.div(first_row + settings.rows - 1, G), settings.T - 1)
    end = jnp.minimum(start + last_t + 1, _length(ref, settings))
    stop = pl.cdiv(jnp.maximum(end, 0), keys)
    begin: Any = 0
    if settings.window is not None:
        begin = lax.div(jnp.maximum(start + lax.div(first_row, G) - settings.window + 1, 0), keys)
    if splits == 1:
        return begin, stop
    blocks = jnp.maximum(stop - begin, 0)
    return tuple(begin + lax.div(blocks * (pl.program_id(0) + i), splits) for i in range(2))


def _attend(queries: _Queries, ref: Refs, begin, stop, settings: Settings):
    """Computes attention of each query to the keys that it sees in the blocks begin … stop - 1. Returns Σ p·v
    for each part of a head, the largest score, and Σ p.

    Scores are in base 2, since the GPU has an instruction for 2**x: softmax(x) is 2**(x·log2 e) normalised.
    The softmax is online (Milakov & Gimelshein 2018): a new maximum rescales the earlier sums.
    """
    keys = settings.keys
    interpret = settings.interpret
    row = pl.program_id(2)
    length = _length(ref, settings)
    (dtype,) = {part.dtype for part in queries.parts}

    def step(block, state):
        sums, max_R, sum_R = state
        at = _slots_of_block(ref, row, block, settings)
        key_C = block * keys + jnp.arange(keys)
        k, k_scale = _load_block(ref, "k", at, key_C < length, dtype, settings)
        v = k[:1]
        v_scale = None
        if "v" in ref:
            v, v_scale = _load_block(ref, "v", at, key_C < length, dtype, settings)
        s_RC = sum(dot(q_RW, k_CW.T) for q_RW, k_CW in zip(queries.parts, k, strict=True))
        if k_scale is not None:
            s_RC = s_RC * k_scale[0] + queries.sum_R[:, None] * k_scale[1]
        if queries.across:
            s_RC += _bias_scores(queries, ref, block * keys, settings)
        s_RC = jnp.where(_visible(queries, key_C), _base2(s_RC, settings), -jnp.inf)

        new_R = jnp.maximum(max_R, s_RC.max(1))
        p_RC = exp2(s_RC - new_R[:, None], interpret)
        shrink_R = exp2(max_R - new_R, interpret)
        sum_R = sum_R * shrink_R + p_RC.sum(1)
        sums = [sums_RW * shrink_R[:, None] for sums_RW in sums]
        if v_scale is not None:
            low_R = (p_RC * v_scale[1]).sum(1)
            sums = [sums_RW + low_R[:, None] for sums_RW in sums]
            p_RC = p_RC * v_scale[0]
        sums = [sums_RW + dot(p_RC.astype(dtype), v_CW) for sums_RW, v_CW in zip(sums, v, strict=True)]
        return sums, new_R, sum_R

    zeros_R = jnp.zeros(settings.rows, jnp.float32)
    of_values = queries.parts[: 1 if settings.rank else None]
    zeros = [jnp.zeros(part.shape, jnp.float32) for part in of_values]
    return lax.fori_loop(begin, stop, step, (zeros, zeros_R + LOWEST, zeros_R))


def _slots_of_block(ref: Refs, row, block, settings: Settings) -> tuple[Any, Any]:
    """Returns the row of the cache, or the page, and the slots in it."""
    first = block * settings.keys
    in_order = "table" not in ref and not settings.ring
    at = pl.ds(first if in_order else lax.rem(first, settings.slots), settings.keys)
    return (ref["table"][lax.div(first, settings.slots)] if "table" in ref else row), at


def _load_block(ref: Refs, name: str, at, valid_C, dtype, settings: Settings):
    """Returns keys or values of one block, each part [C, W], and if they are quantized their step and low,
    each [C]. Invalid ones are zeros: 0 * NaN is NaN.
    """
    if settings.rank:
        return [_load_columns(ref[name], at, valid_C, *of_part) for of_part in settings.part_columns], None
    loaded = _load_columns(ref[name], at, valid_C, 0, settings.columns)
    if f"{name}_scale" not in ref:
        return [loaded], None
    level = loaded.astype(jnp.int32)
    levels = [level] if settings.parts == 1 else [level & 15, level >> 4]
    mask = jnp.broadcast_to(valid_C[:, None], (settings.keys, 2))
    scale_C2 = pltriton.load(ref[f"{name}_scale"].at[at], mask=mask, other=0).astype(jnp.float32)
    scale = [jnp.where(jnp.arange(2) == i, scale_C2, 0).sum(1) for i in range(2)]
    return [part.astype(jnp.float32).astype(dtype) for part in levels], scale


def _load_columns(ref, at, valid_C, first: int, count: int) -> jax.Array:
    """Returns some columns of a block of keys or values, with zeros in their place where they are invalid."""
    width = tile_size(count)
    mask = valid_C[:, None] & (jnp.arange(width) < count)
    return pltriton.load(ref.at[(*at, pl.ds(first, width))], mask=mask, other=0)


def _bias_scores(queries: _Queries, ref: Refs, first_key, settings: Settings) -> jax.Array:
    """Returns the scores of the bias of the keys of a block. Queries are rotated back, not keys forth."""
    keys = settings.keys
    width = settings.width
    (multiples, pairs) = ref["cos"].shape
    far = jnp.minimum(lax.div(first_key, BIAS_STRIDE), multiples - 1)  # a ring may go on past the capacity
    near = lax.rem(first_key, BIAS_STRIDE)
    real_W = jnp.arange(width) < settings.columns
    s_RC = jnp.zeros((settings.rows, keys), jnp.float32)
    for part, (q_RW, across_RW) in enumerate(zip(queries.parts, queries.across, strict=True)):
        column_W = part * settings.columns + jnp.arange(width)
        rotated_W = real_W & (column_W < 2 * pairs)
        angle = (jnp.full(width, far), lax.rem(column_W, pairs))
        cos_W = pltriton.load(ref["cos"].at[angle], mask=rotated_W, other=1)
        sin_W = pltriton.load(ref["sin"].at[angle], mask=rotated_W, other=0)
        rotated_RW = q_RW.astype(jnp.float32) * cos_W + across_RW * sin_W
        bias_CW = pltriton.load(
            ref["near"].at[pl.ds(near, keys), pl.ds(part * settings.columns, width)],
            mask=jnp.broadcast_to(real_W, (keys, width)),
            other=0,
        )
        s_RC += dot(rotated_RW.astype(q_RW.dtype), bias_CW.T)
    return s_RC


def _base2(s_RC: jax.Array, settings: Settings) -> jax.Array:
    """Returns scaled and capped scores times log2 e."""
    scale = settings.scale
    cap = settings.soft_cap
    return s_RC * (scale * LOG2_E) if cap is None else jnp.tanh(s_RC * (scale / cap)) * (cap * LOG2_E)


def _visible(queries: _Queries, key_C: jax.Array) -> jax.Array:
    visible_RC = key_C < queries.end_R[:, None]
    return visible_RC if queries.first_R is None else visible_RC & (key_C >= queries.first_R[:, None])
