"""Prefill attention on Hopper: two warpgroups compute in turn, one fetches keys and values ahead of them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .parts import (
    ROWS,
    add_values,
    columns,
    padded,
    params,
    rows,
    scores,
    silence,
    softmax_step,
    spread,
    start,
    tile,
)

_COMPUTE = 2  # warpgroups; a third one fetches
_QUERIES = _COMPUTE * ROWS  # per program


def prefill_attention(  # noqa: PLR0913
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    block: int | None = None,
    stages: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Causal attention with the schedule of FlashAttention-3 (Shah et al. 2024).

    While one warpgroup takes the softmax of its block, the other has the tensor cores.

    Args:
        q_BTNH: bfloat16 or float16; N a multiple of K, H at most 256.
        k_BKSH, v_BKSH: in the same dtype; slots at or past length_B may hold anything.
        start_B: int32, position of each row's first query.
        length_B: int32, valid keys per row.
        scale, window, soft_cap: as in `reference.prefill_attention`.
        block: keys per step, a multiple of 64; None: 128, or 64 above width 128.
        stages: blocks of keys and values in shared memory; None: 2, or 4 up to width 64.
        interpret: `plgpu.InterpretGPUParams()`: on CPU, emulated.

    Returns:
        [B, T, N, H] in the dtype of q; zeros where a query sees no key.
    """
    B, T, N, H = q_BTNH.shape
    K, S = k_BKSH.shape[1:3]
    group = N // K
    width = H
    dtype = q_BTNH.dtype
    q_BTNH = padded(q_BTNH, 8, 1, 16)
    k_BKSH = padded(k_BKSH, 8, 16)
    v_BKSH = padded(v_BKSH, 8, 16)
    H = q_BTNH.shape[-1]
    block = block or (128 if H <= 128 else 64)
    stages = stages or (4 if H <= 64 else 2)
    blocks = pl.cdiv(T, _QUERIES)

    def kernel(start_ref, length_ref, q_ref, k_ref, v_ref, out_ref, *scratch):
        (q_smem, *kv_smem), (q_landed, *kv_landed), kv_used, turn = scratch
        (k_smem, v_smem) = kv_smem
        (k_landed, v_landed, _) = kv_landed
        (k_used, v_used) = kv_used
        row = lax.axis_index("row")
        head = lax.axis_index("head")
        warpgroup = lax.axis_index("warpgroup")
        # The last queries see most keys: they go first.
        first_query = (blocks - 1 - lax.axis_index("block")) * _QUERIES
        position = start_ref[row] + first_query
        length = jnp.minimum(length_ref[row], S)
        end = lax.div(jnp.minimum(length, position + _QUERIES) + (block - 1), jnp.int32(block))
        begin = (
            jnp.int32(0)
            if window is None
            else lax.div(jnp.maximum(position - (window - 1), 0), jnp.int32(block))
        )

        @pl.when(warpgroup < _COMPUTE)
        def compute():
            plgpu.set_max_registers(216, action="increase")
            tile_query = first_query + warpgroup * ROWS
            tile_position = position + warpgroup * ROWS
            queries = row, pl.ds(tile_query, ROWS), head
            q_tile = q_smem.at[warpgroup]
            plgpu.copy_gmem_to_smem(q_ref.at[queries], q_tile, q_landed.at[warpgroup])
            plgpu.barrier_wait(q_landed.at[warpgroup])

            def step(masked, i, carry):
                acc, most, total = carry
                slot = lax.rem(i - begin, jnp.int32(stages))
                plgpu.barrier_wait(k_landed.at[slot])
                s = scores(q_tile, k_smem.at[slot], scale, soft_cap, then=take_turn)
                plgpu.barrier_arrive(k_used.at[slot])
                if masked:
                    key = columns(s.shape) + i * block
                    query = rows(s.shape) + tile_position
                    seen = (key <= query) & (key < length)
                    if window is not None:
                        seen &= key > query - window
                    s = jnp.where(seen, s, -jnp.inf)
                p, acc, most, total = softmax_step(s, acc, most, total)
                # All of the softmax within the turn.
                p, acc, most, total = lax.optimization_barrier((p.astype(dtype), acc, most, total))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_landed.at[slot])
                plgpu.barrier_wait(turn)
                acc = add_values(acc, p, v_smem.at[slot], bool(interpret))
                plgpu.barrier_arrive(v_used.at[slot])
                return acc, most, total

            def take_turn():
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

            # Blocks that every query of the tile sees whole need no mask: they lie between the window's edge
            # and the diagonal.
            inner = (
                begin
                if window is None
                else lax.div(jnp.maximum(tile_position + (ROWS - window), 0) + (block - 1), jnp.int32(block))
            )
            inner = jnp.clip(inner, begin, end)
            outer = jnp.clip(lax.div(jnp.minimum(length, tile_position + 1), jnp.int32(block)), inner, end)
            pl.when(warpgroup == 1)(take_turn)  # half a step behind
            carry = start(H)
            if window is not None:
                carry = lax.fori_loop(begin, inner, partial(step, True), carry)
            carry = lax.fori_loop(inner, outer, partial(step, False), carry)
            acc, _, total = lax.fori_loop(outer, end, partial(step, True), carry)
            pl.when(warpgroup == 0)(take_turn)
            q_tile[...] = (acc / spread(jnp.maximum(total, 1e-30), acc.shape)).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, out_ref.at[queries])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == _COMPUTE)
        def fetch():
            plgpu.set_max_registers(72, action="decrease")
            place = (row, lax.div(head, jnp.int32(group)))
            span = (begin, end, length)
            _fetch((k_ref, v_ref), place, span, kv_smem, kv_landed, kv_used)

    out_BTNH = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q_BTNH.shape, dtype),
        scratch_types=(
            (
                tile((_COMPUTE, ROWS, H), dtype),
                tile((stages, block, H), dtype),
                tile((stages, block, H), dtype),
            ),
            tuple(plgpu.Barrier(num_barriers=n) for n in (_COMPUTE, stages, stages, 1)),
            (plgpu.Barrier(num_arrivals=_COMPUTE, num_barriers=stages),) * 2,
            plgpu.Barrier(num_arrivals=_COMPUTE),
        ),
        grid=(blocks, N, B),  # the first axis varies slowest
        grid_names=("block", "head", "row"),
        num_threads=_COMPUTE + 1,
        thread_name="warpgroup",
        compiler_params=params(),
        interpret=interpret,
    )(start_B, length_B, q_BTNH, k_BKSH, v_BKSH)
    return out_BTNH[:, :T, :, :width]


