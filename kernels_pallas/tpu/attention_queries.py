"""The queries of a TPU attention kernel: from the order of products, by token and then by head, to rows of
each key head, and the results back.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..key_layouts import LANES
from .attention_settings import Settings


def _heads(ref, settings: Settings) -> list[tuple[int, Any]]:
    """The key head and the rows in `query` of each query head."""
    heads = ref["query"].shape[0]
    group = ref["q"].shape[-1] // settings.width // heads
    return [(i // group, pl.ds(i % group * settings.tokens, settings.tokens)) for i in range(heads * group)]


def load_queries(ref, settings: Settings, row) -> None:
    """Puts the queries of each key head into rows, and zeros beside those that do not fill lanes."""
    H = settings.width
    flat_ref = ref["q"].at[0]
    if settings.block_rows:
        in_block = lax.rem(row, settings.block_rows)

        @pl.when(in_block == 0)
        def _unpack():
            block = ref["q"][0].astype(jnp.float32)
            for i in range(settings.block_rows):
                ref["flat"][i] = block[i : i + 1]

        flat_ref = ref["flat"].at[in_block]
    for i, at in enumerate(_heads(ref, settings)):
        x = flat_ref[:, i * H : (i + 1) * H].astype(jnp.float32)
        if H % LANES:
            x = jnp.concatenate([x, jnp.zeros((len(x), LANES - H), jnp.float32)], -1)
        ref["query"][at] = x.astype(ref["query"].dtype)


def store_queries(ref, settings: Settings, row) -> None:
    """The reverse of `load_queries`, of the results: with a width below 128 the second half, p · v."""
    H = settings.width
    in_block = lax.rem(row, settings.block_rows) if settings.block_rows else 0
    out_ref = ref["flat"].at[in_block] if settings.block_rows else ref["out"].at[0]
    for i, at in enumerate(_heads(ref, settings)):
        out_ref[:, i * H : (i + 1) * H] = ref["out_sum"][at][:, -H:].astype(out_ref.dtype)
    if settings.block_rows:

        @pl.when((in_block == settings.block_rows - 1) | (row + 1 == pl.num_programs(0)))
        def _pack():
            rows = [ref["flat"][i] for i in range(settings.block_rows)]
            ref["out"][0] = jnp.concatenate(rows, 0).astype(ref["out"].dtype)
