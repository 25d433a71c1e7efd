"""Products with float matrices. M rows (a batch's tokens), I inputs, O outputs."""

import jax
import jax.numpy as jnp
from jax import lax

from .operation import run


def float_product(x_MI: jax.Array, matrix_OI: jax.Array) -> jax.Array:
    """Returns x @ matrix.T, float32 [M, O]: float32 precision on every backend (no TF32), float32 sums."""
    return run("float_product", dot, x_MI, matrix_OI)


def dot(a: jax.Array, b: jax.Array, axis: int = 1, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Contracts the last axis of a with an axis of b; accumulates in dtype."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    axes = ((a.ndim - 1,), (axis,)), ((), ())
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=dtype)
