"""Products with experts' matrices in MXFP4, within Triton's kernels of experts.

A number is exact in 16 bits: two tables of eight bytes have the high and low bytes of each magnitude, and a
byte permutation takes those of four numbers at a time (13 instructions for four numbers, their signs
included). A group's sum is scaled in float32. The even inputs of a group come before the odd ones in x, so
that each half of its bytes is one product of 16 inputs.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..mxfp4 import GROUP, Mxfp4, number, power
from .parts import convert_halves, dot, outer

_HALF = GROUP // 2
# Of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6: their high bytes and their low ones, four in a number.
_TABLES = {
    "bfloat16": ("0x3f3f3f00", "0x40404040", "0xc0800000", "0xc0804000"),
    "float16": ("0x3e3c3800", "0x46444240", "0", "0"),
}


def mxfp4_products(
    x_ref, row_R: jax.Array, matrices: tuple[Mxfp4, ...], at: tuple[jax.Array, pl.Slice], interpret: bool
) -> tuple[jax.Array, ...]:
    """The rows row_R of x times the outputs `at` (expert, slice) of each matrix, float32 [R, O].

    x_ref has the even inputs of each group first.
    """
    (expert, out) = at
    groups = x_ref.shape[1] // GROUP
    at_once = math.gcd(groups, 2)

    def add_group(group, sums):
        columns = (group * GROUP + half * _HALF + jnp.arange(_HALF) for half in (0, 1))
        xs = [pltriton.load(x_ref.at[outer(row_R, column)]) for column in columns]
        added = []
        for sum_RO, matrix in zip(sums, matrices, strict=True):
            values_YO = pltriton.load(matrix.values.at[expert, group, pl.ds(0, _HALF), out])
            numbers = _numbers(values_YO, x_ref.dtype, interpret)
            product_RO = sum(dot(x_RY, number_YO) for x_RY, number_YO in zip(xs, numbers, strict=True))
            added.append(sum_RO + product_RO * power(pltriton.load(matrix.scale.at[expert, group, out])))
        return tuple(added)

    def step(i, sums):
        for j in range(at_once):
            sums = add_group(i * at_once + j, sums)
        return sums

    zeros_RO = jnp.zeros((len(row_R), out.size), jnp.float32)
    return lax.fori_loop(0, groups // at_once, step, (zeros_RO,) * len(matrices))


def _numbers(values_YO: jax.Array, dtype, interpret: bool) -> list[jax.Array]:
    """The numbers of `dtype` in each half of the bytes."""
    if interpret:
        return [number(values_YO, shift).astype(dtype) for shift in (0, 4)]
    (high_0, high_1, low_0, low_1) = _TABLES[jnp.dtype(dtype).name]
    asm = f"""{{{{
        .reg .b32 bits, place, high, low, first, last;
        shr.b32 bits, $2, {{shift}};
        and.b32 bits, bits, 0x0f0f0f0f;
        shr.b32 place, bits, 4;
        or.b32 place, place, bits;
        prmt.b32 place, place, 0, 0x4420;
        and.b32 place, place, 0x7777;
        mov.b32 first, {high_0};
        mov.b32 last, {high_1};
        prmt.b32 high, first, last, place;
        mov.b32 first, {low_0};
        mov.b32 last, {low_1};
        prmt.b32 low, first, last, place;
        and.b32 bits, bits, 0x08080808;
        shl.b32 bits, bits, 4;
        or.b32 high, high, bits;
        prmt.b32 $0, low, high, 0x5140;
        prmt.b32 $1, low, high, 0x7362;
    }}}}"""
    return convert_halves(asm, values_YO, dtype)
