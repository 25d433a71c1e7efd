"""Prefill attention on Hopper: two warpgroups compute in turn, a third one loads keys and values."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import parts

_COMPUTE = 2  # warpgroups that compute; a third one loads
_QUERIES = _COMPUTE * parts.ROWS  # per program


def prefill_attention(  # noqa: PLR0913
    q_BTNH, k_PKSH, v_PKSH, start_B, length_B, *, scale, window=None, soft_cap=None, table_BP=None,
    ring=False, sink_N=None, first_key=0, block=None, stages=None, interpret=None,
) -> jax.Array:  # fmt: skip
    """Computes causal attention with the schedule of FlashAttention-3 (Shah et al. 2024), in the dtype of q.
    While one warpgroup computes the softmax of its block, the other uses the tensor cores.

    Args:
        q_BTNH, k_PKSH, v_PKSH: bfloat16 or float16, H at most 256. The reference describes these and the
            other arguments. A page has 64 slots, a ring a multiple of 64.
        block: keys per step, a multiple of 64. None: 128, or 64 above width 128.
        stages: blocks of keys and values in shared memory. None: 2, or 4 up to width 64.
        interpret: `plgpu.InterpretGPUParams()`: emulated on CPU.
    """
    B, T, N, width = q_BTNH.shape
    group = N // k_PKSH.shape[1]
    dtype = q_BTNH.dtype
    q_BTNH = parts.pad_to_multiples(q_BTNH, 8, 1, 16)
    capacity = parts.key_capacity(k_PKSH, table_BP, ring)
    k_PKSH = parts.pad_to_multiples(k_PKSH, 8, 16)
    v_PKSH = parts.pad_to_multiples(v_PKSH, 8, 16)
    H = q_BTNH.shape[-1]
    block = block or (128 if H <= 128 else 64)
    stages = stages or (4 if H <= 64 else 2)
    blocks = pl.cdiv(T, _QUERIES)
    scattered = table_BP is not None or ring
    copies = block // parts.PAGE if scattered else 1  # of one block

    def kernel(start_ref, length_ref, table_ref, sink_ref, q_ref, k_ref, v_ref, out_ref, *scratch):
        (q_smem, *kv_smem), (q_loaded, *kv_loaded), kv_used, turn = scratch
        (k_smem, v_smem) = kv_smem
        (k_loaded, v_loaded, _) = kv_loaded
        (k_used, v_used) = kv_used
        row = lax.axis_index("row")
        head = lax.axis_index("head")
        warpgroup = lax.axis_index("warpgroup")
        # The last queries see the most keys, so they start first.
        first_query = (blocks - 1 - lax.axis_index("block")) * _QUERIES
        position = start_ref[row] + first_query
        length = jnp.minimum(length_ref[row], capacity)
        end = lax.div(jnp.minimum(length, position + _QUERIES) + (block - 1), jnp.int32(block))
        lowest = parts.lowest_key(position, window)
        begin = lax.div(lowest, jnp.int32(block))

        @pl.when(warpgroup < _COMPUTE)
        def compute():
            plgpu.set_max_registers(232, action="increase")
            tile_query = first_query + warpgroup * parts.ROWS
            tile_position = position + warpgroup * parts.ROWS
            queries = row, pl.ds(tile_query, parts.ROWS), head
            q_tile = q_smem.at[warpgroup]
            plgpu.copy_gmem_to_smem(q_ref.at[queries], q_tile, q_loaded.at[warpgroup])
            plgpu.barrier_wait(q_loaded.at[warpgroup])

            def step(masked, i, carry):
                acc, largest, total = carry
                slot = lax.rem(i - begin, jnp.int32(stages))
                plgpu.barrier_wait(k_loaded.at[slot])
                s = parts.attention_scores(q_tile, k_smem.at[slot], scale, soft_cap, meanwhile=take_turn)
                plgpu.barrier_arrive(k_used.at[slot])
                if masked:
                    key = parts.column_index(s.shape) + i * block
                    query = parts.row_index(s.shape) + tile_position
                    visible = _is_visible(key, query, length, window, first_key)
                    s = jnp.where(visible, s, -jnp.inf)
                p, acc, largest, total = parts.softmax_step(s, acc, largest, total)
                # Keeps all of the softmax within the turn.
                p, acc, largest, total = lax.optimization_barrier((p.astype(dtype), acc, largest, total))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_loaded.at[slot])
                plgpu.barrier_wait(turn)
                acc = parts.add_values(acc, p, v_smem.at[slot], bool(interpret))
                plgpu.barrier_arrive(v_used.at[slot])
                return acc, largest, total

            def take_turn():
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

            seen = window, first_key
            ranges = _block_ranges((begin, end), tile_position, length, seen, block, H)
            pl.when(warpgroup == 1)(take_turn)  # starts half a step later
            carry = parts.init_softmax(H)
            for first, last, masked in ranges:
                carry = lax.fori_loop(first, last, partial(step, masked), carry)
            (acc, largest, total) = carry
            pl.when(warpgroup == 0)(take_turn)
            if sink_N is not None:  # infinite where no key is seen: zeros
                total += jnp.exp2(sink_ref[head] * parts.LOG2_E - largest)
            q_tile[...] = (acc / parts.broadcast_along(jnp.maximum(total, 1e-30), acc.shape)).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, out_ref.at[queries])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == _COMPUTE)
        def fetch():
            plgpu.set_max_registers(40, action="decrease")

            places = partial(
                parts.key_places, block=block, row=row, k_ref=k_ref, table_ref=table_ref, ring=ring
            )
            # Before the window may be another page, or newer keys.
            valid = (lowest if window is not None and scattered else None, length)
            key_head = lax.div(head, jnp.int32(group))
            _fetch((k_ref, v_ref), key_head, places, (begin, end), valid, kv_smem, kv_loaded, kv_used)

    out_BTNH = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q_BTNH.shape, dtype),
        scratch_types=(
            (
                parts.smem_tile((_COMPUTE, parts.ROWS, H), dtype),
                parts.smem_tile((stages, block, H), dtype),
                parts.smem_tile((stages, block, H), dtype),
            ),
            (
                plgpu.Barrier(num_barriers=_COMPUTE),
                *(plgpu.Barrier(num_arrivals=copies, num_barriers=n) for n in (stages, stages, 1)),
            ),
            (plgpu.Barrier(num_arrivals=_COMPUTE, num_barriers=stages),) * 2,
            plgpu.Barrier(num_arrivals=_COMPUTE),
        ),
        grid=(blocks, N, B),  # the first axis varies slowest
        grid_names=("block", "head", "row"),
        num_threads=_COMPUTE + 1,
        thread_name="warpgroup",
        compiler_params=parts.compiler_params(),
        interpret=interpret,
    )(start_B, length_B, table_BP, sink_N, q_BTNH, k_PKSH, v_PKSH)
    return out_BTNH[:, :T, :, :width]


def _is_visible(key: Any, query: Any, length: Any, window: int | None, first_key: int) -> jax.Array:
    """Returns True for the keys that a query sees."""
    visible = key <= jnp.minimum(query, length - 1)
    if window is not None:
        visible &= key > query - window
    return visible & (key >= jnp.minimum(query, first_key)) if first_key else visible


def _block_ranges(blocks, position, length, seen, block, width) -> list[tuple[Any, Any, bool]]:
    """Returns ranges of blocks. For each range it says whether the blocks need a mask. Blocks of which every
    query of the tile sees all keys, between the start of the window and the diagonal, need none. position:
    the position of the tile's first query. seen: the window, and the first key that queries see.
    """
    (begin, end) = blocks
    (window, first_key) = seen
    diagonal = lax.div(jnp.minimum(length, position + 1), jnp.int32(block))
    if window is None and not first_key:
        outer = jnp.clip(diagonal, begin, end)
        return [(begin, outer, False), (outer, end, True)]
    if width > 128:  # three loops would spill registers
        return [(begin, end, True)]
    first = jnp.int32(first_key) if window is None else position + (parts.ROWS - window)
    inner = lax.div(jnp.maximum(first, first_key) + (block - 1), jnp.int32(block))
    inner = jnp.clip(inner, begin, end)
    outer = jnp.clip(diagonal, inner, end)
    return [(begin, inner, True), (inner, outer, False), (outer, end, True)]


def _fetch(refs, head, places, blocks, valid, smem, loaded, used) -> None:
    """Runs the third warpgroup: it loads the blocks of keys and values of one row and head into shared
    memory, each into a slot once the computing warpgroups have used it. Values outside `valid` become zeros.
    """
    (k_ref, v_ref) = refs
    (k_smem, v_smem) = smem
    (k_loaded, v_loaded, v_raw) = loaded
    (begin, end) = blocks
    (lowest, length) = valid
    (k_used, v_used) = used
    (stages, block) = k_smem.shape[:2]

    @pl.loop(begin, end + stages)
    # `stages` more iterations than blocks: waits until every slot is free before the program ends.
    def _(i):
        slot = lax.rem(i - begin, jnp.int32(stages))
        where = places(i)
        reused = i - begin >= stages
        wanted = i < end
        key_0 = i * block
        ragged = length - key_0 < block
        if lowest is not None:
            ragged |= key_0 < lowest
        pl.when(reused)(lambda: plgpu.barrier_wait(k_used.at[slot]))
        pl.when(wanted)(lambda: parts.load_block(k_ref, where, head, k_smem.at[slot], k_loaded.at[slot]))
        pl.when(reused)(lambda: plgpu.barrier_wait(v_used.at[slot]))

        @pl.when(wanted & ~ragged)
        def _():
            parts.load_block(v_ref, where, head, v_smem.at[slot], v_loaded.at[slot])

        @pl.when(wanted & ragged)
        def _():
            parts.load_block(v_ref, where, head, v_smem.at[slot], v_raw.at[0])
            plgpu.barrier_wait(v_raw)
            parts.zero_rows_outside(
                v_smem.at[slot], None if lowest is None else lowest - key_0, length - key_0
            )
            for _ in where:
                plgpu.barrier_arrive(v_loaded.at[slot])
