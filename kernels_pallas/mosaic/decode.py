"""Decode attention on Hopper: one or a few queries per row, with the keys split over the GPU. TMA loads run
ahead of the tensor cores.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..compat import store_scattered
from . import parts


def decode_attention(  # noqa: PLR0913
    q_BTNH, k_PKSH, v_PKSH, start_B, length_B, *, scale, window=None, soft_cap=None, table_BP=None,
    ring=False, sink_N=None, first_key=0, splits=None, block=64, stages=None, interpret=None,
) -> jax.Array:  # fmt: skip
    """Computes attention of a few queries per row, as in Flash-Decoding (Dao et al. 2023), in the dtype of q.

    The T · G queries that share a key head (G = N/K) are the rows of a tile, or of several tiles of 64. Each
    program takes an equal share of the key blocks that a query of its row sees. The partial results are
    merged by their log-sum-exp.

    Args:
        q_BTNH, k_PKSH, v_PKSH: bfloat16 or float16, H at most 256. The reference describes these and the
            other arguments. A page has 64 slots, a ring a multiple of 64.
        splits: programs per row, key head and tile. None: enough to fill the GPU.
        block: keys per step, a multiple of 64.
        stages: blocks in flight per program. None: as many as let two programs share a multiprocessor, up to
            width 128.
        interpret: `plgpu.InterpretGPUParams()`: emulated on CPU.
    """
    B, T, N, width = q_BTNH.shape
    K = k_PKSH.shape[1]
    G = N // K
    dtype = q_BTNH.dtype
    capacity = parts.key_capacity(k_PKSH, table_BP, ring)
    k_PKSH = parts.pad_to_multiples(k_PKSH, 8, 16)
    v_PKSH = parts.pad_to_multiples(v_PKSH, 8, 16)
    H = k_PKSH.shape[-1]
    tiles = pl.cdiv(T * G, parts.ROWS)
    seen = capacity if window is None else min(capacity, window + T - 2 + block)  # by the queries of a row
    splits = splits or max(1, min(parts.PROGRAMS // (B * K * tiles), pl.cdiv(seen, block)))
    # Of 113 KiB, half of a multiprocessor's shared memory.
    stages = stages or max(2, min(6, (109 * 1024 - 2 * parts.ROWS * H) // (4 * block * H)))
    scattered = table_BP is not None or ring
    # Rows t · G + g, zero-padded.
    q_BKRH = q_BTNH.reshape(B, T, K, G, width).swapaxes(1, 2).reshape(B, K, T * G, width)
    q_BKRH = parts.pad_to_multiples(q_BKRH, 8, 16)
    rows = q_BKRH.shape[2]
    out_rows = min(rows, parts.ROWS)  # rows of a tile that are written

    def kernel(  # noqa: PLR0913
        start_ref, length_ref, table_ref, sink_ref, q_ref, k_ref, v_ref, out_ref, lse_ref, *scratch
    ):
        q_smem, ((k_smem, v_smem), out_smem), loaded, q_loaded = scratch
        head = lax.axis_index("head")
        part = lax.axis_index("part")
        row_tile = lax.axis_index("row_tile")
        row = lax.div(row_tile, jnp.int32(tiles))
        tile = lax.rem(row_tile, jnp.int32(tiles)) * parts.ROWS
        position = start_ref[row]
        length = jnp.minimum(jnp.minimum(length_ref[row], position + T), capacity)
        lowest = parts.lowest_key(position, window)
        first = lax.div(lowest, jnp.int32(block))
        end = lax.div(length + (block - 1), jnp.int32(block))
        share = lax.div(end - first + (splits - 1), jnp.int32(splits))
        first = first + part * share
        count = jnp.clip(end - first, 0, share)
        places = partial(parts.key_places, block=block, row=row, k_ref=k_ref, table_ref=table_ref, ring=ring)

        def fetch(where, slot):
            parts.load_block(k_ref, where, head, k_smem.at[slot], loaded.at[slot])
            parts.load_block(v_ref, where, head, v_smem.at[slot], loaded.at[slot])

        def step(i, carry):
            acc, largest, total = carry
            slot = lax.rem(i, jnp.int32(stages))
            ahead = places(first + i + stages)  # reads the table before it is needed
            plgpu.barrier_wait(loaded.at[slot])
            key_0 = (first + i) * block
            left = length - key_0  # valid keys from this block on
            if window is not None and scattered:  # before the window may be another page, or newer keys
                unseen = (left < block) | (key_0 < lowest)
                pl.when(unseen)(lambda: parts.zero_rows_outside(v_smem.at[slot], lowest - key_0, left))
            else:
                pl.when(left < block)(lambda: parts.zero_rows_outside(v_smem.at[slot], None, left))
            s = parts.attention_scores(q_smem, k_smem.at[slot], scale, soft_cap)
            key = parts.column_index(s.shape) + key_0
            visible = key < length
            query = position
            if T > 1:
                query = parts.broadcast_along(lax.div(_rows(tile), jnp.int32(G)) + position, s.shape)
                visible &= key <= query
            if window is not None:
                visible &= key > query - window
            if first_key:
                visible &= key >= jnp.minimum(query, first_key)
            p, acc, largest, total = parts.softmax_step(jnp.where(visible, s, -jnp.inf), acc, largest, total)
            acc = parts.add_values(acc, p.astype(dtype), v_smem.at[slot], bool(interpret))
            pl.when(i + stages < count)(lambda: fetch(ahead, slot))
            return acc, largest, total

        # Rows beyond the last query are loaded as zeros.
        plgpu.copy_gmem_to_smem(q_ref.at[row, head, pl.ds(tile, parts.ROWS)], q_smem, q_loaded)
        for i in range(stages):
            pl.when(i < count)(lambda i=i: fetch(places(first + i), i))
        plgpu.barrier_wait(q_loaded)
        acc, largest, total = parts.init_softmax(H)
        if sink_N is not None:  # in the first split: a key without a value
            sinks = _sink_rows(sink_ref, head * G, tile, G)
            largest = jnp.where(jnp.full_like(sinks, part, jnp.int32) == 0, sinks, largest)
            total += jnp.where(part == 0, 1.0, 0.0)
        acc, largest, total = lax.fori_loop(0, count, step, (acc, largest, total))
        total = jnp.maximum(total, 1e-30)  # a split without keys: zeros, with a weight of zero
        out_smem[...] = acc / parts.broadcast_along(total, acc.shape)
        # Divided here, not in XLA: it may round max(x · c) and x · c differently, and the difference would be
        # huge between splits without keys.
        lse = (largest + jnp.log2(total)) / parts.LOG2_E
        store_scattered(lse_ref.at[row, head, pl.ds(tile, parts.ROWS), part], lse)
        plgpu.commit_smem()
        out_tile = out_ref.at[row, head, part, pl.ds(tile, out_rows)]
        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, out_rows)], out_tile)
        plgpu.wait_smem_to_gmem(0)

    out_BKPRH, lse_BKRP = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((B, K, splits, rows, H), jnp.float32),
            jax.ShapeDtypeStruct((B, K, tiles * parts.ROWS, splits), jnp.float32),
        ),
        scratch_types=(
            parts.smem_tile((parts.ROWS, H), dtype),
            # The result reuses the memory of the keys.
            plgpu.RefUnion(
                (parts.smem_tile((stages, block, H), dtype),) * 2,
                parts.smem_tile((parts.ROWS, H), jnp.float32),
            ),
            plgpu.Barrier(num_arrivals=2 * (block // parts.ROWS if scattered else 1), num_barriers=stages),
            plgpu.Barrier(),
        ),
        grid=(K, splits, B * tiles),
        grid_names=("head", "part", "row_tile"),
        compiler_params=parts.compiler_params(),
        interpret=interpret,
    )(start_B, length_B, table_BP, sink_N, q_BKRH, k_PKSH, v_PKSH)
    # With the split axis last XLA merges the partial results in one kernel.
    weight_BKRP = jax.nn.softmax(lse_BKRP[:, :, : T * G], axis=-1)
    out_BKRH = jnp.einsum("bkrp,bkprh->bkrh", weight_BKRP, out_BKPRH[..., : T * G, :width])
    return out_BKRH.reshape(B, K, T, G, width).swapaxes(1, 2).reshape(q_BTNH.shape).astype(dtype)


def _rows(first) -> jax.Array:
    """Returns int32 [64]: the rows of a tile, in the layout of a column of its scores."""
    return plgpu.broadcasted_iota(jnp.int32, (parts.ROWS,), 0, layout=parts.WGMMA.reduce(1)) + first


def _sink_rows(sink_ref, first, tile, group: int) -> jax.Array:
    """Returns, float32 [64], the sink of each row of a tile, times log2 e: row r has the sink of head first +
    r % G.
    """
    row = _rows(tile)
    sinks = jnp.full((parts.ROWS,), parts.LOWEST, jnp.float32)
    for g in range(group):
        sink = jnp.maximum(sink_ref[first + g] * parts.LOG2_E, parts.LOWEST)
        sinks = jnp.where(lax.rem(row, jnp.int32(group)) == g, sink, sinks)
    return sinks
