"""Quantizes float matrices on their devices, in one program for each shape. It takes some outputs at a time,
so that no whole matrix is in float32.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..errors import InputError
from .grouped_weight import GroupedWeight, pack_int4, split_groups
from .int8_weight import Int8Weight
from .quantization import bits_of, divisor, round_to_nearest
from .quantized_weight import QuantizedWeight

_BLOCKS = 64  # of a matrix, one after another


def quantized_on_device(matrix: jax.Array, name: str, quantize: str, group: int) -> QuantizedWeight:
    """Returns the same as `quantized_leaf`, by a program on the matrix's devices. 16-bit numbers that lie
    between two levels may get the other level. Raises InputError for NaN, inf or too large numbers.
    """
    leaf: QuantizedWeight = _ON_DEVICE(matrix, bits_of(name, quantize), group)
    if not bool(jnp.isfinite(leaf.scale).all()):
        raise InputError(f"{name} holds NaN, inf or numbers too large to be quantized: give finite weights")
    return leaf


def _on_device(matrix: jax.Array, bits: int, group: int) -> Any:
    if matrix.ndim > 2:
        return lax.map(partial(_on_device, bits=bits, group=group), matrix)
    outputs, inputs = matrix.shape
    blocks = math.gcd(outputs, _BLOCKS)
    matrix_OBI = matrix.reshape(-1, blocks, inputs)  # so devices divide all blocks alike

    def of_block(block: jax.Array) -> Any:
        block_OI = lax.dynamic_index_in_dim(matrix_OBI, block, 1, keepdims=False)
        block_OI = lax.optimization_barrier(block_OI)  # else all blocks are converted before the loop
        return _block_on_device(block_OI.astype(jnp.float32), bits, group)

    def joined(x_B: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_B, 0, -1).reshape(*x_B.shape[1:-1], outputs)

    leaf = jax.tree.map(joined, lax.map(of_block, jnp.arange(blocks)))
    return dataclasses.replace(leaf, values=leaf.values.T) if isinstance(leaf, Int8Weight) else leaf


def _block_on_device(block_OI: jax.Array, bits: int, group: int) -> Any:
    """Returns a leaf of some outputs. Values of an `Int8Weight` have outputs last."""
    inputs = block_OI.shape[1]
    if bits == 8 and group >= inputs:
        max_O = jnp.abs(block_OI).max(1)
        scale_O = jnp.where(max_O == 0, 1, max_O) / divisor(max_O, 127)
        return Int8Weight(jnp.rint(block_OI / scale_O[:, None]).T.astype(jnp.int8), scale_O)
    levels_OQJ, step_OQ, zero_OQ = round_to_nearest(split_groups(block_OI, group, jnp), bits, jnp)
    levels_QJO = levels_OQJ.transpose(1, 2, 0)
    scale_QO = step_OQ.T.astype(jnp.float16)
    if bits == 8:
        return GroupedWeight(levels_QJO.astype(jnp.int8), scale_QO, None, None, inputs)
    packed_QYO: Any = pack_int4(levels_QJO.astype(jnp.uint8))  # type: ignore[arg-type]
    return GroupedWeight(packed_QYO, scale_QO, zero_OQ.T.astype(jnp.uint8), None, inputs)


_ON_DEVICE = jax.jit(_on_device, static_argnames=("bits", "group"))
