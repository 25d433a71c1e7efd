"""The online softmax of a TPU attention kernel, and the settings of the whole kernel."""

import math
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..key_layouts import BIAS_STRIDE, LANES
from .parts import dot, rotate_lanes

LOG2_E = math.log2(math.e)
_MASKED = -1e30  # finite, and far below the first maximum: a query that sees no key gives zeros, not NaN
_LOWEST = -1e29


class Settings(NamedTuple):
    """The settings that are the same for every program."""

    scale: float
    window: int | None
    soft_cap: float | None
    ring: bool
    is_prompt: bool  # many queries of a row: they see most keys, all of them
    rank: int  # of `Latents`, whose first numbers are the values; 0: keys and values are side by side
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
    first_key: int = 0  # no query sees a key before it, except its own


class Tile(NamedTuple):
    """Some of the rows of queries of a key head."""

    head: Any
    rows: Any


class Keys(NamedTuple):
    """Keys and values of a step, as a tile sees them."""

    position: Any  # of the first one
    kv_SX: jax.Array
    scale_4S: list[jax.Array] | None
    visible_RS: jax.Array | None  # None: all

    def split(self, settings: Settings, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values [S, W]. Both are in one vector if they are narrow."""
        width = settings.width
        kv_SX = self.kv_SX if self.scale_4S is None else self.kv_SX.astype(dtype)
        if settings.rank:
            return kv_SX, kv_SX[:, : settings.rank]
        return (kv_SX, kv_SX) if width % LANES else (kv_SX[:, :width], kv_SX[:, width:])


def for_each_head(ref, function) -> None:
    lax.fori_loop(0, ref["query"].shape[0], lambda head, _: function(head) or 0, 0)


def reset(ref) -> None:
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
            sums = ref["query"][head].astype(jnp.float32).sum(-1, keepdims=True)
            ref["query_sum"][head] = jnp.broadcast_to(sums, shape)

    for_each_head(ref, one_head)


def add_keys(ref, settings: Settings, tiles: list[Tile], keys: list[Keys]) -> None:
    """Takes one step of the online softmax (Milakov & Gimelshein 2018) for some tiles. Nothing is stored
    before all is read, so that no tile waits for the stores of another.
    """
    scores = [_scores(ref, settings, *of_tile) for of_tile in zip(tiles, keys, strict=True)]
    sums = [_added(ref, settings, *of_tile) for of_tile in zip(tiles, keys, scores, strict=True)]
    for tile, of_tile in zip(tiles, sums, strict=True):
        for name, x in zip(("max", "sum", "out_sum"), of_tile, strict=True):
            ref[name][tile] = x


def _scores(ref, settings: Settings, tile: Tile, keys: Keys) -> jax.Array:  # [R, S]
    q_RW = ref["query"][tile].astype(ref["q"].dtype)
    scores_RS = dot(q_RW, keys.split(settings, q_RW.dtype)[0], 1)
    if keys.scale_4S is not None:
        sums_RS = _to_lanes(ref["query_sum"][tile], scores_RS.shape[1])
        scores_RS = scores_RS * keys.scale_4S[0] + sums_RS * keys.scale_4S[1]
    if settings.pairs:
        scores_RS += _bias_scores(ref, settings, tile, keys.position, scores_RS.shape[1])
    return scores_RS


def _added(ref, settings: Settings, tile: Tile, keys: Keys, scores_RS) -> tuple[jax.Array, ...]:
    """Returns the tile's `max`, `sum` and `out_sum` with these keys. Scores are in units of log 2. The
    largest score of a row is in all lanes of `max`. The sum of its weights is the sum over the lanes of
    `sum`.
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
        out_RW += (weight_RS * keys.scale_4S[3]).sum(-1, keepdims=True)
        weight_RS *= keys.scale_4S[2]
    dtype = ref["q"].dtype
    v_SW = keys.split(settings, dtype)[1]
    return new_max_RL, sum_RL, out_RW + dot(weight_RS.astype(dtype), v_SW, 0)


def _bias_scores(ref, settings: Settings, tile: Tile, position, count: int) -> jax.Array:
    """Returns the scores of the bias of keys. Queries are rotated back, not keys forth."""
    query_RW = ref["query"][tile].astype(jnp.float32)
    near_CH = ref["near"][tile.head]
    last = ref["angle"].shape[0] - 1  # a ring may go on past the capacity
    scores = []
    for i in range(pl.cdiv(count, BIAS_STRIDE)):
        far = jnp.minimum(lax.div(position, BIAS_STRIDE) + i, last)
        factors = jnp.split(ref["angle"][pl.ds(far, 1)], 3, -1)
        q_RW = rotate_lanes(query_RW, (factors[0], factors[1], factors[2]), settings.pairs)
        q_RH = q_RW[:, : settings.width].astype(near_CH.dtype)
        scores.append(dot(q_RH, near_CH[: count - i * BIAS_STRIDE], 1))
    return jnp.concatenate(scores, -1)


def _to_lanes(x_RL: jax.Array, width: int) -> jax.Array:
    """Returns [R, width] of numbers that are the same in all lanes of a row."""
    if width % LANES:
        return jnp.broadcast_to(x_RL[:, :1], (len(x_RL), width))
    return jnp.concatenate([x_RL] * (width // LANES), -1)


def _sum_to_lanes(x_RS: jax.Array) -> jax.Array:
    """Returns [R, 128], whose lanes have the same sum as the row."""
    S = x_RS.shape[1]
    if S % LANES:
        is_first = lax.broadcasted_iota(jnp.int32, (len(x_RS), LANES), 1) == 0
        return jnp.where(is_first, x_RS.sum(-1, keepdims=True), 0)
    return reduce(jnp.add, [x_RS[:, i : i + LANES] for i in range(0, S, LANES)])


def divide(ref, tiles: list[Tile]) -> None:
    """Turns weighted sums of values into means."""
    for tile in tiles:
        sum_R1 = jnp.maximum(ref["sum"][tile].sum(-1, keepdims=True), 1e-30)
        ref["out_sum"][tile] = ref["out_sum"][tile] / sum_R1


def join_scales(parts: list[jax.Array], chunk: int) -> list[jax.Array]:
    """Returns step and low of keys and of values, [1, S] each, of chunks in the form of
    `SideBySide.scale`.
    """
    rows, lanes = parts[0].shape
    columns = [jnp.concatenate([x[:, i : i + chunk] for x in parts], -1) for i in range(0, lanes, chunk)]
    return [x[i : i + 1] for i in range(rows) for x in columns]
