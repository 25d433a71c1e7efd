"""The append of a few tokens of each row on TPUs: norms of queries and keys, RoPE, levels, and the writes."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..dispatch import result_type
from ..key_layouts import LANES, HeadNorms, Latents, SideBySide
from .parts import Factors, as_row, emulator, keep_in_hbm, rotate_lanes, rotation_factors, to_levels
from .tiles import Tile, Tiling, Update, insert, make_tiling, scale_tile, select_type, update_tiles

FEW_TOKENS = 17
_PROGRAM_BYTES = 2**22  # of the rows of a program
_ROWS = 16  # of one token each: a tile of memory in 16 bits


class _Settings(NamedTuple):
    """The settings that are the same for every program."""

    width: int  # H
    tokens: int  # T
    rows: int  # of a program
    pairs: int  # of a head that RoPE rotates; 0: none
    eps: float  # of norms
    offset: float | None
    of_values: Tiling
    of_scale: Tiling


def tile_slots(dtype: Any) -> int:
    """Returns the slots of the smallest tile of keys and values that a copy takes."""
    return 32 // jnp.dtype(dtype).itemsize


def append_tokens(  # noqa: PLR0913
    qkv, angles, norms: HeadNorms | None, kv: Any, start_B, count_B, *, table_BP, ring, interpret
) -> tuple[jax.Array, Any]:
    """Returns the queries after norm and RoPE, and the cache with the first count_B[b] of T tokens of each
    row.

    Args:
        qkv: queries, keys and values [B, T, N or K, H]. Numbers of all heads are in lanes, as products leave
            them. Of latents the keys alone are read.
        angles: None, or cos and sin [B, T, P].
        norms, kv, start_B, count_B, table_BP, ring, interpret: see `rope_append`.
    """
    is_latent = isinstance(kv, Latents)
    B, T, N, _ = qkv[0].shape
    H = qkv[1].shape[-1]
    pairs = 0 if angles is None else angles[0].shape[-1]
    eps, offset = (0.0, None) if norms is None else (norms.eps, norms.offset)
    tilings = (
        make_tiling(tile_slots(kv.values.dtype), T, B, kv, table_BP, ring, 1),
        make_tiling(scale_tile(kv.values.shape[2]), T, B, kv, table_BP, ring, 2),
    )
    settings = _Settings(H, T, _program_rows(qkv, kv, tilings), pairs, eps, offset, *tilings)
    new = {"k": qkv[1]} if is_latent else dict(zip("qkv", qkv, strict=True))
    inputs = {name: _in_lanes(_fill_lanes(x, H)) for name, x in new.items()}
    if angles is not None:
        inputs |= {name: _in_lanes(x) for name, x in zip(("cos", "sin"), angles, strict=True)}
    specs = [_block(x, settings) for x in inputs.values()]
    if norms is not None:
        inputs |= {"q_norm": norms.q_H, "k_norm": norms.k_H}
        specs += [pl.BlockSpec(memory_space=pltpu.VMEM)] * 2
    scalars = {"start": start_B, "count": count_B}
    if table_BP is not None:
        scalars["table"] = table_BP.reshape(-1)
    bound = keep_in_hbm(kv, interpret)
    caches = {"values": bound.values} | ({} if bound.scale is None else {"scale": bound.scale})
    of_caches = [pl.BlockSpec(memory_space=pltpu.HBM)] * len(caches)
    scratch = _scratch(kv, settings)
    arrays = scalars | inputs | {f"old_{name}": x for name, x in caches.items()}
    outs = ({} if is_latent else {"rotated": inputs["q"]}) | caches
    names = (*arrays, *outs, *scratch)
    first = len(outs) - len(caches)
    results = pl.pallas_call(
        partial(_kernel, names=names, scalars=len(scalars), settings=settings),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(pl.cdiv(B, settings.rows),),
            in_specs=[*specs, *of_caches],
            out_specs=[*specs[:first], *of_caches],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[result_type(x.shape, x.dtype, *arrays.values()) for x in outs.values()],
        input_output_aliases={len(scalars) + len(inputs) + i: first + i for i in range(len(caches))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=emulator(interpret),
        name="append",
    )(*arrays.values())
    if is_latent:
        return qkv[0], dataclasses.replace(kv, values=results[0])
    rotated, *written = results
    return rotated[..., : N * H].reshape(B, T, N, H), SideBySide(*written)


def _program_rows(qkv, kv: SideBySide | Latents, tilings: tuple[Tiling, Tiling]) -> int:
    """Returns the number of rows of a program: all rows if each has one token, otherwise a multiple of 16."""
    B, T, N, H = qkv[0].shape
    K, _, X = kv.values.shape[1:]
    of_values, of_scale = tilings
    size = K * X * (4 * T + of_values.tiles * of_values.size * kv.values.dtype.itemsize)
    size += 8 * T * (N + 2 * K) * H
    if kv.scale is not None:
        size += 16 * K * of_scale.size * (T + of_scale.tiles)
    least = _ROWS if T == 1 else 1
    rows = max(_PROGRAM_BYTES // size // least * least, least)
    return min(rows, B)


def _fill_lanes(x_BTNH, width: int) -> jax.Array:
    """Returns [B, T, X] with X a multiple of 128 and of the width."""
    x = x_BTNH.reshape(*x_BTNH.shape[:2], -1)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % max(width, LANES))))


def _in_lanes(x_BTX) -> jax.Array:
    """Returns the array, or [1, B, X] of one token of each row: so that rows fill tiles."""
    return x_BTX.reshape(1, len(x_BTX), -1) if x_BTX.shape[1] == 1 else x_BTX


def _block(x, settings: _Settings) -> pl.BlockSpec:
    """Returns the rows of a program."""
    if settings.tokens == 1:
        return pl.BlockSpec((1, settings.rows, x.shape[2]), lambda i, *_: (0, i, 0))
    return pl.BlockSpec((settings.rows, *x.shape[1:]), lambda i, *_: (i, 0, 0))


def _scratch(kv: SideBySide | Latents, settings: _Settings) -> dict[str, Any]:
    """Returns the on-chip memory: the new numbers of each token, tiles of the caches, and semaphores of their
    copies.

    Tokens are [A, R]: if each row has one token [1, rows], otherwise [rows, T].
    """
    K, _, X = kv.values.shape[1:]
    rows = settings.rows
    tokens = (1, rows) if settings.tokens == 1 else (rows, settings.tokens)
    tiles = rows * settings.of_values.tiles
    scratch = {
        "new": pltpu.VMEM((tokens[0], K, tokens[1], X), select_type(kv.values.dtype)),
        "values_tile": pltpu.VMEM((tiles, K, settings.of_values.size, X), kv.values.dtype),
        "values_copied": pltpu.SemaphoreType.DMA((2, tiles)),
    }
    if kv.scale is None:
        return scratch
    tiles = rows * settings.of_scale.tiles
    parts = kv.scale.shape[2]
    lanes = 4 * settings.of_scale.size // parts
    return scratch | {
        "new_scale": pltpu.VMEM((tokens[0], K, parts, tokens[1], lanes), jnp.float32),
        "scale_tile": pltpu.VMEM((tiles, K, parts, lanes), jnp.float32),
        "scale_copied": pltpu.SemaphoreType.DMA((2, tiles)),
    }


def _kernel(*refs: Any, names: tuple[str, ...], scalars: int, settings: _Settings) -> None:
    """Runs one program. refs: in the order of `names`, with refs of scalar memory first. Caches are the same
    memory as input and as output.
    """
    ref = dict(zip(names, refs, strict=True))
    first_row = pl.program_id(0) * settings.rows

    def token(tile: Tile, t: Any) -> tuple[Any, Any]:
        row = tile.row - first_row
        return (0, row) if settings.tokens == 1 else (row, t)

    def insert_values(i: Any, tile: Tile, t: Any) -> None:
        a, r = token(tile, t)
        insert(ref["values_tile"].at[i], ref["new"][a, :, pl.ds(r, 1)], tile, settings.of_values, 1)

    def insert_scale(i: Any, tile: Tile, t: Any) -> None:
        a, r = token(tile, t)

        @pl.loop(0, ref["scale_tile"].shape[1])
        def _one_head(head: Any) -> None:
            old_ref = ref["scale_tile"].at[i, head]
            row = lax.broadcasted_iota(jnp.int32, old_ref.shape, 0)
            new = jnp.zeros(old_ref.shape, jnp.float32)
            for j in range(old_ref.shape[0]):
                new = jnp.where(row == j, ref["new_scale"][a, head, j, pl.ds(r, 1)], new)
            insert(old_ref, new, tile, settings.of_scale, 1)

    def update(name: str, tiling: Tiling, insert_token: Any) -> Update:
        memory = ref[name], ref[f"{name}_tile"], ref[f"{name}_copied"]
        change = partial(_each_token, insert_token, tiling, settings.tokens)
        return Update(*memory, tiling, first_row * tiling.tiles, change)

    updates = [update("values", settings.of_values, insert_values)]
    if "scale" in ref:
        updates.append(update("scale", settings.of_scale, insert_scale))
    of_program = pl.loop(0, ref["new"].shape[0])
    update_tiles(refs[:scalars], updates, lambda: of_program(partial(_compute, ref, settings)))


def _each_token(insert_token: Any, tiling: Tiling, tokens: int, i: Any, tile: Tile) -> None:
    """Inserts the tokens of a tile one by one."""
    if tokens == 1:
        insert_token(i, tile, 0)
        return

    @pl.loop(0, tokens)
    def _one(t: Any) -> None:
        position = tile.low + t
        here = (position >= tile.position) & (position < jnp.minimum(tile.position + tiling.size, tile.high))

        @pl.when(here)
        def _insert():
            insert_token(i, tile._replace(low=position, high=position + 1), t)


def _compute(ref, settings: _Settings, a: Any) -> None:
    """Computes rotated queries, and the new numbers of the caches, for R tokens [a]."""
    H = settings.width
    factors = rotation_factors(ref["cos"][a], ref["sin"][a], H) if settings.pairs else None
    k = _vectors(ref, settings, "k", a, factors)
    if "v" not in ref:  # latents
        for head, x_RW in enumerate(k):
            ref["new"][a, head] = x_RW
        return
    for i, x_RW in enumerate(_vectors(ref, settings, "q", a, factors)):
        W = x_RW.shape[1]
        ref["rotated"][a, :, i * W : (i + 1) * W] = x_RW.astype(ref["rotated"].dtype)
    v = _vectors(ref, settings, "v", a, None)
    for head in range(ref["new"].shape[1]):
        if H < LANES:
            pair = [_side_by_side(k[head // 2], v[head // 2], head % 2, H)]
        else:
            pair = [k[head], v[head]]
        if "scale" in ref:
            pair, numbers = to_levels(pair, H)
            _store_scale(ref["new_scale"].at[a, head], numbers)
        for i, x in enumerate(pair):
            W = x.shape[1]
            ref["new"][a, head, :, i * W : (i + 1) * W] = x


def _vectors(ref, settings: _Settings, name: str, a: Any, factors: Factors | None) -> list[jax.Array]:
    """Returns float32 [R, W] of one or two heads each, after norm and RoPE, rounded to the dtype of the
    input.
    """
    H = settings.width
    x_ref = ref[name]
    W = max(H, LANES)
    vectors = []
    for i in range(x_ref.shape[2] // W):
        x = x_ref[a, :, i * W : (i + 1) * W].astype(jnp.float32)
        if f"{name}_norm" in ref:
            x = _norm(x, as_row(ref[f"{name}_norm"]), settings, x_ref.dtype)
        if factors is not None:
            x = rotate_lanes(x, factors, settings.pairs)
            x = x.astype(x_ref.dtype).astype(jnp.float32)
        vectors.append(x)
    return vectors


def _norm(x_RW, weight_1H, settings: _Settings, dtype: Any) -> jax.Array:
    """Returns the RMS norm of each head, rounded as `HeadNorms` says."""
    H = settings.width
    W = x_RW.shape[1]
    squares_RW = x_RW * x_RW
    if W == H:
        mean = squares_RW.sum(-1, keepdims=True) / H
    else:
        is_first = lax.broadcasted_iota(jnp.int32, x_RW.shape, 1) < H
        halves = is_first, ~is_first
        first, second = (jnp.where(half, squares_RW, 0).sum(-1, keepdims=True) for half in halves)
        mean = jnp.where(is_first, first, second) / H
        weight_1H = jnp.concatenate([weight_1H, weight_1H], -1)
    x_RW = x_RW * lax.rsqrt(mean + settings.eps)
    if settings.offset is not None:
        x_RW = x_RW * (settings.offset + weight_1H)
    else:
        x_RW = weight_1H * x_RW.astype(dtype).astype(jnp.float32)
    return x_RW.astype(dtype).astype(jnp.float32)


def _side_by_side(k_RW, v_RW, half: int, width: int) -> jax.Array:
    """Returns the key and the value of one of two heads, in one vector."""
    is_key = lax.broadcasted_iota(jnp.int32, k_RW.shape, 1) < width
    if half:
        k_RW = pltpu.roll(k_RW, width, 1)
    else:
        v_RW = pltpu.roll(v_RW, width, 1)
    return jnp.where(is_key, k_RW, v_RW)


def _store_scale(scale_ref, numbers: list[jax.Array]) -> None:
    """Writes four numbers [R, 1] of each token to rows [R, lanes] as `SideBySide.scale` has them."""
    rows, _, lanes = scale_ref.shape
    if rows == 2:
        is_first = lax.broadcasted_iota(jnp.int32, scale_ref.shape[1:], 1) < lanes // 2
        numbers = [jnp.where(is_first, numbers[i], numbers[i + 1]) for i in (0, 2)]
    for i, x in enumerate(numbers):
        scale_ref[i] = jnp.broadcast_to(x, scale_ref.shape[1:])
