"""Products with matrices in groups of inputs, for Triton's kernels of products and of experts.

- A level of int4 becomes 128 + level in bfloat16 (1,024 + level in float16) by putting it into the last bits
  of that number: seven instructions for eight levels. The product with 128 + zero, the same for a whole
  group, is subtracted from the group's sum. The sum is scaled in float32.
- Of experts in MXFP4 the even inputs of a group come before the odd ones in x, so that each half of a
  group's bytes is one product here too.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from ..mxfp4 import Mxfp4, power
from .mxfp4 import mxfp4_numbers
from .parts import Range, convert_halves, dot, load_tile, outer

_RUN = 32  # bytes


class Run(NamedTuple):
    """Bytes of a group that one product multiplies: all or a part of them."""

    group: jax.Array
    bytes: Range
    inputs: list[jax.Array]  # the first one of each half

    @classmethod
    def of(cls, number: jax.Array, values: Any) -> "Run":
        """Returns the run of this number in values [..., Q, Y, O]."""
        Y = values.shape[-2]
        size = group_run(Y)
        group = lax.div(number, Y // size)
        byte = lax.rem(number, Y // size) * size
        halves = 2 if values.dtype == jnp.uint8 else 1
        first = group * (halves * Y) + byte
        return cls(group, Range.of(byte, size, Y), [first + half * Y for half in range(halves)])


def group_run(Y: int) -> int:
    """Returns the bytes of a group that one product multiplies: a power of two."""
    return min(Y & -Y, _RUN)


def count_runs(values: Any) -> int:
    """Returns the runs of values [..., Q, Y, O]."""
    (Q, Y, _) = values.shape[-3:]
    return Q * Y // group_run(Y)


def add_run(
    sums: Sequence[jax.Array], xs: Sequence[jax.Array], matrices: Sequence[Any], at: tuple, run: Run,
    out: Range, interpret: bool,
) -> list[jax.Array]:  # fmt: skip
    """Returns the sums, float32 [M, O] of each matrix, plus the products of a run.

    xs: x of the run's halves. matrices: `Matrix` in groups, or `Mxfp4`. at: the expert, or nothing.
    """
    dtype = xs[0].dtype
    total_M = jnp.sum(sum(x_MY.astype(jnp.float32) for x_MY in xs), 1)
    added = []
    for sum_MO, matrix in zip(sums, matrices, strict=True):
        values_YO = load_tile(matrix.values, *at, run.group, run.bytes, out)
        is_mxfp4 = isinstance(matrix, Mxfp4)
        numbers = (mxfp4_numbers if is_mxfp4 else _levels)(values_YO, dtype, interpret)
        run_MO = sum(dot(x_MY, number_YO) for x_MY, number_YO in zip(xs, numbers, strict=True))
        zero = None if is_mxfp4 else matrix.zero
        has_magic = not is_mxfp4 and len(numbers) == 2
        if has_magic or zero is not None:
            zero_O = jnp.full(out.slice.size, _magic(dtype) if has_magic else 0, jnp.float32)
            if zero is not None:
                zero_O += load_tile(zero, *at, run.group, out).astype(jnp.float32)
            run_MO -= total_M[:, None] * zero_O
        scale_O = load_tile(matrix.scale, *at, run.group, out)
        added.append(sum_MO + run_MO * (power(scale_O) if is_mxfp4 else scale_O.astype(jnp.float32)))
    return added


def expert_products(
    x_ref, row_R: jax.Array, matrices: Sequence[Any], expert: jax.Array, out: Range, interpret: bool
) -> list[jax.Array]:
    """Returns the rows row_R of x times outputs of an expert's matrices in groups, float32 [R, O]."""
    values = matrices[0].values
    runs = count_runs(values)
    at_once = math.gcd(runs, _RUN // group_run(values.shape[-2]))

    def add_one(number, sums):
        run = Run.of(number, values)
        columns = (first + jnp.arange(run.bytes.slice.size) for first in run.inputs)
        xs = [pltriton.load(x_ref.at[outer(row_R, column)]) for column in columns]
        return add_run(sums, xs, matrices, (expert,), run, out, interpret)

    def step(i, sums):
        for j in range(at_once):
            sums = add_one(i * at_once + j, sums)
        return sums

    zeros_RO = jnp.zeros((len(row_R), out.slice.size), jnp.float32)
    return lax.fori_loop(0, runs // at_once, step, [zeros_RO] * len(matrices))


def _levels(values_YO: jax.Array, dtype: Any, interpret: bool) -> list[jax.Array]:
    """Returns numbers of `dtype` for each half of a group: int8, or int4 plus `_magic`."""
    if values_YO.dtype != jnp.uint8:
        return [values_YO.astype(dtype)]
    if interpret:
        wide = values_YO.astype(jnp.int32)
        return [(level + int(_magic(dtype))).astype(dtype) for level in (wide & 15, wide >> 4)]
    high = {"bfloat16": "0x43434343", "float16": "0x64646464"}[jnp.dtype(dtype).name]
    asm = f"""{{{{
        .reg .b32 level;
        shr.b32 level, $2, {{shift}};
        and.b32 level, level, 0x0f0f0f0f;
        prmt.b32 $0, level, {high}, 0x4140;
        prmt.b32 $1, level, {high}, 0x4342;
    }}}}"""
    return convert_halves(asm, values_YO, dtype)


def _magic(dtype: Any) -> float:
    """Returns the number whose last bits are the bits of a level: 128 with 7 bits, 1,024 with 10."""
    return float(1 / jnp.finfo(dtype).eps)
