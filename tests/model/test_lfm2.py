"""LFM2: short convolutions beside attention. A row's cache is its last few inputs: what is cached equals what
is not, however it is split. Drafts are undone. What has no state is rejected.
"""

import dataclasses

import family_checks
import jax
import numpy as np
import parity_cases as cases
import pytest
from family_checks import CACHED, NEW
from layer_changes import with_mixer
from random_matrices import random_params, write_checkpoint

import xinfer_jax as xj
from xinfer_jax.config.layer_spec import LayerSpec
from xinfer_jax.config.unsupported import check_supported
from xinfer_jax.mixers.gated_delta import GatedDeltaSpec
from xinfer_jax.mixers.short_conv import ShortConvSpec
from xinfer_jax.weights.layout import is_divisible
from xinfer_jax.weights.quantized_weight import is_quantized

pytestmark = pytest.mark.oldest

CASE = cases.CASES["lfm2-published-tied"]  # convolutions of three tokens
BIAS = cases.CASES["lfm2-bias-untied-layer-types"]  # of five, with biases


@pytest.fixture(scope="module")
def model():
    """A layer with a convolution, and one with attention."""
    return family_checks.small_model(CASE, num_hidden_layers=2, full_attn_idxs=[1])


@pytest.fixture(scope="module")
def out(model):
    """Returns the output of `generate`."""
    return xj.generate(*model, dataclasses.replace(CACHED, keep_prefix=True))


# --- the cache ----------------------------------------------------------------------------------------------


def test_cached_equals_uncached_however_it_is_split(model):
    _, config, _ = model
    assert xj.init_cache(config, 3, 128, "int8").layers[0].inputs.dtype == np.float32
    cache = family_checks.check_chunks(model, (1, 2, 39, 76, 77))
    with pytest.raises(xj.InputError, match="cannot go back from 5 to 4 tokens: its short convolutions"):
        cache.truncate([4, 23, 77])
    assert cache.truncate([0, 23, 77]).length_B.tolist() == [0, 23, 77]


@pytest.mark.full
def test_chunks_shorter_than_the_convolution():
    params, config, prompts = family_checks.small_model(BIAS)
    family_checks.check_chunks((params, config, [prompts[0], prompts[1][:3]]), (1, 3, 4, 5))


@pytest.mark.full
def test_tokens_by_cache_and_drafts(model, out):
    assert family_checks.check_tokens(model) == out.tokens


@pytest.mark.full
def test_drafts_are_undone(model, out):
    family_checks.check_drafts_are_undone(model, out)


@pytest.mark.full
def test_prefixes_reach_to_their_state(model, out, tmp_path):
    family_checks.check_prefix_of_states(model, out, tmp_path / "prefix")


def test_texts_of_one_row_do_not_see_each_other(model):
    family_checks.check_packed_texts(model)


# --- files --------------------------------------------------------------------------------------------------


def test_older_names_of_settings():
    types = ["conv", "full_attention", "conv", "full_attention", "conv"]
    newer = dict(CASE.hf, intermediate_size=CASE.hf["block_ff_dim"], layer_types=types)
    del newer["block_ff_dim"], newer["full_attn_idxs"]
    assert xj.ModelConfig.from_hf(newer) == CASE.config
    assert CASE.config.intermediate_size == 80 and CASE.config.tie_word_embeddings
    assert not xj.ModelConfig.from_hf(CASE.hf | dict(tie_embedding=False)).tie_word_embeddings
    assert xj.ModelConfig.from_hf(CASE.hf | dict(block_ffn_dim_multiplier=1.3)).intermediate_size == 96
    assert xj.ModelConfig.from_hf(CASE.hf | dict(block_ffn_dim_multiplier=None)).intermediate_size == 66
    attention = xj.ModelConfig.from_hf(CASE.hf | dict(full_attn_idxs=None))
    assert [layer.attention is not None for layer in attention.layers] == [True] * 5


