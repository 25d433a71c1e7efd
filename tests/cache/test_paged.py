"""A paged cache gives the same results as a contiguous one, wherever its pages are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases
import pytest
from layer_changes import with_windows
from quick import full_except

import xinfer_jax as xj
from xinfer_jax.cache.contiguous import Contiguous
from xinfer_jax.cache.kv_cache import KVCache
from xinfer_jax.cache.paged import PAGE_SIZE, Paged, empty_pools
from xinfer_jax.cache.ring import Ring
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.mixers.attention import Scoring, VisibleKeys, attention

pytestmark = pytest.mark.oldest

LENGTHS = (1, 70, 200)
CAPACITY = 320
STEPS = 4
CLOSE = {"float32": 2e-4, "int8": 2e-2}  # the last bit may decide between two levels


def make_model(name, layers=2):
    config = parity_cases.CASES[name].config
    windows = config.layer_windows if config.layer_windows[0] is None else (100, None)
    config = with_windows(config, windows[:layers], max_position_embeddings=4096)
    return parity_cases.params_from(config, parity_cases.random_tensors(config, 0)), config


@partial(jax.jit, static_argnums=1)
def call(params, config, tokens_BT, num_tokens_B, cache):
    """Logits [B, T, V], and the cache."""
    hidden_BTD, cache = xj.hidden_states(params, config, tokens_BT, cache, num_tokens_B)
    return xj.unembed(params, config, hidden_BTD), cache


def paged_cache(config, pools, table_BP, length_B):
    """A cache with the rows of that block table."""
    layers = tuple(
        Paged(k, v, window, CAPACITY, jnp.array(table_BP))
        for (k, v), window in zip(pools, config.layer_windows, strict=True)
    )
    return KVCache(layers, jnp.array(length_B, jnp.int32), jnp.zeros(len(length_B), bool), None)


def read(model, pools, row_P, tokens, chunk=128):
    """The last token's logits, and pools with the prompt's keys and values."""
    params, config = model
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        padded = np.pad(part, (0, chunk - len(part)))[None]
        cache = paged_cache(config, pools, row_P[None], [start])
        logits, cache = call(params, config, padded, np.array([len(part)]), cache)
        pools = tuple((layer.k, layer.v) for layer in cache.layers)
    return logits[0, len(part) - 1], pools


def scattered_table(lengths, seed=0):
    """A block table int32 [B, 5] for rows of these lengths and STEPS more tokens; pages in random order, 0
    where unused.
    """
    table_BP = np.zeros((len(lengths), CAPACITY // PAGE_SIZE), np.int32)
    pages = iter(np.random.RandomState(seed).permutation(np.arange(1, 20)))
    for row_P, length in zip(table_BP, lengths, strict=True):
        for i in range(-(-(length + STEPS) // PAGE_SIZE)):
            row_P[i] = next(pages)
    return table_BP


def contiguous_logits(model, tokens, dtype):
    """Logits of the steps after these tokens; one program for all lengths."""
    tokens_1T = np.zeros((1, max(LENGTHS) + STEPS), np.int32)
    tokens_1T[0, : len(tokens)] = tokens
    cache = xj.init_cache(model[1], 1, CAPACITY, dtype)
    return xj.prefill(*model, tokens_1T, np.array([len(tokens)]), cache)[0][0]


@pytest.mark.parametrize("dtype", full_except(["float32"], CLOSE))
def test_paged_logits_equal_contiguous_logits(dtype):
    """The model has a layer with a window and a layer without one."""
    model = params, config = make_model("gemma3-old")
    rows = [np.random.RandomState(n).randint(0, config.vocab_size, n + STEPS) for n in LENGTHS]
    table_BP = scattered_table(LENGTHS)
    pools = empty_pools(config, 20, dtype)
    pools = jax.tree.map(lambda x: x.at[0].set(255 if x.dtype == jnp.uint8 else jnp.nan), pools)
    for row_P, tokens, length in zip(table_BP, rows, LENGTHS, strict=True):
        last, pools = read(model, pools, row_P, tokens[:length])
        np.testing.assert_allclose(last, contiguous_logits(model, tokens[:length], dtype), atol=CLOSE[dtype])
    cache = paged_cache(config, pools, table_BP, LENGTHS)
    counts = np.ones(len(rows), np.int32)
    for t in range(STEPS):
        token_BT = np.array([[tokens[len(tokens) - STEPS + t]] for tokens in rows])
        logits, cache = call(params, config, token_BT, counts, cache)
    for tokens, got in zip(rows, logits, strict=True):
        wanted = contiguous_logits(model, tokens, dtype)
        np.testing.assert_allclose(got[0], wanted, atol=CLOSE[dtype])
        assert got[0].argmax() == wanted.argmax()


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen2-gqa-tied-old", "moe-defaults"])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(name):
    """A row has the same bits in every slot, next to other rows, and from other pages. This holds for single
    tokens and draft tokens.
    """
    model = params, config = make_model(name)
    probe = np.random.RandomState(0).randint(0, config.vocab_size, 110)

    def answered(slot, seed):
        random = np.random.RandomState(seed)
        lengths = random.permutation([3, 0, 250, 64])
        lengths[slot] = 100
        table_BP = scattered_table(lengths, seed)
        pools = empty_pools(config, 20, "float32")
        seen = []
        for b, length in enumerate(lengths):
            tokens = probe[:100] if b == slot else random.randint(0, config.vocab_size, length)
            last, pools = read(model, pools, table_BP[b], tokens) if length else (None, pools)
            seen += [last] if b == slot else []
        cache = paged_cache(config, pools, table_BP, lengths)
        for at, T in ((100, 1), (101, 3)):
            tokens_BT = random.randint(0, config.vocab_size, (4, T))
            tokens_BT[slot] = probe[at : at + T]
            counts = np.where(lengths > 0, random.randint(0, T + 1, 4), 0)
            counts[slot] = T
            logits, cache = call(params, config, tokens_BT, counts, cache)
            seen += [*logits[slot]]
        return np.stack(seen)

    alone = answered(0, 0)
    assert np.isfinite(alone).all()
    for slot, seed in ((0, 1), (1, 2), (3, 3)):
        np.testing.assert_array_equal(answered(slot, seed), alone)


@pytest.mark.full
@pytest.mark.parametrize("kind", [Contiguous, Ring, Paged])
@pytest.mark.parametrize("T", [1, 5])
def test_attention_of_a_row_does_not_read_other_rows(T, kind):
    """A row's bits follow from its own keys. Those of other rows may be NaN."""
    B = 4
    S = 320
    lengths = np.array([300, 7, 64, 129], np.int32)
    q, k, v = (
        jax.random.normal(jax.random.key(i), (B, n, m, 8)) for i, n, m in ((0, T, 4), (1, 2, S), (2, 2, S))
    )

    @jax.jit
    def attend(q, k, v, length_B):
        if kind is Paged:
            table_BP = jnp.arange(1, 1 + B * S // PAGE_SIZE)[::-1].reshape(B, -1)
            pages = (
                x.reshape(B, 2, -1, PAGE_SIZE, 8).swapaxes(1, 2).reshape(-1, 2, PAGE_SIZE, 8)[::-1]
                for x in (k, v)
            )
            layer = Paged(*(jnp.concatenate([x[:1] * jnp.nan, x]) for x in pages), None, S, table_BP)
        else:
            layer = kind(k, v, 9 if kind is Ring else None, 4 * S if kind is Ring else S)
        return attention(q, layer, VisibleKeys(length_B - T, length_B), Scoring(0.3))

    wanted = attend(q, k, v, lengths)
    for b in range(B):
        moved = [jnp.roll(x, 1 - b, 0).at[np.arange(B) != 1].set(jnp.nan) for x in (q, k, v)]
        got = attend(*moved, np.roll(lengths, 1 - b))[1]
        np.testing.assert_array_equal(got, wanted[b])


@pytest.mark.full
def test_a_kernel_reads_pages_in_order():
    """A kernel gets the same keys as from a contiguous layer cache."""
    q = jax.random.normal(jax.random.key(0), (2, 1, 4, 16))
    k = jax.random.normal(jax.random.key(1), (7, 2, PAGE_SIZE, 16))
    layer = Paged(k, k + 1, None, 128, jnp.array([[5, 2], [3, 0]]))
    length_B = np.array([100, 30], np.int32)
    visible = VisibleKeys(length_B - 1, length_B)
    got, wanted = (
        attention(q, layer, visible, Scoring(0.3), run_config=RunConfig(impl))
        for impl in ("interpret", "xla")
    )
    np.testing.assert_allclose(got, wanted, atol=1e-5)
