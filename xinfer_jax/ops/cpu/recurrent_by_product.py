"""The step of linear attention by one matrix product, for CPUs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...model.linear_attention import recurrent_step


def step_form(plain: Callable, impl: str | None, operands: Any, static: Any) -> Callable:
    """A form of `recurrent_step`. Into sums jax 0.10 fuses all that makes k and q, and computes it for each
    number of S (16 heads of 128, Zen 4: 3.4 ms a token for the layer's attention, 1.1 in this way; jax 0.12
    1.3 and 1.1).
    """
    return partial(recurrent_step, read=_read_by_product)


def _read_by_product(
    k_BNH: jax.Array, q_BNH: jax.Array, state_BNHY: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sᵀk and Sᵀq, [B, N, Y]."""
    kq_BN2H = jnp.stack([k_BNH, q_BNH], 2)
    read_BN2Y = jnp.matmul(kq_BN2H, state_BNHY, precision=lax.Precision.HIGHEST)
    return read_BN2Y[:, :, 0], read_BN2Y[:, :, 1]
