"""Latent attention: what is cached, in the absorbed form, equals what is not, in the expanded form."""

import dataclasses
import json
from functools import partial

import family_checks
import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
import tiny
from family_checks import CACHED, NEW, OPTIONS
from layer_changes import with_mixer
from random_matrices import write_checkpoint
from scaled_checkpoints import (
    assert_equal,
    checkpoint,
    equal_model,
    fp8,
    fp8_settings,
    published_tensors,
    write,
)

import xinfer_jax as xj
from xinfer_jax.cache.kv_cache import cache_bytes
from xinfer_jax.config.unsupported import check_supported
from xinfer_jax.weights.layout import is_divisible
from xinfer_jax.weights.quantized_weight import is_quantized
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


@pytest.mark.full
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
    params, config, prompts = model
    row_1T = np.array([sum(prompts[:2], [])])
    ids_1T = np.repeat([0, 1], [5, 23])[None]
    together_1T = xj.score(params, config, row_1T, segment_ids_BT=ids_1T).logprobs_BT[0]
    alone = [xj.score(params, config, np.array([prompt])).logprobs_BT[0] for prompt in prompts[:2]]
    np.testing.assert_allclose(together_1T[:4], alone[0], atol=1e-4)
    np.testing.assert_allclose(together_1T[5:], alone[1], atol=1e-4)


@pytest.mark.full
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
    family_checks.check_chunks((of_rows, config, prompts), (39, 76, 77))
    one = xj.lora.with_adapter(params, adapters[0])
    tokens_BT, num_tokens_B = cases.pad_prompts(prompts)
    logits_BTV = xj.forward(of_rows, config, tokens_BT, None, num_tokens_B)[0]
    plain_BTV = xj.forward(params, config, tokens_BT, None, num_tokens_B)[0]
    np.testing.assert_allclose(logits_BTV[2], plain_BTV[2], atol=1e-5)
    assert np.abs(logits_BTV[:2, :5] - plain_BTV[:2, :5]).max() > 0.1
    merged = xj.lora.merge_adapter(params, adapters[0])
    family_checks.check_chunks((one, config, prompts), (77,))
    alone_1TV = xj.forward(merged, config, tokens_BT[:1], None, num_tokens_B[:1])[0]
    np.testing.assert_allclose(logits_BTV[0, :5], alone_1TV[0, :5], atol=1e-4)


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_int8_matrices_and_what_stays_float(tmp_path):
    path = write_checkpoint(tmp_path / "float", CASE.hf | dict(first_k_dense_replace=3), fused=True)
    exact, near = (xj.load_model(path, "float32", quantize=quantize) for quantize in (None, "int8"))
    layer = near.params["layers"][0]
    matrices = {name: leaf["weight"] for name, leaf in layer.items() if isinstance(leaf, dict)}
    quantized = {name for name, weight in matrices.items() if is_quantized(weight)}
    assert quantized == {"q_a", "q_b", "kv_a", "o", "gate", "up", "down"}
    prompt = cases.prompts(CASE)[1:2]
    found, wanted = (xj.forward(m.params, m.config, np.array(prompt))[0] for m in (near, exact))
    assert 0 < np.abs(found - wanted).mean() < 0.05 * np.abs(wanted).mean()
    xj.save_model(near.params, near.config, tmp_path / "int8")
    again = xj.load_model(tmp_path / "int8", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, again.params, near.params)


@pytest.mark.full
def test_fp8_files_whose_matrices_stay(tmp_path):
    """In blocks, which cross the heads of `kv_b_proj`. Its two matrices become floats."""
    sizes = dict(kv_lora_rank=144, q_lora_rank=132, qk_nope_head_dim=40, v_head_dim=56, hidden_size=160)
    hf = CASE.hf | sizes | dict(num_hidden_layers=1)
    path, equal = checkpoint(tmp_path / "a", hf, fp8_settings([128, 128]), fp8((128, 128)))
    kept = xj.load_model(path, "float32", "fp8")
    assert_equal(kept, equal_model(tmp_path / "b", hf, equal))
    layer = kept.params["layers"][0]
    is_kept = {
        name for name, leaf in layer.items() if isinstance(leaf, dict) and is_quantized(leaf["weight"])
    }
    assert is_kept == {"q_a", "q_b", "kv_a", "o", "gate", "up", "down"}
    xj.save_model(kept.params, kept.config, tmp_path / "c", like=path)
    again = xj.load_model(tmp_path / "c", "float32", "fp8")
    jax.tree.map(np.testing.assert_array_equal, again.params, kept.params)


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


