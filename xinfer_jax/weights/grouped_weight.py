"""Matrices in int8 or int4 in groups of inputs, and their products.

A matrix has O outputs and I inputs, in Q groups of J inputs. A group of one output has Y bytes: J in int8,
J/2 in int4.

How CPU products in groups read the weights at memory speed:
- int4 is not unpacked. A byte is low + 16 high, the weights of inputs j and j + J/2, with activations x and
  y: low * x + high * y = low * (x - y/16) + byte * y/16. So activations are transformed once, and no weight
  is shifted. Zero points are subtracted from the result: each times the sum of its activations.
- A row times int4 is one loop nest that reads each byte once: the innermost loop sums a run of bytes of a
  group and is unrolled by LLVM; the loop over outputs is vectorized. A few rows are multiplied one by one.
- With more rows, a tile of outputs at a time is dequantized and multiplied.
- With int8 activations the scale of a group is an integer number of its output's steps, as in QServe (Lin et
  al. 2024): levels times it, rounded to int8, are a matrix in int8 with a scale per output, made in each
  product. A few rows keep their floats, and levels are not rounded.
"""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..ops.cpu import product_table
from ..ops.cpu.cpu_products import pad_outputs, quantize_activations, row_by_row, tiled_product
from ..ops.operation import match_varying_axes
from ..ops.product import dot, float_precision
from .padded_weight import PaddedWeight
from .rotated_weight import RotatedWeight
from .weight_leaf import WeightLeaf

