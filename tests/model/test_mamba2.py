"""Mamba-2: layers with a state alone, or next to attention. Prompts in blocks equal the recurrence, in chunks
of any split. Drafts are undone, and engines give the same bits alone and next to others.
"""

import dataclasses

import family_checks
import jax
import numpy as np
import parity_cases as cases
import pytest
from family_checks import CACHED, NEW
from random_matrices import random_params

import xinfer_jax as xj
from xinfer_jax.config.layer_spec import AttentionSpec, LayerSpec
from xinfer_jax.config.unsupported import check_supported
from xinfer_jax.mixers.mamba2 import Mamba2Spec
from xinfer_jax.weights.layout import is_divisible
from xinfer_jax.weights.resharding import with_repeated_kv_heads

pytestmark = pytest.mark.oldest

CASE = cases.CASES["mamba2-groups"]
BIAS = cases.CASES["mamba2-bias-tied"]
_SPEC = Mamba2Spec(num_heads=4, head_dim=16, n_groups=2, state_size=12, conv_kernel=4)


@pytest.fixture(scope="module")
def model():
    """Two layers, and no keys."""
    return family_checks.small_model(CASE, num_hidden_layers=2)


@pytest.fixture(scope="module")
def hybrid():
    """A layer with both mixers, and one with a state alone, with other forms of the gated norm."""
    config = cases.CASES["qwen3-head-dim-tied"].config
    both = Mamba2Spec(**dict(vars(_SPEC), norm="before_gate", norm_groups=2, in_multiplier=0.7))
    alone = Mamba2Spec(
        **dict(vars(_SPEC), norm=None, multipliers=(0.5, 2, 1.5, 0.7, 1.2), out_multiplier=0.8)
    )
    layers = (LayerSpec((AttentionSpec(qk_norm="head"), both)), LayerSpec((alone,)))
    config = dataclasses.replace(config, layers=layers, num_hidden_layers=2)
    return random_params(config), config, cases.prompts(CASE)


@pytest.fixture(scope="module")
def out(model):
    return xj.generate(*model, dataclasses.replace(CACHED, keep_prefix=True))


# --- the cache ----------------------------------------------------------------------------------------------


def test_cached_equals_uncached_however_it_is_split(model):
    cache = family_checks.check_chunks(model, (1, 2, 39, 76, 77))
    with pytest.raises(xj.InputError, match="cannot go back from 5 to 4 tokens: its "):
        cache.truncate([4, 23, 77])


@pytest.mark.soak
def test_chunks_next_to_attention(hybrid):
    family_checks.check_chunks(hybrid, (1, 2, 39, 76, 77))
    family_checks.check_packed_texts(hybrid)


@pytest.mark.full
def test_token_by_token_equals_blocks(model):
    """For 65 tokens, a block and one more, to 1e-5 of the largest logit."""
    params, config, _ = model
    tokens_BT = np.random.RandomState(0).randint(0, cases.VOCAB, (1, 65))
    logits_BTV = xj.forward(params, config, tokens_BT)[0]
    cache = xj.init_cache(config, 1, 65)
    allowed = 1e-5 * np.abs(logits_BTV).max()
    step = jax.jit(xj.decode_step, static_argnames="config")
    for t in range(65):
        logits_BV, cache = step(params, config, tokens_BT[:, t], cache)
        np.testing.assert_allclose(logits_BV, logits_BTV[:, t], atol=allowed)


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


# --- engines ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_engine_bits(model):
    family_checks.check_engine_bits(model)


@pytest.mark.soak
def test_engine_bits_next_to_attention(hybrid):
    family_checks.check_engine_bits(hybrid)


# --- settings and meshes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(n_groups=4), "num_heads 6 is not a multiple of n_groups 4"),
        (dict(conv_kernel=1), "conv_kernel must be at least 2, got 1"),
        (dict(state_size=0), "state_size must be a number above 0"),
        (dict(head_dim=15), "expand 2 makes 96 inner features, and 6 heads of 15 have 90"),
        (dict(expand=1.5, head_dim=12), "expand must be an integer, got 1.5"),
        (dict(expand=3), "expand 3 makes 144 inner features, and 6 heads of 16 have 96"),
        (dict(use_conv_bias=None), "use_conv_bias must be true or false"),
        (dict(layer_norm_epsilon=0), "layer_norm_epsilon must be a number above 0"),
        (dict(hidden_act="relu2"), "hidden_act 'relu2' is not supported"),
    ],
)
def test_rejected_settings(change, message):
    with pytest.raises(xj.InputError, match=message):
        xj.ModelConfig.from_hf(CASE.hf | change)


def test_widths_that_rope_could_not_rotate():
    """A model without RoPE may have odd ones, also of the heads of Mamba-2."""
    config = xj.ModelConfig.from_hf(CASE.hf | dict(hidden_size=45, head_dim=15))
    assert config.ropes == ()
    logits_BTV = xj.forward(random_params(config), config, np.array([[1, 2, 3]]))[0]
    assert np.isfinite(logits_BTV).all()


def test_rejected_draft_models_and_caches(model):
    params, config, prompts = model
    with pytest.raises(xj.InputError, match="draft model is not supported .*which has Mamba-2 layers"):
        draft = xj.Model(params, config)
        xj.generate(params, config, prompts, xj.GenerateOptions(max_tokens=NEW, draft=draft))
    with pytest.raises(xj.InputError, match="which has Mamba-2 layers: remedy"):
        check_supported(config, "scales", "it is", "remedy")


def test_meshes_divide_heads_and_repeat_groups():
    assert is_divisible(CASE.config, 2)
    assert not is_divisible(CASE.config, 3)  # B and C have two groups
    assert not is_divisible(BIAS.config, 2)
    repeated = with_repeated_kv_heads(BIAS.config, 4)
    assert is_divisible(repeated, 4)
    assert repeated.cached_mixers[0].fits[0] == (4, 2, 16)