def _fetch(refs, place, span, smem, landed, used) -> None:
    """The third warpgroup: the blocks begin … end - 1 of one row and head into shared memory, each where the
    computing ones have used what was there.
    """
    (k_ref, v_ref) = refs
    (k_smem, v_smem) = smem
    (k_landed, v_landed, v_raw) = landed
    (begin, end, length) = span
    (k_used, v_used) = used
    (stages, block) = k_smem.shape[:2]

    @pl.loop(begin, end + stages)
    # `stages` turns more than there are blocks: every slot is seen free again before the program ends.
    def _(i):
        slot = lax.rem(i - begin, jnp.int32(stages))
        keys = *place, pl.ds(i * block, block)
        reused = i - begin >= stages
        wanted = i < end
        left = length - i * block
        pl.when(reused)(lambda: plgpu.barrier_wait(k_used.at[slot]))
        pl.when(wanted)(lambda: plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem.at[slot], k_landed.at[slot]))
        pl.when(reused)(lambda: plgpu.barrier_wait(v_used.at[slot]))

        @pl.when(wanted & (left >= block))
        def _():
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem.at[slot], v_landed.at[slot])

        @pl.when(wanted & (left < block))
        def _():
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem.at[slot], v_raw)
            plgpu.barrier_wait(v_raw)
            silence(v_smem.at[slot], left)
            plgpu.barrier_arrive(v_landed.at[slot])
