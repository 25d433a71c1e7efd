"""Draft heads without an engine: the target runs known tokens once, and the head drafts in rounds."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import xinfer_jax as xj
from xinfer_jax.cache.kv_cache import KVCache
from xinfer_jax.cache.paged import PAGE_SIZE, Paged, empty_pools
from xinfer_jax.config.run_config import PLAIN
from xinfer_jax.draft_heads.draft_head import DraftCall, HeadParams, UnreadTokens


class Rounds(NamedTuple):
    """The results of rounds of drafts."""

    drafts: np.ndarray  # [R, B, count]
    logits: np.ndarray  # [R, B, count, V]
    cache: KVCache


def features_before(head, params: HeadParams, tokens_BT):
    """Returns the features of the token before each token, [B, T, X], as `UnreadTokens` has them."""
    taps = {layer: xj.Tap(read=True) for layer in head.taps} or None
    out = jax.jit(xj.run_model, static_argnums=1)(
        params.target, head.target, jnp.asarray(tokens_BT), taps=taps
    )
    reads = tuple(out.reads[layer] for layer in head.taps)
    features_BTX = head.features(params, out.hidden, reads)
    return np.asarray(jnp.pad(features_BTX, ((0, 0), (1, 0), (0, 0)))[:, :-1])


def run_rounds(head, params: HeadParams, tokens_BT, lengths_RB, count: int, cache: KVCache) -> Rounds:
    """Returns greedy drafts. lengths_RB: the number of certain tokens of each row in each round."""
    features_BTX = features_before(head, params, tokens_BT)
    starts_RB = np.concatenate([np.zeros_like(lengths_RB[:1]), lengths_RB[:-1]])
    width = int((lengths_RB - starts_RB).max())
    seen = []

    def greedy(logits_BV, context):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), logits_BV, ordered=True)
        return jnp.argmax(logits_BV, -1).astype(jnp.int32), context

    @jax.jit
    def draft(params, unread, cache):
        return head.draft(params, DraftCall(unread, cache, None, jnp.zeros(()), greedy, PLAIN), count)

    drafts = []
    for start_B, length_B in zip(starts_RB, lengths_RB, strict=True):
        index_BT = np.minimum(start_B[:, None] + np.arange(width), tokens_BT.shape[1] - 1)
        unread = UnreadTokens(
            np.take_along_axis(tokens_BT, index_BT, 1),
            np.take_along_axis(features_BTX, index_BT[..., None], 1),
            jnp.asarray(length_B - start_B, jnp.int32),
        )
        draft_BT, cache = draft(params, unread, cache)
        drafts.append(np.asarray(draft_BT))
        np.testing.assert_array_equal(cache.length_B, length_B)
    jax.effects_barrier()
    logits = np.stack(seen).reshape(len(drafts), count, *seen[0].shape)
    return Rounds(np.stack(drafts), np.moveaxis(logits, 1, 2), cache)


def paged_cache(config, rows: int, pages_per_row: int, seed: int = 0) -> KVCache:
    """Returns an empty cache whose rows have pages of a pool in any order."""
    pools = empty_pools(config, 1 + rows * pages_per_row, jnp.dtype("float32"))
    order = 1 + np.random.RandomState(seed).permutation(rows * pages_per_row)
    table_BP = jnp.asarray(order.reshape(rows, pages_per_row), jnp.int32)
    paged = partial(Paged, capacity=pages_per_row * PAGE_SIZE, table_BP=table_BP)
    windows = (mixer.window for mixer in config.cached_mixers)
    layers = tuple(paged(k, v, window) for (k, v), window in zip(pools, windows, strict=True))
    return KVCache(layers, jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool), None)
