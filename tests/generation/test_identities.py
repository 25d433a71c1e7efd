"""Tests of results that must be equal: cached and not, chunked and whole, alone and in a batch, streamed and
looped. Also tests of calls that must not recompile or copy.
"""

import dataclasses
from functools import partial

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import full_except
from small_models import CONFIGS, QWEN, build, prompts

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf
from xinfer_jax.generation.simple import generate_in_steps
from xinfer_jax.sampling.batched_settings import settings_per_row

pytestmark = [pytest.mark.oldest, pytest.mark.optimized]

MIXED = (
    xj.SamplingConfig(),
    xj.SamplingConfig(temperature=0.9, top_k=30, top_p=0.9, repetition_penalty=1.2),
    xj.SamplingConfig(temperature=1.5),
    xj.SamplingConfig(repetition_penalty=1.3),
)


@pytest.fixture(scope="module", params=full_except(["qwen2"], CONFIGS))
def model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def qwen():
    return build("qwen2")


def options(**kwargs):
    return xj.GenerateOptions(**{"max_tokens": 20} | kwargs)


full_forward = jax.jit(xj.forward, static_argnums=1)


@pytest.mark.parametrize("split", [1, 16, 30, 39])
def test_prefill_and_decode_equal_one_forward(model, split):
    params, config = model
    tokens = np.array(prompts(40), np.int32)
    want, _ = full_forward(params, config, tokens)
    padded = np.zeros((1, 64), np.int32)
    padded[:, :split] = tokens[:, :split]
    logits, cache = xj.prefill(
        params, config, padded, np.array([split], np.int32), xj.init_cache(config, 1, 100)
    )
    got = [logits]
    for t in range(split, 40):
        logits, cache = xj.decode_step(params, config, tokens[:, t], cache)
        got.append(logits)
    assert int(cache.length_B[0]) == 40
    np.testing.assert_allclose(np.stack(got, 1), want[:, split - 1 :], atol=1e-5 * np.abs(want).max())


def test_forward_appends_any_number_of_tokens_to_a_cache(model):
    params, config = model
    tokens = np.array(prompts(40, 40), np.int32)
    want, _ = full_forward(params, config, tokens)
    want = want[:, :39]
    cache = xj.init_cache(config, 2, 41)
    got = []
    for first, last in ((0, 19), (19, 20), (20, 39)):  # two programs
        logits, cache = full_forward(params, config, tokens[:, first:last], cache)
        got.append(logits)
    np.testing.assert_allclose(np.concatenate(got, 1), want, atol=1e-5 * np.abs(want).max())


def test_chunked_prefill_equals_one_forward(model, monkeypatch):
    params, config = model
    tokens = np.array(prompts(1200, 1200, seed=1), np.int32)
    lengths = np.array([1200, 400], np.int32)  # the second row ends in the first chunk
    want, _ = full_forward(params, config, tokens, None, lengths)
    logits, cache = xj.prefill(params, config, tokens, lengths, xj.init_cache(config, 2, 1201))
    np.testing.assert_array_equal(cache.length_B, lengths)
    for row, n in enumerate(lengths):
        np.testing.assert_allclose(logits[row], want[row, n - 1], atol=2e-5 * np.abs(want[row, n - 1]).max())


def test_a_row_of_a_ragged_batch_is_the_row_alone(model):
    params, config = model
    rows = prompts(3, 31, 17, 25)
    keys = jax.random.split(jax.random.key(9), 4)
    together = xj.generate(params, config, rows, options(sampling=MIXED, eos_token_ids=(5, 77)), key=keys)
    for i, row in enumerate(rows):
        alone = xj.generate(
            params, config, [row], options(sampling=MIXED[i], eos_token_ids=(5, 77)), key=keys[i : i + 1]
        )
        assert (
            alone.tokens == together.tokens[i : i + 1]
            and alone.finish_reason == together.finish_reason[i : i + 1]
        )
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[i], atol=1e-4)


