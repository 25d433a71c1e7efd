"""The largest numbers of each row: `argmax` and `largest_k`."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ..config.run_config import DEFAULT, RunConfig
from .operation import run


def argmax(logits_BV: jax.Array, run_config: RunConfig = DEFAULT) -> jax.Array:
    """Returns the index of each row's largest logit, int32 [B]. It is the lowest index of equal logits, or
    the index of the first NaN if there is any.
    """
    return run("argmax", plain_argmax, run_config, logits_BV=logits_BV)


def plain_argmax(logits_BV: jax.Array) -> jax.Array:
    """Runs `argmax` in plain jnp."""
    return jnp.argmax(logits_BV, -1).astype(jnp.int32)


def largest_k(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns `lax.top_k` of [..., V]: the `count` largest numbers, and their indices."""
    return run("top_k", partial(_top_k, count=count), static=dict(count=count), x=x)


def _top_k(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    values, index = lax.top_k(x, count)
    return values, index
