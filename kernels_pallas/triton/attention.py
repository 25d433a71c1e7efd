"""Flash attention for Triton over contiguous caches, rings and pages: prefill, and decode split over the
keys. Both are one kernel.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..dispatch import result_type
from ..key_layouts import BIAS_STRIDE, Latents, Levels
from .attention_kernel import Settings, attention_kernel
from .merge import merge_splits
from .parts import tile_size

STAGES = 3  # of the loop over keys: loads run ahead of the products by two blocks, if memory holds them
_MOST_STAGES = 8
_SHARED = 96 * 1024  # bytes of a tile of queries and of blocks of keys: RTX cards have 99 KB
_NO_LIMIT = 2**31 - 1
PROGRAMS = 264  # two for each of the 132 multiprocessors of an H200
_ENOUGH = 100  # programs that are not split: three quarters of these, nearly all 108 of an A100
# A program of latents takes the registers of a multiprocessor: if not all run at once, some wait for all.
_LATENT_PROGRAMS = PROGRAMS // 2
_LATENT_BLOCKS = 2  # of a split, at least: a partial result of 20 queries has the bytes of a block
# Bytes that a program of decode has in flight. An H200 delivers 4.8 TB/s, and a load takes about 0.8 µs:
# 29 KB for each multiprocessor, which may have only one program.
_IN_FLIGHT = 32 * 1024


def prefill_attention(  # noqa: PLR0913
    q_BTNH, k_PKSH, v_PKSH, start_B, length_B, *, scale, window=None, soft_cap=None, table_BP=None,
    ring=False, sink_N=None, key_bias=None, first_key=0, interpret=False,
) -> jax.Array:  # fmt: skip
    """Computes causal attention of T new tokens to the keys in the cache (FlashAttention-2, Dao 2023), in the
    dtype of q.

    It takes the arguments of the reference. Keys are in the dtype of q, or `Levels`, or `Latents`. H, or the
    rank of latents, is at most 512. A page and a ring have a multiple of 64 slots. interpret: True: run on
    any device, slowly, by Pallas's interpreter.
    """
    layout = (k_PKSH, v_PKSH, table_BP, key_bias)
    settings = _settings(q_BTNH, layout, scale, window, soft_cap, ring, interpret)
    settings = settings._replace(first_key=first_key)
    return _attention(q_BTNH, layout, start_B, length_B, sink_N, settings)


def decode_attention(  # noqa: PLR0913
    q_BTNH, k_PKSH, v_PKSH, start_B, length_B, *, scale, window=None, soft_cap=None, table_BP=None,
    ring=False, sink_N=None, key_bias=None, first_key=0, splits=None, interpret=False,
) -> jax.Array:  # fmt: skip
    """Computes attention of few tokens per row, with the keys split over programs (Flash-Decoding, Dao et al.
    2023).

    The blocks of keys that a row needs are divided evenly among the splits, so that cost follows the length
    and every split has work.

    Args:
        splits: programs per tile of queries. None: enough for the whole GPU. If rows and heads give about one
            program for each multiprocessor, there is one split: partial results would cost a launch, and with
            small keys a tenth of their bytes. A row that is longer than the others then takes longer.
    """
    layout = (k_PKSH, v_PKSH, table_BP, key_bias)
    settings = _settings(q_BTNH, layout, scale, window, soft_cap, ring, interpret)
    if splits is None:
        B, T, N, _ = q_BTNH.shape
        K = k_PKSH.shape[1]
        tiles = B * K * pl.cdiv(T * N // K, settings.rows)
        most = settings.slots if ring else settings.positions
        if window is not None:  # of the queries of a row, in whole blocks
            most = min(most, window + T - 2 + settings.keys)
        wanted = 1 if tiles >= _ENOUGH else pl.cdiv(PROGRAMS, tiles)
        least = settings.keys
        if settings.rank:
            wanted = _LATENT_PROGRAMS // tiles
            least *= _LATENT_BLOCKS
        splits = max(1, min(wanted, pl.cdiv(most, least)))
    ahead = pl.cdiv(_IN_FLIGHT, _block_bytes(k_PKSH, settings.keys))
    stages = min(max(settings.stages, 1 + ahead), _MOST_STAGES)
    settings = settings._replace(splits=splits, stages=stages, first_key=first_key)
    return _attention(q_BTNH, layout, start_B, length_B, sink_N, settings)


def _block_bytes(k: jax.Array | Levels | Latents, keys: int) -> int:
    """Returns the bytes of a block of keys and values of one head, with their steps and lows."""
    arrays = 1 if isinstance(k, Latents) else 2
    return arrays * keys * sum(x.shape[-1] * x.dtype.itemsize for x in jax.tree.leaves(k))


def _settings(q_BTNH, layout, scale, window, soft_cap, ring, interpret) -> Settings:
    k, _, table_BP, _ = layout
    B, T, N, H = q_BTNH.shape
    _, K, slots, columns = k.shape
    positions = slots if table_BP is None else slots * table_BP.shape[1]
    rank = k.rank if isinstance(k, Latents) else 0
    rows, keys, warps = _tiles(q_BTNH.dtype, rank or H, T * N // K, isinstance(k, Levels))
    free = _SHARED - rows * (H if rank else tile_size(H)) * q_BTNH.dtype.itemsize
    stages = min(STAGES, 1 + free // _block_bytes(k, keys))
    sizes = T, slots, _NO_LIMIT if ring else positions, H // columns, columns
    return Settings(scale, window, soft_cap, ring, rank, *sizes, rows, keys, warps, stages, 1, interpret)


def _attention(q_BTNH, layout, start_B, length_B, sink_N, settings: Settings) -> jax.Array:
    B, T, N, H = q_BTNH.shape
    K = layout[0].shape[1]
    G = N // K
    inputs, specs = _inputs(q_BTNH, layout, start_B, length_B, settings)
    rows = settings.rows
    splits = settings.splits
    V = settings.rank or H
    wide = tile_size(V) if settings.rank else settings.block_columns
    tiles = pl.cdiv(T * G, rows)
    shapes = [((B, T, K, G, V), q_BTNH.dtype)]
    out_specs = [pl.BlockSpec((None, T, None, G, wide), lambda i, k, b, r: (b, 0, k, 0, 0))]
    if splits > 1:
        shapes = [((B, K, T * G, splits, *axes), jnp.float32) for axes in ((V,), ())]
        out_specs = [
            pl.BlockSpec((None, None, rows, None, wide), lambda i, k, b, r: (b, k, tiles - 1 - r, i, 0)),
            pl.BlockSpec((None, None, rows, None), lambda i, k, b, r: (b, k, tiles - 1 - r, i)),
        ]
    elif sink_N is not None:
        inputs["sink"] = sink_N.reshape(K, G).astype(jnp.float32)
        specs["sink"] = pl.BlockSpec((None, G), lambda i, k, b, r: (k, 0))
    outs = pl.pallas_call(
        partial(attention_kernel, names=tuple(inputs), settings=settings),
        grid=(splits, K, B, tiles),  # the last axis varies slowest
        in_specs=[specs[name] for name in inputs],
        out_specs=out_specs,
        out_shape=[result_type(*shape, *inputs.values()) for shape in shapes],
        compiler_params=pltriton.CompilerParams(num_warps=settings.warps, num_stages=settings.stages),
        interpret=settings.interpret,
        name="attention",
    )(*inputs.values())
    if splits == 1:
        return outs[0].reshape(B, T, N, V)
    out_BKRPV, lse_BKRP = outs
    out_BKRV = merge_splits(out_BKRPV, lse_BKRP, sink_N, G, q_BTNH.dtype, settings.interpret)
    return jnp.swapaxes(out_BKRV.reshape(B, K, T, G, V), 1, 2).reshape(B, T, N, V)


def _inputs(q_BTNH, layout, start_B, length_B, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arrays that a program reads, by the names that `attention_kernel` uses, and their
    blocks.
    """
    k, v, table_BP, bias = layout
    B, T, N, H = q_BTNH.shape
    P, K, S, _ = k.shape
    wide = settings.block_columns
    slots = max(S, settings.keys)

    def one_head(*shape: int) -> pl.BlockSpec:  # of all rows or pages
        return pl.BlockSpec((P, None, *shape), lambda i, k, b, r: (0, k, 0, 0))

    one_row = pl.BlockSpec((1,), lambda i, k, b, r: (b,))
    inputs = {"start": start_B, "length": length_B, "q": q_BTNH.reshape(B, T, K, N // K, H)}
    specs = {"start": one_row, "length": one_row}
    specs["q"] = pl.BlockSpec((None, T, None, N // K, wide), lambda i, k, b, r: (b, 0, k, 0, 0))
    for name, x in {"k": k, "v": v}.items():
        if x is None:
            continue
        inputs[name] = x.values if isinstance(x, Levels | Latents) else x
        specs[name] = one_head(slots, wide if settings.rank else settings.width)
        if isinstance(x, Levels):
            inputs[f"{name}_scale"] = x.scale
            specs[f"{name}_scale"] = one_head(slots, 2)
    if table_BP is not None:
        inputs["table"] = table_BP
        specs["table"] = pl.BlockSpec((None, table_BP.shape[1]), lambda i, k, b, r: (b, 0))
    if bias is not None:
        inputs |= {"near": bias.near_KCH.astype(q_BTNH.dtype), "cos": bias.cos_RP, "sin": bias.sin_RP}
        specs["near"] = pl.BlockSpec((None, BIAS_STRIDE, wide), lambda i, k, b, r: (k, 0, 0))
        specs["cos"] = specs["sin"] = pl.BlockSpec(bias.cos_RP.shape, lambda i, k, b, r: (0, 0))
    return inputs, specs


def _tiles(dtype, H: int, rows: int, quantized: bool) -> tuple[int, int, int]:
    """Returns, for a program, the rows of a tile of queries, the rows of a tile of keys, and the warps.

    They compile for sm_80, and for sm_89 with 99 KB of shared memory, without register spills. Dequantized
    keys pass through registers, so their tiles are smaller. Heads above 256 have twice the sums of a row in
    registers.
    """
    width = tile_size(H)
    narrow = width <= 64
    full, keys, warps = (128, 64, 8) if width <= 128 else (64, 16, 8)
    if quantized and width <= 128:
        full, keys, warps = (64, 32, 8) if narrow else (32, 32, 8)
    is_float32 = jnp.dtype(dtype).itemsize == 4
    if is_float32:  # not for tensor cores: products are unrolled into registers
        full, keys, warps = (32, 32, 8) if narrow else (32, 16, 8)
        if quantized:
            full, keys, warps = (32, 16, 8) if narrow else (16, 16, 8)
    if width > 256:
        full = 16 if is_float32 else 32
        keys = 16 if is_float32 or quantized or rows <= 16 else 32
        warps = 4 if is_float32 and rows > 256 else 8
    rows = min(tile_size(rows), full)
    if quantized and narrow and rows == 16 and not is_float32:
        keys = 64  # more bytes in flight; with 32 rows some registers would spill
    wide = jnp.dtype(dtype).itemsize * width > 256
    return rows, keys, warps if rows == full or wide else 4
