"""Partial results of attention to parts of the keys, as one result."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..dispatch import result_type
from .parts import LOG2_E, LOWEST, tile_size

_COLUMNS = 64  # of a program


def merge_splits(out_BKRPH, lse_BKRP, sink_N, G: int, dtype, interpret: bool) -> jax.Array:
    """Returns the results of P splits as one, [B, K, R, H], in one kernel.

    Args:
        out_BKRPH: float32, the result of each split.
        lse_BKRP: float32, base-2 logarithms of the splits' sums. `LOWEST`: the split has no keys, and its
            values were not written.
        G: the number of heads that share a key head. R has them innermost.
    """
    B, K, R, splits, H = out_BKRPH.shape
    wide = min(tile_size(H), _COLUMNS)
    count = tile_size(splits)
    inputs = [out_BKRPH, lse_BKRP]
    specs = [
        pl.BlockSpec((None, None, None, count, wide), lambda h, r, k, b: (b, k, r, 0, h)),
        pl.BlockSpec((None, None, None, count), lambda h, r, k, b: (b, k, r, 0)),
    ]
    if sink_N is not None:
        inputs.append(sink_N.reshape(K, G).astype(jnp.float32))
        specs.append(pl.BlockSpec((None, G), lambda h, r, k, b: (k, 0)))

    def kernel(*refs):
        out_ref, lse_ref, *sink_ref, merged_ref = refs
        real_P = jnp.arange(count) < splits
        real_W = pl.program_id(0) * wide + jnp.arange(wide) < H
        lse_P = pltriton.load(lse_ref, mask=real_P, other=LOWEST)
        out_PW = pltriton.load(out_ref, mask=(lse_P > LOWEST)[:, None] & real_W, other=0)
        largest = lse_P.max(0)
        if sink_ref:
            sink = sink_ref[0][lax.rem(pl.program_id(1), G)] * LOG2_E
            largest = jnp.maximum(largest, sink)
        weight_P = jnp.where(lse_P > LOWEST / 2, jnp.exp2(lse_P - largest), 0)
        total = weight_P.sum(0)
        if sink_ref:
            total += jnp.exp2(sink - largest)
        out_W = (out_PW * weight_P[:, None]).sum(0) / jnp.where(total == 0, 1, total)
        pltriton.store(merged_ref, out_W.astype(dtype), mask=real_W)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(H, wide), R, K, B),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, None, None, wide), lambda h, r, k, b: (b, k, r, h)),
        out_shape=result_type((B, K, R, H), dtype, *inputs),
        compiler_params=pltriton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="merge_attention",
    )(*inputs)
