"""RoPE of vectors whose numbers are in lanes."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..key_layouts import LANES


def rotation_table(cos: jax.Array, sin: jax.Array, width: int) -> jax.Array:
    """float32 [..., 3W] for `rotate_lanes` of these angles, float32 [..., P], of heads of that width. W: the
    width, or 128 lanes with as many heads as they hold.
    """
    rest = [(0, 0)] * (cos.ndim - 1)
    pairs = cos.shape[-1]
    heads = pl.cdiv(LANES, width)

    def lanes(x: jax.Array, before: int, other: float) -> jax.Array:
        after = width - before - x.shape[-1]
        return jnp.tile(jnp.pad(x, [*rest, (before, after)], constant_values=other), heads)

    same = lanes(jnp.concatenate([cos, cos], -1), 0, 1.0)
    return jnp.concatenate([same, lanes(-sin, 0, 0.0), lanes(sin, pairs, 0.0)], -1)


def rotate_lanes(x: jax.Array, table: jax.Array, pairs: int) -> jax.Array:
    """float32 x [R, W] with its pairs (i, i + P) rotated. table: [R or 1, 3W] of `rotation_table`."""
    width = x.shape[-1]
    same, up, down = (table[:, i * width : (i + 1) * width] for i in range(3))
    rotated = x * same + pltpu.roll(x, width - pairs, 1) * up
    return rotated + pltpu.roll(x, pairs, 1) * down
