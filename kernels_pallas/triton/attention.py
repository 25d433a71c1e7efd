"""Flash attention for Triton: prefill, and decode split over the keys, around one online softmax."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from .parts import LOWEST, dot, exp2, result_type, tile_size

LOG2_E = math.log2(math.e)
STAGES = 3  # of the loop over keys: loads run ahead of the products by two blocks
PROGRAMS = 264  # two for each of the 132 multiprocessors of an H200


class _Settings(NamedTuple):
    """Settings of attention that are the same for every program."""

    scale: float
    window: int | None
    soft_cap: float | None
    width: int  # of a head
    keys: int  # of a block
    interpret: bool


def prefill_attention(  # noqa: PLR0913
    q_BTNH, k_BKSH, v_BKSH, start_B, length_B, *, scale, window=None, soft_cap=None, interpret=False
) -> jax.Array:
    """Causal attention of T new tokens to the keys in the cache (FlashAttention-2, Dao 2023).

    Args:
        q_BTNH: queries. N is a multiple of K: heads share keys in groups of N/K. H is at most 256.
        k_BKSH: keys in order of position, in the dtype of q.
        v_BKSH: values, in the dtype of q.
        start_B: position of the first query.
        length_B: number of valid keys per row. Keys and values past it may hold anything, NaN included.
        scale: factor on the scores.
        window: None, or how many keys a query sees at most, itself included.
        soft_cap: None, or c of c · tanh(score / c).
        interpret: run on any device, slowly, by Pallas's interpreter.

    Returns:
        [B, T, N, H] in the dtype of q; zeros for a query that sees no key.
    """
    B, T, N, H = q_BTNH.shape
    K, S = k_BKSH.shape[1:3]
    G = N // K
    rows, keys, warps = _tiles(q_BTNH.dtype, H, T * G)
    settings = _Settings(scale, window, soft_cap, H, keys, interpret)
    per_row = pl.BlockSpec((1,), lambda k, b, i: (b,))
    queries = pl.BlockSpec((None, T, None, G, tile_size(H)), lambda k, b, i: (b, 0, k, 0, 0))
    cache = pl.BlockSpec((None, None, max(S, keys), tile_size(H)), lambda k, b, i: (b, k, 0, 0))
    out = pl.pallas_call(
        partial(_prefill_kernel, T=T, S=S, rows=rows, settings=settings),
        grid=(K, B, pl.cdiv(T * G, rows)),  # the last axis varies slowest
        in_specs=[per_row, per_row, queries, cache, cache],
        out_specs=queries,
        out_shape=result_type((B, T, K, G, H), q_BTNH.dtype, q_BTNH, k_BKSH, v_BKSH, start_B, length_B),
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=STAGES),
        interpret=interpret,
        name="prefill_attention",
    )(start_B, length_B, q_BTNH.reshape(B, T, K, G, H), k_BKSH, v_BKSH)
    return out.reshape(B, T, N, H)


def _prefill_kernel(*refs, T: int, S: int, rows: int, settings: _Settings):
    start_ref, length_ref, q_ref, k_ref, v_ref, out_ref = refs
    (G, width) = q_ref.shape[1:]
    window = settings.window
    keys = settings.keys
    # The last queries see the most keys, so they start first: else one program would run long after the
    # others.
    block = pl.num_programs(2) - 1 - pl.program_id(2)
    # A row of the tile is one head of one query: the G heads that share these keys fill the tile even if T is
    # small.
    row_R = block * rows + jnp.arange(rows)
    t_R = lax.div(row_R, G)
    g_R = lax.rem(row_R, G)
    at = tuple(jnp.broadcast_to(x, (rows, width)) for x in (t_R[:, None], g_R[:, None], jnp.arange(width)))
    real_RH = (at[0] < T) & (at[2] < settings.width)

    start = start_ref[0]
    length = jnp.minimum(length_ref[0], S)
    position_R = start + t_R
    end_R = jnp.minimum(position_R + 1, length)
    last = jnp.minimum(lax.div(block * rows + rows - 1, G), T - 1)
    stop = pl.cdiv(jnp.minimum(start + last + 1, length), keys)
    first_R = None if window is None else position_R - window + 1
    begin = (
        0 if window is None else lax.div(jnp.maximum(start + lax.div(block * rows, G) - window + 1, 0), keys)
    )

    q_RH = pltriton.load(q_ref.at[at], mask=real_RH, other=0)
    acc_RH, _, sum_R = _attend(q_RH, (k_ref, v_ref), length, (first_R, end_R), (begin, stop), settings)
    out_RH = acc_RH * (1 / jnp.where(sum_R == 0, 1, sum_R))[:, None]
    pltriton.store(out_ref.at[at], out_RH.astype(out_ref.dtype), mask=real_RH)


def _attend(q_RH, cache_refs, length, visible, blocks, settings: _Settings):
    """Row r of q attends to the keys first_R[r] … end_R[r] - 1 (`visible`), in the blocks begin … stop - 1
    (`blocks`). Returns Σ p·v, the largest score, and Σ p.

    Scores are in base 2, since the GPU has an instruction for 2**x: softmax(x) is 2**(x·log2 e) normalised.
    The softmax is online (Milakov & Gimelshein 2018): a new maximum rescales the earlier sums.
    """
    (R, width) = q_RH.shape
    (first_R, end_R) = visible
    _, _, soft_cap, H, keys, interpret = settings
    h_H = jnp.arange(width)

    def step(block, state):
        acc_RH, max_R, sum_R = state
        key_C = block * keys + jnp.arange(keys)
        valid_CH = (key_C < length)[:, None] & (h_H < H)  # 0 * NaN is NaN
        k_CH, v_CH = (
            pltriton.load(ref.at[pl.ds(block * keys, keys)], mask=valid_CH, other=0) for ref in cache_refs
        )

        s_RC = dot(q_RH, k_CH.T)
        s_RC = (
            s_RC * (settings.scale * LOG2_E)
            if soft_cap is None
            else jnp.tanh(s_RC * (settings.scale / soft_cap)) * (soft_cap * LOG2_E)
        )
        visible_RC = key_C < end_R[:, None]
        if first_R is not None:
            visible_RC &= key_C >= first_R[:, None]
        s_RC = jnp.where(visible_RC, s_RC, -jnp.inf)

        new_R = jnp.maximum(max_R, s_RC.max(1))
        p_RC = exp2(s_RC - new_R[:, None], interpret)
        shrink_R = exp2(max_R - new_R, interpret)
        acc_RH = acc_RH * shrink_R[:, None] + dot(p_RC.astype(v_CH.dtype), v_CH)
        return acc_RH, new_R, sum_R * shrink_R + p_RC.sum(1)

    initial = jnp.zeros((R, width), jnp.float32), jnp.full(R, LOWEST, jnp.float32), jnp.zeros(R, jnp.float32)
    begin, stop = blocks
    return lax.fori_loop(begin, stop, step, initial)


def decode_attention(  # noqa: PLR0913
    q_BNH, k_BKSH, v_BKSH, length_B, *, scale, window=None, soft_cap=None, splits=None, interpret=False
) -> jax.Array:
    """Attention of one new token per row, the last of its row, with the keys split over programs
    (Flash-Decoding, Dao et al. 2023).

    The blocks of keys that a row needs are divided evenly among the splits, so that cost follows the length
    and every split has work.

    Args:
        q_BNH: queries, at the positions length_B - 1. N is a multiple of K: heads share keys in groups of
            N/K. H is at most 256.
        k_BKSH: keys in order of position, in the dtype of q.
        v_BKSH: values, in the dtype of q.
        length_B: number of valid keys per row. Keys and values past it may hold anything, NaN included.
        scale: factor on the scores.
        window: None, or how many keys a query sees at most, itself included.
        soft_cap: None, or c of c · tanh(score / c).
        splits: programs per row and KV head; None: enough for the whole GPU.
        interpret: run on any device, slowly, by Pallas's interpreter.

    Returns:
        [B, N, H] in the dtype of q; zeros for a row of length 0.
    """
    B, N, H = q_BNH.shape
    K, S = k_BKSH.shape[1:3]
    G = N // K
    rows, keys, warps = _tiles(q_BNH.dtype, H, G)
    settings = _Settings(scale, window, soft_cap, H, keys, interpret)
    splits = splits or max(1, min(pl.cdiv(PROGRAMS, B * K), pl.cdiv(S, keys)))
    queries = pl.BlockSpec((None, None, rows, tile_size(H)), lambda i, r, k, b: (b, k, r, 0))
    cache = pl.BlockSpec((None, None, max(S, keys), tile_size(H)), lambda i, r, k, b: (b, k, 0, 0))
    part = pl.BlockSpec((None, None, None, rows), lambda i, r, k, b: (i, b, k, r))
    part_acc = pl.BlockSpec((None, None, None, rows, tile_size(H)), lambda i, r, k, b: (i, b, k, r, 0))
    inputs = length_B, q_BNH.reshape(B, K, G, H), k_BKSH, v_BKSH
    acc_PBKGH, max_PBKG, sum_PBKG = pl.pallas_call(
        partial(_decode_kernel, S=S, G=G, settings=settings),
        grid=(splits, pl.cdiv(G, rows), K, B),
        in_specs=[pl.BlockSpec((1,), lambda i, r, k, b: (b,)), queries, cache, cache],
        out_specs=[part_acc, part, part],
        out_shape=[result_type((splits, B, K, G, *axes), jnp.float32, *inputs) for axes in ((H,), (), ())],
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=STAGES),
        interpret=interpret,
        name="decode_attention",
    )(*inputs)
    weight_PBKG = jnp.exp2(max_PBKG - max_PBKG.max(0))
    sum_BKG = (weight_PBKG * sum_PBKG).sum(0)
    out_BKGH = (weight_PBKG[..., None] * acc_PBKGH).sum(0) / jnp.where(sum_BKG == 0, 1, sum_BKG)[..., None]
    return out_BKGH.reshape(B, N, H).astype(q_BNH.dtype)


def _decode_kernel(*refs, S: int, G: int, settings: _Settings):
    length_ref, q_ref, k_ref, v_ref, acc_ref, max_ref, sum_ref = refs
    (rows, width) = q_ref.shape
    window = settings.window
    real_R = pl.program_id(1) * rows + jnp.arange(rows) < G
    real_RH = real_R[:, None] & (jnp.arange(width) < settings.width)

    length = jnp.minimum(length_ref[0], S)
    first = 0 if window is None else jnp.maximum(length_ref[0] - window, 0)
    begin = lax.div(first, settings.keys)
    blocks = jnp.maximum(pl.cdiv(length, settings.keys) - begin, 0)
    split = pl.program_id(0)
    splits = pl.num_programs(0)
    begin, stop = (begin + lax.div(blocks * i, splits) for i in (split, split + 1))

    q_RH = pltriton.load(q_ref, mask=real_RH, other=0)
    first_R = None if window is None else jnp.full(rows, first)
    end_R = jnp.full(rows, length)
    acc_RH, max_R, sum_R = _attend(q_RH, (k_ref, v_ref), length, (first_R, end_R), (begin, stop), settings)
    pltriton.store(acc_ref, acc_RH, mask=real_RH)
    pltriton.store(max_ref, max_R, mask=real_R)
    pltriton.store(sum_ref, sum_R, mask=real_R)


def _tiles(dtype, H: int, rows: int) -> tuple[int, int, int]:
    """Of a program: rows of a tile of queries, rows of a tile of keys, warps. They compile for sm_80 and
    sm_89 with 99 KB of shared memory, without register spills.
    """
    width = tile_size(H)
    if jnp.dtype(dtype).itemsize == 4:  # not for tensor cores: products are unrolled into registers
        full, keys, warps = (32, 32, 8) if width <= 64 else (32, 16, 4)
    else:
        full, keys, warps = (128, 64, 8) if width <= 128 else (64, 16, 8)
    rows = min(tile_size(rows), full)
    return rows, keys, warps if rows == full else 4