@pytest.mark.full
def test_int8_matrices_and_what_stays_float(tmp_path):
    config = BIAS.config
    path = write_checkpoint(tmp_path / "float", BIAS.hf, fused=True)
    exact, near = (xj.load_model(path, "float32", quantize=quantize) for quantize in (None, "int8"))
    layer = near.params["layers"][0]
    matrices = {name: leaf["weight"] for name, leaf in layer.items() if isinstance(leaf, dict)}
    quantized = {name for name, weight in matrices.items() if is_quantized(weight)}
    assert quantized == {"conv_b", "conv_c", "conv_x", "conv_o", "gate", "up", "down"}
    assert layer["conv_taps"].dtype == layer["conv_bias"].dtype == np.float32
    prompt = cases.prompts(BIAS)[1:2]
    found, wanted = (xj.forward(m.params, config, np.array(prompt))[0] for m in (near, exact))
    assert 0 < np.abs(found - wanted).mean() < 0.05 * np.abs(wanted).mean()
    xj.save_model(near.params, config, tmp_path / "int8")
    again = xj.load_model(tmp_path / "int8", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, again.params, near.params)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(layer_types=["conv", "mamba", "conv", "conv", "conv"]), "layer type 'mamba' is not supported"),
        (dict(layer_types=["conv"]), "one type for each of the 5 layers"),
        (dict(full_attn_idxs=[1, 5]), r"full_attn_idxs must list layers from 0 to 4, got \[1, 5\]"),
        (dict(full_attn_idxs=3), "full_attn_idxs must list layers from 0 to 4, got 3"),
        (dict(conv_L_cache=1), "conv_L_cache must be at least 2, got 1"),
        (dict(conv_L_cache=2.5), "conv_L_cache must be an integer"),
        (dict(conv_bias=None), "conv_bias must be true or false"),
        (dict(norm_eps=0), "norm_eps must be a number above 0"),
        (dict(norm_eps=2), "norm_eps must lie between 1e-30 and 1"),
        (dict(block_ff_dim="100"), "intermediate_size must be a number above 0"),
        (dict(block_multiple_of=0), "block_multiple_of must be a number above 0"),
        (dict(block_auto_adjust_ff_dim=1), "block_auto_adjust_ff_dim must be true or false"),
        (dict(tie_embedding="yes"), "tie_word_embeddings must be true or false"),
        (dict(hidden_act="relu2"), "hidden_act 'relu2' is not supported: LFM2's is 'silu'"),
    ],
)
def test_rejected_settings(change, message):
    with pytest.raises(xj.InputError, match=message):
        xj.ModelConfig.from_hf(CASE.hf | change)


# --- the mixer ----------------------------------------------------------------------------------------------


def test_rejected_draft_models_and_caches(model):
    params, config, prompts = model
    draft = xj.Model(params, config)
    with pytest.raises(xj.InputError, match="draft model is not supported .*'lfm2', which has short conv"):
        xj.generate(params, config, prompts, xj.GenerateOptions(max_tokens=NEW, draft=draft))
    with pytest.raises(xj.InputError, match="which has short convolutions: remedy"):
        check_supported(config, "scales", "it is", "remedy")
    other = with_mixer(config, kernel_dim=7)
    with pytest.raises(xj.InputError, match=r"states of \(4, 6, 12\).* for a model of .*\(4, 2, 12\)"):
        xj.decode_step(params, config, np.zeros(3, np.int32), xj.init_cache(other, 3, 8))


def test_meshes_divide_groups_of_channels():
    """There are as many groups as heads, if that number divides the channels."""
    assert is_divisible(CASE.config, 2)
    assert not is_divisible(dataclasses.replace(CASE.config, hidden_size=46), 2 * 23)
    three = dataclasses.replace(CASE.config, hidden_size=54)
    assert three.cached_mixers[0].fits == ((2, 2, 27),)


@pytest.mark.full
def test_side_by_side_with_attention_and_another_state():
    """Its names are those of no other mixer, and a model has states of two kinds."""
    config = cases.CASES["qwen3-5-tied"].config
    convolution = ShortConvSpec(4, bias=True)
    attention = config.layers[1].attention
    delta = GatedDeltaSpec(2, 4, 12, 16, 4)
    layers = ((attention, convolution), (delta, convolution), (convolution,))
    config = dataclasses.replace(config, layers=tuple(map(LayerSpec, layers)))
    params = random_params(config)
    prompts = [prompt[:20] for prompt in cases.prompts(CASE)]
    cache = family_checks.check_chunks((params, config, prompts), (3, 4, 20))
    assert [type(layer).__name__ for layer in cache.layers] == [
        "Contiguous", "ShortConvCache", "Recurrent", "ShortConvCache", "ShortConvCache",
    ]  # fmt: skip