def test_simple_stream_loop_and_recomputing_give_the_same_tokens(model):
    params, config = model
    rows = prompts(3, 31, 17, 25)
    key = jax.random.key(3)
    asked = options(sampling=MIXED, eos_token_ids=(5, 77))
    want = xj.generate(params, config, rows, asked, key=key)
    simple = generate_in_steps(params, config, rows, 20, MIXED, (5, 77), key)
    for ids, row, n in zip(want.tokens, np.asarray(simple.tokens_BT), simple.length_B, strict=True):
        assert row[:n].tolist() == ids
    streamed = [[] for _ in rows]
    for ids in xj.stream(params, config, rows, asked, key=key):
        for row, token in zip(streamed, ids, strict=True):
            row += [] if token is None else [token]
    assert streamed == want.tokens
    assert (
        xj.generate(params, config, rows, dataclasses.replace(asked, use_cache=False), key=key).tokens
        == want.tokens
    )
    cache = xj.init_cache(config, 4, 64)
    tokens = np.zeros((4, 40), np.int32)
    lengths = np.array([len(r) for r in rows], np.int32)
    seen = np.zeros((4, config.vocab_size), bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        seen[i, row] = True
    logits, cache = xj.prefill(params, config, tokens, lengths, cache)
    result = xj.decode_loop(
        params,
        config,
        logits,
        cache,
        key,
        settings_per_row(MIXED, 4, config.vocab_size),
        np.array([5, 77]),
        20,
        seen_BV=seen,
    )
    for i, row in enumerate(want.tokens):
        ended = want.finish_reason[i] == "stop"
        assert bool(result.finished_B[i]) == ended and int(result.length_B[i]) == len(row)
        assert result.tokens_BT[i, : len(row)].tolist() == row
        assert not result.tokens_BT[i, len(row) :].any()
    # every token but the last one chosen is in the cache
    np.testing.assert_array_equal(result.cache.length_B, lengths + result.length_B - 1)


def test_nothing_is_compiled_for_other_settings_and_rows_within_the_buckets(qwen):
    """The first calls are a greedy call, a call with plain settings and a call with any other setting. The
    next calls, up to the next power of two, compile nothing.
    """
    params, config = qwen
    rows = prompts(3, 31, 17, 25)

    def both(new, cut, settings, eos=(3,), stop=(), count=4):
        asked = options(max_tokens=new, sampling=settings, eos_token_ids=eos, stop_token_ids=stop)
        for call in (xj.generate, lambda *args, **kwargs: list(xj.stream(*args, **kwargs))):
            call(params, config, [row[:cut] for row in rows[:count]], asked, key=jax.random.key(cut))

    others = [
        xj.SamplingConfig(typical_p=0.8), xj.SamplingConfig(no_repeat_ngram_size=2),
        xj.SamplingConfig(presence_penalty=1.0, frequency_penalty=0.5, min_tokens=3),
        xj.SamplingConfig(allowed_token_ids=(5, 6), forbidden_token_ids=(7,)),
    ]  # fmt: skip
    both(30, 31, xj.SamplingConfig())
    both(30, 31, xj.SamplingConfig(temperature=1.0))  # greedy rows compile no sampler
    both(30, 31, xj.SamplingConfig(temperature=0.9, min_p=0.1, logit_bias={3: 1.0}))
    with compiling.events() as compiled:
        both(30, 31, xj.SamplingConfig(), stop=(4, 5))
        both(30, 31, xj.SamplingConfig(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1))
        both(17, 17, xj.SamplingConfig(temperature=1.5), (1, 2), count=3)
        both(32, 25, MIXED[1:], (), count=3)
        both(32, 31, others)
    assert compiled == []


@pytest.mark.parametrize("dtype", full_except(["float32"], ["float32", "bfloat16", "float16"]))
def test_decode_loop_aliases_a_donated_cache_and_copies_no_weights(dtype):
    """Compiled memory analysis: the cache's bytes are aliased. Temporaries are far below the weights: none
    were widened or copied.
    """
    config = from_hf(
        QWEN | dict(vocab_size=4096, hidden_size=256, intermediate_size=512, max_position_embeddings=8192)
    )
    params = xj.init_params(config, jax.random.key(0), dtype)
    cache = xj.init_cache(config, 1, 2048, "float32")

    @partial(jax.jit, donate_argnames="cache")
    def loop(params, logits_BV, cache, key, new):
        eos_ids = np.zeros(4, np.int32)
        return xj.decode_loop(
            params, config, logits_BV, cache, key, xj.SamplingConfig(), eos_ids, new, output_size=16
        )

    inputs = (params, jnp.zeros((1, 4096)), cache, jax.random.key(0), np.int32(16))
    memory = loop.lower(*inputs).compile().memory_analysis()
    cache_bytes, weight_bytes = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (cache, params))
    assert memory.alias_size_in_bytes >= cache_bytes
    # Half of the widened vocabulary matrix: no tile is larger than 4 MiB.
    tile_bytes = 2**21 if dtype == "float16" else 0
    assert memory.temp_size_in_bytes < 2**20 + weight_bytes // 5 + tile_bytes


