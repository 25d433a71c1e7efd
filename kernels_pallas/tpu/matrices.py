"""The matrices that TPU kernels of products stream from HBM: the blocks of a grid step, and how few rows are
multiplied with one.

R rows of x are M, padded to tiles. A packed matrix has Q groups of J inputs, C inputs are some whole groups.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..key_layouts import LANES
from ..mxfp4 import GROUP, power
from ..reference_products import FP8_BLOCK, Matrix
from . import fp8
from .parts import dot, has_bfloat16_vectors, pieces

_SPLIT = 254  # steps of the lower int8 number of x in one of the higher
_DEPTH = 256  # inputs that a product in groups sums up at once: those of a matrix unit
_ROWS = 8  # groups whose scales are loaded at once
_DIGITS = 0x0F0F0F0F
_SIGNS = -0x7F7F7F80  # 0x80808080
_REPEAT = 0x01010101  # puts a byte into all four of a word
_SIZES = 0x0E0E0E0E  # where E5M2 has the bits of a size in E2M1 in each byte of a word
_SIGNS_AND_SIZES = -0x71717172  # 0x8E8E8E8E: and its sign
_E2M1_SCALE = 2**14  # of a number in E2M1 to that one: exponents are larger by 14
_EIGHTS = -0x77777778  # 0x88888888


@dataclasses.dataclass(frozen=True)
class Form:
    """The static properties of a matrix and of the few rows that it is multiplied with."""

    kind: str  # "float", "int8", "fp8", "int4" or "mxfp4"
    dtype: Any  # of x
    rows: int  # R
    inputs: int  # with those that fill the last group
    outputs: int
    group: int = 1  # J
    has_zero: bool = False
    halves: bool = False  # the vector unit computes with pairs of bfloat16 numbers
    has_blocks: bool = False  # of FP8, with a scale each

    @classmethod
    def of(cls, matrix: Matrix, dtype: Any, rows: int) -> "Form":
        """Returns the form of a matrix for x of this dtype and M rows."""
        values = matrix.values
        rows = 8 * pl.cdiv(rows, 8)
        if values.ndim == 3:
            Q, Y, outputs = values.shape
            has_zero = matrix.zero is not None
            return cls("int4", dtype, rows, 2 * Y * Q, outputs, 2 * Y, has_zero, has_bfloat16_vectors())
        if values.dtype == jnp.uint8:
            size, outputs = values.shape
            return cls("mxfp4", dtype, rows, 2 * size, outputs, GROUP, halves=has_bfloat16_vectors())
        kind = {"int8": "int8", "float8_e4m3fn": "fp8"}.get(values.dtype.name, "float")
        has_blocks = kind == "fp8" and matrix.scale.ndim == 2
        return cls(kind, dtype, rows, values.shape[1], values.shape[0], has_blocks=has_blocks)

    @property
    def has_groups(self) -> bool:
        return self.group > 1

    @property
    def has_outputs_last(self) -> bool:
        """Returns True if XLA stores a matrix by inputs, since outputs fill tiles of 128 and inputs do
        not.
        """
        return self.has_groups or (self.inputs % LANES > 0 and self.outputs % LANES == 0)

    @property
    def _chunk(self) -> int:
        """C, the size of a chunk. The last chunk may be smaller."""
        return self.group * math.gcd(_ROWS, max(1, _DEPTH // self.group))

    @property
    def block_counts(self) -> tuple[int, int]:
        """The numbers of blocks along outputs and along inputs."""
        return pl.cdiv(self.outputs, FP8_BLOCK), pl.cdiv(self.inputs, FP8_BLOCK)

    def output_scale(self, matrix: Matrix) -> jax.Array | None:
        """Returns the scale per output, or None."""
        return None if self.has_groups or self.has_blocks else matrix.scale

    def arrays(self, matrix: Matrix) -> list[jax.Array]:
        """Returns the operands of a kernel, without a scale per output."""
        if not self.has_groups:
            values = jnp.swapaxes(matrix.values, -1, -2) if self.has_outputs_last else matrix.values
            return [values, matrix.scale] if self.has_blocks else [values]
        # A kernel reads no float16.
        scale = matrix.scale if self.kind == "mxfp4" else matrix.scale.astype(jnp.float32)
        return [matrix.values, scale] + ([matrix.zero] if self.has_zero else [])

    def tile_shapes(self, tile: int) -> list[tuple[tuple[int, ...], int]]:
        """Returns, for each operand, the shape of a tile of outputs and the axis of the outputs. -1: a tile
        has all outputs.
        """
        if not self.has_groups:
            values = ((self.inputs, tile), 1) if self.has_outputs_last else ((tile, self.inputs), 0)
            return [values, (self.block_counts, -1)] if self.has_blocks else [values]
        Q = self.inputs // self.group
        shape: tuple[int, ...] = (Q, self.group // 2, tile) if self.kind == "int4" else (Q * GROUP // 2, tile)
        return [(shape, len(shape) - 1)] + [((8 * pl.cdiv(Q, 8), tile), 1)] * (1 + self.has_zero)

    def group_memory(self, tile: int) -> list[Any]:
        """Returns memory for scales and zero points of a tile, as products take them."""
        if self.has_blocks:
            return [pltpu.VMEM((self.block_counts[1], LANES * pl.cdiv(tile, LANES)), jnp.float32)]
        shape = (8 * pl.cdiv(self.inputs // self.group, 8), tile)
        kinds = [jnp.int32 if self.halves else jnp.float32] + [jnp.int32] * self.has_zero
        return [pltpu.VMEM(shape, kind) for kind in kinds] if self.has_groups else []

    # --- x --------------------------------------------------------------------------------------------------

    def prepared(self) -> list[Any]:
        """Returns memory for the results of `prepare`."""
        R = self.rows
        if self.kind in ("float", "fp8"):
            copies = fp8.blocks_at_once() if self.has_blocks else 1
            return [pltpu.VMEM((copies * R, self.inputs), self.dtype)]
        if self.kind == "int8":
            return [pltpu.VMEM((2 * R, self.inputs), jnp.int8), pltpu.VMEM((R, LANES), jnp.float32)]
        C = self._chunk
        return [pltpu.VMEM((pl.cdiv(self.inputs, C), R, C), self.dtype)]

    def prepare(self, x_RI: jax.Array, refs: Sequence[Any]) -> None:
        """Stores x, float32 [R, I], in the form that `multiply` takes."""
        if self.kind in ("float", "fp8"):
            rows = fp8.rows_of_blocks(x_RI) if self.has_blocks else x_RI
            refs[0][...] = rows.astype(self.dtype)
            return
        if self.has_groups:
            orders: dict[int, jax.Array] = {}
            for i, first in enumerate(range(0, self.inputs, self._chunk)):
                x_RC = x_RI[:, first : first + self._chunk].astype(self.dtype)
                C = x_RC.shape[1]
                if self.kind == "int4" and self.halves:
                    if C not in orders:
                        orders[C] = self._order(C)
                    x_RC = dot(x_RC, orders[C], 0).astype(self.dtype)
                refs[0][i, :, :C] = x_RC
            return
        max_R1 = jnp.abs(x_RI).max(1, keepdims=True)
        step_R1 = jnp.where(max_R1 == 0, 1, max_R1) / 127
        is_real_R1 = jnp.abs(x_RI).sum(1, keepdims=True) < jnp.inf  # a maximum may leave out a NaN
        step_R1 = jnp.where(is_real_R1, step_R1, jnp.nan)
        exact_RI = x_RI / step_R1
        high_RI = jnp.round(exact_RI)
        low_RI = jnp.round((exact_RI - high_RI) * _SPLIT)
        refs[1][...] = jnp.broadcast_to(step_R1 / _SPLIT, (self.rows, LANES))
        refs[0][...] = jnp.concatenate([high_RI, low_RI]).astype(jnp.int8)

    def _order(self, size: int) -> jax.Array:
        """Returns [C, C] of zeros and ones, which put the inputs of a chunk in the order that its matrix of
        int4 has: the two halves of a byte one after the other.
        """
        Y = self.group // 2
        column, row = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (1, 0))
        byte = lax.div(column, 2)
        place = lax.rem(column, 2) * Y + lax.rem(byte, Y)
        return (row == lax.div(byte, Y) * self.group + place).astype(self.dtype)

    # --- products -------------------------------------------------------------------------------------------

    def multiply(
        self, x: Sequence[Any], refs: Sequence[Any], memory: Sequence[Any], read: Any = None
    ) -> jax.Array:
        """Returns x · blockᵀ, float32 [R, its outputs], without a scale per output.

        Args:
            x: references to the values that `prepare` stored.
            refs: references to the block of each operand.
            memory: `group_memory` for at least this number of outputs.
            read: with blocks: a function from the reference to scales to the column [Q, 1] of a block of
                outputs.
        """
        if self.has_groups:
            outputs = refs[0].shape[-1]
            self._store_groups(refs[1:], [ref.at[:, :outputs] for ref in memory])
            products = []
            for columns in pieces(outputs):
                of_groups = [ref.at[:, columns] for ref in memory]
                products.append(self._multiply_groups(x, refs[0].at[..., columns], of_groups))
            y_RO = jnp.concatenate(products, 1)
            return y_RO * _E2M1_SCALE if self.kind == "mxfp4" else y_RO
        axis = 0 if self.has_outputs_last else 1
        if self.kind == "float":
            return dot(x[0][...], refs[0][...], axis)
        if self.kind == "fp8":
            scales = memory[0] if memory else None
            return fp8.multiply(x[0], refs[0], self.rows, axis, scales, read and partial(read, *refs[1:]))
        sums = dot(x[0][...], refs[0][...], axis, jnp.int32).astype(jnp.float32)
        # The sum of both would not fit in 32 bits.
        return (sums[: self.rows] * _SPLIT + sums[self.rows :]) * x[1][:, :1]

    def _store_groups(self, refs: Sequence[Any], memory: Sequence[Any]) -> None:
        if self.kind == "mxfp4":
            exponent = refs[0][...].astype(jnp.int32)
            memory[0][: len(exponent)] = exponent << 7 | exponent << 23 if self.halves else power(exponent)
            return
        scale = refs[0][...]
        memory[0][: len(scale)] = _pair(scale) if self.halves else scale
        if self.has_zero:
            zero = refs[1][...].astype(jnp.int32)
            offset = _pair((zero - 8).astype(jnp.float32)) if self.halves else _SIGNS - zero * _REPEAT
            memory[1][: len(zero)] = offset

    def _multiply_groups(self, x: Sequence[Any], values: Any, of_groups: Sequence[Any]) -> jax.Array:
        """Returns products in groups, float32 [R, O]. of_groups: references to the values that
        `_store_groups` stored.
        """
        Q = self.inputs // self.group
        y_RO = jnp.zeros((self.rows, values.shape[-1]), jnp.float32)
        looped = Q // _ROWS * _ROWS if Q > _ROWS else 0
        add_groups = partial(self._add_groups, x, values, of_groups)

        def add(i: Any, y_RO: jax.Array) -> jax.Array:
            return add_groups(pl.multiple_of(i * _ROWS, _ROWS), _ROWS, y_RO)

        if looped:  # less code
            y_RO = lax.fori_loop(0, looped // _ROWS, add, y_RO, unroll=2 if self.kind == "mxfp4" else 1)
        return add_groups(looped, Q - looped, y_RO) if Q > looped else y_RO

    def _add_groups(self, x, values_ref, of_groups, first: Any, size: int, y_RO: jax.Array) -> jax.Array:
        """Adds the products of some groups, from the first on."""
        count = self._chunk // self.group
        for i, g in enumerate(range(0, size, count)):
            groups = range(g, min(g + count, size))
            inputs = len(groups) * self.group
            x_RC = x[0][lax.div(first, count) + i][:, :inputs]
            scales, *offsets = ([ref[pl.ds(first + j, 1)] for j in groups] for ref in of_groups)
            if self.kind == "mxfp4":
                size_of_groups = len(groups) * GROUP // 2
                at = pl.multiple_of((first + g) * (GROUP // 2), GROUP)
                matrix = self._mxfp4(values_ref[pl.ds(at, size_of_groups)], scales)
            elif self.halves:
                block = values_ref[pl.ds(first + g, len(groups))]
                matrix = self._by_halves(block.reshape(-1, block.shape[2]), scales, *offsets)
            else:
                of_group = offsets[0] if offsets else [None] * len(groups)
                levels = map(_levels, [values_ref[first + j] for j in groups], of_group)
                floats = [x.astype(jnp.float32) * scale for x, scale in zip(levels, scales, strict=True)]
                matrix = jnp.concatenate(floats).astype(self.dtype)
            y_RO += dot(x_RC, matrix, 0)
        return y_RO

    def _by_halves(
        self, values: jax.Array, scales: list[jax.Array], zeros: Sequence[jax.Array] = ()
    ) -> jax.Array:
        """Returns the bfloat16 matrix of a chunk, its inputs in the order of `_order`: bytes [Y ..., O], and
        pairs of each group's scale and zero point minus 8 [1, O].
        """
        words = pltpu.bitcast(values, jnp.int32)
        scale = _wide(scales, self.group)
        signed = pltpu.bitcast(words ^ _EIGHTS, jnp.int4).astype(jnp.bfloat16)  # levels minus 8
        return (signed - (_wide(zeros, self.group) if zeros else -8.0)) * scale

    def _mxfp4(self, values: jax.Array, scales: list[jax.Array]) -> jax.Array:
        """Returns the bfloat16 matrix of some groups over `_E2M1_SCALE`: of `values_for_tpu` [16 for each,
        O], and of each the scale [1, O] or a pair of it. In FP8 of type E5M2, which chips convert, numbers in
        E2M1 have the same bits, and smaller exponents.
        """
        words = pltpu.bitcast(values, jnp.int32)
        first = words & _SIGNS_AND_SIZES
        second = lax.shift_right_logical(words, 3) & _SIZES | (words << 7) & _SIGNS
        dtype = jnp.bfloat16 if self.halves else jnp.float32
        numbers = [pltpu.bitcast(half, jnp.float8_e5m2).astype(dtype) for half in (first, second)]
        factors = [_wide([scale], GROUP) if self.halves else scale for scale in scales]
        groups = [numbers[i % 2][i // 2 * GROUP :][:GROUP] * factor for i, factor in enumerate(factors)]
        return jnp.concatenate(groups).astype(jnp.bfloat16)


def _wide(pairs: Sequence[jax.Array], rows: int) -> jax.Array:
    """Returns each pair of numbers [1, O] in all rows of a group, bfloat16."""
    wide = [jnp.broadcast_to(pair, (rows // 2, pair.shape[1])) for pair in pairs]
    return pltpu.bitcast(jnp.concatenate(wide), jnp.bfloat16)


def _levels(values_YO: jax.Array, offset_1O: jax.Array | None) -> jax.Array:
    """Returns the levels of a group minus its zero points, int8 [J, O]. It takes four in a word of 32 bits at
    once. offset_1O: 128 minus the zero points, in each byte of a word, or None.
    """
    words = pltpu.bitcast(values_YO, jnp.int32)
    halves = [words & _DIGITS, lax.shift_right_logical(words, 4) & _DIGITS]
    if offset_1O is not None:  # no byte carries into the next
        halves = [(half + offset_1O) ^ _SIGNS for half in halves]
    return jnp.concatenate([pltpu.bitcast(half, jnp.int8) for half in halves])


def _pair(x: jax.Array) -> jax.Array:
    """Returns words of two equal bfloat16 numbers of a float32 number."""
    bits = lax.bitcast_convert_type(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.int32)
    return bits | lax.shift_right_logical(bits, 16)
