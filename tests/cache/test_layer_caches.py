"""All layer caches return the same keys for the same operations; only they know the slot of a position."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.cache.contiguous import Contiguous
from xinfer_jax.cache.ring import RING_SLACK, Ring
from xinfer_jax.families.reading import from_hf

SLOTS = 12


def stored_keys(layer, length_B, most):
    """For each row the positions in its blocks, and their keys."""
    width, count = layer.block_layout(most)
    rows = [{} for _ in length_B]
    for i in range(count):
        block = layer.get_block(i, width, length_B)
        for b, row in enumerate(rows):
            position_S, valid_S = (
                np.broadcast_to(x, (2, width))[b] for x in (block.position_BS, block.valid_BS)
            )
            new = {
                p: float(block.k_BKSH[b, 0, s, 0]) for s, p in enumerate(position_S.tolist()) if valid_S[s]
            }
            assert not row.keys() & new.keys()  # blocks overlap, but no key is valid twice
            row |= new
    return rows


@pytest.mark.full
@pytest.mark.parametrize("most", [5, 64], ids=["blocks", "one-block"])
@pytest.mark.parametrize("kind", [Contiguous, Ring])
def test_blocks_have_each_position_once(kind, most):
    """Two rows of 30 and 17 tokens, appended three at a time: a ring has the last ones."""
    capacity = 40 if kind is Ring else 30
    slots = SLOTS if kind is Ring else 32
    layer = kind(jnp.zeros((2, 1, slots, 1)), jnp.zeros((2, 1, slots, 1)), 4, capacity)
    length_B = jnp.zeros(2, jnp.int32)
    for _ in range(11):
        new_B = jnp.minimum(3, jnp.array([30, 17]) - length_B)
        keys_BTKH = (length_B[:, None] + jnp.arange(3.0))[:, :, None, None]  # a key is its position
        layer = layer.append(keys_BTKH, -keys_BTKH, length_B, new_B)
        length_B += new_B
    swapped = stored_keys(layer.reorder(jnp.array([1, 0])), length_B[::-1], most)
    for row, other, n in zip(
        stored_keys(layer, length_B, most), swapped[::-1], length_B.tolist(), strict=True
    ):
        first = max(0, n - SLOTS) if kind is Ring else 0
        assert row == other == {p: float(p) for p in range(first, n)}


def test_most_tokens_of_one_call():
    config = from_hf(tiny.CONFIG | dict(model_type="mistral", sliding_window=8))
    assert xj.init_cache(config, 1, 300).most_at_once == 300
    assert RING_SLACK <= xj.init_cache(config, 1, 4096).most_at_once == 569
