"""The index of each row's largest number, and the greedy token straight from hidden states."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import compat
from . import parts

_BLOCK = 2048  # numbers per program of argmax
_WIDE = 128  # columns of the vocabulary matrix per step
_MAX_INT = np.int32(2**31 - 1)
_LOWEST = (
    np.float32(parts.LOWEST).view(np.int32) ^ _MAX_INT
)  # the key of a finite number: no difference is NaN


def float_to_key(x: jax.Array) -> jax.Array:
    """Returns int32 keys in the order of float32 numbers, with NaN above all, as in jnp.argmax."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)  # -0.0 equals 0.0
    return jnp.where(x != x, _MAX_INT, jnp.where(bits < 0, bits ^ _MAX_INT, bits))


def key_to_float(key: jax.Array) -> jax.Array:
    """Returns the float32 number of a key."""
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ _MAX_INT, key), jnp.float32)


def argmax(x_BV: jax.Array, *, interpret: Any = None) -> jax.Array:
    """Returns the index of each row's largest number, int32 [B], like the reference. V that is not a multiple
    of 8 costs a copy. interpret: `plgpu.InterpretGPUParams()`: emulated on CPU.
    """
    B = x_BV.shape[0]
    missing = max(_BLOCK - x_BV.shape[1], -x_BV.shape[1] % 8)
    x_BV = jnp.pad(x_BV, ((0, 0), (0, missing)), constant_values=-jnp.inf) if missing else x_BV
    V = x_BV.shape[1]
    blocks = pl.cdiv(V, _BLOCK)
    layout = plgpu.Layout.WG_STRIDED((_BLOCK,), vec_size=16 // x_BV.dtype.itemsize)

    def kernel(x_ref, key_ref, index_ref):
        row = lax.axis_index("row")
        block = lax.axis_index("block")
        # The last block overlaps the one before, so nothing needs a mask.
        first = jnp.minimum(block * _BLOCK, V - _BLOCK)
        key = float_to_key(compat.load(x_ref.at[row], first, _BLOCK, layout).astype(jnp.float32))
        index = plgpu.broadcasted_iota(jnp.int32, (_BLOCK,), 0, layout=layout) + first
        largest = key.max(axis=0)
        key_ref[row, block] = largest
        index_ref[row, block] = jnp.where(key == largest, index, _MAX_INT).min(axis=0)

    pairs = plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((B, blocks), jnp.int32),) * 2,
        grid=(blocks, B),
        grid_names=("block", "row"),
        compiler_params=parts.compiler_params(),
        interpret=interpret,
    )(x_BV)
    return _first_of_largest(*pairs)


