"""Gemma 4: layers whose heads differ in width and number, the last of which use keys and values of earlier
ones; experts beside an MLP; inputs of each layer.
"""

import dataclasses
import re

import family_checks
import jax
import numpy as np
import parity_cases as cases
import pytest
import tiny
from family_checks import CACHED, OPTIONS

import xinfer_jax as xj
from xinfer_jax.compress import awq
from xinfer_jax.feed_forward.experts import mixture_of_experts
from xinfer_jax.weights.layout import is_divisible

pytestmark = pytest.mark.oldest

CASE = cases.CASES["gemma4-shared-kv"]
MOE = cases.CASES["gemma4-experts"]
# One of each kind, and one that uses the keys and values of another.
FEWER_LAYERS = dict(
    num_hidden_layers=3, num_kv_shared_layers=1,
    layer_types=["sliding_attention", "full_attention", "full_attention"],
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return family_checks.small_model(CASE, **FEWER_LAYERS)


def test_layers_differ():
    config = CASE.config
    assert config.caches_of_layers == ((0,), (1,), (2,), (2,), (1,), (1,)) and config.head_widths == (16, 24)
    cache = xj.init_cache(config, 1, 1024)
    assert [layer.k.shape for layer in cache.layers] == [(1, 2, 576, 16), (1, 2, 1024, 24), (1, 2, 576, 16)]
    layers = cases.params_from(config, cases.random_tensors(config, 0))["layers"]
    assert "k" in layers[2] and not {"k", "v", "k_norm"} & layers[3].keys()
    assert [layer["up"]["weight"].shape[0] for layer in layers] == [80] * 3 + [160] * 3
    assert [mixer.fits for mixer in MOE.config.cached_mixers[:3]] == [
        (2, 16),
        (1, 24),
        (1, 24),
    ]


@pytest.mark.full
def test_generated_tokens_by_cache_stream_and_drafts(model):
    tokens = family_checks.check_tokens(model)
    assert [[*row] for row in zip(*xj.stream(*model, CACHED), strict=True)] == tokens


@pytest.mark.full
def test_engine_bits_alone_and_beside_others(model):
    """The engine has pages in int8, whose heads have two widths."""
    family_checks.check_engine_bits(model)


@pytest.mark.full
def test_negative_scales_of_experts():
    """They count as the positive ones do, also where every expert is computed for all tokens."""
    config = MOE.config
    layer = cases.params_from(config, cases.random_tensors(config, 3))["layers"][0]
    scale_X = layer["router"]["per_expert_scale"]
    opposite = layer | dict(router=layer["router"] | dict(per_expert_scale=-scale_X))
    x_BTD = jax.random.normal(jax.random.key(0), (1, 9, config.hidden_size))
    out, negated = (mixture_of_experts(x_BTD, tree, config) for tree in (layer, opposite))
    np.testing.assert_array_equal(negated, -out)
    assert np.abs(out).max() > 0.1


def published(case: cases.Case, seed: int) -> tuple[dict, dict[str, np.ndarray]]:
    """config.json and tensors of the text model next to others; with keys of layers that have none."""
    tensors = cases.fuse_tensors(case.config, cases.random_tensors(case.config, seed))
    tensors |= {"model.layers.5.self_attn.k_proj.weight": np.zeros((2, 2), np.float32)}
    text = {k: v for k, v in case.hf.items() if k != "architectures"}
    outer = dict(
        architectures=["Gemma4ForConditionalGeneration"], model_type="gemma4", text_config=text,
        audio_config={}, vision_config=None,
    )  # fmt: skip
    renamed = {name.replace("model.", "model.language_model."): x for name, x in tensors.items()}
    other = {f"model.{name}": np.zeros(3, np.float32) for name in ("vision_tower.x", "embed_audio.x")}
    return outer, {name: np.ascontiguousarray(x) for name, x in (renamed | other).items()}


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_published_checkpoints(tmp_path, quantize):
    outer, tensors = published(CASE, 3)
    path = tiny.write(tmp_path, outer, weights=tensors, with_tokenizer=False)
    loaded = xj.load_model(path, dtype="float32", quantize=quantize)
    assert loaded.load_stats.skipped == ("model.embed_audio.* (1)", "model.vision_tower.* (1)")
    assert loaded.config == CASE.config
    if quantize is None:
        params = cases.params_from(CASE.config, cases.random_tensors(CASE.config, 3))
        jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


def test_per_layer_config_of_saved_files():
    """transformers 5.23 writes sizes per layer in place of the published names."""
    full = dict(head_dim=24, num_key_value_heads=1)
    sliding = dict(head_dim=16, num_key_value_heads=2)
    hf = {k: v for k, v in MOE.hf.items() if k not in ("global_head_dim", "num_global_key_value_heads")}
    saved = hf | dict(per_layer_config={"0": sliding, "1": full, "2": full})
    assert xj.ModelConfig.from_hf(saved) == MOE.config
    with pytest.raises(xj.InputError, match="layers of full_attention must have the same sizes, and layer 2"):
        xj.ModelConfig.from_hf(hf | dict(per_layer_config={"1": full, "2": sliding}))
    with pytest.raises(xj.InputError, match=re.escape("per_layer_config of layer 0: ['skip'] is not")):
        xj.ModelConfig.from_hf(hf | dict(per_layer_config={"0": dict(skip=["mlp"])}))
    for keys in (["0", "00"], ["3"], ["first"], ["-1"]):
        with pytest.raises(xj.InputError, match="must have layers below 3 as its keys, each once, got"):
            xj.ModelConfig.from_hf(hf | dict(per_layer_config=dict.fromkeys(keys, {})))
    # Without attention_k_eq_v, as transformers reads them.
    assert xj.ModelConfig.from_hf(MOE.hf | dict(attention_k_eq_v=False)).cached_mixers[1].num_kv_heads == 2


def test_keys_of_per_layer_config_from_ten_layers_on():
    """transformers pads them with zeros to one width."""
    types = [*["sliding_attention"] * 5, "full_attention"] * 2
    hf = MOE.hf | dict(num_hidden_layers=12, layer_types=types)
    full = dict(head_dim=24, num_key_value_heads=1)
    for keys in (["05", "11"], ["5", "11"], ["0005", "0011"]):
        assert xj.ModelConfig.from_hf(
            hf | dict(per_layer_config=dict.fromkeys(keys, full))
        ) == xj.ModelConfig.from_hf(hf)


@pytest.mark.full
def test_a_checkpoint_that_transformers_saves(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    types = [*["sliding_attention"] * 5, "full_attention"] * 2
    hf = MOE.hf | dict(num_hidden_layers=12, layer_types=types)
    saved = cases.hf_model(hf, cases.random_tensors(xj.ModelConfig.from_hf(hf), 5))
    saved.save_pretrained(tmp_path)
    model = xj.load_model(tmp_path, dtype="float32")
    assert model.config == xj.ModelConfig.from_hf(hf)
    wanted = cases.params_from(model.config, cases.random_tensors(model.config, 5))
    jax.tree.map(np.testing.assert_array_equal, model.params, wanted)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(use_bidirectional_attention="all"), "use_bidirectional_attention 'all' is not supported"),
        (dict(num_kv_shared_layers=6), "num_kv_shared_layers must be an integer from 0 to 5, got 6"),
        (dict(num_kv_shared_layers=5), "num_kv_shared_layers 5 leaves no layer of full_attention with keys"),
        (dict(vocab_size_per_layer_input=90), "vocab_size_per_layer_input 90 is below vocab_size 96"),
        (dict(layer_types=["chunked_attention"] * 6), "layer type 'chunked_attention' is not supported"),
        (dict(global_head_dim=25), "head_dim 25 is odd"),
        (dict(rope_parameters=dict(rope_theta=1e4)), "rope_parameters of model_type 'gemma4_text' must name"),
    ],
)
def test_rejected_settings(change, message):
    with pytest.raises(xj.InputError, match=message):
        xj.ModelConfig.from_hf(CASE.hf | change)


def test_rejected_calls(model):
    params, config, prompts = model
    inputs_BTD = xj.embed_tokens(params, config, np.array(prompts[:1]))
    with pytest.raises(xj.InputError, match="inputs_BTD is not supported for model_type 'gemma4_text'"):
        xj.score(params, config, np.array(prompts[:1]), inputs_BTD=inputs_BTD)
    with pytest.raises(xj.InputError, match="linear attention and Gemma 4 cannot be written"):
        awq.quantized_params(params, "int8")
    with pytest.raises(xj.InputError, match="index of an outlier in a byte, and head_dim 512 exceeds 256"):
        wide = xj.ModelConfig.from_hf(CASE.hf | FEWER_LAYERS | dict(global_head_dim=512))
        xj.generate(params, wide, prompts, dataclasses.replace(OPTIONS, cache_dtype="gear"))
    assert is_divisible(config, 2) and not is_divisible(MOE.config, 2)  # one key head of full layers
