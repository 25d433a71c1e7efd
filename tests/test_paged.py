"""Keys in pages, wherever they lie: what the contiguous cache gives."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases
import pytest

import xinfer_jax as xj
from xinfer_jax.cache.kv_cache import KVCache
from xinfer_jax.cache.paged import PAGE, Paged, empty_pools

LENGTHS, CAPACITY, STEPS = (1, 70, 200), 320, 4
CLOSE = {"float32": 2e-4, "int8": 2e-2, "int4": 0.2}  # where the last bit decides on a level


def model_of(name, layers=2):
    config = parity_cases.CASES[name].config
    windows = config.layer_windows if config.layer_windows[0] is None else (100, None)
    cut = dict(
        num_hidden_layers=layers, layer_windows=windows[:layers], layer_rope=config.layer_rope[:layers]
    )
    config = dataclasses.replace(config, max_position_embeddings=4096, **cut)
    return parity_cases.params_from(config, parity_cases.random_tensors(config, 0)), config


@partial(jax.jit, static_argnums=1)
def called(params, config, tokens_BT, num_tokens_B, cache):
    """Logits [B, T, V], and the cache."""
    hidden_BTD, cache = xj.hidden_states(params, config, tokens_BT, cache, num_tokens_B)
    return xj.unembed(params, config, hidden_BTD), cache


def paged(config, pools, table_BP, length_B):
    """A cache of the rows of that table."""
    layers = tuple(
        Paged(k, v, window, CAPACITY, jnp.array(table_BP))
        for (k, v), window in zip(pools, config.layer_windows, strict=True)
    )
    return KVCache(layers, jnp.array(length_B, jnp.int32), jnp.zeros(len(length_B), bool), None)


def read(model, pools, row_P, tokens, chunk):
    """The last token's logits, and pools that hold the prompt."""
    params, config = model
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        padded = np.pad(part, (0, chunk - len(part)))[None]
        cache = paged(config, pools, row_P[None], [start])
        logits, cache = called(params, config, padded, np.array([len(part)]), cache)
        pools = tuple((layer.k, layer.v) for layer in cache.layers)
    return logits[0, len(part) - 1], pools


def scattered(lengths, seed=0):
    """A table int32 [B, 5] of rows that long and STEPS more; pages lie anywhere, 0 where there is none."""
    table_BP = np.zeros((len(lengths), CAPACITY // PAGE), np.int32)
    pages = iter(np.random.RandomState(seed).permutation(np.arange(1, 20)))
    for row_P, length in zip(table_BP, lengths, strict=True):
        for i in range(-(-(length + STEPS) // PAGE)):
            row_P[i] = next(pages)
    return table_BP


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("name", ["qwen2-gqa-tied-old", "gemma3-old"])
def test_pages_give_what_the_contiguous_cache_gives(name, dtype):
    model = params, config = model_of(name)
    rows = [np.random.RandomState(n).randint(0, config.vocab_size, n + STEPS) for n in LENGTHS]
    table_BP, pools = scattered(LENGTHS), empty_pools(config, 20, dtype)
    pools = jax.tree.map(lambda x: x.at[0].set(255 if x.dtype == jnp.uint8 else jnp.nan), pools)
    for row_P, tokens, length in zip(table_BP, rows, LENGTHS, strict=True):
        last, pools = read(model, pools, row_P, tokens[:length], 64 if length < 100 else 128)
        alone = xj.init_cache(config, 1, CAPACITY, dtype)
        wanted, _ = xj.prefill(params, config, tokens[None, :length], np.array([length]), alone)
        np.testing.assert_allclose(last, wanted[0], atol=CLOSE[dtype])
    cache, counts = paged(config, pools, table_BP, LENGTHS), np.ones(len(rows), np.int32)
    for t in range(STEPS):
        token_BT = np.array([[tokens[len(tokens) - STEPS + t]] for tokens in rows])
        logits, cache = called(params, config, token_BT, counts, cache)
    for tokens, got in zip(rows, logits, strict=True):
        alone = xj.init_cache(config, 1, CAPACITY, dtype)
        wanted, _ = xj.prefill(params, config, tokens[None], np.array([len(tokens)]), alone)
        np.testing.assert_allclose(got[0], wanted[0], atol=CLOSE[dtype])
        assert got[0].argmax() == wanted[0].argmax()
