"""The append of keys and values to a cache on TPUs, in place.

Memory is divided into tiles of 8 to 32 slots, which a copy takes whole. A tile that new tokens fill in part
is read, changed and written back. All tiles of a program are in flight at once. Few tokens of a row have a
separate kernel, which does everything between products and attention (`append_tokens`).
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..dispatch import result_type
from ..key_layouts import HeadNorms, Latents, SideBySide, quantize
from ..reference_append import norm_heads, rotate
from .append_tokens import FEW_TOKENS, append_tokens, tile_slots
from .parts import emulator, keep_in_hbm
from .tiles import Tiling, Update, insert, make_tiling, scale_tile, update_tiles

_PROMPT_TILE = 64  # slots
_PROGRAM_BYTES = 2**21  # of the tiles of a program


def rope_append(  # noqa: PLR0913
    q_BTNH, k_BTKH, v_BTKH, cos_BTP, sin_BTP, kv_PKSX, v_PKSH, start_B, num_tokens_B, *, capacity,
    table_BP=None, ring=False, norms=None, interpret=False,
) -> tuple[jax.Array, SideBySide | Latents, None]:  # fmt: skip
    """Rotates queries and keys by their angles, and writes the keys and values of new tokens to a cache. XLA
    copies the cache if it is used again. For prompts XLA computes norms, RoPE and levels, before the kernel.

    It takes the arguments of the reference, and returns its results, with a cache `SideBySide`, or `Latents`
    without norms and angles. T tokens may touch no tile of a ring twice: its slots are T rounded up to 64
    (int8: 128), and at least one such tile more. interpret: True: emulate a TPU on a CPU, slowly, and raise
    if accesses to memory race.
    """
    assert v_PKSH is None
    S = kv_PKSX.values.shape[2]
    if not ring:
        capacity = min(capacity, S if table_BP is None else S * table_BP.shape[1])
    count_B = jnp.clip(capacity - start_B, 0, num_tokens_B)
    angles = None if cos_BTP is None else (cos_BTP, sin_BTP)
    append = append_tokens if q_BTNH.shape[1] <= FEW_TOKENS else _append_prompts
    if isinstance(kv_PKSX, Latents):
        k_BTKH = jnp.pad(k_BTKH, [(0, 0)] * 3 + [(0, kv_PKSX.shape[3] - k_BTKH.shape[3])])
    args = (q_BTNH, k_BTKH, v_BTKH), angles, norms, kv_PKSX, start_B, count_B
    return *append(*args, table_BP=table_BP, ring=ring, interpret=interpret), None


def _append_prompts(  # noqa: PLR0913
    qkv, angles, norms: HeadNorms | None, kv: Any, start_B, count_B, *, table_BP, ring, interpret
) -> tuple[jax.Array, Any]:
    q_BTNH, k_BTKH, v_BTKH = qkv
    q_BTNH, k_BTKH = (rotate(x, *(angles or (None, None))) for x in norm_heads(q_BTNH, k_BTKH, norms))
    k, v = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKH))
    B, _, T, _ = k.shape
    S = kv.values.shape[2]
    write = partial(_write, start_B=start_B, count_B=count_B, table_BP=table_BP, interpret=interpret)
    size = _PROMPT_TILE if S % _PROMPT_TILE == 0 else tile_slots(kv.values.dtype)
    tiling = make_tiling(size, T, B, kv, table_BP, ring, 1)
    if isinstance(kv, Latents):
        return q_BTNH, dataclasses.replace(kv, values=write(kv.values, k, tiling=tiling))
    if kv.scale is None:
        return q_BTNH, SideBySide(write(kv.values, jnp.concatenate([k, v], -1), tiling=tiling))
    pair = quantize(k, 8), quantize(v, 8)
    levels, scale = (jnp.concatenate(parts, -1) for parts in zip(*pair, strict=True))
    values = write(kv.values, levels, tiling=tiling)
    tiling = make_tiling(scale_tile(S), T, B, kv, table_BP, ring, 2)
    return q_BTNH, SideBySide(values, write(kv.scale, jnp.swapaxes(scale, 2, 3), tiling=tiling))


def _write(old, new, *, start_B, count_B, table_BP, tiling: Tiling, interpret) -> jax.Array:
    """Returns `old` with the first count_B[b] tokens of `new` from position start_B[b] on. Their slots are on
    axis 1 + `tiling.axis`: [P, K, S, X] and [B, K, T, X], or the scale and [B, K, 4, T].
    """
    new = _tiles_of(new.astype(old.dtype), start_B, tiling)
    shape = list(old.shape[1:])
    if not tiling.is_whole:
        shape[tiling.axis] = tiling.size
    new = new.reshape(len(new), *shape)
    group = min(max(_PROGRAM_BYTES // (old.dtype.itemsize * math.prod(shape)), 1), tiling.items)
    scalars = [start_B, count_B] + ([] if table_BP is None else [table_BP.reshape(-1)])
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    old = keep_in_hbm(old, interpret)
    return pl.pallas_call(
        partial(_kernel, tiling=tiling),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(pl.cdiv(tiling.items, group),),
            in_specs=[pl.BlockSpec((group, *shape), lambda i, *_: (i, 0, 0, 0)), in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[pltpu.VMEM((group, *shape), old.dtype), pltpu.SemaphoreType.DMA((2, group))],
        ),
        out_shape=result_type(old.shape, old.dtype, *scalars, new, old),
        input_output_aliases={len(scalars) + 1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=emulator(interpret),
        name="append",
    )(*scalars, new, old)


def _kernel(*refs: Any, tiling: Tiling) -> None:
    """Runs one program.

    The refs are, in this order:

    - start_B, count_B and perhaps table_BP, in scalar memory,
    - new tiles,
    - the cache twice, as input and as output, which are the same memory,
    - tiles on the chip,
    - semaphores of reads and of writes.
    """
    *scalar_refs, new_ref, _, cache_ref, tile_ref, copied = refs

    def change(i: Any, tile: Any) -> None:
        insert(tile_ref.at[i], new_ref[i], tile, tiling, tiling.axis)

    first = pl.program_id(0) * tile_ref.shape[0]
    update_tiles(scalar_refs, [Update(cache_ref, tile_ref, copied, tiling, first, change)])


def _tiles_of(new, start_B, tiling: Tiling) -> jax.Array:
    """Returns new tokens as the tiles that they touch, [B · tiles, K, …], each in its slot. Other slots may
    hold anything.
    """
    axis = 1 + tiling.axis
    size = tiling.tiles * tiling.size
    widths = [(tiling.size, size - new.shape[axis]) if i == axis else (0, 0) for i in range(new.ndim)]
    cut = partial(lax.dynamic_slice_in_dim, slice_size=size, axis=axis - 1)
    new = jax.vmap(cut)(jnp.pad(new, widths), tiling.size - start_B % tiling.size)
    new = new.reshape(*new.shape[:axis], tiling.tiles, tiling.size, *new.shape[axis + 1 :])
    new = jnp.moveaxis(new, axis, 1)
    return new.reshape(-1, *new.shape[2:])
