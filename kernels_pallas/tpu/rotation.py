"""RoPE of vectors whose numbers are in lanes."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..key_layouts import LANES

Factors = tuple[jax.Array, jax.Array, jax.Array]  # float32 [R or 1, W]


def rotation_factors(cos_RP: jax.Array, sin_RP: jax.Array, width: int) -> Factors:
    """Factors for `rotate_lanes` of these angles, for heads of that width; W: the width, or 128 lanes with as
    many heads as they hold.
    """
    zeros = jnp.zeros_like(cos_RP)
    rest = jnp.zeros((len(cos_RP), width - 2 * cos_RP.shape[1]), jnp.float32)

    def lanes(*parts: jax.Array) -> jax.Array:
        head = [part for part in parts if part.shape[1]]
        return jnp.concatenate(head * pl.cdiv(LANES, width), -1)

    same = lanes(cos_RP, cos_RP, rest + 1)
    return same, lanes(-sin_RP, zeros, rest), lanes(zeros, sin_RP, rest)


def rotate_lanes(x_RW: jax.Array, factors: Factors, pairs: int) -> jax.Array:
    """float32 vectors with their pairs (i, i + P) rotated."""
    same, up, down = factors
    rotated = x_RW * same + pltpu.roll(x_RW, x_RW.shape[1] - pairs, 1) * up
    return rotated + pltpu.roll(x_RW, pairs, 1) * down
