"""Mixture of experts for Triton: an expert multiplies the tokens that chose it, and is read once for each
tile of them.

Choices (a token and one of its experts) are sorted by expert. A tile has up to `rows` consecutive choices of
one expert. The number of tiles is static, an upper bound. Tiles beyond the last one load and store nothing.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..dispatch import result_type
from ..mxfp4 import Mxfp4, even_inputs_first, place_in_group
from ..reference import inner_features
from ..reference_products import Matrix
from .fp8 import block_scale, flat_numbers, has_blocks
from .groups import expert_products
from .parts import Range, dot, outer, tile_size

_MOST_KEYS = 2**31  # of int32


class _Sizes(NamedTuple):
    """Sizes of a program's tiles, and its settings."""

    rows: int  # choices
    gate_outputs: int  # features of gate, and as many of up
    down_outputs: int
    width: int  # inputs of a step
    warps: int
    stages: int


def gated_experts(  # noqa: PLR0913
    x_MD, weight_MU, expert_MU, gate_XFD, up_XFD, down_XDF, *biases, activation, num_experts=None,
    limit=None, interpret=False,
) -> jax.Array:  # fmt: skip
    """Returns the sum of `reference.gated_experts`. A choice's bits depend neither on other choices nor on
    its place in a tile.

    Args:
        x_MD: tokens, in the dtype of the matrices, or of 16 bits with quantized matrices. D and F are
            multiples of 16.
        gate_XFD, up_XFD, down_XDF: see the reference. Groups have a multiple of 16 bytes. gate_XFD may be
            None.
        activation: an elementwise function of float32 arrays that Pallas can lower.
        num_experts: the number of experts that a token chooses from. It is X, or more if other devices have
            the others. It affects the sizes of tiles.
        interpret: True: run on any device, slowly, by Pallas's interpreter.
    """
    M, U = expert_MU.shape
    D = x_MD.shape[1]
    X, F = _experts_and_outputs(up_XFD)
    C = M * U
    sizes = _sizes(C / (num_experts or X), x_MD.dtype, _is_grouped(up_XFD))
    key_C, start_X1 = _sort(expert_MU.reshape(C), X)
    present = min(X, C)  # experts, at most
    tiles = (C + present * (sizes.rows - 1)) // sizes.rows
    whole = pl.BlockSpec(memory_space=pl.ANY)
    if isinstance(up_XFD, Mxfp4):
        x_MD = even_inputs_first(x_MD)

    def launch(kernel: Callable, args: tuple[Any, ...], width: int, most: int, name: str) -> jax.Array:
        """Runs a kernel for all tiles and `width` outputs, of which a program has up to `most`. Tiles of one
        expert run side by side, so that they share its weights.
        """
        outputs = math.gcd(width, most)
        return pl.pallas_call(
            partial(kernel, sizes=sizes, outputs=outputs, interpret=interpret),
            grid=(tiles, width // outputs),
            in_specs=jax.tree.map(lambda _: whole, args),
            out_specs=whole,
            out_shape=result_type((C, width), x_MD.dtype, *jax.tree.leaves(args)),
            compiler_params=pltriton.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
            interpret=interpret,
            name=name,
        )(*args)

    gate_up = partial(_gate_up_kernel, U=U, activation=activation, limit=limit)
    matrices = (up_XFD,) if gate_XFD is None else (gate_XFD, up_XFD)
    args = (start_X1, key_C, x_MD, matrices, biases[:2])
    inner_CF = launch(gate_up, args, F, sizes.gate_outputs, "experts_gate_up")
    args = (start_X1, key_C, inner_CF, down_XDF)
    out_CD = launch(_down_kernel, args, D, sizes.down_outputs, "experts_down")
    out_MUD = out_CD.reshape(M, U, D).astype(jnp.float32)
    if biases:
        out_MUD += biases[2][jnp.clip(expert_MU, 0, X - 1)]
    weighted_MUD = weight_MU[..., None] * out_MUD
    here_MU = (expert_MU >= 0) & (expert_MU < X)
    return jnp.where(here_MU[..., None], weighted_MUD, 0).sum(1)  # rows of other choices were never written


def _experts_and_outputs(matrix: Any) -> tuple[int, int]:
    """Returns X and O."""
    if isinstance(matrix, Mxfp4) or _is_grouped(matrix):
        return len(matrix.values), matrix.scale.shape[-1]
    return (matrix.values if isinstance(matrix, Matrix) else matrix).shape[:2]


def _is_grouped(matrix: Any) -> bool:
    return isinstance(matrix, Mxfp4 | Matrix) and matrix.values.ndim == 4


def _sizes(mean: float, dtype, is_grouped: bool) -> _Sizes:
    """Returns sizes for `mean` choices of an expert. Tiles of twice that number read most experts once. They
    compile for sm_80 and sm_89 with 99 KB of shared memory, without register spills.
    """
    rows = min(tile_size(math.ceil(2 * mean)), 128)
    if jnp.dtype(dtype).itemsize == 4:  # not for tensor cores: products are unrolled into registers
        return _Sizes(min(rows, 32), 32, 32, 32, 4, 3)
    if is_grouped:
        return _Sizes(rows, 64, 64, 0, 4 if rows <= 64 else 8, 4 if rows <= 32 else 3)
    if rows <= 32:  # memory is the limit: many loads at once, and programs for all multiprocessors
        return _Sizes(rows, 32, 64, 128, 4, 4)
    return _Sizes(rows, 64, 128, 64, 4 if rows == 64 else 8, 3)


def _sort(expert_C: jax.Array, X: int) -> tuple[jax.Array, jax.Array]:
    """Returns the choices in order of their experts, int32 [C], as expert * C + choice, or as the choice if
    int32 cannot hold that. Also returns the place in that order at which each expert begins, with the end of
    the last one, int32 [X + 1].
    """
    C = len(expert_C)
    expert_C = jnp.clip(expert_C, -1, X)  # experts of other devices
    if (X + 1) * C <= _MOST_KEYS:
        key_C = lax.sort(expert_C * C + jnp.arange(C), is_stable=False)  # no two keys are equal
        return key_C, (key_C < C * jnp.arange(X + 1)[:, None]).sum(1)
    expert_C, choice_C = lax.sort((expert_C, jnp.arange(C)), num_keys=2, is_stable=False)
    return choice_C, jnp.searchsorted(expert_C, jnp.arange(X + 1), method="sort")


def _find_tile(start_ref, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the expert of this program's tile, and its choices: the first in the sorted order, and the end.
    Without choices they are zeros.
    """
    X = start_ref.shape[0] - 1
    expert_X = jnp.arange(tile_size(X))
    first_X, stop_X = (
        pltriton.load(start_ref.at[jnp.minimum(expert_X + i, X)], mask=expert_X < X, other=0) for i in (0, 1)
    )
    tiles_X = pl.cdiv(stop_X - first_X, rows)
    tile_X = pl.program_id(0) - jnp.cumsum(tiles_X) + tiles_X  # relative to the expert's first tile
    own_X = (tile_X >= 0) & (tile_X < tiles_X)

    def found(value_X: jax.Array) -> jax.Array:
        return jnp.where(own_X, value_X, 0).sum()

    return found(expert_X), found(first_X + tile_X * rows), found(stop_X)


def _gate_up_kernel(
    *refs, sizes: _Sizes, U: int, outputs: int, activation: Callable, limit: float | None, interpret: bool
):
    start_ref, key_ref, x_ref, matrix_refs, bias_refs, inner_ref = refs
    expert, first, stop = _find_tile(start_ref, sizes.rows)
    column = pl.program_id(1) * outputs

    @pl.when(first < stop)
    def _():
        row_R = first + jnp.arange(sizes.rows)
        key_R = pltriton.load(key_ref.at[jnp.minimum(row_R, stop - 1)])
        token_R = lax.div(lax.rem(key_R, key_ref.shape[0]), U)
        at = expert, pl.ds(column, outputs)
        inputs = _products(x_ref, token_R, matrix_refs, at, sizes.width, interpret)
        if bias_refs:
            of_inputs = [pltriton.load(ref.at[at]).astype(jnp.float32) for ref in bias_refs]
            inputs = [x_RF + bias_F[None] for x_RF, bias_F in zip(inputs, of_inputs, strict=True)]
        inner_RF = inner_features(inputs, activation, limit).astype(inner_ref.dtype)
        column_F = column + jnp.arange(outputs)
        at = outer(row_R, place_in_group(column_F) if isinstance(matrix_refs[0], Mxfp4) else column_F)
        pltriton.store(inner_ref.at[at], inner_RF, mask=(row_R < stop)[:, None])


def _down_kernel(*refs, sizes: _Sizes, outputs: int, interpret: bool):
    start_ref, key_ref, inner_ref, down_ref, out_ref = refs
    expert, first, stop = _find_tile(start_ref, sizes.rows)
    column = pl.program_id(1) * outputs

    @pl.when(first < stop)
    def _():
        row_R = first + jnp.arange(sizes.rows)
        last_R = jnp.minimum(row_R, stop - 1)
        at = expert, pl.ds(column, outputs)
        (out_RD,) = _products(inner_ref, last_R, (down_ref,), at, sizes.width, interpret)
        choices = key_ref.shape[0]
        # The interpreter writes masked rows too, with what was there: no two rows may have one index.
        choice_R = jnp.where(row_R < stop, lax.rem(pltriton.load(key_ref.at[last_R]), choices), choices)
        at = outer(choice_R, column + jnp.arange(outputs))
        pltriton.store(out_ref.at[at], out_RD.astype(out_ref.dtype), mask=(row_R < stop)[:, None])


def _products(x_ref, row_R, matrices, at, width: int, interpret: bool) -> Sequence[jax.Array]:
    """Returns the rows row_R of x times the outputs `at` (expert, slice) of each matrix, float32 [R, O]."""
    if _is_grouped(matrices[0]):
        return expert_products(x_ref, row_R, matrices, at[0], Range(at[1], None), interpret)
    width = math.gcd(x_ref.shape[1], width)
    matrices = [matrix if isinstance(matrix, Matrix) else Matrix(matrix) for matrix in matrices]

    def step(i, sums):
        x_RI = pltriton.load(x_ref.at[outer(row_R, i * width + jnp.arange(width))])
        added = []
        for sum_RO, matrix in zip(sums, matrices, strict=True):
            values_OI = pltriton.load(matrix.values.at[*at, pl.ds(i * width, width)])
            product_RO = dot(x_RI, flat_numbers(values_OI, x_RI.dtype, interpret).T)
            if has_blocks(matrix):
                product_RO *= block_scale(matrix, at[:1], at[1].start, i * width)
            added.append(sum_RO + product_RO)
        return added

    zeros_RO = jnp.zeros((len(row_R), at[1].size), jnp.float32)
    sums = lax.fori_loop(0, x_ref.shape[1] // width, step, [zeros_RO] * len(matrices))
    if matrices[0].scale is None or has_blocks(matrices[0]):
        return sums
    scales = (pltriton.load(matrix.scale.at[at]) for matrix in matrices)
    return [sum_RO * scale_O for sum_RO, scale_O in zip(sums, scales, strict=True)]
