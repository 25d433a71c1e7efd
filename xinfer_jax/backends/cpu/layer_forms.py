"""Parts of layers on CPUs: attention row by row, experts by tiles, the step of linear attention."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ...mixers.attention import blocked_attention, query_block
from ...mixers.linear_attention import recurrent_step
from ...ops.forms import always
from ...ops.operation import Call
from ...ops.product import float_precision
from ..expert_tiles import experts_by_tiles, is_tiled

_ROW_BLOCK = 64  # keys per loop step, which is cheap


def attention_form(call: Call) -> Callable | None:
    """Returns a form of `attention` of a decode step: a row's cost and bits depend on no other row. Products
    batched over rows took three to four times as long, and as long as the longest row. None: there are many
    queries.
    """
    if not call.static["few"]:
        return None
    return partial(blocked_attention, scoring=call.static["scoring"], static=False, attend=_by_row)


def _by_row(q_BKTGH, kv, visible, sink_KG, scoring, static):
    """Runs `query_block` for one row after the other."""

    def one(row):
        q_1KTGH, of_row, number_1 = row
        return query_block(q_1KTGH, kv, of_row, sink_KG, scoring, static, number_1[0], _ROW_BLOCK)

    rows = (q_BKTGH, visible, jnp.arange(len(q_BKTGH)))
    if len(q_BKTGH) == 1:  # no loop: compiles faster
        return one(rows)
    return lax.map(one, jax.tree.map(lambda x: x[:, None], rows))[:, 0]


def expert_at_form(call: Call) -> Callable:
    """Returns a form of `expert_at`. On CPU jax 0.10 would slice 16-bit stacks in float32: without the
    barrier it would convert all experts once, before the loop.
    """
    return lambda expert, experts: call.plain(*lax.optimization_barrier((expert, experts)))


def experts_form(call: Call) -> Callable | None:
    """Returns a form of `experts`. None: there are few tokens."""
    config = call.static["config"]
    return partial(experts_by_tiles, config=config) if is_tiled(call.operands["expert_MU"], config) else None


def _read_by_product(
    k_BNH: jax.Array, q_BNH: jax.Array, state_BNHY: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns Sᵀk and Sᵀq, [B, N, Y]."""
    kq_BN2H = jnp.stack([k_BNH, q_BNH], 2)
    read_BN2Y = jnp.matmul(kq_BN2H, state_BNHY, precision=float_precision())
    return read_BN2Y[:, :, 0], read_BN2Y[:, :, 1]


# A form of `recurrent_step`. Into sums jax 0.10 fuses all that makes k and q, and computes it for each number
# of S (16 heads of 128, Zen 4: 3.4 ms a token for the layer's attention, 1.1 in this way; jax 0.12 1.3 and
# 1.1).
STEP = always(partial(recurrent_step, read=_read_by_product))
