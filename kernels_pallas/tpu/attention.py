"""Flash attention for TPUs over contiguous caches, rings and pages: prefill and decode are one kernel."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..dispatch import result_type
from ..key_layouts import LANES, Latents, SideBySide
from .attention_kernel import attention_kernel
from .attention_softmax import Settings
from .parts import emulator, keep_in_hbm, rotation_factors

BLOCK_BYTES = 2**20  # of keys and values in one of two buffers
_MAX_BLOCK = 1024  # keys
_COPY = 128  # slots of a contiguous cache or a ring that are copied at a time
_STEP = 512  # keys that the softmax takes at a time
_TILE_ROWS = 512  # of queries of a key head
_PART_ROWS = 512  # of these that the softmax takes at a time
_ALL_ROWS = 2048  # of queries of all key heads
_FEW_TOKENS = 17  # of a row: more are a prompt
_PROMPT_TOKENS = 256  # of a tile, at most
_PROMPT_BYTES = 24 * 2**20  # of its queries, results and sums
_PROMPT_LIMIT = 48 * 2**20  # with buffers of keys, and what the compiler spills
_BLOCK_ROWS = 16  # of one query each, in a block: a tile of memory in 16 bits
_NO_LIMIT = 2**30


def prefill_attention(  # noqa: PLR0913
    q_BTNH, kv_PKSX, v_PKSH, start_B, length_B, *, scale, window=None, soft_cap=None, table_BP=None,
    ring=False, sink_N=None, key_bias=None, first_key=0, interpret=False,
) -> jax.Array:  # fmt: skip
    """Computes causal attention of T new tokens to the keys in the cache (FlashAttention-2, Dao 2023), in the
    dtype of q.

    It takes the arguments of the reference, with keys and values `SideBySide`, or `Latents` whose widths fill
    lanes. q is float32 or bfloat16. If keys and values are side by side, H is 64, 128, 256 or 512. With a
    bias of keys S is a multiple of its stride. interpret: True: emulate a TPU on a CPU, slowly, and raise if
    accesses to memory race.
    """
    assert v_PKSH is None
    rank = kv_PKSX.rank
    if rank:
        q_BTNH = _pad(q_BTNH, 3, kv_PKSX.values.shape[3])
    B, T, N, H = q_BTNH.shape
    K = kv_PKSX.values.shape[1]
    settings = _settings(q_BTNH, kv_PKSX, scale, window, soft_cap, table_BP, ring, key_bias)
    settings = settings._replace(first_key=first_key)
    rows = settings.rows * pl.cdiv(settings.tokens * N // K, settings.rows)
    inputs = {"start": start_B, "length": length_B}
    if table_BP is not None:
        inputs["table"] = table_BP.reshape(-1)
    scalars = len(inputs)
    block = settings.block_rows
    if rank:
        q = _by_key_head(q_BTNH, K, rows, settings)
        one_tile = _blocks((1, 1, K, rows), lambda b, t, *_: (b, t, 0, 0, 0))
    elif block:  # rows of one token each
        q = q_BTNH.reshape(1, B, N * H)
        one_tile = _blocks((1, block), lambda b, t, *_: (0, lax.div(b, block), 0))
    else:
        q = q_BTNH.reshape(B, T, N * H)
        one_tile = _blocks((1, settings.tokens), lambda b, t, *_: (b, t, 0))
    out_width = rank or q.shape[-1]
    is_large = settings.is_prompt or rank > 0 and K * rows > _TILE_ROWS
    offset_R = np.tile(np.arange(settings.tokens, dtype=np.int32), N // K)  # the token of each row of a tile
    constants: dict[str, Any] = {"offset": _pad(offset_R, 0, rows)[:, None]}
    if sink_N is not None:
        sink_KR = jnp.repeat(sink_N.astype(jnp.float32).reshape(K, -1), settings.tokens, 1)
        constants["sink"] = _pad(sink_KR, 1, rows)[..., None]
    if key_bias is not None:
        constants["near"] = key_bias.near_KCH.astype(q.dtype)
        factors = rotation_factors(key_bias.cos_RP, -key_bias.sin_RP, H)
        constants["angle"] = jnp.concatenate(factors, -1)
    inputs |= {"q": q} | constants
    specs = [one_tile(q.shape[-1]), *[pl.BlockSpec()] * len(constants)]
    kv = keep_in_hbm(kv_PKSX, interpret)
    inputs["kv"] = kv.values
    if kv.scale is not None:
        inputs["scale"] = kv.scale
    specs += [pl.BlockSpec(memory_space=pltpu.HBM) for name in ("kv", "scale") if name in inputs]
    scratch = _scratch(q_BTNH, kv_PKSX, rows, settings)
    out = pl.pallas_call(
        partial(attention_kernel, names=(*inputs, "out", *scratch), settings=settings),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars,
            grid=(B, settings.tiles),
            in_specs=specs,
            out_specs=one_tile(out_width),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=result_type((*q.shape[:-1], out_width), q.dtype, *inputs.values()),
        compiler_params=pltpu.CompilerParams(
            disable_bounds_checks=True,
            vmem_limit_bytes=_PROMPT_LIMIT if is_large else None,
        ),
        interpret=emulator(interpret),
        name="attention",
    )(*inputs.values())
    return _by_token(out, q_BTNH, settings) if rank else out.reshape(B, T, N, H)


decode_attention = prefill_attention  # of few tokens per row


def _blocks(shape: tuple[int, ...], index: Callable) -> Callable[[int], pl.BlockSpec]:
    """Returns a function that gives the blocks of this shape and of a width in lanes."""
    return lambda width: pl.BlockSpec((*shape, width), index)


def _by_key_head(q_BTNH, K: int, rows: int, settings: Settings) -> jax.Array:
    """Returns the rows of each tile and key head, [B, tiles, K, rows, H], with a head's tokens in order."""
    B, _, N, H = q_BTNH.shape
    tokens = settings.tokens
    tiles = settings.tiles
    q = _pad(q_BTNH, 1, tiles * tokens).reshape(B, tiles, tokens, N, H)
    return _pad(jnp.swapaxes(q, 2, 3).reshape(B, tiles, K, -1, H), 3, rows)


