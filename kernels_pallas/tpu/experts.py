"""Mixture of experts for TPUs: one kernel, which reads each expert that some token chose once for a block of
tokens.

A tile is an expert and some of the rows that chose it. The pipeline of `pallas_call` reads the expert of the
next tile while one is computed, unless it is the same. Few tokens are all rows of each tile: memory is the
limit, so it costs nothing that an expert multiplies those that did not choose it. Of many tokens a tile has
up to `_TILE_ROWS` that chose the expert. They are taken from the tokens on the chip, and their results added
to those of the tokens, by products with matrices of zeros and ones: nothing is gathered in HBM.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..dispatch import result_type
from ..key_layouts import LANES
from .parts import dot, emulator

_FEW_TOKENS = 64
_TILE_ROWS = 128
_BLOCK_BYTES = 16 * 2**20  # of the results of a block of tokens, float32
_MOST_TOKENS = 2048  # of a block
_EXPERT_BYTES = 12 * 2**20  # of three matrices, or parts of them, of which there are two in VMEM
_LIMIT = 60 * 2**20


class _Tiles(NamedTuple):
    """The tiles of each block of tokens (A)."""

    expert_AT: jax.Array  # int32; of a tile without rows that of the last one with rows
    count_A: jax.Array  # int32: tiles with rows
    weight_ATR: jax.Array  # float32, 0 where there is no row
    token_ATR: jax.Array  # int32, the token in its block


def gated_experts(  # noqa: PLR0913
    x_MD, weight_MU, expert_MU, gate_XFD, up_XFD, down_XDF, *, activation, num_experts=None, interpret=False
) -> jax.Array:  # fmt: skip
    """The sum of `reference.gated_experts`.

    x is float32 or bfloat16, in the dtype of the matrices. A token that is not finite gives NaN, and so does
    one whose weights are not. The activation is an elementwise function of float32 arrays that Pallas can
    lower. interpret: emulate a TPU on a CPU, slowly, and raise where accesses to memory race.
    """
    matrices = (gate_XFD, up_XFD, down_XDF)
    is_sharded = num_experts not in (None, len(gate_XFD))
    options = dict(activation=activation, interpret=interpret)
    if len(x_MD) <= _FEW_TOKENS:
        return _of_few(x_MD, weight_MU, expert_MU, matrices, is_sharded, options)
    return _of_many(x_MD, weight_MU, expert_MU, matrices, options)


def _of_few(x_MD, weight_MU, expert_MU, matrices, is_sharded: bool, options) -> jax.Array:  # noqa: PLR0913
    X = len(matrices[0])
    expert_C = expert_MU.reshape(-1)
    if is_sharded:  # one of this device in place of those of others
        is_here_C = (expert_C >= 0) & (expert_C < X)
        expert_C = jnp.where(is_here_C, expert_C, jnp.where(is_here_C, expert_C, 0).max())
    if len(expert_C) < X:
        expert_T = lax.sort(expert_C, is_stable=False)
    else:
        is_used_X = (expert_C[:, None] == jnp.arange(X)).any(0)
        expert_T = lax.cummax(jnp.where(is_used_X, jnp.arange(X), 0))
    M, U = expert_MU.shape
    choices = pl.BlockSpec((M, U), lambda *_: (0, 0))
    inputs = (weight_MU.astype(jnp.float32), expert_MU)
    kernel = partial(_kernel_of_few, activation=options["activation"])
    return _call(kernel, (expert_T,), inputs, [choices] * 2, x_MD, M, matrices, [], options)


def _of_many(x_MD, weight_MU, expert_MU, matrices, options) -> jax.Array:
    M, D = x_MD.shape
    block = min(_block_tokens(D), LANES * pl.cdiv(M, LANES))
    blocks = pl.cdiv(M, block)
    x_MD, weight_MU = (_pad(x, blocks * block, 0) for x in (x_MD, weight_MU))
    # Products with zeros would spread a NaN to other tokens.
    is_finite_M1 = jnp.isfinite(x_MD).all(1, keepdims=True) & jnp.isfinite(weight_MU).all(1, keepdims=True)
    x_MD, weight_MU = (jnp.where(is_finite_M1, x, 0) for x in (x_MD, weight_MU))
    expert_MU = _pad(expert_MU, blocks * block, -1)
    by_block = partial(_tiles, X=len(matrices[0]))
    tiles = jax.vmap(by_block)(*(x.reshape(blocks, block, -1) for x in (weight_MU, expert_MU)))
    rows = tiles.weight_ATR.shape[2]
    count = tiles.expert_AT.shape[1]
    inputs = [x.reshape(-1, rows, 1) for x in (tiles.weight_ATR, tiles.token_ATR)]
    inputs.append(tiles.token_ATR.reshape(-1, 1, rows))

    def of_tile(b, t, *_):
        return b * count + t, 0, 0

    specs = [pl.BlockSpec((1, *x.shape[1:]), of_tile) for x in inputs]
    scalars = (tiles.expert_AT.reshape(-1), tiles.count_A)
    scratch = [pltpu.VMEM((rows, D), x_MD.dtype)]
    kernel = partial(_kernel_of_many, activation=options["activation"])
    out_MD = _call(kernel, scalars, inputs, specs, x_MD, block, matrices, scratch, options)
    return jnp.where(is_finite_M1, out_MD, jnp.nan)[:M]


def _call(kernel, scalars, inputs, specs, x_MD, block: int, matrices, scratch, options):  # noqa: PLR0913
    """Runs a kernel for blocks of tokens, tiles, and parts of experts. scalars: the expert of each tile, and
    perhaps how many tiles of each block have rows.
    """
    D = x_MD.shape[1]
    F = matrices[0].shape[1]
    width = _expert_width(F, D * x_MD.dtype.itemsize)
    parts = F // width
    blocks = len(x_MD) // block
    tiles = len(scalars[0]) // blocks

    def part(b, t, f, experts, counts=None):
        """The expert and the part of it to read. The first one of the next tile is read during this one, so a
        tile that computes nothing keeps the last.
        """
        at = b * tiles + t
        is_idle = _repeats(experts, t) if counts is None else t >= counts[b]
        return experts[at], jnp.where(is_idle, parts - 1, f)

    def of_inputs(*at):
        expert, f = part(*at)
        return expert, f, 0

    def of_outputs(*at):
        expert, f = part(*at)
        return expert, 0, f

    of_block = pl.BlockSpec((block, D), lambda b, *_: (b, 0), pipeline_mode=pl.Buffered(1))
    in_parts = [pl.BlockSpec((1, width, D), of_inputs)] * 2 + [pl.BlockSpec((1, D, width), of_outputs)]
    rows = scratch[0].shape[0] if scratch else block
    sums = [] if parts == 1 else [pltpu.VMEM((rows, D), jnp.float32)]
    inputs = (*inputs, x_MD, *matrices)
    return pl.pallas_call(
        partial(kernel, parts=parts),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(blocks, tiles, parts),
            in_specs=[*specs, of_block, *in_parts],
            out_specs=of_block,
            scratch_shapes=[*scratch, *sums],
        ),
        out_shape=result_type(x_MD.shape, jnp.float32, *scalars, *inputs),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3, disable_bounds_checks=True, vmem_limit_bytes=_LIMIT
        ),
        interpret=emulator(options["interpret"]),
        name="experts",
    )(*scalars, *inputs)


def _repeats(experts, tile) -> Any:
    """Whether the tile before has the same expert."""
    return (tile > 0) & (experts[tile] == experts[jnp.maximum(tile - 1, 0)])


def _block_tokens(width: int) -> int:
    """The tokens of a block, a multiple of 128."""
    return max(LANES, min(_MOST_TOKENS, _BLOCK_BYTES // (4 * width) // LANES * LANES))


def _expert_width(features: int, row_bytes: int) -> int:
    """The features of an expert that are read at a time: a part of all in multiples of 128, or all."""
    most = _EXPERT_BYTES // (3 * row_bytes)
    sizes = [size for size in range(LANES, features, LANES) if features % size == 0 and size <= most]
    return features if features <= most or not sizes else sizes[-1]


def _pad(x: jax.Array, rows: int, value: int) -> jax.Array:
    return jnp.pad(x, ((0, rows - len(x)), (0, 0)), constant_values=value)


def _tiles(weight_MU, expert_MU, X: int) -> _Tiles:
    """Tiles of up to `_TILE_ROWS` rows that chose an expert. Of one block of tokens."""
    M, U = expert_MU.shape
    C = M * U
    R = _TILE_ROWS
    count = min(X, C) + C // R
    expert_C = expert_MU.reshape(C)
    is_here_C = (expert_C >= 0) & (expert_C < X)
    key_C = jnp.where(is_here_C, expert_C, X) * C + jnp.arange(C)
    token_C = jnp.arange(C) // U
    _, token_C, weight_C = lax.sort(
        (key_C, token_C, weight_MU.reshape(C).astype(jnp.float32)), is_stable=False, num_keys=1
    )
    chosen_X = (expert_C[:, None] == jnp.arange(X)).sum(0)
    first_X = jnp.cumsum(chosen_X) - chosen_X
    tiles_X = pl.cdiv(chosen_X, R)
    last_X = jnp.cumsum(tiles_X)
    tile_T = jnp.minimum(jnp.arange(count), jnp.maximum(last_X[-1] - 1, 0))
    expert_T = jnp.minimum((last_X <= tile_T[:, None]).sum(1), X - 1)
    start_T = first_X[expert_T] + (tile_T - last_X[expert_T] + tiles_X[expert_T]) * R
    row_TR = start_T[:, None] + jnp.arange(R)
    is_row_TR = row_TR < (first_X + chosen_X)[expert_T][:, None]

    def of_rows(x_C):
        cut = partial(lax.dynamic_slice_in_dim, jnp.pad(x_C, (0, R)), slice_size=R)
        return jax.vmap(cut)(start_T)

    weight_TR = jnp.where(is_row_TR, of_rows(weight_C), 0)
    token_TR = jnp.where(is_row_TR, of_rows(token_C), M)
    return _Tiles(expert_T, last_X[-1], weight_TR, token_TR)


def _kernel_of_few(  # noqa: PLR0913
    experts_ref, weight_ref, chosen_ref, x_ref, gate_ref, up_ref, down_ref, out_ref, *sum_refs, parts,
    activation
):  # fmt: skip
    """Adds one part of an expert for all rows."""
    tile = pl.program_id(1)
    _clear_first(out_ref)

    def add(out_MD) -> None:
        weight_MU = jnp.where(chosen_ref[...] == experts_ref[tile], weight_ref[...], 0)
        weight_M1 = weight_MU.sum(1, keepdims=True)
        out_ref[...] += jnp.where(weight_M1 != 0, weight_M1 * out_MD, 0)  # 0 * inf would be NaN

    @pl.when(jnp.logical_not(_repeats(experts_ref, tile)))
    def _compute():
        _add_part(_gated_mlp(x_ref[...], gate_ref, up_ref, down_ref, activation), sum_refs, parts, add)


def _kernel_of_many(  # noqa: PLR0913
    experts_ref, count_ref, weight_ref, token_ref, across_ref, x_ref, gate_ref, up_ref, down_ref, out_ref,
    rows_ref, *sum_refs, parts, activation
):  # fmt: skip
    """Adds one part of an expert for the rows of a tile."""
    _clear_first(out_ref)

    def add(out_RD) -> None:
        is_token_MR = lax.broadcasted_iota(jnp.int32, (len(out_ref), len(out_RD)), 0) == across_ref[0]
        weighted_RD = (weight_ref[0] * out_RD).astype(x_ref.dtype)
        out_ref[...] += dot(is_token_MR.astype(x_ref.dtype), weighted_RD, 0)

    @pl.when(pl.program_id(1) < count_ref[pl.program_id(0)])
    def _compute():
        @pl.when(pl.program_id(2) == 0)
        def _take_rows():
            is_token_RM = lax.broadcasted_iota(jnp.int32, (len(rows_ref), len(x_ref)), 1) == token_ref[0]
            rows_ref[...] = dot(is_token_RM.astype(x_ref.dtype), x_ref[...], 0).astype(rows_ref.dtype)

        _add_part(_gated_mlp(rows_ref[...], gate_ref, up_ref, down_ref, activation), sum_refs, parts, add)


def _clear_first(out_ref) -> None:
    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _clear():
        out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)


def _gated_mlp(x_RD, gate_ref, up_ref, down_ref, activation: Callable) -> jax.Array:  # float32 [R, D]
    inner_RF = activation(dot(x_RD, gate_ref[0], 1)) * dot(x_RD, up_ref[0], 1)
    return dot(inner_RF.astype(x_RD.dtype), down_ref[0], 1)


def _add_part(out_RD, sum_refs, parts: int, add: Callable) -> None:
    """Calls `add` with the sum of all parts of an expert, at the last one."""
    if parts == 1:
        add(out_RD)
        return
    (sum_ref,) = sum_refs
    part = pl.program_id(2)

    @pl.when(part == 0)
    def _first():
        sum_ref[...] = out_RD

    @pl.when(part > 0)
    def _next():
        sum_ref[...] += out_RD

    pl.when(part == parts - 1)(lambda: add(sum_ref[...]))
