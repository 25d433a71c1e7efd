"""Hadamard rotations that remove outliers from activations: QuaRot (Ashkboos et al. 2024), in blocks.

A large value of one channel is spread over the channels of a block, so int8 keeps the others precise. If a
vector and the inputs of a matrix are rotated alike, their product stays the same. So a matrix whose inputs
are rotated rotates its activations in each product (`RotatedWeight.input_block`), and the rest of the model
does not know about it.

A rotation first multiplies by signs, without which the common part of all channels would become an outlier.
Then it multiplies by a Hadamard matrix.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_BLOCK = 64  # the widest: 128 and 256 take two and four times as long
_MIN_BLOCK = 16  # the narrowest; on the host a matrix of this size is a factor of the others


def hadamard_rotate(x: jax.Array, width: int) -> jax.Array:
    """Returns x [..., I] rotated in blocks of that width. It is computed in float32, and has the type of
    x.
    """
    x_RW = x.astype(jnp.float32).reshape(-1, width) * _signs(width)
    return _multiply(x_RW).reshape(x.shape).astype(x.dtype)


def hadamard_unrotate(x: jax.Array, width: int) -> jax.Array:
    """Returns the inverse of `hadamard_rotate`."""
    x_RW = _multiply(x.astype(jnp.float32).reshape(-1, width)) * _signs(width)
    return x_RW.reshape(x.shape).astype(x.dtype)


def _multiply(x_RW: jax.Array) -> jax.Array:
    return jnp.einsum("rn,nm->rm", x_RW, _hadamard(x_RW.shape[1]), precision=lax.Precision.HIGHEST)


def rotate_on_host(x_RI: np.ndarray, width: int) -> np.ndarray:
    """Does the same as `hadamard_rotate` in float32, in products so small that BLAS starts no threads."""
    x = (x_RI.reshape(-1, width) * _signs(width)).reshape(-1, width // _MIN_BLOCK, _MIN_BLOCK)
    return (_hadamard(width // _MIN_BLOCK) @ (x @ _hadamard(_MIN_BLOCK))).reshape(x_RI.shape)


def input_block_width(inputs: int) -> int:
    """Returns the width of the blocks in which a matrix's inputs can be rotated. 0: there is none."""
    power = min(_BLOCK, inputs & -inputs)
    return power if power >= _MIN_BLOCK else 0


@functools.lru_cache(maxsize=8)
def _hadamard(size: int) -> np.ndarray:
    """Returns the symmetric orthogonal matrix of a power of two, float32."""
    index = np.arange(size)
    return _parity(index[:, None] & index) / np.sqrt(np.float32(size))


@functools.lru_cache(maxsize=8)
def _signs(width: int) -> np.ndarray:
    """Returns the Rudin-Shapiro sequence, float32 [W]: its product with a Hadamard matrix has no large
    entry.
    """
    index = np.arange(width)
    return _parity(index & index >> 1)


def _parity(number: np.ndarray) -> np.ndarray:
    """Returns -1 if an odd number of bits is set, otherwise 1."""
    for shift in (16, 8, 4, 2, 1):
        number = number ^ number >> shift
    return 1 - 2 * (number & 1).astype(np.float32)


class RotatedRows:
    """A matrix [O, I] whose rows are read and rotated."""

    def __init__(self, matrix_OI: Any, width: int):
        self._matrix_OI = matrix_OI
        self._width = width
        self.shape = matrix_OI.shape

    def __getitem__(self, rows: slice) -> np.ndarray:
        return rotate_on_host(self._matrix_OI[rows].astype(np.float32), self._width)
