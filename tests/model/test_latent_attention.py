"""Latent attention: what is cached, in the absorbed form, equals what is not, in the expanded form."""

import dataclasses
from functools import partial

import family_checks
import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
from family_checks import CACHED, NEW, OPTIONS
from layer_changes import with_mixer

import xinfer_jax as xj
from xinfer_jax.cache.kv_cache import cache_bytes
from xinfer_jax.config.unsupported import check_supported
from xinfer_jax.weights.layout import is_divisible
from xinfer_jax.weights.resharding import with_repeated_kv_heads

pytestmark = pytest.mark.oldest

CASE = cases.CASES["deepseek-v3-yarn-groups"]
BIAS = cases.CASES["deepseek-v3-bias-one-query-matrix-halves"]


@pytest.fixture(scope="module")
def model():
    """A dense layer and a mixture."""
    return family_checks.small_model(CASE, num_hidden_layers=2)


@pytest.fixture(scope="module")
def out(model):
    """What it generates."""
    return xj.generate(*model, dataclasses.replace(CACHED, keep_prefix=True))


# --- the cache ----------------------------------------------------------------------------------------------


def test_cached_equals_uncached_however_it_is_split(model):
    cache = family_checks.check_chunks(model, (1, 2, 39, 76, 77))
    assert cache.k[0].shape == (3, 1, 128, 36) and cache.v == (None, None)
    assert cache.fits == ((1, 36, 28),) * 2 and cache.dtype == "float32"
    assert cache.truncate([4, 23, 70]).length_B.tolist() == [4, 23, 70]


@pytest.mark.full
def test_tokens_by_cache_and_drafts(model, out):
    assert family_checks.check_tokens(model) == out.tokens


@pytest.mark.soak
def test_a_draft_model_and_beams(model, out):
    params, config, prompts = model
    drafted = dataclasses.replace(CACHED, draft=xj.Model(params, config), draft_tokens=3)
    drafted = xj.generate(params, config, prompts, drafted)
    assert drafted.tokens == out.tokens and min(drafted.stats.acceptance) > 0.8
    options = dict(max_tokens=NEW, eos_token_ids=(), early_stopping=False)
    greedy = xj.beam_search(params, config, prompts, num_beams=1, **options)
    assert [tokens for (tokens,) in greedy.sequences] == out.tokens
    best = xj.beam_search(params, config, prompts, num_beams=3, **options)
    for prompt, (tokens, *_), (score, *_) in zip(prompts, best.sequences, best.scores, strict=True):
        row_1T = np.array([prompt + tokens])
        logprobs_T = xj.score(params, config, row_1T).logprobs_BT[0, len(prompt) - 1 :]
        np.testing.assert_allclose(score, logprobs_T.mean(), atol=1e-4)


def test_prefixes_in_files(model, out, tmp_path):
    params, config, prompts = model
    xj.save_prefix(params, config, out.prefix, tmp_path / "prefix")
    prefix = xj.load_prefix(params, config, tmp_path / "prefix")
    longer = [p + t + [1, 2] for p, t in zip(prompts, out.tokens, strict=True)]
    found = xj.generate(params, config, longer, dataclasses.replace(CACHED, prefix=prefix))
    assert found.stats.reused_tokens == sum(len(p) + NEW - 1 for p in prompts)
    assert found.tokens == xj.generate(params, config, longer, CACHED).tokens


def test_bytes_of_a_token():
    """DeepSeek-V3's cache: 576 numbers in each of 61 layers, however many heads there are."""
    config = xj.ModelConfig.from_hf(DEEPSEEK_V3)
    assert cache_bytes(config, 1, 128, jnp.bfloat16) == 128 * 70_272
    assert cache_bytes(with_repeated_kv_heads(config, 8), 1, 128, jnp.bfloat16) == 8 * 128 * 70_272
    assert is_divisible(with_repeated_kv_heads(config, 8), 8) and not is_divisible(config, 8)


@pytest.mark.parametrize("dtype", ["int8", "int4", "gear", "float8_e4m3fn"])
def test_rejected_cache_dtypes(model, dtype):
    params, config, prompts = model
    options = dataclasses.replace(CACHED, cache_dtype=dtype)
    for call in (
        lambda: xj.init_cache(config, 2, 64, dtype),
        lambda: xj.generate(params, config, prompts, options),
        lambda: xj.Engine(xj.Model(params, config), rows=2, capacity=128, cache_dtype=dtype),
    )[: 2 if dtype == "gear" else 3]:  # which no pages hold
        with pytest.raises(xj.InputError, match=f"cache_dtype='{dtype}' .* latent attention.*: use a float"):
            call()


# --- without a cache ----------------------------------------------------------------------------------------


def test_texts_of_one_row_do_not_see_each_other(model):
    family_checks.check_packed_texts(model)


@pytest.mark.soak
def test_stacked_layers_remat_and_taps():
    params, config, prompts = family_checks.small_model(CASE, first_k_dense_replace=0)
    row_1T = np.array(prompts[1:2])
    wanted = xj.run_model(params, config, row_1T, taps={1: xj.Tap(read=True)})
    assert wanted.reads and wanted.reads[1].shape == (1, 23, config.hidden_size)
    stacked = xj.params.stack_layers(params, config)
    np.testing.assert_allclose(xj.run_model(stacked, config, row_1T).hidden, wanted.hidden, atol=1e-5)
    loss = lambda params, remat: xj.forward(params, config, row_1T, remat=remat)[0].std()  # noqa: E731
    pairs = (jax.jit(jax.grad(partial(loss, remat=remat)))(params) for remat in (None, "layer"))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), *pairs)


