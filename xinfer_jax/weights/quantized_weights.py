"""Quantized matrices: int8 with a scale per output, int8 or int4 in groups, and those of other files.

A matrix has O outputs and I inputs, in Q groups of J inputs. A group of one output has Y bytes: J in int8,
J/2 in int4. The matrices of X experts are one leaf, whose arrays have a first axis X.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kernels_pallas

from ..errors import InputError
from ..formatting import ShortRepr
from .mxfp4 import Mxfp4Weight
from .ternary import TernaryWeight, dequantize_ternary

METHODS = ("int8", "int4")  # for any model; "ternary" and "mxfp4" are of models trained so
GROUP = 64  # inputs that share a scale in int4
_SMALL = 64  # matrices with a side of at most this size have more scales (the package's docstring says why)
_SMALL_GROUP = {8: 8, 4: 32}  # inputs that share a scale in them, by bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Int8Weight(ShortRepr):
    """A matrix [O, I] as `values * scale` with a scale per output."""

    values: jax.Array  # int8 [O, I]
    scale: jax.Array  # float32 [O]
    # Activations are quantized to one int8 number: on CPU not split into two, in GPU kernels not floats.
    int8_activations: bool = dataclasses.field(default=False, repr=False, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class GroupedWeight(ShortRepr):
    """A matrix [O, I] as `(values - zero) * scale` in groups of inputs. Outputs are the last axis."""

    values: jax.Array  # int8 [Q, Y, O], I padded to Q * J; int4: uint8 from `pack_int4`
    scale: jax.Array  # float16 or float32 [Q, O]; on TPUs of int4 float32 (`device_form`)
    zero: jax.Array | None  # uint8 [Q, O]; None: 0
    order: jax.Array | None  # int32 [I]: the inputs of each group; None: in their own order
    inputs: int = dataclasses.field(metadata=dict(static=True))  # I

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.values.shape[:-3], self.values.shape[-1], self.inputs

    @property
    def group(self) -> int:
        """J."""
        return self.values.shape[-2] * (2 if self.values.dtype == jnp.uint8 else 1)


QuantizedWeight = Int8Weight | GroupedWeight | Mxfp4Weight | TernaryWeight


def local_shard(x: jax.Array, weight: QuantizedWeight, axis_name: str) -> tuple[jax.Array, QuantizedWeight]:
    """Returns a device's activations [..., I] and weight as those of a separate matrix, inside a `shard_map`.

    Args:
        x: activations.
        weight: its inputs are divided along `axis_name`. Where it has an order, activations are gathered from
            all devices.
        axis_name: an axis of the mesh.
    """
    if isinstance(weight, Int8Weight | Mxfp4Weight):
        return x, weight
    if isinstance(weight, TernaryWeight):
        return x, dataclasses.replace(weight, inputs=x.shape[-1], axis_name=axis_name)
    if weight.order is not None:
        x = lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True)[..., weight.order]
    return x, dataclasses.replace(weight, order=None, inputs=x.shape[-1])


def device_form(weight: Any) -> Any:
    """Returns a leaf, or its shapes, as this process's devices read it: on TPUs scales of packed groups are
    float32, since no kernel there reads float16. Other leaves stay.
    """
    is_packed = isinstance(weight, GroupedWeight) and weight.values.dtype == np.uint8
    if not is_packed or kernels_pallas.device_impl().impl != "tpu":
        return weight
    if isinstance(weight.scale, jax.ShapeDtypeStruct):
        return dataclasses.replace(weight, scale=jax.ShapeDtypeStruct(weight.scale.shape, np.float32))
    return dataclasses.replace(weight, scale=weight.scale.astype(np.float32))


def check_quantize_method(quantize: str | None) -> None:
    """Raises InputError unless it is None or one of `METHODS`."""
    if quantize is not None and quantize not in METHODS:
        raise InputError(f"quantize={quantize!r} is not supported: use None or one of {', '.join(METHODS)}")


def check_activations(activations: str | None, quantize: str | None, group: int | None = None) -> None:
    """Raises InputError unless these activations are supported with weights that are quantized in this way.

    Args:
        activations: None or "int8".
        quantize: method of the weights.
        group: inputs that share a scale; None: all.
    """
    if activations not in (None, "int8"):
        raise InputError(f"activations={activations!r} is not supported: use None or int8")
    if activations and quantize != "int8":
        raise InputError(
            f"activations={activations!r} needs quantize='int8', got {quantize!r}: give that too, or leave"
            " out activations (a checkpoint that was written with them has them)"
        )
    if activations and group is not None:
        raise InputError(f"group={group} with activations={activations!r}: int8 activations have no groups")


def with_int8_activations(params: Any) -> Any:
    """Returns the parameters with int8 activations for int8 matrices with a scale per output."""

    def leaf(x: Any) -> Any:
        return dataclasses.replace(x, int8_activations=True) if isinstance(x, Int8Weight) else x

    return jax.tree.map(leaf, params, is_leaf=is_quantized)


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedWeight)


def grouped_struct(
    shape: tuple[int, ...], bits: int, J: int, scale: Any = np.float16, ordered: bool = False
) -> GroupedWeight:
    """Shapes and types of a matrix [O, I] in groups of J; scale: its type; ordered: with an order."""
    (outputs, inputs) = shape
    struct = jax.ShapeDtypeStruct
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
    """Packs 4-bit numbers, uint8 [Q, J, O], to [Q, J/2, O]: j in a byte's low half, j + J/2 in its high
    half.
    """
    half = levels_QJO.shape[1] // 2
    return levels_QJO[:, :half] | (levels_QJO[:, half:] << 4)


def dequantize(weight: QuantizedWeight) -> jax.Array:
    """Returns the matrix, float32 [O, I]."""
    if isinstance(weight, TernaryWeight):
        return dequantize_ternary(weight)
    if isinstance(weight, Mxfp4Weight):
        return kernels_pallas.mxfp4.dequantize_mxfp4(weight)
    values = weight.values
    scale = weight.scale.astype(jnp.float32)
    if isinstance(weight, Int8Weight):
        return values.astype(jnp.float32) * scale[:, None]
    levels_QJO = values.astype(jnp.int32)
    if values.dtype == jnp.uint8:  # packed by `pack_int4`
        halves = (levels_QJO[:, None] >> np.array([0, 4], np.int32)[:, None, None]) & 15
        levels_QJO = halves.reshape(len(values), -1, values.shape[-1])
    levels_QJO = levels_QJO.astype(jnp.float32)
    if weight.zero is not None:
        levels_QJO -= weight.zero.astype(jnp.float32)[:, None]
    matrix_IO = (levels_QJO * scale[:, None]).reshape(-1, values.shape[-1])[: weight.inputs]
    if weight.order is not None:
        matrix_IO = jnp.zeros_like(matrix_IO).at[weight.order].set(matrix_IO)
    return matrix_IO.T


def embedding_rows(weight: QuantizedWeight, index: jax.Array) -> jax.Array:
    """Returns rows of the matrix, float32 [..., I], as an embedding does; index: int32 [...]."""
    if isinstance(weight, Int8Weight):
        if index.size == 1 and kernels_pallas.device_impl().impl == "tpu":
            # For a single row XLA would copy the matrix into another layout.
            return embedding_rows(weight, jnp.repeat(index.reshape(1), 2))[:1].reshape(*index.shape, -1)
        return weight.values[index].astype(jnp.float32) * weight.scale[index][..., None]
    parts = {name: getattr(weight, name) for name in ("values", "scale", "zero") if hasattr(weight, name)}
    rows = {name: None if x is None else x[..., index.reshape(-1)] for name, x in parts.items()}
    return dequantize(dataclasses.replace(weight, **rows)).reshape(*index.shape, -1)
