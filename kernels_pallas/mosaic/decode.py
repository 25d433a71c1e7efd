"""Decode attention on Hopper: one query per row, the keys split over the GPU; TMA loads run ahead of the
tensor cores.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..compat import store_scattered
from .parts import (
    LOG2_E,
    PROGRAMS,
    ROWS,
    add_values,
    attention_scores,
    broadcast_along,
    column_index,
    compiler_params,
    init_softmax,
    pad_to_multiples,
    smem_tile,
    softmax_step,
    zero_rows_from,
)


def decode_attention(  # noqa: PLR0913
    q_BNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    length_B: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    splits: int | None = None,
    block: int = 64,
    stages: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Attention of one query per row, at position length_B[b] - 1, as in Flash-Decoding (Dao et al. 2023).

    The G = N/K queries that share a key head are the rows of one tile. Each program takes an equal share of
    the key blocks below the row's length. The partial results are merged by their log-sum-exp.

    Args:
        q_BNH: bfloat16 or float16; G at most 64, H at most 256.
        k_BKSH, v_BKSH: in the same dtype; slots at or past length_B may hold anything.
        length_B: int32, valid keys per row; 0 gives zeros.
        scale, window, soft_cap: as in `reference.decode_attention`.
        splits: programs per row and key head; None: enough to fill the GPU.
        block: keys per step, a multiple of 64.
        stages: blocks in flight per program; None: as many as let two programs share a multiprocessor, up to
            width 128.
        interpret: `plgpu.InterpretGPUParams()`: emulated on CPU.

    Returns:
        [B, N, H] in the dtype of q.
    """
    B, N, H = q_BNH.shape
    K, S = k_BKSH.shape[1:3]
    G = N // K
    width = H
    dtype = q_BNH.dtype
    k_BKSH = pad_to_multiples(k_BKSH, 8, 16)
    v_BKSH = pad_to_multiples(v_BKSH, 8, 16)
    H = k_BKSH.shape[-1]
    splits = splits or max(1, min(PROGRAMS // (B * K), pl.cdiv(S, block)))
    # Of 113 KiB, half of a multiprocessor's shared memory.
    stages = stages or max(2, min(6, (109 * 1024 - 2 * ROWS * H) // (4 * block * H)))
    out_rows = pl.cdiv(G, 8) * 8  # rows of the tile that are written
    q_BKGH = pad_to_multiples(q_BNH.reshape(B, K, G, width), 8, 16)

    def kernel(length_ref, q_ref, k_ref, v_ref, out_ref, lse_ref, *scratch):
        q_smem, ((k_smem, v_smem), out_smem), loaded, q_loaded = scratch
        row = lax.axis_index("row")
        head = lax.axis_index("head")
        part = lax.axis_index("part")
        position = length_ref[row] - 1
        length = jnp.minimum(position + 1, S)
        first = (
            jnp.int32(0)
            if window is None
            else lax.div(jnp.maximum(position + 1 - window, 0), jnp.int32(block))
        )
        end = lax.div(length + (block - 1), jnp.int32(block))
        share = lax.div(end - first + (splits - 1), jnp.int32(splits))
        first = first + part * share
        count = jnp.clip(end - first, 0, share)

        def fetch(i, slot):
            keys = pl.ds((first + i) * block, block)
            plgpu.copy_gmem_to_smem(k_ref.at[row, head, keys], k_smem.at[slot], loaded.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[row, head, keys], v_smem.at[slot], loaded.at[slot])

        def step(i, carry):
            acc, largest, total = carry
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(loaded.at[slot])
            key_0 = (first + i) * block
            left = length - key_0  # valid keys from this block on
            pl.when(left < block)(lambda: zero_rows_from(v_smem.at[slot], left))
            s = attention_scores(q_smem, k_smem.at[slot], scale, soft_cap)
            key = column_index(s.shape) + key_0
            visible = key < length
            if window is not None:
                visible &= key > position - window
            p, acc, largest, total = softmax_step(jnp.where(visible, s, -jnp.inf), acc, largest, total)
            acc = add_values(acc, p.astype(dtype), v_smem.at[slot], bool(interpret))
            pl.when(i + stages < count)(lambda: fetch(i + stages, slot))
            return acc, largest, total

        # Rows beyond G are loaded as zeros.
        plgpu.copy_gmem_to_smem(q_ref.at[row, head, pl.ds(0 * part, ROWS)], q_smem, q_loaded)
        for i in range(stages):
            pl.when(i < count)(lambda i=i: fetch(jnp.int32(i), i))
        plgpu.barrier_wait(q_loaded)
        acc, largest, total = lax.fori_loop(0, count, step, init_softmax(H))
        total = jnp.maximum(total, 1e-30)  # a split without keys: zeros, with a weight of zero
        out_smem[...] = acc / broadcast_along(total, acc.shape)
        store_scattered(lse_ref.at[row, head, :, part], largest + jnp.log2(total))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, out_rows)], out_ref.at[row, head, part])
        plgpu.wait_smem_to_gmem(0)

    out_BKPRH, lse_BKRP = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((B, K, splits, out_rows, H), jnp.float32),
            jax.ShapeDtypeStruct((B, K, ROWS, splits), jnp.float32),
        ),
        scratch_types=(
            smem_tile((ROWS, H), dtype),
            # The result reuses the memory of the keys.
            plgpu.RefUnion((smem_tile((stages, block, H), dtype),) * 2, smem_tile((ROWS, H), jnp.float32)),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(),
        ),
        grid=(K, splits, B),
        grid_names=("head", "part", "row"),
        compiler_params=compiler_params(),
        interpret=interpret,
    )(length_B, q_BKGH, k_BKSH, v_BKSH)
    # With the split axis last XLA merges the partial results in one kernel.
    weight_BKRP = jax.nn.softmax(lse_BKRP / LOG2_E, axis=-1)
    out_BKGH = jnp.einsum("bkgp,bkpgh->bkgh", weight_BKRP[:, :, :G], out_BKPRH[..., :G, :width])
    return out_BKGH.reshape(q_BNH.shape).astype(dtype)