def lm_head_argmax(
    x_BD: jax.Array, weight_VD: jax.Array, *, soft_cap: float | None = None, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the greedy token and its log-probability, like the reference. Logits are never written.
    Programs are persistent and take tiles of 64 tokens in turn. Loads run ahead across tiles.

    x and weight are bfloat16 or float16. Every 64 rows read the matrix once. V that is not a multiple of 8,
    or D not a multiple of 64, costs a copy. interpret: `plgpu.InterpretGPUParams()`: emulated on CPU.
    """
    B = x_BD.shape[0]
    V = weight_VD.shape[0]
    if B > parts.ROWS:
        some = partial(lm_head_argmax, weight_VD=weight_VD, soft_cap=soft_cap, interpret=interpret)
        ids, logprobs = zip(*(some(x_BD[i : i + parts.ROWS]) for i in range(0, B, parts.ROWS)), strict=True)
        return jnp.concatenate(ids), jnp.concatenate(logprobs)
    x_ND = parts.pad_to_multiples(x_BD, 8, 64)
    weight_VD = parts.pad_to_multiples(weight_VD, 8, 64)
    N, D = x_ND.shape
    steps = pl.cdiv(D, _WIDE)
    tiles = pl.cdiv(V, parts.ROWS)
    programs = min(parts.PROGRAMS, tiles)
    # Of 113 KiB, half of a multiprocessor's shared memory.
    stages = min(6, 104 * 1024 // (2 * _WIDE * (parts.ROWS + N)))

    def kernel(x_ref, w_ref, *refs):
        best_refs = refs[:3]
        (x_smem, w_smem, *best_smem, loaded) = refs[3:]
        program = lax.axis_index("program")
        # Tiles program, program + programs, …
        mine = lax.div(tiles - program + (programs - 1), jnp.int32(programs))

        def fetch(i, slot):
            token = (program + lax.div(i, jnp.int32(steps)) * programs) * parts.ROWS
            wide = pl.ds(lax.rem(i, jnp.int32(steps)) * _WIDE, _WIDE)
            plgpu.copy_gmem_to_smem(
                w_ref.at[pl.ds(token, parts.ROWS), wide], w_smem.at[slot], loaded.at[slot]
            )
            plgpu.copy_gmem_to_smem(x_ref.at[:, wide], x_smem.at[slot], loaded.at[slot])

        def logits(t):
            def product(acc_ref):
                @pl.loop(0, steps)
                def _(j):
                    i = t * steps + j
                    slot = lax.rem(i, jnp.int32(stages))
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.wgmma(acc_ref, w_smem.at[slot], compat.transpose_ref(x_smem.at[slot]))
                    plgpu.wgmma_wait(0)
                    pl.when(i + stages < mine * steps)(lambda: fetch(i + stages, slot))

                return acc_ref[...]

            return pl.run_scoped(product, plgpu.ACC((parts.ROWS, N), jnp.float32))

        def one_tile(t, best):
            key, index, total = best
            x = logits(t) if soft_cap is None else parts.tanh_capped(logits(t), 1.0, soft_cap) * soft_cap
            token = parts.row_index(x.shape) + (program + t * programs) * parts.ROWS
            x = jnp.where(token < V, x, -jnp.inf)
            keys = float_to_key(x)
            largest = keys.max(axis=0)
            first = jnp.where(keys == parts.broadcast_along(largest, x.shape, 1), token, _MAX_INT).min(axis=0)
            new = jnp.maximum(key, largest)
            shrunk = total * jnp.exp(key_to_float(key) - key_to_float(new))
            return (
                new,
                jnp.where(largest > key, first, index),
                shrunk + jnp.exp(x - parts.broadcast_along(key_to_float(new), x.shape, 1)).sum(axis=0),
            )

        for i in range(stages):
            pl.when(i < mine * steps)(lambda i=i: fetch(jnp.int32(i), i))
        initial = [
            plgpu.layout_cast(jnp.full((N,), *start), parts.WGMMA.reduce(0))
            for start in ((_LOWEST, jnp.int32), (0, jnp.int32), (0, jnp.float32))
        ]
        best = lax.fori_loop(0, mine, one_tile, tuple(initial))
        for value, smem, ref in zip(best, best_smem, best_refs, strict=True):
            smem[...] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, ref.at[program])
        plgpu.wait_smem_to_gmem(0)

    shapes = [((programs, N), dtype) for dtype in (jnp.int32, jnp.int32, jnp.float32)]
    key_PN, index_PN, sum_PN = plgpu.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes),
        scratch_types=(
            parts.smem_tile((stages, N, _WIDE), x_BD.dtype),
            parts.smem_tile((stages, parts.ROWS, _WIDE), x_BD.dtype),
            *(plgpu.SMEM((N,), dtype) for _, dtype in shapes),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ),
        grid=(programs,),
        grid_names=("program",),
        compiler_params=parts.compiler_params(),
        interpret=interpret,
    )(x_ND, weight_VD)
    largest_PN = key_to_float(key_PN)
    total_N = jnp.sum(sum_PN * jnp.exp(largest_PN - jnp.max(largest_PN, 0)), 0)
    return _first_of_largest(key_PN.T, index_PN.T)[:B], -jnp.log(total_N)[:B]


def _first_of_largest(key_BP: jax.Array, index_BP: jax.Array) -> jax.Array:
    """Returns [B]: the lowest of the indices whose key is the largest of a row."""
    return jnp.min(jnp.where(key_BP == jnp.max(key_BP, -1, keepdims=True), index_BP, _MAX_INT), -1)