GROUP = 64  # inputs that share a scale in int4
_SMALL = 64  # matrices with a side of at most this size have more scales (the package's docstring says why)
_SMALL_GROUP = {8: 8, 4: 32}  # inputs that share a scale in them, by bits
_RUN = 16  # bytes of one sum: 8 are 15% slower; LLVM does not unroll 32, a tenth of the speed
_FEW_TPU_ROWS = 64  # up to this number of rows a TPU multiplies by levels
STEP_BITS = 8  # of int8 that int4 becomes with int8 activations, a number is 1 << STEP_BITS steps
_INT8_NUMBERS = 8 << 20  # of a matrix in int8 at a time


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class GroupedWeight(RotatedWeight):
    """A matrix [O, I] as `(values - zero) * scale * step + offset` in groups of inputs. Outputs are last."""

    values: jax.Array  # int8 [Q, Y, O], I padded to Q * J; int4: uint8 from `pack_int4`
    # [Q, O]: float16 or float32; on TPUs of int4 float32 (`device_form`); with a step int16: how many.
    scale: jax.Array
    zero: jax.Array | None  # uint8 [Q, O]; None: 0
    order: jax.Array | None  # int32 [I]: the inputs of each group; None: in their own order
    inputs: int = dataclasses.field(metadata=dict(static=True))  # I
    offset: jax.Array | None = None  # a float type [Q, O]; None: 0
    step: jax.Array | None = None  # float32 [O], of int4 with int8 activations (`with_steps`); None: 1

    @property
    def int8_activations(self) -> bool:
        return self.step is not None

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.values.shape[:-3], self.values.shape[-1], self.inputs

    @property
    def group(self) -> int:
        """J."""
        return self.values.shape[-2] * (2 if self.values.dtype == jnp.uint8 else 1)

    @property
    def groups_with_padding(self) -> int:
        return 0 if self.values.shape[-3] * self.group == self.inputs else self.group

    def for_tpu(self) -> WeightLeaf:
        """Scales of packed groups are float32, since no kernel there reads float16. Packed experts that a
        kernel takes are padded, unless they fill tiles. Leaves with steps stay.
        """
        if self.values.dtype != np.uint8 or self.step is not None:
            return self
        weight = dataclasses.replace(self, scale=self.scale.astype(np.float32))
        is_plain = self.offset is None and self.order is None and not self.groups_with_padding
        return PaddedWeight.padded(weight) if is_plain and len(self.shape) > 2 else weight

    def local_shard(self, x: jax.Array, axis_name: str) -> tuple[jax.Array, Self]:
        """With an order, activations are gathered from all devices."""
        if self.order is not None:
            x = lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True)[..., self.order]
        return x, dataclasses.replace(self, order=None, inputs=x.shape[-1], axis_name=axis_name)

    def field_axes(self, *axes: str | None) -> dict[str, tuple[str | None, ...]]:
        *experts, outputs, inputs = axes
        of_groups = *experts, inputs, outputs
        values = *experts, inputs, None, outputs
        return {
            "values": values,
            "scale": of_groups,
            "zero": of_groups,
            "order": (inputs,),
            "offset": of_groups,
            "step": (*experts, outputs),
        }

    def group_scale(self) -> jax.Array:
        """float32 [Q, O]."""
        scale_QO = self.scale.astype(jnp.float32)
        return scale_QO if self.step is None else scale_QO * self.step

    def dequantize(self) -> jax.Array:
        values = self.values
        scale = self.group_scale()
        levels_QJO = values.astype(jnp.int32)
        if values.dtype == jnp.uint8:  # packed by `pack_int4`
            halves = (levels_QJO[:, None] >> np.array([0, 4], np.int32)[:, None, None]) & 15
            levels_QJO = halves.reshape(len(values), -1, values.shape[-1])
        levels_QJO = levels_QJO.astype(jnp.float32)
        if self.zero is not None:
            levels_QJO -= self.zero.astype(jnp.float32)[:, None]
        matrix_QJO = levels_QJO * scale[:, None]
        if self.offset is not None:
            matrix_QJO += self.offset.astype(jnp.float32)[:, None]
        matrix_IO = matrix_QJO.reshape(-1, values.shape[-1])[: self.inputs]
        if self.order is not None:
            matrix_IO = jnp.zeros_like(matrix_IO).at[self.order].set(matrix_IO)
        return self.unrotated(matrix_IO.T)

    def forms_product(self, x_MI: jax.Array) -> jax.Array:
        """Offsets are multiplied with the sums of groups of activations."""
        if self.offset is None:
            return super().forms_product(x_MI)
        y_MO = dataclasses.replace(self, offset=None).forms_product(x_MI)
        x_MI = x_MI if self.order is None else x_MI[:, self.order]
        sum_MQ = split_groups(x_MI.astype(jnp.float32), self.group, jnp).sum(-1)
        return y_MO + dot(sum_MQ, self.offset.astype(jnp.float32), 0)

    def cpu_product(self, x_MI: jax.Array) -> jax.Array:
        x_MI = self.rotated_inputs(x_MI).astype(jnp.float32)
        if self.order is not None:
            x_MI = x_MI[:, self.order]
        weight = dataclasses.replace(self, order=None, input_block=0)
        kind = "int4 activations" if self.int8_activations else "int4"
        form = product_table.fastest_form(kind, len(x_MI), *weight.shape)
        if form == product_table.ROWS:
            return row_by_row(lambda x_I: _row(x_I, weight), x_MI)
        if form == product_table.INT8:
            return _int8_product(x_MI, weight)

        def multiply_tile(first: jax.Array, size: int, weight: GroupedWeight) -> jax.Array:  # [M, size]
            tile = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size, x.ndim - 1), weight)
            return dot(x_MI, pad_outputs(tile.dequantize()))[:, :size]

        return tiled_product(multiply_tile, x_MI, weight.shape[0], 4 * weight.inputs, weight)

    def tpu_product(self, x_MI: jax.Array) -> jax.Array:
        return self.plain_product(x_MI) if self.int8_activations else tpu_grouped_product(x_MI, self)


