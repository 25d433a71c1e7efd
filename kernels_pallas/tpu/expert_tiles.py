"""The tiles of a mixture of experts on TPUs: an expert, and some of the rows of a block that chose it."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..key_layouts import LANES

TILE_ROWS = 128
_BLOCK_BYTES = 16 * 2**20  # of the results of a block of tokens, float32
_MOST_TOKENS = 2048  # of a block


class Tiles(NamedTuple):
    """The tiles of each block of tokens (A)."""

    expert_AT: jax.Array  # int32; of a tile without rows that of the last one with rows
    count_A: jax.Array  # int32: tiles with rows
    weight_ATR: jax.Array  # float32, 0 where there is no row
    token_ATR: jax.Array  # int32, the token in its block


def experts_of_few(expert_MU: jax.Array, X: int, is_sharded: bool) -> jax.Array:
    """Returns the experts that few tokens chose, int32 [T], in order. Equal experts may follow each other.
    is_sharded: True: some are on other devices.
    """
    expert_C = expert_MU.reshape(-1)
    if is_sharded:  # one of this device in place of those of others
        is_here_C = (expert_C >= 0) & (expert_C < X)
        expert_C = jnp.where(is_here_C, expert_C, jnp.where(is_here_C, expert_C, 0).max())
    if len(expert_C) < X:
        return lax.sort(expert_C, is_stable=False)
    is_used_X = (expert_C[:, None] == jnp.arange(X)).any(0)
    return lax.cummax(jnp.where(is_used_X, jnp.arange(X), 0))


def block_tokens(tokens: int, width: int, numbers: int) -> int:
    """Returns the tokens of a block, a multiple of 128. numbers: the count of numbers that fit into VMEM."""
    most = min(_BLOCK_BYTES // 4, numbers) // width // LANES * LANES
    most = max(LANES, min(_MOST_TOKENS, most))
    return min(most, LANES * pl.cdiv(tokens, LANES))


def tiles_of_blocks(weight_MU: jax.Array, expert_MU: jax.Array, block: int, X: int) -> Tiles:
    """Returns tiles of up to `TILE_ROWS` rows that chose an expert, for blocks of `block` tokens."""
    parts = (x.reshape(-1, block, x.shape[1]) for x in (weight_MU, expert_MU))
    return jax.vmap(partial(_tiles, X=X))(*parts)


def _tiles(weight_MU, expert_MU, X: int) -> Tiles:
    """Returns the tiles of one block of tokens."""
    M, U = expert_MU.shape
    C = M * U
    R = TILE_ROWS
    count = min(X, C) + C // R
    expert_C = expert_MU.reshape(C)
    is_here_C = (expert_C >= 0) & (expert_C < X)
    key_C = jnp.where(is_here_C, expert_C, X) * C + jnp.arange(C)
    token_C = jnp.arange(C) // U
    _, token_C, weight_C = lax.sort(
        (key_C, token_C, weight_MU.reshape(C).astype(jnp.float32)), is_stable=False, num_keys=1
    )
    chosen_X = (expert_C[:, None] == jnp.arange(X)).sum(0)
    first_X = jnp.cumsum(chosen_X) - chosen_X
    tiles_X = pl.cdiv(chosen_X, R)
    last_X = jnp.cumsum(tiles_X)
    tile_T = jnp.minimum(jnp.arange(count), jnp.maximum(last_X[-1] - 1, 0))
    expert_T = jnp.minimum((last_X <= tile_T[:, None]).sum(1), X - 1)
    start_T = first_X[expert_T] + (tile_T - last_X[expert_T] + tiles_X[expert_T]) * R
    row_TR = start_T[:, None] + jnp.arange(R)
    is_row_TR = row_TR < (first_X + chosen_X)[expert_T][:, None]

    def of_rows(x_C):
        cut = partial(lax.dynamic_slice_in_dim, jnp.pad(x_C, (0, R)), slice_size=R)
        return jax.vmap(cut)(start_T)

    weight_TR = jnp.where(is_row_TR, of_rows(weight_C), 0)
    token_TR = jnp.where(is_row_TR, of_rows(token_C), M)
    return Tiles(expert_T, last_X[-1], weight_TR, token_TR)