def _by_token(out, q_BTNH, settings: Settings) -> jax.Array:
    """Returns [B, T, N, V] of results in the order of `_by_key_head`."""
    B, T, N, _ = q_BTNH.shape
    tokens = settings.tokens
    out = out[:, :, :, : tokens * N // out.shape[2]].reshape(B, settings.tiles, N, tokens, -1)
    return jnp.swapaxes(out, 2, 3).reshape(B, settings.tiles * tokens, N, -1)[:, :T]


def _settings(
    q_BTNH, kv: SideBySide | Latents, scale, window, soft_cap, table_BP, ring, key_bias
) -> Settings:
    B, T, N, H = q_BTNH.shape
    _, K, S, X = kv.values.shape
    positions = S if table_BP is None else S * table_BP.shape[1]
    chunk = copy_slots(S, table_BP is not None, kv.scale is not None)
    itemsize = q_BTNH.dtype.itemsize
    is_prompt = T > _FEW_TOKENS
    tokens = _prompt_tokens(T, N, H, itemsize) if is_prompt else tile_tokens(T, N // K, K)
    step = _STEP
    block = 2 ** int(math.log2(BLOCK_BYTES // (K * X * kv.values.dtype.itemsize)))
    block = min(max(block, LANES), _MAX_BLOCK, LANES * pl.cdiv(positions, LANES))
    if chunk > _COPY or LANES % chunk:  # all slots at once
        step = block = chunk
    block = step * pl.cdiv(block, step) if block > step else block
    step = min(step, block)
    limit = _NO_LIMIT if ring else positions
    tiles = pl.cdiv(T, tokens)
    pages = 0 if table_BP is None else table_BP.shape[1]
    rows = tokens if is_prompt else _part_rows(tokens * N // K, itemsize)
    block_rows = 0 if T > 1 or kv.rank else min(B, _BLOCK_ROWS)
    pairs = 0 if key_bias is None else key_bias.cos_RP.shape[1]
    sizes = H, block_rows, tokens, tiles, rows, limit, S, pages, chunk, step, block, pairs
    return Settings(scale, window, soft_cap, ring, is_prompt, kv.rank, *sizes)


def _part_rows(rows: int, itemsize: int) -> int:
    """Returns the rows of one of the parts into which a tile of queries is divided, a multiple of 8 or 16."""
    multiple = 32 // itemsize
    return multiple * pl.cdiv(pl.cdiv(rows, pl.cdiv(rows, _PART_ROWS)), multiple)


def copy_slots(slots: int, is_paged: bool, is_quantized: bool) -> int:
    """Returns the number of slots of a page, a row or a ring that one copy takes. It is a part that divides
    them and is aligned in memory, or all of them.
    """
    least = LANES if is_quantized else 64  # slots are in lanes of the scale
    if is_paged or slots % least:
        return slots
    return math.gcd(slots, _COPY)


def tile_tokens(tokens: int, group: int, heads: int) -> int:
    """Returns the tokens of a tile of queries, of which each has `group` rows for each key head."""
    most = max(min(_TILE_ROWS, _ALL_ROWS // heads) // group, 1)
    return tokens if tokens <= most else max(16, 2 ** int(math.log2(most)))


def _prompt_tokens(tokens: int, heads: int, width: int, itemsize: int) -> int:
    """Returns the number of tokens of a tile of a prompt, a multiple of 16. The softmax takes the tokens of a
    few heads together.
    """
    of_head = 4 * width * itemsize + 8 * LANES * pl.cdiv(width, LANES) + 8 * LANES
    most = max(16, 2 ** int(math.log2(_PROMPT_BYTES // (heads * of_head))))
    return min(most, _PROMPT_TOKENS, 16 * pl.cdiv(tokens, 16))


def _pad(x: Any, axis: int, size: int) -> Any:
    widths = [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)]
    return x.__array_namespace__().pad(x, widths)


def _scratch(q_BTNH, kv: SideBySide | Latents, rows: int, settings: Settings) -> dict[str, Any]:
    """Returns the on-chip memory that programs share, by the names that `attention_kernel` uses."""
    _, _, N, H = q_BTNH.shape
    _, K, _, X = kv.values.shape
    vectors = pltpu.VMEM((K, rows, LANES * pl.cdiv(H, LANES)), jnp.float32)
    sums = pltpu.VMEM((K, rows, LANES), jnp.float32)
    out_sums = pltpu.VMEM((K, rows, settings.rank), jnp.float32) if settings.rank else vectors
    scratch = {"kv_buffer": pltpu.VMEM((2, K, settings.block, X), kv.values.dtype)}
    if kv.scale is not None:
        chunks = settings.block // settings.chunk
        parts = kv.scale.shape[2]
        scratch["scale_buffer"] = pltpu.VMEM((2, chunks, K, parts, 4 * settings.chunk // parts), jnp.float32)
        scratch["query_sum"] = sums
    if settings.block_rows:
        scratch["flat"] = pltpu.VMEM((settings.block_rows, 1, N * H), jnp.float32)
    queries = pltpu.VMEM(vectors.shape, q_BTNH.dtype if settings.is_prompt else jnp.float32)
    scratch |= {"query": queries, "max": sums, "sum": sums, "out_sum": out_sums}
    return scratch | {"copied": pltpu.SemaphoreType.DMA((2, 2)), "count": pltpu.SMEM((1,), jnp.int32)}
