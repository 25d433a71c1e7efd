"""Products with float matrices. M rows (a batch's tokens), I inputs, O outputs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..checks import array_module
from .operation import run


def float_product(x: jax.Array, matrix_OI: jax.Array) -> jax.Array:
    """Returns x @ matrix.T in float32, [..., I] -> [..., O], in `float_precision`."""
    if array_module(*x.shape) is jnp:  # jax.export cannot tell that a product of symbolic sizes is at least 0
        return dot(x, matrix_OI)
    y_MO = run("float_product", dot, x=x.reshape(-1, x.shape[-1]), matrix=matrix_OI)
    return y_MO.reshape(*x.shape[:-1], -1)


def dot(x: jax.Array, matrix: jax.Array, axis: int = 1, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Contracts the last axis of x with an axis of the matrix. Accumulates in dtype."""
    precision = float_precision(matrix.dtype)
    axes = ((x.ndim - 1,), (axis,)), ((), ())
    return lax.dot_general(x, matrix, axes, precision=precision, preferred_element_type=dtype)


def float_precision(dtype: Any = jnp.float32) -> lax.Precision | None:
    """Returns the precision of a product by the dtype of an operand. No backend rounds float32 to TF32 or
    bfloat16, unless the caller chose another precision by `jax.default_matmul_precision`.
    """
    settings: Any = jax.config
    is_chosen = settings.jax_default_matmul_precision is not None
    return None if is_chosen or dtype != jnp.float32 else lax.Precision.HIGHEST
