"""Rows of embeddings that TPUs store by inputs."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...kernels_pallas.key_layouts import LANES
from ...ops.operation import Call
from ...sharding import abstract_mesh_of

_TOKENS = 4  # that one operation reads


def tpu_embedding_form(call: Call) -> Callable | None:
    """Returns a form of `embedding`. XLA stores a table [V, D] by inputs if V fills tiles of 128 lanes, and D
    does not. It would copy such a table to take rows of it: gpt-oss's table in 6.6 ms on a v6e.

    None: XLA stores the table by rows, or the tiles of all tokens have more bytes than a copy reads and
    writes. A single row of an int8 table is taken twice: otherwise XLA would copy the table into another
    layout.
    """
    token = call.operands["token"]
    table = call.operands["table"]
    V, D = table.shape
    is_repeated = token.size == 1 and table.dtype == jnp.int8
    size = 2 if is_repeated else token.size
    has_rows = V % LANES > 0 or D % LANES == 0
    if has_rows or not size or size * LANES > 2 * V or abstract_mesh_of(table):
        return partial(_repeated_row, call.plain) if is_repeated else None
    return partial(_repeated_row, _rows_of_columns) if is_repeated else _rows_of_columns


def _repeated_row(take: Callable, token: jax.Array, table: jax.Array) -> jax.Array:  # [..., D]
    rows = take(token=jnp.repeat(token.reshape(1), 2), table=table)
    return rows[:1].reshape(*token.shape, -1)


def _rows_of_columns(token: jax.Array, table: jax.Array) -> jax.Array:  # [..., D]
    V, D = table.shape
    table_DV = table.T
    ids = jnp.where(token < 0, token + V, token).clip(0, V - 1).reshape(-1)
    M = min(_TOKENS, ids.size)

    def some_rows(ids_M: jax.Array) -> jax.Array:  # [M, D]
        is_here_ML = jnp.arange(LANES) == (ids_M % LANES)[:, None]
        x_MD = jnp.zeros((M, D), table.dtype)
        for m in range(M):
            tile_DL = lax.dynamic_slice(table_DV, (np.int32(0), ids_M[m] // LANES * LANES), (D, LANES))
            row_D = jnp.where(is_here_ML[m], tile_DL, 0).sum(1, dtype=table.dtype)
            x_MD = jnp.where(np.arange(M)[:, None] == m, row_D, x_MD)
        return x_MD

    padded = jnp.pad(ids, (0, -ids.size % M))
    x_MD = lax.map(some_rows, padded.reshape(-1, M)).reshape(-1, D)
    return x_MD[: ids.size].reshape(*token.shape, D)
