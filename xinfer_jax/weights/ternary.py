"""Ternary weights with int8 activations, as in BitNet b1.58 (Ma et al. 2024): two bits a weight, exact sums.

A matrix has O outputs and I inputs, in W words of 32 inputs. Two bit planes mark the weights that are 1 and
the weights that are -1. CPUs count the common bits of these planes and of the planes of the activations
(`backends/cpu/ternary_products.py`).
"""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..device import aligned_empty, run_in_blocks
from ..errors import InputError
from ..ops.operation import run
from ..ops.product import dot
from .quantized_weight import QuantizedWeight, quantize_activations

WORD = 32  # inputs in a word
_MIN_MEAN = 1e-5  # avoids a division by 0 in matrices of zeros


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class TernaryWeight(QuantizedWeight):
    """A matrix [O, I] of -scale, 0 and scale. Its products quantize activations to int8, one scale a
    token.
    """

    group = WORD  # inputs that stay on one device
    values: jax.Array  # int32 [W, 2, O]: bit k of word w marks input 32 w + k as 1, and as -1
    scale: jax.Array  # float32 [O]
    inputs: int = dataclasses.field(metadata=dict(static=True))  # I
    # A mesh axis along which I is divided (`local_shard`): a token's scale is computed over all inputs.
    axis_name: str | None = dataclasses.field(default=None, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.values.shape[:-3], self.values.shape[-1], self.inputs

    @property
    def groups_with_padding(self) -> int:
        return 0 if len(self.values) * WORD == self.inputs else WORD

    def local_shard(self, x: jax.Array, axis_name: str) -> tuple[jax.Array, Self]:
        return x, dataclasses.replace(self, inputs=x.shape[-1], axis_name=axis_name)

    def field_axes(self, *axes: str | None) -> dict[str, tuple[str | None, ...]]:
        outputs, inputs = axes
        return {"values": (inputs, None, outputs), "scale": (outputs,)}

    def dequantize(self) -> jax.Array:
        return unpack_ternary(self.values, self.inputs).astype(jnp.float32).T * self.scale[:, None]

    def product_of_rows(self, x_MI: jax.Array) -> jax.Array:
        """Returns the product. Sums of integers are exact: other rows and devices change no bit."""
        x_MI, factor_M1 = quantize_activations(x_MI, self.axis_name)
        sums_MO = run("ternary_sums", plain_sums, x_MI=x_MI, values_W2O=self.values)
        return sums_MO / factor_M1 * self.scale


def ternary_struct(shape: tuple[int, ...]) -> TernaryWeight:
    """Returns the leaf of a matrix [O, I] with `jax.ShapeDtypeStruct` instead of arrays."""
    (outputs, inputs) = shape
    words = -(-inputs // WORD)
    struct: Any = jax.ShapeDtypeStruct
    return TernaryWeight(struct((words, 2, outputs), np.int32), struct((outputs,), np.float32), inputs)


def ternary_leaf(matrix_OI: Any, name: str) -> TernaryWeight:
    """Quantizes a float matrix to -1, 0 and 1 times its mean magnitude, on the host.

    matrix_OI: an array, or an object that reads a slice of rows. Raises InputError: it has NaN or inf.
    """
    outputs, inputs = matrix_OI.shape
    sums: list[float] = []
    run_in_blocks(lambda at: sums.append(_magnitude(matrix_OI[at])), outputs, 4 * inputs)
    mean = np.float32(math.fsum(sums) / (outputs * inputs))
    if not np.isfinite(mean):
        raise InputError(f"{name} holds NaN or inf, which cannot be quantized: fetch the checkpoint again")
    # As in transformers: times the reciprocal in float32, and the scale is the reciprocal of that.
    factor = np.float32(1) / max(mean, np.float32(_MIN_MEAN))

    def levels(at: slice) -> np.ndarray:
        return np.clip(np.rint(matrix_OI[at].astype(np.float32) * factor), -1, 1)

    return pack_ternary(levels, matrix_OI.shape, np.float32(1) / factor)


def _magnitude(block_OI: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        return float(np.abs(block_OI.astype(np.float32)).sum(dtype=np.float64))


def pack_ternary(levels: Any, shape: tuple[int, ...], scale: np.float32) -> TernaryWeight:
    """Returns the leaf of a matrix [O, I] with NumPy arrays. levels: takes a slice of outputs, returns their
    levels -1, 0 and 1, [outputs, I].
    """
    weight = jax.tree.map(aligned_empty, ternary_struct(shape))
    (outputs, inputs) = shape
    weight.scale[:] = scale

    def fill(at: slice) -> None:
        levels_OI = levels(at)
        planes_2OI = np.stack([levels_OI == 1, levels_OI == -1])
        bits = np.packbits(np.pad(planes_2OI, ((0, 0), (0, 0), (0, -inputs % WORD))), 2, "little")
        weight.values[..., at] = bits.view("<i4").transpose(2, 0, 1)

    run_in_blocks(fill, outputs, 4 * inputs)
    return weight


def ternary_levels(values_W2O: np.ndarray, inputs: int) -> np.ndarray:
    """Returns the levels -1, 0 and 1, int8 [outputs, I], that `pack_ternary` packed, on the host."""
    words_2OW = np.ascontiguousarray(values_W2O.transpose(1, 2, 0), "<i4")
    (plus_OI, minus_OI) = np.unpackbits(words_2OW.view(np.uint8), 2, inputs, "little").view(np.int8)
    return plus_OI - minus_OI


def unpack_ternary(values_W2O: jax.Array, inputs: int) -> jax.Array:
    """Returns the levels -1, 0 and 1, int8 [I, O]."""
    bytes_W4 = jnp.stack([(values_W2O >> at).astype(jnp.uint8) for at in (0, 8, 16, 24)], 1)
    # Split into bytes before bits are masked: masking 32-bit words runs at a quarter of the speed.
    plus, minus = jnp.split(lax.optimization_barrier(bytes_W4), 2, 2)  # each [W, 4, 1, O]
    bits = (1 << np.arange(8)).astype(np.uint8)[:, None]
    signs = ((plus & bits) != 0).astype(jnp.int8) - ((minus & bits) != 0).astype(jnp.int8)
    return signs.reshape(-1, values_W2O.shape[-1])[:inputs]


def plain_sums(x_MI: jax.Array, values_W2O: jax.Array) -> jax.Array:
    """Returns the sums on GPU and TPU. int8 numbers are exact in bfloat16, and their sums are exact in
    float32.
    """
    # The barrier makes weights depend on x, or XLA would unpack all layers before the loop.
    x_MI, values_W2O = lax.optimization_barrier((x_MI, values_W2O))
    levels_IO = unpack_ternary(values_W2O, x_MI.shape[1])
    return dot(x_MI.astype(jnp.bfloat16), levels_IO.astype(jnp.bfloat16), 0)
