"""Attention of a decode step row by row: a row's cost and bits depend on no other row. Products batched over
rows took three to four times as long, and as long as the longest row.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...model.attention import blocked_attention, query_block

_ROW_BLOCK = 64  # keys per loop step, which is cheap


def attention_form(plain: Any, impl: str | None, operands: Any, static: dict[str, Any]) -> Callable | None:
    """A form of `attention`; None: of many queries."""
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