def test_saved_settings(tmp_path):
    for case in (CASE, BIAS):
        params, config, _ = family_checks.small_model(case)
        xj.save_model(params, config, tmp_path, overwrite=True)
        settings = json.loads((tmp_path / "config.json").read_text())
        assert settings["qk_head_dim"] == 20 and settings["head_dim"] == 8
        assert xj.ModelConfig.from_hf(settings) == config


def test_rope_of_deepseek_v2_is_interleaved():
    """Whatever a setting says that transformers does not know."""
    hf = cases.CASES["deepseek-v2-groups"].hf
    assert xj.ModelConfig.from_hf(hf | dict(rope_interleave=False)) == xj.ModelConfig.from_hf(hf)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(qk_rope_head_dim=7), "qk_rope_head_dim 7 is odd: rotary embedding needs an even number"),
        (dict(kv_lora_rank=None), "kv_lora_rank must be a number above 0, got None"),
        (dict(q_lora_rank=0), "q_lora_rank must be a number above 0, got 0"),
        (dict(v_head_dim=1.5), "v_head_dim must be an integer, got 1.5"),
        (dict(rope_interleave=None), "rope_interleave must be true or false, got None"),
        (dict(scoring_func="softmax"), "scoring_func 'softmax' is not supported .*: only 'sigmoid' is"),
        (dict(topk_method="greedy"), "topk_method 'greedy' is not supported .*: only 'noaux_tc' is"),
        (dict(moe_layer_freq=2), "moe_layer_freq 2 is not supported .*: only 1 is"),
        (dict(index_topk=2048), "index_topk 2048 is not supported: there is no indexer for sparse attention"),
        (dict(index_n_heads=64), "index_n_heads 64 is not supported: there is no indexer"),
        (dict(model_type="deepseek_v32"), "model_type 'deepseek_v32' is not supported: there is no indexer"),
        (dict(model_type="glm_moe_dsa"), "model_type 'glm_moe_dsa' is not supported: there is no indexer"),
        (dict(is_causal=False), "is_causal False is not supported .*: only True is"),
        (dict(n_group=3), "n_routed_experts 8 is not a multiple of n_group 3"),
        (dict(rope_scaling=dict(rope_type="longrope")), "rope type 'longrope' is not supported"),
    ],
)
def test_rejected_settings(change, message):
    with pytest.raises(xj.InputError, match=message):
        xj.ModelConfig.from_hf(CASE.hf | change)


ATTENTION = "model.layers.1.self_attn"
BIAS_OF_CHOICE = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    "name, shape, message",
    [
        (f"{ATTENTION}.q_a_proj.weight", (24, 48), "q_a_proj.weight has shape [24, 48], the config asks for"),
        (
            f"{ATTENTION}.kv_b_proj.weight",
            (96, 28),
            "kv_b_proj.weight has shape [96, 28], the config asks for",
        ),
        (f"{ATTENTION}.q_a_layernorm.weight", None, "missing model.layers.1.self_attn.q_a_layernorm.weight"),
        (f"{ATTENTION}.indexer.wk.weight", (8, 48), "unexpected model.layers.1.self_attn.indexer.wk.weight"),
        (BIAS_OF_CHOICE, (4,), "e_score_correction_bias has shape [4], the config asks for [8]"),
        (BIAS_OF_CHOICE, None, "missing model.layers.1.mlp.gate.e_score_correction_bias [8]"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, name, shape, message):
    stored = published_tensors(CASE.hf)
    stored |= {name: None if shape is None else np.ones(shape, np.float32)}
    path = write(tmp_path, CASE.hf, {name: x for name, x in stored.items() if x is not None})
    assert message in tiny.load_error(path)


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
