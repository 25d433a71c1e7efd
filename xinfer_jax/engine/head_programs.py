"""Programs of an engine's draft head: its caches over pages, prefill, after which the head has read the
prompt, and reading the tokens of later steps in which it drafted nothing.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from ..cache.kv_cache import KVCache
from ..cache.paged import FeaturePages, Paged
from ..draft_heads.draft_head import DraftHead, HeadParams, UnreadTokens, head_run_config
from ..generation.executor import Executor
from ..generation.head_prefill import read_chunk
from ..generation.loop import last_hidden
from ..generation.state import UnreadFeatures
from ..model.decoder import Inputs, head_logits


def head_caches(
    head: DraftHead, pools: Any, table_BP: Any, capacity: int, length_B: Any
) -> tuple[KVCache | None, FeaturePages | None]:
    """Returns the cache of a head and its features, in rows of this length. They are None if the head has no
    cache. pools: `CacheArrays.head`.
    """
    if not head.has_cache:
        return None, None
    *of_mixers, (features, none) = pools
    mixers = zip(of_mixers, head.config.cached_mixers, strict=True)
    layers = tuple(Paged(k, v, mixer.window, capacity, table_BP) for (k, v), mixer in mixers)
    cache = KVCache(layers, length_B, jnp.zeros(length_B.shape, bool), None)
    return cache, FeaturePages(features, none, None, capacity, table_BP)


def head_pools(cache: KVCache | None, features: FeaturePages | None) -> Any:
    """Returns `CacheArrays.head` of these caches."""
    if cache is None or features is None:
        return ()
    return (*((layer.k, layer.v) for layer in cache.kv_layers), (features.k, None))


def prefill_chunk_with_head(
    executor: Executor, static: tuple, caches: tuple[KVCache, Any], args: tuple
) -> tuple:
    """Prefills a chunk of one row, which begins with a page.

    Args:
        executor: the executor of a trace.
        static: the head, the config of the target, the capacity, and True for the outputs of all tokens.
        caches: the cache of the target, and `CacheArrays.head`.
        args: the parameters and extras of the target, the parameters of the head, the block table, and the
            tokens.

    Returns:
        The logits of the last token, or the hidden states of all tokens, the features of the last token, the
        cache of the target, and `CacheArrays.head`.
    """
    head, config, capacity, whole = static
    cache, pools = caches
    params, extras, own, table_BP, (tokens_BT, num_tokens_B) = args
    start_B = jnp.asarray(cache.length_B)
    num_tokens_B = jnp.asarray(num_tokens_B)
    T = tokens_BT.shape[1]
    tokens_BT = tokens_BT[:, :capacity]  # the rest is padding
    head_cache, features = head_caches(head, pools, jnp.asarray(table_BP), capacity, start_B)
    before_BX: Any = None if features is None else features.before(start_B)
    models = params, config, extras, own
    inputs = Inputs(jnp.asarray(tokens_BT), num_tokens_B)
    found = read_chunk(head, models, inputs, before_BX, (cache, head_cache), executor.run_config)
    if features is not None:
        features = features.record(found.features_BTX, start_B, num_tokens_B)
    last_BX = last_hidden(found.features_BTX, num_tokens_B)
    if whole:
        outputs = jnp.pad(found.hidden_BTD, ((0, 0), (0, T - tokens_BT.shape[1]), (0, 0)))
    else:
        outputs = head_logits(params, config, last_hidden(found.hidden_BTD, num_tokens_B))
    return outputs, last_BX, found.cache, head_pools(found.head_cache, features)


def read_unread(executor: Executor, static: tuple, pools: Any, args: tuple) -> tuple[Any, UnreadFeatures]:
    """Lets the head read all unread tokens of the rows of a call except their last ones.

    Args:
        executor: the executor of a trace.
        static: the head, the capacity, and the number of tokens that the head reads at a time.
        pools: `CacheArrays.head`.
        args: the parameters of the head and of the target, the rows, the rows that take part, bool [B], and
            the block table.

    Returns:
        `CacheArrays.head`, and `DecodeState.unread`.
    """
    head, capacity, chunk = static
    own, target, rows, running_B, table_BP = args
    features_BTX, count_B = map(jnp.asarray, rows.unread)
    running_B = jnp.asarray(running_B)
    read_B = jnp.where(running_B, count_B - 1, 0)  # also of rows that have ended
    first_B = rows.position_B - count_B
    cache, features = head_caches(head, pools, jnp.asarray(table_BP), capacity, jnp.maximum(first_B, 0))
    run_config = head_run_config(executor.run_config)
    padded_BTX = jnp.pad(features_BTX, ((0, 0), (0, -features_BTX.shape[1] % chunk), (0, 0)))

    def body(i: Any, cache: Any) -> Any:
        at_T = i * chunk + jnp.arange(chunk)
        index_BT = jnp.maximum(first_B[:, None] + at_T, 0)
        tokens_BT = jnp.take_along_axis(rows.context.history_BS, index_BT, 1, mode="clip")
        part_BTX = lax.dynamic_slice_in_dim(padded_BTX, i * chunk, chunk, 1)
        unread = UnreadTokens(tokens_BT, part_BTX, jnp.clip(read_B - i * chunk, 0, chunk))
        return head.read(HeadParams(own, target), unread, cache, run_config)

    cache = lax.fori_loop(0, -(-jnp.max(read_B) // chunk), body, cache)
    last_BX = jnp.take_along_axis(features_BTX, read_B[:, None, None], 1)[:, 0]
    has_read_B = read_B > 0
    first_BX = jnp.where(has_read_B[:, None], last_BX, features_BTX[:, 0])
    unread = UnreadFeatures(features_BTX.at[:, 0].set(first_BX), jnp.where(has_read_B, 1, count_B))
    return head_pools(cache, features), unread


def first_unread(features_BX: Any, old: UnreadFeatures, is_new_B: Any) -> UnreadFeatures:
    """Returns the features of the last tokens of prompts for new rows, whose heads read one token next. Other
    rows keep theirs.
    """
    new_BTX = jnp.asarray(old.features_BTX).at[:, 0].set(features_BX)
    features_BTX = jnp.where(jnp.asarray(is_new_B)[:, None, None], new_BTX, old.features_BTX)
    return UnreadFeatures(features_BTX, jnp.where(is_new_B, 1, old.count_B))
