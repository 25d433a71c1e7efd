"""What TPU kernels and their calls have in common."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu


def emulator(interpret: bool) -> Any:
    """The `interpret` of a `pallas_call`: an emulator that raises where accesses to memory race; or none."""
    return pltpu.InterpretParams(detect_races=True) if interpret else False


def keep_in_hbm(arrays: Any, interpret: bool) -> Any:
    """Operands that XLA does not copy to on-chip memory before the call, as it may with small ones. The
    emulator has no such memory.
    """
    if interpret:
        return arrays
    return jax.tree.map(partial(pltpu.with_memory_space_constraint, memory_space=pltpu.HBM), arrays)


def dot(a: jax.Array, b: jax.Array, axis: int, dtype: Any = jnp.float32) -> jax.Array:
    """Contracts the last axis of a with an axis of b. float32 operands are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=dtype)
