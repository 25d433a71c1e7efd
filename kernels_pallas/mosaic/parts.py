"""Parts that the Mosaic kernels share: shared-memory tiles for TMA and wgmma, one step of flash attention."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..compat import transpose_ref

LOG2_E = math.log2(math.e)
LOWEST = -1e30  # the maximum before the first key: finite, so that differences are never NaN
ROWS = 64  # of a wgmma tile
PAGE = 64  # positions of a page, and of a part of a ring that is contiguous
PROGRAMS = 264  # two per multiprocessor of an H100 or H200: one computes while the other loads
WGMMA = plgpu.Layout.WGMMA


def compiler_params(**kwargs: Any) -> plgpu.CompilerParams:
    return plgpu.CompilerParams(
        approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup, **kwargs
    )


def swizzle(width: int, dtype: Any) -> int:
    """Returns the widest swizzle, in bytes, that divides a row of this many elements."""
    return next(size for size in (128, 64, 32) if width * jnp.dtype(dtype).itemsize % size == 0)


def smem_tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns a shared-memory tile that TMA fills and wgmma reads."""
    size = swizzle(shape[-1], dtype)
    tiling = plgpu.TilingTransform((8, size // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(size)))


def pad_to_multiples(x: jax.Array, *multiples: int) -> jax.Array:
    """Returns x with its last axes zero-padded to these multiples, as TMA needs them. Copies only if it
    pads.
    """
    missing = [-size % multiple for size, multiple in zip(x.shape[-len(multiples) :], multiples, strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(multiples)) + [(0, n) for n in missing]) if any(missing) else x


def broadcast_along(x: jax.Array, shape: tuple[int, int], axis: int = 0) -> jax.Array:
    """Repeats one number per row over its columns. With axis 1 it repeats one number per column over its
    rows.
    """
    return lax.broadcast_in_dim(x, shape, [axis])


def column_index(shape: tuple[int, int]) -> jax.Array:
    """Returns int32: the column of each element."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)


def row_index(shape: tuple[int, int]) -> jax.Array:
    """Returns int32: the row of each element."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)


def init_softmax(width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns accumulator [64, H], running maximum [64] and running sum [64] before the first key."""
    row = WGMMA.reduce(1)
    return (
        plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), row),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row),
    )


def attention_scores(
    q_smem, k_smem, scale: float, soft_cap: float | None, meanwhile: Callable[[], None] = lambda: None
) -> jax.Array:
    """Scores q · kᵀ times log2 e, since the GPU has an instruction for 2**x. Calls `meanwhile` while the
    tensor cores compute.
    """

    def product(s_ref):
        plgpu.wgmma(s_ref, q_smem, transpose_ref(k_smem))
        meanwhile()
        return s_ref[...]

    s = pl.run_scoped(product, plgpu.ACC((q_smem.shape[0], k_smem.shape[0]), jnp.float32))
    return s * (scale * LOG2_E) if soft_cap is None else tanh_capped(s, scale, soft_cap) * (soft_cap * LOG2_E)


def tanh_capped(x: jax.Array, scale: float, soft_cap: float) -> jax.Array:
    """Returns tanh(scale · x / soft_cap), as 1 - 2 / (1 + e**2x): the GPU's own tanh has only 11 exact
    bits.
    """
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2_E * scale / soft_cap)))


def softmax_step(s, acc, largest, total):
    """Takes one step of online softmax. Returns the weights of this block, and the accumulator, maximum and
    sum of weights, rescaled to the new maximum.
    """
    new = jnp.maximum(largest, s.max(axis=1))
    shrink = jnp.exp2(largest - new)
    p = jnp.exp2(s - broadcast_along(new, s.shape))
    return p, acc * broadcast_along(shrink, acc.shape), new, total * shrink + p.sum(axis=1)


def key_capacity(k_PKSH: jax.Array, table_BP: jax.Array | None, ring: bool) -> int:
    """Returns positions below this number have slots, the latest of them in a ring."""
    if ring:
        return 2**30
    return k_PKSH.shape[2] * (1 if table_BP is None else table_BP.shape[1])


def lowest_key(position: jax.Array, window: int | None) -> jax.Array:
    """Returns the first position that the query at `position` sees."""
    return jnp.int32(0) if window is None else jnp.maximum(position - (window - 1), 0)


def key_places(i: jax.Array, *, block: int, row, k_ref, table_ref, ring: bool) -> list[tuple[Any, Any]]:
    """Returns the places of the keys at positions i · block … (i + 1) · block - 1 of a row. They are one pair
    (index of the first axis, first slot) if they are contiguous, otherwise one pair for every 64 positions.
    """
    if table_ref is None and not ring:
        return [(row, i * block)]
    units = [i * (block // PAGE) + j for j in range(block // PAGE)]
    if ring:
        return [(row, lax.rem(unit, jnp.int32(k_ref.shape[2] // PAGE)) * PAGE) for unit in units]
    # A block may reach, and loads may run, beyond the table: those values are not used.
    return [(table_ref[row, jnp.minimum(unit, table_ref.shape[1] - 1)], 0) for unit in units]


def load_block(ref, places: list[tuple[Any, Any]], head, smem, loaded) -> None:
    """Starts the TMA copies of one block of keys or values. Each arrives at the barrier `loaded`."""
    size = smem.shape[0] // len(places)
    for j, (index, slot) in enumerate(places):
        source = ref.at[index, head, pl.ds(slot, size)]
        plgpu.copy_gmem_to_smem(source, smem.at[pl.ds(j * size, size)], loaded)


def zero_rows_outside(tile_ref, begin: jax.Array | None, end: jax.Array) -> None:
    """Writes zeros to the rows of values before `begin` (None: 0) and from `end` on, since 0 * NaN is NaN. In
    small parts, which need few registers.
    """
    keys, width = tile_ref.shape
    wide = swizzle(width, tile_ref.dtype) // tile_ref.dtype.itemsize
    for row in range(0, keys, ROWS):
        for column in range(0, width, wide):
            part = tile_ref.at[pl.ds(row, ROWS), pl.ds(column, wide)]
            index = row_index((ROWS, wide)) + row
            wanted = index < end
            if begin is not None:
                wanted &= index >= begin
            part[...] = jnp.where(wanted, part[...], jnp.zeros((), part.dtype))
    plgpu.commit_smem()


def add_values(acc, p, v_smem, emulate: bool):
    """Returns acc + p · v. Pallas's interpreter has no wgmma with an operand in registers, so it gets a plain
    product.
    """
    if emulate:
        added = acc + jnp.dot(p, v_smem[...], preferred_element_type=jnp.float32)
        # A plain read, unlike that of wgmma, needs a fence before the TMA write that reuses the slot.
        plgpu.commit_smem()
        return added
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p, v_smem))(plgpu.ACC.init(acc))
