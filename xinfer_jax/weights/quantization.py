"""Quantizes float matrices: int8 with a scale per output, int8 or int4 in groups, ternary."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import kernels_pallas
from ..checks import is_traced
from ..config.model_config import ModelConfig
from ..config.unsupported import check_supported
from ..device import aligned_empty, run_in_blocks
from ..errors import InputError
from .grouped_weight import STEP_BITS, GroupedWeight, group_size, grouped_struct, pack_int4, split_groups
from .hadamard import RotatedRows, input_block_width
from .int8_weight import Int8Weight
from .quantized_weight import QuantizedWeight, is_quantized
from .ternary import ternary_leaf, ternary_struct

METHODS = ("int8", "int4")  # for any model; "ternary" is of models trained so
_METHOD_BITS = dict(int8=8, int4=4, ternary=2)
_STRETCHES = np.linspace(1, 1.1, 11)  # factors on the smallest step without clipping, for int8 in groups


def device_form(weight: Any) -> Any:
    """Returns a leaf, or its shapes, as this process's devices read it."""
    if not is_quantized(weight) or kernels_pallas.device_impl().impl != "tpu":
        return weight
    is_struct = isinstance(jax.tree.leaves(weight)[0], jax.ShapeDtypeStruct)
    return jax.eval_shape(lambda leaf: leaf.for_tpu(), weight) if is_struct else weight.for_tpu()


def check_quantize_method(quantize: str | None) -> None:
    """Raises InputError unless it is None or one of `METHODS`."""
    if quantize is not None and quantize not in METHODS:
        raise InputError(f"quantize={quantize!r} is not supported: use None or one of {', '.join(METHODS)}")


def check_quantize(config: ModelConfig, method: str | None) -> None:
    """Raises InputError if the model's matrices cannot be quantized by this method."""
    if method and method not in METHODS:
        remedy = f"load a float checkpoint with quantize={' or '.join(METHODS)}"
        check_supported(config, "leaf formats", f"quantized weights ({method}) are", remedy)


def check_activations(activations: str | None, quantize: str | None, group: int | None = None) -> None:
    """Raises InputError unless these activations go with weights of this method, in these groups."""
    if activations not in (None, "int8"):
        raise InputError(f"activations={activations!r} is not supported: use None or int8")
    if activations and quantize not in METHODS:
        raise InputError(
            f"activations={activations!r} needs quantize='int8' or 'int4', got {quantize!r}: give that too,"
            " or leave out activations (a checkpoint that was written with them has them)"
        )
    if activations and quantize == "int8" and group is not None:
        raise InputError(
            f"group={group} with quantize='int8', activations={activations!r}: these have a scale per output"
        )


def with_int8_activations(params: Any) -> Any:
    """Returns the parameters with int8 activations for int8 matrices with a scale per output, and for int4,
    whose inputs `in_blocks` rotated.
    """

    def leaf(x: Any) -> Any:
        if isinstance(x, Int8Weight):
            x = dataclasses.replace(x, int8_activations=True)
        elif isinstance(x, GroupedWeight) and x.zero is not None and x.step is None:
            x = with_steps(x)
        else:
            return x
        return dataclasses.replace(x, input_block=input_block_width(x.shape[-1]))

    return jax.tree.map(leaf, params, is_leaf=is_quantized)


