"""The greedy token for Triton: of given logits, or from hidden states without writing logits."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..dispatch import result_type
from .parts import LOWEST, dot, tile_size

BLOCK = 1024


def argmax(x_BV, *, interpret=False) -> jax.Array:
    """Returns the index of each row's largest number, int32 [B], like the reference. interpret: True: run on
    any device, slowly, by Pallas's interpreter.
    """
    B, V = x_BV.shape
    blocks = pl.cdiv(V, BLOCK)
    one = pl.BlockSpec((1, 1), lambda i, b: (b, i))
    best_Bi, index_Bi = pl.pallas_call(
        partial(_argmax_kernel, V=V),
        grid=(blocks, B),
        in_specs=[pl.BlockSpec((None, BLOCK), lambda i, b: (b, i))],
        out_specs=[one, one],
        out_shape=[result_type((B, blocks), dtype, x_BV) for dtype in (jnp.float32, jnp.int32)],
        compiler_params=pltriton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="argmax",
    )(x_BV)
    return _of_best_block(best_Bi, index_Bi)


def _argmax_kernel(x_ref, best_ref, index_ref, *, V):
    index_V = pl.program_id(0) * BLOCK + jnp.arange(BLOCK)
    x_V = pltriton.load(x_ref, mask=index_V < V, other=-jnp.inf).astype(jnp.float32)
    best_ref[0, 0], index_ref[0, 0] = _first_best(x_V, index_V)


def _first_best(x, index):
    """Returns the largest along the first axis, and its first index. A NaN is larger than every number."""
    nan = x != x  # tested separately, because the GPU's max drops it
    best = jnp.where(jnp.max(nan.astype(jnp.int32), 0) > 0, jnp.nan, jnp.max(jnp.where(nan, -jnp.inf, x), 0))
    return best, jnp.min(jnp.where(nan | (x == best), index, jnp.iinfo(jnp.int32).max), 0)


def _of_best_block(best_Bi, of_block_Bi):
    """Returns of_block_Bi at the block with the largest best_Bi, for each row."""
    return jnp.take_along_axis(of_block_Bi, jnp.argmax(best_Bi, -1, keepdims=True), -1)[:, 0]


def lm_head_argmax(
    x_BD, weight_VD, scale_V=None, *, soft_cap=None, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """Returns the greedy token and its log-probability, like the reference. Logits are never written. x is in
    the dtype of the weight. With an int8 matrix, whose numbers are exact in 16 bits, x is of 16 bits, and
    scales are float32. The matrix is read once for up to 64 rows. interpret: True: run on any device, slowly,
    by Pallas's interpreter.
    """
    B, D = x_BD.shape
    V = weight_VD.shape[0]
    rows = min(tile_size(B), 64)
    vocab = 128
    width = 128 // weight_VD.dtype.itemsize  # a row of the tile is one full cache line
    if scale_V is not None and rows > 16:
        width = 64  # as much of x, in 16 bits, is loaded beside it
    blocks = pl.cdiv(V, vocab)
    part = pl.BlockSpec((None, rows), lambda j, i: (i, j))
    best_iB, index_iB, sum_iB = pl.pallas_call(
        partial(_lm_head_kernel, B=B, D=D, V=V, width=width, soft_cap=soft_cap),
        grid=(pl.cdiv(B, rows), blocks),
        in_specs=[
            pl.BlockSpec((rows, max(D, width)), lambda j, i: (j, 0)),
            pl.BlockSpec((vocab, max(D, width)), lambda j, i: (i, 0)),
            *[pl.BlockSpec((vocab,), lambda j, i: (i,))] * (scale_V is not None),
        ],
        out_specs=[part] * 3,
        out_shape=[
            result_type((blocks, B), dtype, x_BD, weight_VD)
            for dtype in (jnp.float32, jnp.int32, jnp.float32)
        ],
        compiler_params=pltriton.CompilerParams(num_warps=4 if rows == 16 else 8, num_stages=4),
        interpret=interpret,
        name="lm_head_argmax",
    )(x_BD, weight_VD, *[scale_V] * (scale_V is not None))
    max_iB = jnp.maximum(best_iB, LOWEST)
    sum_B = (sum_iB * jnp.exp(max_iB - max_iB.max(0))).sum(0)
    return _of_best_block(best_iB.T, index_iB.T), best_iB.max(0) - max_iB.max(0) - jnp.log(sum_B)


int8_head_argmax = lm_head_argmax


def _lm_head_kernel(*refs, B, D, V, width, soft_cap):
    x_ref, weight_ref, *scale_ref, best_ref, index_ref, sum_ref = refs
    rows = x_ref.shape[0]
    vocab = weight_ref.shape[0]
    real_B = pl.program_id(0) * rows + jnp.arange(rows) < B
    index_V1 = (pl.program_id(1) * vocab + jnp.arange(vocab))[:, None]

    def step(i, logits_VB):
        real_D = i * width + jnp.arange(width) < D
        at = slice(None), pl.ds(i * width, width)
        x_BD = pltriton.load(x_ref.at[at], mask=real_B[:, None] & real_D, other=0)
        weight_VD = pltriton.load(weight_ref.at[at], mask=(index_V1 < V) & real_D, other=0)
        return logits_VB + dot(weight_VD.astype(x_BD.dtype), x_BD.T)

    logits_VB = lax.fori_loop(0, pl.cdiv(D, width), step, jnp.zeros((vocab, rows), jnp.float32))
    if scale_ref:
        logits_VB *= pltriton.load(scale_ref[0], mask=index_V1[:, 0] < V, other=0)[:, None]
    if soft_cap is not None:
        logits_VB = jnp.tanh(logits_VB * (1 / soft_cap)) * soft_cap
    logits_VB = jnp.where(index_V1 < V, logits_VB, -jnp.inf)
    best_B, index_B = _first_best(logits_VB, index_V1)
    pltriton.store(best_ref, best_B, mask=real_B)
    pltriton.store(index_ref, index_B, mask=real_B)
    pltriton.store(sum_ref, jnp.exp(logits_VB - jnp.maximum(best_B, LOWEST)).sum(0), mask=real_B)
