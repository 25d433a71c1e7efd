"""Parts of layers on CPUs: attention row by row, experts by tiles, the step of linear attention."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...config.model_config import ModelConfig
from ...model.attention import blocked_attention, query_block
from ...model.experts import expert_at, expert_output, num_local_experts
from ...model.linear_attention import recurrent_step
from ...weights.params import Params
from ..operation import match_varying_axes

_ROW_BLOCK = 64  # keys per loop step, which is cheap


def attention_form(plain: Any, impl: str | None, operands: Any, static: dict[str, Any]) -> Callable | None:
    """A form of `attention` of a decode step: a row's cost and bits depend on no other row. Products batched
    over rows took three to four times as long, and as long as the longest row. None: of many queries.
    """
    if not static["few"]:
        return None
    return partial(blocked_attention, scoring=static["scoring"], static=False, attend=_by_row)


def _by_row(q_BKTGH, kv, start_B, length_B, sink_KG, **options):
    """`query_block` for one row after the other."""

    def one(row):
        q_1KTGH, start_1, length_1, number_1 = row
        arrays = q_1KTGH, kv, start_1, length_1, sink_KG
        return query_block(*arrays, **options, row=number_1[0], decode_block=_ROW_BLOCK)

    rows = (q_BKTGH, start_B, length_B, jnp.arange(len(q_BKTGH)))
    if len(q_BKTGH) == 1:  # no loop: compiles faster
        return one(rows)
    return lax.map(one, jax.tree.map(lambda x: x[:, None], rows))[:, 0]


_TILE_ROWS = 64  # at most: more rows are no faster


def expert_at_form(plain: Callable, impl: str | None, operands: Any, static: Any) -> Callable:
    """A form of `expert_at`. On CPU jax 0.10 would slice 16-bit stacks in float32: without the barrier it
    would convert all experts once, before the loop.
    """
    return lambda expert, experts: plain(*lax.optimization_barrier((expert, experts)))


def experts_form(plain: Any, impl: str | None, operands: Any, static: dict[str, Any]) -> Callable | None:
    """A form of `experts`; None: every expert for all tokens is faster than up to 3 rows per choice."""
    config = static["config"]
    choices = operands[2].size
    if choices >= config.num_experts >= 4 * config.num_experts_per_tok:
        return partial(_by_tiles, config=config)
    return None


def _by_tiles(x_MD, weight_MU, expert_MU, experts: Params, config: ModelConfig) -> jax.Array:
    """[M, D]: in order of the experts, a tile of choices (C) of one expert at a time; as many steps as there
    are tiles. Its rows past the expert's last choice are overwritten by the next tile.
    """
    M, U = expert_MU.shape
    C = M * U
    X = num_local_experts(experts)
    rows = min(_TILE_ROWS, 1 << (2 * C // config.num_experts - 1).bit_length())
    key_C = lax.sort(expert_MU.reshape(C) * C + jnp.arange(C), is_stable=False)  # no two are equal
    choice_C = key_C % C
    padded_C = jnp.pad(choice_C, (0, rows))
    first_X, stop_X = ((key_C < C * (jnp.arange(X) + i)[:, None]).sum(1) for i in (0, 1))
    tiles_X = -((first_X - stop_X) // rows)
    last_X = jnp.cumsum(tiles_X)

    def step(tile, out_CD):
        expert = (last_X <= tile).sum()
        first = first_X[expert] + (tile - last_X[expert] + tiles_X[expert]) * rows
        token_R = lax.dynamic_slice_in_dim(padded_C, first, rows) // U
        tree = expert_at(expert, experts)
        out_RD = expert_output(x_MD[token_R], tree, config)
        return lax.dynamic_update_slice_in_dim(out_CD, out_RD, first, 0)

    start_CD = jnp.zeros((C + rows, x_MD.shape[1]), jnp.float32)
    start_CD = match_varying_axes(start_CD, x_MD, expert_MU, experts)
    out_CD = lax.fori_loop(0, last_X[-1], step, start_CD)
    place_C = jnp.zeros_like(choice_C).at[choice_C].set(jnp.arange(C))
    here_MU = (expert_MU >= 0) & (expert_MU < X)
    out_MUD = out_CD[place_C].reshape(M, U, -1)
    return jnp.where(here_MU[..., None], weight_MU[..., None] * out_MUD, 0).sum(1)


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
