"""Matrices in int8 or int4 in groups of inputs, and their products.

A matrix has O outputs and I inputs, in Q groups of J inputs. A group of one output has Y bytes: J in int8,
J/2 in int4.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..ops.product import dot
from .padded_weight import PaddedWeight
from .rotated_weight import RotatedWeight
from .weight_leaf import WeightLeaf

GROUP = 64  # inputs that share a scale in int4
_SMALL = 64  # matrices with a side of at most this size have more scales (the package's docstring says why)
_SMALL_GROUP = {8: 8, 4: 32}  # inputs that share a scale in them, by bits
STEP_BITS = 8  # of int8 that int4 becomes with int8 activations, a number is 1 << STEP_BITS steps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class GroupedWeight(RotatedWeight):
    """A matrix [O, I] as `(values - zero) * scale * step + offset` in groups of inputs. Outputs are last."""

    operation = "grouped_product"
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
        """Returns the leaf for TPUs. Scales of packed groups are float32, since no kernel there reads
        float16. Packed experts that a kernel takes are padded, unless they fill tiles. Leaves with steps
        stay.
        """
        if self.values.dtype != np.uint8 or self.step is not None:
            return self
        weight = dataclasses.replace(self, scale=self.scale.astype(np.float32))
        is_plain = self.offset is None and self.order is None and not self.groups_with_padding
        return PaddedWeight.padded(weight) if is_plain and len(self.shape) > 2 else weight

    def local_shard(self, x: jax.Array, axis_name: str) -> tuple[jax.Array, Self]:
        """Returns the activations and the leaf for a device's shard. If there is an order, activations are
        gathered from all devices.
        """
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
        """Returns float32 [Q, O]."""
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

    def product_of_rows(self, x_MI: jax.Array) -> jax.Array:
        """Returns the product. Offsets are multiplied with the sums of groups of activations."""
        if self.offset is None:
            return super().product_of_rows(x_MI)
        y_MO = dataclasses.replace(self, offset=None).product_of_rows(x_MI)
        x_MI = x_MI if self.order is None else x_MI[:, self.order]
        sum_MQ = split_groups(x_MI.astype(jnp.float32), self.group, jnp).sum(-1)
        return y_MO + dot(sum_MQ, self.offset.astype(jnp.float32), 0)


def grouped_struct(
    shape: tuple[int, ...], bits: int, J: int, scale: Any = np.float16, ordered: bool = False
) -> GroupedWeight:
    """Returns shapes and types of a matrix [O, I] in groups of J. scale: its type. ordered: True: it has an
    order.
    """
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
    """Returns the number of inputs of a matrix [O, I] that share a scale by default."""
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
    """Returns the 4-bit numbers, uint8 [Q, J, O], that `pack_int4` packed."""
    return np.concatenate([values_QYO & 15, values_QYO >> 4], 1)