def with_steps(weight: GroupedWeight) -> GroupedWeight:
    """Returns int4 with zero points, of one matrix or of experts, with scales in integer numbers of an
    output's step. It is computed on the host or on the devices that have the matrix. For shapes it returns
    shapes.
    """
    if isinstance(weight.values, jax.ShapeDtypeStruct):
        return jax.eval_shape(with_steps, weight)
    most = 127 << STEP_BITS
    xp: Any = np if isinstance(weight.values, np.ndarray) else jnp
    scale_QO = weight.scale.astype(np.float32)
    zero_QO: Any = weight.zero
    levels_QO = xp.maximum(zero_QO, 15 - zero_QO).astype(np.float32)  # the most of a group, from zero
    most_O = (scale_QO * levels_QO).max(-2)
    step_O = xp.where(most_O == 0, np.float32(1), most_O) / divisor(most_O, most, xp)
    steps_QO = xp.rint(scale_QO / step_O[..., None, :]).clip(0, most // levels_QO)
    return dataclasses.replace(weight, scale=steps_QO.astype(np.int16), step=step_O)


def in_blocks(matrix_OI: Any) -> Any:
    """Returns a matrix, or an object that reads rows, with its inputs rotated in blocks as they are read."""
    width = input_block_width(matrix_OI.shape[1])
    return RotatedRows(matrix_OI, width) if width else matrix_OI


def quantizer(config: ModelConfig, quantize: str) -> Callable[[jax.Array, str], QuantizedWeight]:
    """Returns a function that quantizes a matrix, or the matrices of experts, of that name in the checkpoint.
    Raises InputError.
    """
    check_quantize_method(None if quantize == "ternary" else quantize)
    check_quantize(config, quantize)

    def on_host(matrix: Any, name: str) -> QuantizedWeight:
        return device_form(quantized_leaf(np.asarray(matrix), name, quantize))

    def leaf(matrix: jax.Array, name: str) -> QuantizedWeight:
        if not is_traced(matrix):
            return jax.device_put(on_host(matrix, name))
        struct = device_form(quantized_struct(matrix.shape, name, quantize))
        return jax.pure_callback(partial(on_host, name=name), struct, matrix)

    return leaf


def quantized_leaf(matrix: Any, name: str, quantize: str, group: int | None = None) -> QuantizedWeight:
    """Quantizes a checkpoint's matrix [O, I] of this name on the host by "int8", "int4" or "ternary". It also
    takes the other arguments of `quantize_matrix`. Matrices of experts, a list or [X, O, I], become one leaf,
    one after another. Its arrays have a first axis for experts. Raises InputError for NaN, inf or too large
    numbers.
    """
    if not isinstance(matrix, list) and len(matrix.shape) == 2:
        return _quantized(matrix, name, quantize, group)
    shape = (len(matrix), *matrix[0].shape)
    stack = jax.tree.map(aligned_empty, quantized_struct(shape, name, quantize, group))
    for i, matrix_OI in enumerate(matrix):
        _quantized(matrix_OI, name, quantize, group, jax.tree.map(lambda x, i=i: x[i], stack))
    return stack


def _quantized(matrix_OI: Any, name: str, quantize: str, group: int | None, out: Any = None) -> Any:
    bits = bits_of(name, quantize)
    if bits == 2:
        return ternary_leaf(matrix_OI, name)
    leaf = quantize_matrix(matrix_OI, bits, group, out)
    if np.isfinite(leaf.scale).all():
        return leaf

    def check_finite(at: slice) -> None:
        if not np.isfinite(matrix_OI[at].astype(np.float32)).all():
            raise InputError(
                f"{name} holds NaN or inf, which cannot be quantized: fetch the checkpoint again"
            )

    run_in_blocks(check_finite, leaf.shape[0], 4 * leaf.shape[1])
    raise InputError(f"{name} holds numbers too large to be quantized: load it without quantize")


def quantized_struct(
    shape: tuple[int, ...], name: str, quantize: str, group: int | None = None
) -> QuantizedWeight:
    """Returns `quantized_leaf` with shapes and types, `jax.ShapeDtypeStruct`, instead of arrays."""
    (*experts, outputs, inputs) = shape
    bits = bits_of(name, quantize)
    if bits == 2:
        return ternary_struct(shape)
    struct = _quantized_struct((outputs, inputs), bits, group)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*experts, *x.shape), x.dtype), struct)


def group_size_for_shards(shape: tuple[int, ...], name: str, quantize: str, parts: int) -> int:
    """Returns the group size of a matrix, or of experts, whose inputs are divided into `parts`: the default,
    or less, so that groups do not cross parts.
    """
    bits = bits_of(name, quantize)
    shape = shape[-2:]
    inputs = shape[1]
    J = group_size(shape, bits)
    while parts > 1 and J < inputs and inputs // parts % J and J > 2:
        J //= 2
    return J


def bits_of(name: str, quantize: str) -> int:
    """Returns 8 for matrices of the vocabulary: their errors are in every logit."""
    return 8 if "embed" in name or name.startswith("lm_head") else _METHOD_BITS[quantize]


def quantize_matrix(
    matrix_OI: Any, bits: int = 8, group: int | None = None, out: QuantizedWeight | None = None
) -> QuantizedWeight:
    """Quantizes by rounding to nearest, in blocks of outputs on all cores. It makes no float32 copy. 8 bits
    are symmetric. 4 bits have a zero point, to use all levels.

    Args:
        matrix_OI: a matrix of any float type: an array, or an object that reads a slice of rows.
        bits: 8 or 4.
        group: the number of inputs that share a scale. None: `group_size`.
        out: NumPy arrays to fill. None: new ones.
    """
    weight = out or jax.tree.map(aligned_empty, _quantized_struct(matrix_OI.shape, bits, group))
    outputs, inputs = matrix_OI.shape

    def quantize(at: slice) -> None:
        _quantize_block(matrix_OI[at].astype(np.float32), weight, at)

    run_in_blocks(quantize, outputs, 4 * inputs)
    return weight


