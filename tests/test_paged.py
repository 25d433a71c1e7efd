"""Keys in pages, wherever they lie: what the contiguous cache gives."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases
import pytest

import xinfer_jax as xj
from xinfer_jax.cache.kinds import Contiguous, Ring
from xinfer_jax.cache.kv_cache import KVCache
from xinfer_jax.cache.paged import PAGE, Paged, empty_pools
from xinfer_jax.model.attention import attention

LENGTHS = (1, 70, 200)
CAPACITY = 320
STEPS = 4
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


def read(model, pools, row_P, tokens, chunk=128):
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


def contiguous(model, tokens, dtype):
    """Logits behind these tokens; one program for all lengths."""
    tokens_1T = np.zeros((1, max(LENGTHS) + STEPS), np.int32)
    tokens_1T[0, : len(tokens)] = tokens
    cache = xj.init_cache(model[1], 1, CAPACITY, dtype)
    return xj.prefill(*model, tokens_1T, np.array([len(tokens)]), cache)[0][0]


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("name", ["qwen2-gqa-tied-old", "gemma3-old"])
def test_pages_give_what_the_contiguous_cache_gives(name, dtype):
    model = params, config = model_of(name)
    rows = [np.random.RandomState(n).randint(0, config.vocab_size, n + STEPS) for n in LENGTHS]
    table_BP = scattered(LENGTHS)
    pools = empty_pools(config, 20, dtype)
    pools = jax.tree.map(lambda x: x.at[0].set(255 if x.dtype == jnp.uint8 else jnp.nan), pools)
    for row_P, tokens, length in zip(table_BP, rows, LENGTHS, strict=True):
        last, pools = read(model, pools, row_P, tokens[:length])
        np.testing.assert_allclose(last, contiguous(model, tokens[:length], dtype), atol=CLOSE[dtype])
    cache = paged(config, pools, table_BP, LENGTHS)
    counts = np.ones(len(rows), np.int32)
    for t in range(STEPS):
        token_BT = np.array([[tokens[len(tokens) - STEPS + t]] for tokens in rows])
        logits, cache = called(params, config, token_BT, counts, cache)
    for tokens, got in zip(rows, logits, strict=True):
        wanted = contiguous(model, tokens, dtype)
        np.testing.assert_allclose(got[0], wanted, atol=CLOSE[dtype])
        assert got[0].argmax() == wanted.argmax()


@pytest.mark.parametrize("name", ["qwen2-gqa-tied-old", "moe-defaults"])
def test_a_row_gets_the_same_bits_in_any_company(name):
    """In every slot, beside other rows, from other pages; single tokens and guesses."""
    model = params, config = model_of(name)
    probe = np.random.RandomState(0).randint(0, config.vocab_size, 110)

    def answered(slot, seed):
        random = np.random.RandomState(seed)
        lengths = random.permutation([3, 0, 250, 64])
        lengths[slot] = 100
        table_BP = scattered(lengths, seed)
        pools = empty_pools(config, 20, "float32")
        seen = []
        for b, length in enumerate(lengths):
            tokens = probe[:100] if b == slot else random.randint(0, config.vocab_size, length)
            last, pools = read(model, pools, table_BP[b], tokens) if length else (None, pools)
            seen += [last] if b == slot else []
        cache = paged(config, pools, table_BP, lengths)
        for at, T in ((100, 1), (101, 3)):
            tokens_BT = random.randint(0, config.vocab_size, (4, T))
            tokens_BT[slot] = probe[at : at + T]
            counts = np.where(lengths > 0, random.randint(0, T + 1, 4), 0)
            counts[slot] = T
            logits, cache = called(params, config, tokens_BT, counts, cache)
            seen += [*logits[slot]]
        return np.stack(seen)

    alone = answered(0, 0)
    assert np.isfinite(alone).all()
    for slot, seed in ((0, 1), (1, 2), (3, 3)):
        np.testing.assert_array_equal(answered(slot, seed), alone)


@pytest.mark.parametrize("kind", [Contiguous, Ring, Paged])
@pytest.mark.parametrize("T", [1, 5])
def test_rows_are_attended_one_by_one(T, kind):
    """A row's bits follow from its own keys, which need not be numbers in other rows."""
    B = 4
    S = 320
    lengths = np.array([300, 7, 64, 129], np.int32)
    q, k, v = (
        jax.random.normal(jax.random.key(i), (B, n, m, 8)) for i, n, m in ((0, T, 4), (1, 2, S), (2, 2, S))
    )

    @jax.jit
    def attend(q, k, v, length_B):
        if kind is Paged:
            table_BP = jnp.arange(1, 1 + B * S // PAGE)[::-1].reshape(B, -1)
            pages = (
                x.reshape(B, 2, -1, PAGE, 8).swapaxes(1, 2).reshape(-1, 2, PAGE, 8)[::-1] for x in (k, v)
            )
            layer = Paged(*(jnp.concatenate([x[:1] * jnp.nan, x]) for x in pages), None, S, table_BP)
        else:
            layer = kind(k, v, 9 if kind is Ring else None, 4 * S if kind is Ring else S)
        return attention(q, layer, length_B=length_B, start_B=length_B - T, scale=0.3)

    wanted = attend(q, k, v, lengths)
    for b in range(B):
        moved = [jnp.roll(x, 1 - b, 0).at[np.arange(B) != 1].set(jnp.nan) for x in (q, k, v)]
        got = attend(*moved, np.roll(lengths, 1 - b))[1]
        np.testing.assert_array_equal(got, wanted[b])


def test_a_kernel_reads_pages_in_order():
    """In place of the contiguous layer's keys."""
    q = jax.random.normal(jax.random.key(0), (2, 1, 4, 16))
    k = jax.random.normal(jax.random.key(1), (7, 2, PAGE, 16))
    layer = Paged(k, k + 1, None, 128, jnp.array([[5, 2], [3, 0]]))
    length_B = np.array([100, 30], np.int32)
    got, wanted = (
        attention(q, layer, length_B=length_B, start_B=length_B - 1, scale=0.3, impl=impl)
        for impl in ("interpret", "xla")
    )
    np.testing.assert_allclose(got, wanted, atol=1e-5)
