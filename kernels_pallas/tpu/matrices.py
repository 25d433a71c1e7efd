"""The matrices that TPU kernels of products stream from HBM: the blocks of a grid step, and how few rows are
multiplied with one.

R rows of x are M, padded to tiles. A packed matrix has Q groups of J inputs, C inputs are some whole groups.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..key_layouts import LANES
from ..reference_products import Matrix
from .parts import dot

_SPLIT = 254  # steps of the lower int8 number of x in one of the higher
_DEPTH = 256  # inputs that a product of int4 sums up at once: those of a matrix unit
_FEW_ROWS = 16  # up to this number of rows int4 is multiplied as integers
_ROWS = 8  # groups whose scales are loaded at once
_DIGITS = 0x0F0F0F0F
_SIGNS = -0x7F7F7F80  # 0x80808080
_REPEAT = 0x01010101  # puts a byte into all four of a word


@dataclasses.dataclass(frozen=True)
class Form:
    """What is static about a matrix and the few rows that it is multiplied with."""

    kind: str  # "float", "int8" or "int4"
    dtype: Any  # of x
    rows: int  # R
    inputs: int  # with those that fill the last group
    outputs: int
    group: int = 1  # J
    has_zero: bool = False

    @classmethod
    def of(cls, matrix: Matrix, dtype: Any, rows: int) -> "Form":
        """The form of a matrix for x of this dtype and M rows."""
        values = matrix.values
        rows = 8 * pl.cdiv(rows, 8)
        if values.ndim == 3:
            Q, Y, outputs = values.shape
            return cls("int4", dtype, rows, 2 * Y * Q, outputs, 2 * Y, matrix.zero is not None)
        kind = "float" if matrix.scale is None else "int8"
        return cls(kind, dtype, rows, values.shape[1], values.shape[0])

    @property
    def dequantizes(self) -> bool:
        """Whether the matrix is converted to x's dtype first."""
        return self.kind == "int4" and self.rows > _FEW_ROWS

    @property
    def _is_integer(self) -> bool:
        """Whether x is split into integers."""
        return self.kind != "float" and not self.dequantizes

    @property
    def _chunk(self) -> int:
        """C."""
        groups = self.inputs // self.group
        return self.group * math.gcd(groups, max(1, _DEPTH // self.group))  # at most `_ROWS` groups

    def arrays(self, matrix: Matrix) -> list[jax.Array]:
        """The operands of a kernel, without a scale per output."""
        if self.kind != "int4":
            return [matrix.values]
        return [matrix.values, _readable(matrix.scale)] + ([matrix.zero] if self.has_zero else [])

    def blocks_of_outputs(self, tile: int, number: Callable[[Any], Any]) -> list[pl.BlockSpec]:
        """For each operand its block of `tile` outputs. number: of the block, in a grid step."""
        if self.kind == "int4":
            Q = self.inputs // self.group
            values = pl.BlockSpec((Q, self.group // 2, tile), lambda i: (0, 0, number(i)))
            return [values] + [pl.BlockSpec((Q, tile), lambda i: (0, number(i)))] * (1 + self.has_zero)
        return [pl.BlockSpec((tile, self.inputs), lambda i: (number(i), 0))]

    # --- x --------------------------------------------------------------------------------------------------

    def prepared(self) -> list[Any]:
        """Memory for the results of `prepare`."""
        R = self.rows
        step = pltpu.VMEM((R, LANES), jnp.float32)
        if self.kind == "float":
            return [pltpu.VMEM((R, self.inputs), self.dtype)]
        if self.kind == "int8":
            return [pltpu.VMEM((2 * R, self.inputs), jnp.int8), step]
        C = self._chunk
        if self._is_integer:
            return [pltpu.VMEM((self.inputs // C, C // self.group * 2 * R, C), jnp.int8), step]
        return [pltpu.VMEM((self.inputs // C, R, C), self.dtype)]

    def prepare(self, x_RI: jax.Array) -> list[jax.Array]:
        """x, float32 [R, I], in the form that `multiply` takes."""
        if self.kind == "float":
            return [x_RI.astype(self.dtype)]
        if not self._is_integer:
            return [jnp.stack(self._chunks(x_RI.astype(self.dtype)))]
        max_R1 = jnp.abs(x_RI).max(1, keepdims=True)
        step_R1 = jnp.where(max_R1 == 0, 1, max_R1) / 127
        exact_RI = x_RI / step_R1
        high_RI = jnp.round(exact_RI)
        low_RI = jnp.round((exact_RI - high_RI) * _SPLIT)
        step_RL = jnp.broadcast_to(step_R1 / _SPLIT, (self.rows, LANES))
        if self.kind == "int8":
            return [jnp.concatenate([high_RI, low_RI]).astype(jnp.int8), step_RL]
        group_RC = lax.div(lax.broadcasted_iota(jnp.int32, (self.rows, self._chunk), 1), self.group)
        chunks = []
        for parts in zip(self._chunks(high_RI), self._chunks(low_RI), strict=True):
            of_group = [
                jnp.where(group_RC == g, x, 0) for g in range(self._chunk // self.group) for x in parts
            ]
            chunks.append(jnp.concatenate(of_group).astype(jnp.int8))
        return [jnp.stack(chunks), step_RL]

    def _chunks(self, x_RI: jax.Array) -> list[jax.Array]:
        return [x_RI[:, i : i + self._chunk] for i in range(0, self.inputs, self._chunk)]

    # --- products -------------------------------------------------------------------------------------------

    def multiply(self, x: Sequence[Any], refs: Sequence[Any]) -> jax.Array:
        """x · blockᵀ, float32 [R, its outputs], without a scale per output.

        Args:
            x: references to what `prepare` returned.
            refs: to the block of each operand.
        """
        if self.kind == "float":
            return dot(x[0][...], refs[0][...], 1)
        if self.kind == "int4":
            return self._multiply_groups(x, *refs)
        return self._join(dot(x[0][...], refs[0][...], 1, jnp.int32)) * x[1][:, :1]

    def _join(self, sums: jax.Array) -> jax.Array:
        """float32 [R, O] of the sums of higher and lower numbers, int32 [2 R, O]. Their sum would not fit in
        32 bits.
        """
        sums = sums.astype(jnp.float32)
        return sums[: self.rows] * _SPLIT + sums[self.rows :]

    def _multiply_groups(self, x: Sequence[Any], *refs: Any) -> jax.Array:
        """float32 [R, O]: products with int4 in groups. refs: to values, scales and perhaps zero points."""
        Q, _, outputs = refs[0].shape
        y_RO = jnp.zeros((self.rows, outputs), jnp.float32)
        if Q % _ROWS or Q == _ROWS:
            y_RO = self._add_groups(x, refs, 0, Q, y_RO)
        else:  # a loop: less code

            def add(i: Any, y_RO: jax.Array) -> jax.Array:
                return self._add_groups(x, refs, pl.multiple_of(i * _ROWS, _ROWS), _ROWS, y_RO)

            y_RO = lax.fori_loop(0, Q // _ROWS, add, y_RO)
        return y_RO * x[1][:, :1] if self._is_integer else y_RO

    def _add_groups(self, x: Sequence[Any], refs: Any, first: Any, size: int, y_RO: jax.Array) -> jax.Array:
        """Adds the products of some groups, from the first on."""
        values_ref, scale_ref, *zero_ref = refs
        rows = pl.ds(first, size)
        has_float32 = scale_ref.dtype == jnp.float32
        scale = _float32(scale_ref[rows] if has_float32 else _numbers(scale_ref, first, size))
        offsets = [_SIGNS - _numbers(ref, first, size) * _REPEAT for ref in zero_ref]
        count = self._chunk // self.group
        for i in range(size // count):
            groups = range(i * count, (i + 1) * count)
            levels = [
                _levels(values_ref[first + g], [offset[g : g + 1] for offset in offsets]) for g in groups
            ]
            scales = [scale[g : g + 1] for g in groups]
            x_RC = x[0][lax.div(first, count) + i] if size < values_ref.shape[0] else x[0][i]
            if self._is_integer:
                sums = dot(x_RC, jnp.concatenate(levels), 0, jnp.int32)
                for pair, scale_1O in zip(jnp.split(sums, count), scales, strict=True):
                    y_RO += self._join(pair) * scale_1O
            else:
                matrices = [level.astype(jnp.float32) * of for level, of in zip(levels, scales, strict=True)]
                y_RO += dot(x_RC, jnp.concatenate(matrices).astype(self.dtype), 0)
        return y_RO


def _levels(values_YO: jax.Array, offset: Sequence[jax.Array]) -> jax.Array:
    """The levels of a group minus its zero points, int8 [J, O]; four in a word of 32 bits at once.

    offset: 128 minus the zero points, in each byte of a word; or nothing.
    """
    words = pltpu.bitcast(values_YO, jnp.int32)
    halves = [words & _DIGITS, lax.shift_right_logical(words, 4) & _DIGITS]
    for offset_1O in offset:  # no byte carries into the next
        halves = [(half + offset_1O) ^ _SIGNS for half in halves]
    return jnp.concatenate([pltpu.bitcast(half, jnp.int8) for half in halves])


def _numbers(ref: Any, first: Any, size: int) -> jax.Array:
    """int32 of some rows of 8 or 16 bits. A load at an index that is not static would have to take
    whole tiles, of 32 or 16 rows.
    """
    numbers = ref[...].astype(jnp.int32)
    if size == len(numbers):
        return numbers
    row = lax.broadcasted_iota(jnp.int32, numbers.shape, 0) - first
    return jnp.concatenate([jnp.where(row == i, numbers, 0).sum(0, keepdims=True) for i in range(size)])


def _readable(scale: jax.Array) -> jax.Array:
    """Scales as a kernel takes them: of float16, which it cannot read, the bits."""
    return lax.bitcast_convert_type(scale, jnp.uint16) if scale.dtype == jnp.float16 else scale


def _float32(scale: jax.Array) -> jax.Array:
    """The scales of `_readable`."""
    if scale.dtype == jnp.float32:
        return scale
    bits = scale.astype(jnp.int32)
    mantissa = bits & 0x3FF
    exponent = lax.shift_right_logical(bits, 10) & 31
    normal = lax.bitcast_convert_type(((exponent + 112) << 23) | (mantissa << 13), jnp.float32)
    size = jnp.where(exponent == 0, mantissa.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(bits >= 0x8000, -size, size)
