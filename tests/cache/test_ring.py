"""Layers with a sliding window use a ring of slots: the same tokens, in memory that does not grow with the
capacity.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases
import pytest
from layer_changes import with_windows

import xinfer_jax as xj
from xinfer_jax.cache.ring import Ring
from xinfer_jax.cache.truncation import truncate
from xinfer_jax.weights.params import tree_bytes

pytestmark = pytest.mark.oldest

CAPACITY = 2048
SLOTS = 576  # of a layer with a window of 8: 8 + 512 - 1, rounded up
LONG = 1200
SHORT = 300


@pytest.fixture(scope="module")
def model():
    config = parity_cases.CASES["gemma3-old"].config
    config = with_windows(config, (8, None), max_position_embeddings=CAPACITY)
    return parity_cases.params_from(config, parity_cases.random_tensors(config, 0)), config


@pytest.fixture(scope="module")
def rows_and_logits(model):
    """Tokens [2, LONG], and their logits without a cache."""
    tokens_BT = np.random.RandomState(0).randint(0, model[1].vocab_size, (2, LONG))
    return tokens_BT, np.asarray(jax.jit(xj.forward, static_argnums=1)(*model, tokens_BT)[0])


def decode_logits(model, cache, tokens_BT):
    """Logits [T, B, V] of tokens appended one by one."""
    step = lambda cache, token_B: xj.decode_step(*model, token_B, cache)[::-1]  # noqa: E731
    return jax.jit(lambda cache, tokens_TB: jax.lax.scan(step, cache, tokens_TB))(
        cache, jnp.asarray(tokens_BT.T)
    )


def filled_cache(model, tokens_BT, lengths):
    cache = xj.init_cache(model[1], len(lengths), CAPACITY)
    return xj.prefill(*model, tokens_BT, np.array(lengths, np.int32), cache)[1]


def test_ring_memory_does_not_grow_with_the_capacity(model):
    config = model[1]
    small, large = (xj.init_cache(config, 1, capacity) for capacity in (CAPACITY, 4 * CAPACITY))
    assert [k.shape[2] for k in large.k] == [
        4 * CAPACITY if window is None else SLOTS for window in config.layer_windows
    ]
    of_tokens = [tree_bytes((cache.k, cache.v)) / (SLOTS + cache.capacity) for cache in (small, large)]
    assert of_tokens[0] == of_tokens[1]
    assert not any(isinstance(layer, Ring) for layer in xj.init_cache(config, 1, SLOTS).layers)


def test_a_ring_equals_a_cache_of_all_tokens(model, rows_and_logits):
    """Ragged rows over several chunks, one of which wraps around, and one only once it is continued."""
    tokens_BT, full_BTV = rows_and_logits
    cache = filled_cache(model, tokens_BT[:, :-50], [LONG - 50, SHORT])
    more_BT = np.stack([tokens_BT[0, -50:], tokens_BT[1, SHORT : SHORT + 50]])
    cache, got_TBV = decode_logits(model, cache, more_BT)
    assert (
        cache.length_B.tolist() == [LONG, SHORT + 50] and cache.reached_B.tolist() == cache.length_B.tolist()
    )
    want_BTV = np.stack([full_BTV[0, -50:], full_BTV[1, SHORT : SHORT + 50]])
    got_BTV = np.moveaxis(np.asarray(got_TBV), 0, 1)
    np.testing.assert_allclose(got_BTV, want_BTV, atol=1e-5 * np.abs(want_BTV).max())


@pytest.mark.full
def test_how_far_a_ring_can_be_truncated(model, rows_and_logits):
    tokens_BT, full_BTV = rows_and_logits
    cache = filled_cache(model, tokens_BT, [LONG, SHORT])
    most = SLOTS - 8 + 1
    back = truncate(cache, np.array([LONG - most, 1]))  # the short row still has all its keys
    cache, logits_TBV = decode_logits(
        model, back, np.stack([tokens_BT[0, LONG - most :][:20], tokens_BT[1, 1:21]])
    )
    np.testing.assert_allclose(logits_TBV[:, 0], full_BTV[0, LONG - most :][:20], atol=1e-4)
    np.testing.assert_allclose(logits_TBV[:, 1], full_BTV[1, 1:21], atol=1e-4)
    # Counted from the longest that the row has been.
    with pytest.raises(xj.InputError, match=f"row 0 cannot go back from {LONG} to {LONG - most - 1}"):
        truncate(cache, LONG - most - 1)
    flagged = jax.jit(truncate)(cache, jnp.int32(LONG - most - 1))
    assert flagged.overflow_B.tolist() == [True, False]
    assert not truncate(cache, 0).overflow_B.any()


def test_too_many_tokens_in_one_call_raise(model, rows_and_logits):
    with pytest.raises(xj.InputError, match="570 tokens in one call exceed the 569"):
        jax.eval_shape(
            lambda tokens_BT: xj.forward(*model, tokens_BT, xj.init_cache(model[1], 2, CAPACITY)),
            rows_and_logits[0][:, :570],
        )


@pytest.mark.full
def test_generate_beyond_the_ring(model):
    """The tokens, made with draft tokens, are the most probable ones of the logits without a cache."""
    prompts = [np.random.RandomState(1).randint(0, model[1].vocab_size, n).tolist() for n in (570, 30)]
    options = xj.GenerateOptions(max_tokens=10, eos_token_ids=(), capacity=CAPACITY, draft="lookup")
    out = xj.generate(*model, prompts, options)
    rows = [prompt + tokens for prompt, tokens in zip(prompts, out.tokens, strict=True)]
    tokens_BT, num_tokens_B = parity_cases.pad_prompts(rows)
    logits_BTV = np.asarray(jax.jit(xj.forward, static_argnums=1)(*model, tokens_BT, None, num_tokens_B)[0])
    for logits_TV, prompt, tokens in zip(logits_BTV, prompts, out.tokens, strict=True):
        assert logits_TV[len(prompt) - 1 :][:10].argmax(-1).tolist() == tokens
    without_rings = with_windows(model[1], (None,) * model[1].num_hidden_layers)
    whole = xj.init_cache(without_rings, len(prompts), CAPACITY)
    assert whole.reached_B is None
    part = out.stats.cache_bytes / tree_bytes((whole.k, whole.v))
    assert part == (SLOTS + CAPACITY) / (2 * CAPACITY)


@pytest.mark.full
def test_a_prefix_is_reused_as_far_as_the_ring_has_its_keys(model, rows_and_logits, tmp_path):
    prompt = rows_and_logits[0][0].tolist()
    options = xj.GenerateOptions(max_tokens=4, capacity=CAPACITY, keep_prefix=True)
    first = xj.generate(*model, [prompt], options).prefix
    xj.save_prefix(*model, first, tmp_path / "cache")
    loaded = xj.load_prefix(*model, tmp_path / "cache")
    assert loaded.cache.reached_B.tolist() == first.cache.reached_B.tolist()
    options = dataclasses.replace(options, capacity=None)
    for shared, reused in ((1000, 1000), (100, 0)):
        changed = [*prompt[:shared], (prompt[shared] + 1) % model[1].vocab_size, 5]
        fresh = xj.generate(*model, [changed], dataclasses.replace(options, capacity=CAPACITY))
        for prefix in (first, loaded):
            again = xj.generate(*model, [changed], dataclasses.replace(options, prefix=prefix))
            assert again.tokens == fresh.tokens and again.stats.reused_tokens == reused
    went_back = dataclasses.replace(first.cache, length_B=jnp.array([560]), reached_B=jnp.array([580]))
    xj.save_prefix(*model, xj.types.Prefix([prompt[:560]], went_back), tmp_path / "cache")
    with pytest.raises(xj.InputError, match="needs slots for 580 tokens, more than the capacity 570"):
        xj.load_prefix(*model, tmp_path / "cache", capacity=570)


@pytest.mark.full
def test_layers_with_different_windows(model, rows_and_logits):
    """Two rings of different lengths: a prompt in chunks, truncated as far as the shorter ring allows."""
    params = model[0]
    config = with_windows(model[1], (8, 600))
    tokens_BT = rows_and_logits[0][:1]
    full_TV = np.asarray(jax.jit(xj.forward, static_argnums=1)(params, config, tokens_BT)[0][0])
    cache = filled_cache((params, config), tokens_BT[:, :-1], [LONG - 1])
    assert [k.shape[2] for k in cache.k] == [SLOTS, 1152]
    most = 1152 - 600 + 1
    for back in (LONG - 1, LONG - most):
        logits_BV, cache = xj.decode_step(params, config, tokens_BT[:, back], truncate(cache, back))
        np.testing.assert_allclose(logits_BV[0], full_TV[back], atol=1e-4)
    with pytest.raises(xj.InputError, match=f"sliding-window layers can go back by at most {most};"):
        truncate(cache, LONG - most - 1)
    assert jax.jit(truncate)(cache, jnp.int32(LONG - most - 1)).overflow_B.tolist() == [True]


def test_truncating_a_row_to_0_resets_its_reached_length(model):
    cache = xj.init_cache(model[1], 2, CAPACITY)
    cache = dataclasses.replace(cache, length_B=jnp.array([LONG, 5]), reached_B=jnp.array([LONG, 5]))
    assert truncate(cache, 2**40).length_B.tolist() == [LONG, 5]
    again = truncate(cache, [0, 3])
    assert again.reached_B.tolist() == [0, 5]
    again = dataclasses.replace(again, length_B=jnp.array([20, 3]), reached_B=jnp.array([20, 5]))
    assert truncate(again, 10).length_B.tolist() == [10, 3]
    assert jax.jit(truncate)(cache, -1).length_B.tolist() == [0, 0]