@pytest.mark.full
def test_writes_past_the_capacity_are_dropped_and_flagged(qwen):
    params, config = qwen
    tokens = np.array(prompts(12, 12), np.int32)
    _, cache = xj.prefill(params, config, tokens, np.array([12, 6]), xj.init_cache(config, 2, 15))
    kept = np.asarray(cache.k[0][:, :, :12])
    _, cache = full_forward(params, config, tokens[:, :5], cache, np.array([5, 5]))
    np.testing.assert_array_equal(cache.overflow_B, [True, False])
    np.testing.assert_array_equal(cache.length_B, [15, 11])
    np.testing.assert_array_equal(cache.k[0][0, :, :12], kept[0])  # nothing in front was moved or overwritten
    np.testing.assert_array_equal(cache.k[0][1, :, :6], kept[1, :, :6])


def test_a_truncated_and_reordered_cache(qwen):
    from xinfer_jax.cache.kv_cache import reorder
    from xinfer_jax.cache.truncation import truncate

    params, config = qwen
    tokens = np.array(prompts(10, 10), np.int32)
    _, cache = xj.prefill(params, config, tokens, np.array([10, 10]), xj.init_cache(config, 2, 32))
    want, _ = xj.decode_step(params, config, tokens[:, 7], truncate(cache, jnp.array([7, 7])))
    got, _ = full_forward(params, config, tokens[:, :8])
    np.testing.assert_allclose(want, got[:, 7], atol=1e-4)
    swapped, _ = xj.decode_step(
        params, config, tokens[::-1, 7], reorder(truncate(cache, 7), jnp.array([1, 0]))
    )
    np.testing.assert_allclose(swapped, want[::-1], atol=1e-5)


@pytest.mark.full
def test_dynamic_rope_raises_past_its_original_maximum():
    config = from_hf(QWEN | dict(max_position_embeddings=32, rope_scaling={"type": "dynamic", "factor": 2.0}))
    params = xj.init_params(config, jax.random.key(0))
    assert len(xj.generate(params, config, prompts(20), options(max_tokens=12)).tokens[0]) == 12
    with pytest.raises(xj.InputError, match="dynamic"):
        xj.generate(params, config, prompts(20), options(max_tokens=13))
    with pytest.raises(xj.InputError, match="dynamic"):
        xj.init_cache(config, 1, 33)
    # one forward past the maximum: each row scales by its own length, as it does alone
    rows = np.array(prompts(50, 50), np.int32)
    both, _ = full_forward(params, config, rows, None, np.array([50, 40]))
    alone, _ = full_forward(params, config, rows[1:, :40])
    np.testing.assert_allclose(both[1, :40], alone[0], atol=1e-5)