def quantize_symmetric(matrix: np.ndarray, group: int | None = None) -> GroupedWeight:
    """Quantizes a float matrix, or the matrices of experts, to int4 with all zero points in the middle, on
    the host. group: see `quantize_matrix`.
    """
    if matrix.ndim > 2:
        return jax.tree.map(lambda *x: np.stack(x), *(quantize_symmetric(x, group) for x in matrix))
    blocks_OQJ = split_groups(matrix.astype(np.float32), group or group_size(matrix.shape, 4))
    step_OQ = float16_step(np.maximum(blocks_OQJ.max(-1) / 7, blocks_OQJ.min(-1) / -8))
    levels_OQJ = np.clip(np.rint(blocks_OQJ / step_OQ[..., None]) + 8, 0, 15).astype(np.uint8)
    zero_QO = np.full(step_OQ.T.shape, 8, np.uint8)
    values_QYO = pack_int4(levels_OQJ.transpose(1, 2, 0))
    return GroupedWeight(values_QYO, step_OQ.T.astype(np.float16), zero_QO, None, matrix.shape[1])


def _quantized_struct(shape: tuple[int, ...], bits: int, group: int | None = None) -> QuantizedWeight:
    (outputs, inputs) = shape
    J = group or group_size(shape, bits)
    struct = jax.ShapeDtypeStruct
    if bits == 8 and J >= inputs:
        return Int8Weight(struct(shape, np.int8), struct((outputs,), np.float32))
    return grouped_struct(shape, bits, J)


def _quantize_block(block_OI: np.ndarray, weight: Int8Weight | GroupedWeight, at: slice) -> None:
    """Quantizes some outputs into the weight. It overwrites block_OI. NaN and inf appear in the scales."""
    with np.errstate(all="ignore"):
        if isinstance(weight, Int8Weight):
            max_O = np.maximum(block_OI.max(1), -block_OI.min(1))
            weight.scale[at] = scale = np.where(max_O == 0, 1, max_O) / np.float32(127)
            weight.values[at] = np.rint(np.divide(block_OI, scale[:, None], out=block_OI), out=block_OI)
            return
        kind = weight.values.dtype
        if kind == np.uint8:  # outputs last in memory, as in the weight: the rest is elementwise
            block_OI = np.asfortranarray(block_OI)
        levels_OQJ, step_OQ, zero_OQ = round_to_nearest(
            split_groups(block_OI, weight.group), 4 if kind == np.uint8 else 8
        )
        levels_QJO = levels_OQJ.astype(kind).transpose(1, 2, 0)
        weight.values[:, :, at] = pack_int4(levels_QJO) if kind == np.uint8 else levels_QJO
        weight.scale[:, at] = step_OQ.T
        if weight.zero is not None:
            weight.zero[:, at] = zero_OQ.T


def round_to_nearest(block_OQJ: Any, bits: int, xp: Any = np) -> tuple[Any, Any, Any]:
    """Returns a matrix's levels, [O, Q, J], and each group's step and zero point, [O, Q]. All are floats."""
    if bits == 8:
        step_OQ = best_int8_step(block_OQJ, xp)
        return xp.clip(xp.rint(block_OQJ / step_OQ[..., None]), -127, 127), step_OQ, xp.zeros_like(step_OQ)
    low_OQ = xp.minimum(block_OQJ.min(-1), 0)
    high_OQ = xp.maximum(block_OQJ.max(-1), 0)
    step_OQ = float16_step((high_OQ - low_OQ) / divisor(high_OQ, 15, xp), xp)
    zero_OQ = xp.clip(xp.rint(-low_OQ / step_OQ), 0, 15)
    return xp.clip(xp.rint(block_OQJ / step_OQ[..., None]) + zero_OQ[..., None], 0, 15), step_OQ, zero_OQ


def best_int8_step(block_OQJ: Any, xp: Any = np) -> Any:
    """Returns the int8 step of least squared error among a few steps, [O, Q]."""
    max_OQ = xp.abs(block_OQJ).max(-1)
    steps = [float16_step(max_OQ * np.float32(stretch / 127), xp) for stretch in _STRETCHES]
    columns = [step[..., None] for step in steps]
    errors = [xp.square(xp.rint(block_OQJ / step) * step - block_OQJ).sum(-1) for step in columns]
    return xp.take_along_axis(xp.stack(steps), xp.stack(errors).argmin(0)[None], 0)[0]


def float16_step(step: Any, xp: Any = np) -> Any:
    """Returns the step as float16 stores it, in float32."""
    return xp.maximum(step.astype(np.float16), np.finfo(np.float16).smallest_normal).astype(np.float32)


def divisor(like: Any, number: int, xp: Any = jnp) -> Any:
    """Returns a number to divide by, so that XLA does not multiply by its inverse, which has other bits."""
    return number if xp is np else lax.optimization_barrier(xp.full_like(like, number))
