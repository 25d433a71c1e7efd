"""Depthwise causal convolutions, and the inputs that the next call needs again.

A layer keeps the last W inputs of each row: the convolution reads them and the token itself. Channels are in
K groups of width H, so that devices can divide the groups.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def by_group(x_BTD: jax.Array, width: int) -> jax.Array:
    """Returns [B, K, T, H]: channels in groups of this width."""
    return jnp.swapaxes(x_BTD.reshape(*x_BTD.shape[:2], -1, width), 1, 2)


def convolve(x_BKSH: jax.Array, weight: jax.Array, first_BT: Any = None) -> jax.Array:
    """Returns [B, K, T, H]: a depthwise causal convolution of S = W + T inputs. weight: [K H, W + 1].
    first_BT: the first input of each token, as in `Positions`.
    """
    _, K, S, H = x_BKSH.shape
    taps = weight.shape[1]
    weight_KHW = weight.astype(jnp.float32).reshape(K, 1, H, taps)
    T = S - taps + 1

    def tap(i: int) -> jax.Array:
        x_BKTH = x_BKSH[:, :, i : i + T]
        if first_BT is not None:
            x_BKTH = jnp.where((jnp.arange(T) - (taps - 1 - i) >= first_BT)[:, None, :, None], x_BKTH, 0)
        return x_BKTH * weight_KHW[..., i]

    out: Any = sum(map(tap, range(taps)))
    return out


def last_inputs(x_BKSH: jax.Array, first_B: jax.Array, count: int) -> jax.Array:
    """Returns `count` slots of each row from slot first_B[b] on."""
    return jax.vmap(lambda x, first: lax.dynamic_slice_in_dim(x, first, count, 1))(x_BKSH, first_B)


def pad_slots(x_BKSH: jax.Array, slots: int) -> jax.Array:
    """Returns the array with zeros up to this number of slots."""
    return jnp.pad(x_BKSH, ((0, 0), (0, 0), (0, slots - x_BKSH.shape[2]), (0, 0)))
