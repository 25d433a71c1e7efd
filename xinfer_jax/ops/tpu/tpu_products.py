"""Products for TPUs: of a single row, and of rows that a norm or an activation makes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import kernels_pallas
from kernels_pallas.reference_products import FEW_ROWS


def tpu_float_form(plain: Any, impl: str | None, operands: Any, static: Any) -> Callable | None:
    """A form of `float_product`."""
    return tpu_forms(plain, operands[0]).get("tpu")


def apart_form(plain: Any, impl: str | None, operands: Any, static: Any) -> Callable | None:
    """A form of `apart`: XLA would compute a norm or an activation again for each tile of the products that
    read it: 1,024 rows of 7B's gate take 249 us on a v6e instead of 176. None: of few rows.
    """
    (x,) = operands
    return lax.optimization_barrier if x.size > FEW_ROWS * x.shape[-1] else None


def tpu_forms(product: Callable[..., jax.Array], x_MI: jax.Array) -> dict[str, Callable[..., jax.Array]]:
    """Returns a product as the form of `lax.platform_dependent` for TPUs, in a process that has them.

    They multiply a single row on their vector units. Eight rows, a tile of their matrix units, take a third
    of the time or less.
    """
    if kernels_pallas.dispatch.device_impl().impl != "tpu":
        return {}
    if len(x_MI) > 1:
        return {"tpu": product}
    return {"tpu": lambda x_1I, matrix: product(jnp.pad(x_1I, ((0, 7), (0, 0))), matrix)[:1]}