# --- engines ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_engine_bits_alone_and_beside_others(model, out):
    """Over pages that requests share."""
    params, config, prompts = model
    prompts = [*prompts, prompts[2] + prompts[1]]
    for options in ({}, dict(draft="lookup", draft_tokens=2)):
        with xj.Engine(xj.Model(params, config), rows=2, capacity=128, chunk=64, **options) as engine:
            alone = [engine.submit(prompt, OPTIONS).result() for prompt in prompts]
            requests = [engine.submit(prompt, OPTIONS) for prompt in prompts]
            together = [request.result() for request in requests]
            assert engine.stats.hits
        assert [x.tokens[0] for x in alone[:3]] == out.tokens
        for one, other in zip(alone, together, strict=True):
            assert one.tokens == other.tokens and one.logprobs == other.logprobs
    assert together[3].stats.reused_tokens == 64


# --- adapters -----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_adapters_of_rows(model):
    """Of every matrix. The absorbed form has those of `kv_b_proj`, which are applied before the product."""
    params, config, prompts = model
    adapters = [xj.lora.init_adapter(config, jax.random.key(i), rank=2 + i) for i in range(2)]
    noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape)  # noqa: E731
    adapters = [jax.tree.map(noise, adapter) for adapter in adapters]
    assert {path.rsplit(".")[-1] for path in adapters[0].matrices} > {
        "k_up",
        "v_up",
        "q_a",
        "q_b",
        "kv_a",
        "o",
    }
    of_rows = xj.lora.with_adapters(params, adapters, np.array([0, 1, -1]))
    family_checks.check_chunks((of_rows, config, prompts), (77,))
    one = xj.lora.with_adapter(params, adapters[0])
    tokens_BT, num_tokens_B = cases.pad_prompts(prompts)
    logits_BTV = xj.forward(of_rows, config, tokens_BT, None, num_tokens_B)[0]
    plain_BTV = xj.forward(params, config, tokens_BT, None, num_tokens_B)[0]
    np.testing.assert_allclose(logits_BTV[2], plain_BTV[2], atol=1e-5)
    assert np.abs(logits_BTV[:2, :5] - plain_BTV[:2, :5]).max() > 0.1
    merged = xj.lora.merge_adapter(params, adapters[0])
    of_one = xj.forward(one, config, tokens_BT[:1], None, num_tokens_B[:1])[0]
    alone_1TV = xj.forward(merged, config, tokens_BT[:1], None, num_tokens_B[:1])[0]
    for found_BTV in (logits_BTV, of_one):
        np.testing.assert_allclose(found_BTV[0, :5], alone_1TV[0, :5], atol=1e-4)


@pytest.mark.full
def test_pages_in_host_memory_and_files(model, tmp_path):
    params, config, _ = model
    draws = np.random.RandomState(0)
    prompts = [draws.randint(0, cases.VOCAB, n).tolist() for n in (100, 90, 70, 110)]
    wanted = xj.generate(params, config, prompts, dataclasses.replace(CACHED, capacity=256)).tokens
    sizes = dict(rows=2, capacity=256, chunk=64, pages=6, host_pages=16, page_directory=tmp_path)
    for hits in ("hits", "file_hits"):
        with xj.Engine(xj.Model(params, config), **sizes) as engine:
            for _ in range(2):
                requests = [engine.submit(prompt, OPTIONS) for prompt in prompts]
                assert [request.result().tokens[0] for request in requests] == wanted
            assert getattr(engine.stats, hits)


def test_what_it_does_not_support(model):
    params, config, _ = model
    dense = dataclasses.replace(config, num_hidden_layers=1)
    with pytest.raises(xj.InputError, match="which has latent attention: remedy"):
        check_supported(dense, "scales", "it is", "remedy")
    cache = xj.init_cache(with_mixer(config, kv_lora_rank=30), 3, 8)
    with pytest.raises(xj.InputError, match="1 key heads of width 38 for a model of .* width 36"):
        xj.decode_step(params, config, np.zeros(3, np.int32), cache)


DEEPSEEK_V3 = dict(  # the published settings, without what is the default
    model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432,
    num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, max_position_embeddings=163840,
    rope_theta=1e4, rope_scaling=dict(
        type="yarn", factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0,
        beta_fast=32, beta_slow=1,
    ),
)  # fmt: skip


def test_kimi_k2_is_deepseek_v3():
    kimi = dict(DEEPSEEK_V3, num_attention_heads=64, num_key_value_heads=64, n_routed_experts=384, n_group=1)
    kimi |= dict(topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.827, rms_norm_eps=1e-5)
    config = xj.ModelConfig.from_hf(kimi)
    assert xj.ModelConfig.from_hf(kimi | dict(model_type="kimi_k2")) == config
    kimi = dict(text_config=kimi | dict(model_type="kimi_k2"), tie_word_embeddings=False)
    assert xj.ModelConfig.from_hf(dict(model_type="kimi_k25", **kimi)) == config


def test_numbers_of_published_models():
    """DeepSeek-V3 has 671 billion parameters. A token uses 38 billion of them, embeddings included."""
    specs = xj.params.param_names(xj.ModelConfig.from_hf(DEEPSEEK_V3))
    numbers = sum(int(np.prod(spec.shape)) for spec in specs)
    idle = sum(int(np.prod(spec.shape)) for spec in specs if ".experts." in spec.path) * 248 // 256
    assert round(numbers / 1e9) == 671 and round((numbers - idle) / 1e9) == 38
