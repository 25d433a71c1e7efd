"""Products with float matrices. M rows (a batch's tokens), I inputs, O outputs."""

import jax
import jax.numpy as jnp
from jax import lax

from .operation import run


def float_product(x: jax.Array, matrix_OI: jax.Array) -> jax.Array:
    """Returns x @ matrix.T in float32, [..., I] -> [..., O]: float32 precision on every backend (no TF32)."""
    y_MO = run("float_product", dot, x.reshape(-1, x.shape[-1]), matrix_OI)
    return y_MO.reshape(*x.shape[:-1], -1)


def dot(a: jax.Array, b: jax.Array, axis: int = 1, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Contracts the last axis of a with an axis of b; accumulates in dtype."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    axes = ((a.ndim - 1,), (axis,)), ((), ())
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=dtype)