def grouped_struct(
    shape: tuple[int, ...], bits: int, J: int, scale: Any = np.float16, ordered: bool = False
) -> GroupedWeight:
    """Shapes and types of a matrix [O, I] in groups of J; scale: its type; ordered: with an order."""
    (outputs, inputs) = shape
    struct: Any = jax.ShapeDtypeStruct
    Q = -(-inputs // J)
    (Y, kind) = (J, np.int8) if bits == 8 else (J // 2, np.uint8)
    return GroupedWeight(
        struct((Q, Y, outputs), kind),
        struct((Q, outputs), scale),
        None if bits == 8 else struct((Q, outputs), np.uint8),
        struct((inputs,), np.int32) if ordered else None,
        inputs,
    )


def group_size(shape: tuple[int, ...], bits: int) -> int:
    """Returns how many inputs of a matrix [O, I] share a scale by default."""
    if min(shape) <= _SMALL:
        return _SMALL_GROUP[bits]
    return GROUP if bits == 4 else shape[1]


def split_groups(x: Any, J: int, xp: Any = np) -> Any:
    """Returns [rows, inputs] as [rows, Q, J], padded with zeros. xp: NumPy or jax.numpy, as the array is."""
    return xp.pad(x, ((0, 0), (0, -x.shape[1] % J))).reshape(len(x), -1, J)


def pack_int4(levels_QJO: np.ndarray) -> np.ndarray:
    """Packs 4-bit numbers, uint8 [Q, J, O], to [Q, J/2, O]: j in a byte's low half, j + J/2 in its high."""
    half = levels_QJO.shape[1] // 2
    return levels_QJO[:, :half] | (levels_QJO[:, half:] << 4)


def unpack_int4(values_QYO: np.ndarray) -> np.ndarray:
    """The 4-bit numbers, uint8 [Q, J, O], that `pack_int4` packed."""
    return np.concatenate([values_QYO & 15, values_QYO >> 4], 1)


def tpu_grouped_product(x_MI: jax.Array, weight: GroupedWeight) -> jax.Array:
    """Returns x @ dequantize(weight).T, float32 [M, O], on TPUs: by halves (H) of packed bytes, so nothing is
    interleaved or transposed.

    Few rows are multiplied with the levels of each group, which are exact in bfloat16, and the results by the
    scale. For more rows the matrix is dequantized.
    """
    # The barrier makes weights depend on x, or XLA would convert all of them before the decode loop.
    x_MI, weight = lax.optimization_barrier((x_MI, weight))
    x_MI = x_MI if weight.order is None else x_MI[:, weight.order]
    Q, Y, _ = weight.values.shape
    M = len(x_MI)
    x_MQHY = split_groups(x_MI, weight.group, jnp).reshape(M, Q, -1, Y)
    scale_Q1O = weight.scale.astype(jnp.float32)[:, None]
    zero_Q1O = None if weight.zero is None else weight.zero.astype(jnp.float32)[:, None]
    packed = x_MQHY.shape[2] == 2
    y_MO: Any = 0
    for half in range(x_MQHY.shape[2]):
        levels_QYO = (weight.values >> 4 * half) & 15 if packed else weight.values
        levels_QYO = levels_QYO.astype(jnp.int32).astype(jnp.float32)
        x_QMY = jnp.swapaxes(x_MQHY[:, :, half], 0, 1)
        if M <= _FEW_TPU_ROWS:
            precision = float_precision(x_MI.dtype)
            levels_QYO = levels_QYO.astype(x_MI.dtype)
            y_QMO = lax.dot_general(x_QMY, levels_QYO, (((2,), (1,)), ((0,), (0,))), precision, jnp.float32)
            if zero_Q1O is not None:
                y_QMO -= x_QMY.astype(jnp.float32).sum(-1, keepdims=True) * zero_Q1O
            y_MO += (y_QMO * scale_Q1O).sum(0)
        else:
            levels_QYO = levels_QYO if zero_Q1O is None else levels_QYO - zero_Q1O
            matrix_IO = (levels_QYO * scale_Q1O).astype(x_MI.dtype).reshape(Q * Y, -1)
            y_MO += dot(x_MQHY[:, :, half].reshape(M, Q * Y), matrix_IO, 0)
    return y_MO


def _row(x_I: jax.Array, weight: GroupedWeight) -> jax.Array:
    """One row's product, [O]. A group is C runs of `run` bytes, and a byte has `halves` inputs."""
    Q, Y, outputs = weight.values.shape
    halves = weight.group // Y
    run = math.gcd(Y, _RUN)
    parts = split_groups(x_I[None], weight.group, jnp).reshape(Q, halves, -1, run).swapaxes(1, 2)
    # Factors of the levels and, last, of the zero points. They are computed by a dot, which XLA does not fuse
    # into the loop: there they would be computed for every output, and LLVM would not unroll it.
    mixed = np.kron([[1.0]] if halves == 1 else [[1, 0], [-1 / 16, 1 / 16]], np.eye(run))
    mixing = np.column_stack([mixed, np.ones(halves * run)]).astype(np.float32)
    factors = dot(parts.reshape(-1, halves * run), jnp.asarray(mixing), 0).reshape(Q, -1, halves * run + 1)
    # The barrier makes weights depend on x, or XLA would convert all of them before the decode loop.
    factors, weight = lax.optimization_barrier((factors, weight))
    *factors_QCY, total_QC1 = jnp.split(factors, (run, 2 * run)[:halves], axis=-1)
    wide = weight.values.reshape(Q, -1, run, outputs).astype(jnp.int32)  # 8-bit arithmetic is slower
    levels = (wide,) if halves == 1 else (wide & 15, wide)
    terms = [x[..., None] * y.astype(jnp.float32) for x, y in zip(factors_QCY, levels, strict=True)]
    # Not a + b: for plain sums XLA calls a library, which reads a float32 copy of all terms.
    sum_QCO = lax.reduce(sum(terms), np.float32(0), lambda a, b: -(-a - b), (2,))
    if weight.zero is not None:
        sum_QCO -= total_QC1 * weight.zero.astype(jnp.float32)[:, None]
    y_RO = (sum_QCO * weight.group_scale()[:, None]).reshape(-1, outputs)
    # A dot with ones: XLA would fuse a sum over runs into the loop, which then has no vector instructions.
    return dot(jnp.ones(len(y_RO), jnp.float32), y_RO, 0)


def _int8_product(x_MI: jax.Array, weight: GroupedWeight) -> jax.Array:
    """The product of int8 activations and the matrix in int8, [M, O]; large ones some groups at a time. Sums
    of int8 are exact, so other rows change no bit of a row.
    """
    assert weight.step is not None
    Q, Y, outputs = weight.values.shape
    int8_MI, factor_M1 = quantize_activations(x_MI, weight.axis_name)
    x_HMI = split_groups(int8_MI, weight.group, jnp).reshape(-1, Q, 2, Y).transpose(2, 0, 1, 3)
    x_HMI = x_HMI.reshape(2, len(x_MI), -1)
    most = max(1, _INT8_NUMBERS // (2 * Y * outputs))
    size = next(size for size in range(min(Q, most), 0, -1) if Q % size == 0)
    # It depends on x, or XLA would convert the matrices of all layers first.
    rounding = (1 << STEP_BITS - 1) + (factor_M1[0, 0] < 0).astype(jnp.int16)

    def add_groups(i: jax.Array, y_MO: jax.Array) -> jax.Array:
        # Without the barriers XLA would convert all groups first, and transpose them.
        *arrays, i = lax.optimization_barrier((weight.values, weight.scale, weight.zero, i))
        values_QYO, *of_groups = (lax.dynamic_slice_in_dim(x, i * size, size) for x in arrays)
        steps_Q1O, zero_Q1O = (x.astype(jnp.int16)[:, None] for x in of_groups)
        x_HMJ = lax.dynamic_slice_in_dim(x_HMI, i * size * Y, size * Y, 2)
        for x_MJ, levels_QYO in zip(x_HMJ, (values_QYO & 15, values_QYO >> 4), strict=True):
            steps_QYO = (levels_QYO.astype(jnp.int16) - zero_Q1O) * steps_Q1O
            int8_QYO = ((steps_QYO + rounding) >> STEP_BITS).astype(jnp.int8)
            y_MO += dot(x_MJ, lax.optimization_barrier(int8_QYO.reshape(-1, outputs)), 0, jnp.int32)
        return y_MO

    start = match_varying_axes(jnp.zeros((len(x_MI), outputs), jnp.int32), int8_MI, weight)
    y_MO = lax.fori_loop(0, Q // size, add_groups, start)
    return y_MO.astype(jnp.float32) * (weight.step * (1 << STEP_BITS)) / factor_M1
