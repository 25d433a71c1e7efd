"""Layers of other parts than the families have: none, several side by side, of several sizes."""

import dataclasses

import jax
import numpy as np
import parity_cases as cases
import pytest
from random_matrices import random_params

import xinfer_jax as xj
from xinfer_jax.cache.kv_cache import cache_bytes, expected_fits, state_bytes
from xinfer_jax.config.layer_spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    SoftmaxRouterSpec,
)
from xinfer_jax.config.unsupported import check_supported
from xinfer_jax.feed_forward.mlp_and_mixture import MlpAndExpertsSpec
from xinfer_jax.generation.simple import generate_in_steps
from xinfer_jax.mixers.gated_delta import GatedDeltaSpec
from xinfer_jax.mixers.short_conv import ShortConvSpec
from xinfer_jax.weights.params import param_specs, tree_bytes

CONFIG = cases.CASES["qwen3-5-tied"].config
DELTA = GatedDeltaSpec(2, 4, 12, 16, 4)
FULL = AttentionSpec(qk_norm="head")
SLIDING = AttentionSpec(window=8)


forward = jax.jit(xj.forward, static_argnums=1)


def with_layers(*layers: LayerSpec) -> xj.ModelConfig:
    return dataclasses.replace(CONFIG, layers=layers, num_hidden_layers=len(layers))


def test_mixers_share_the_cache_of_their_kind_and_window():
    """One cache for each mixer that has its own, in order. Those that share use the last one like theirs."""
    shared = [dataclasses.replace(spec, shares_kv=True) for spec in (FULL, SLIDING)]
    layers = [(DELTA,), (FULL, DELTA), (), (SLIDING,), (FULL,), (DELTA,), (shared[1],), tuple(shared)]
    config = with_layers(*map(LayerSpec, layers))
    assert config.caches_of_layers == ((0,), (1, 2), (), (3,), (4,), (5,), (3,), (4, 3))
    assert len(config.cached_mixers) == len(expected_fits(config)) == 6
    assert [mixer.has_keys for mixer in config.cached_mixers] == [False, True, False, True, True, False]
    cache = xj.init_cache(config, 2, 40, "float32")
    assert cache.fits == expected_fits(config)
    assert tree_bytes(cache.layers) == cache_bytes(config, 2, 40, np.dtype("float32"))
    assert state_bytes(config) == 3 * tree_bytes(cache.layers[0]) // 2


def test_a_layer_has_the_parameters_of_its_parts_and_norms_around_them():
    layers = LayerSpec((), None), LayerSpec((), MlpSpec()), LayerSpec((FULL,), None), LayerSpec((DELTA,))
    found = [set(layer) for layer in param_specs(with_layers(*layers))["layers"]]
    mlp = {"mlp_norm", "gate", "up", "down"}
    assert found[:3] == [set(), mlp, {"attn_norm", "q", "k", "v", "o", "q_norm", "k_norm"}]
    assert mlp < found[3] and {"attn_norm", "A_log", "conv_q", "gated_norm"} < found[3]


def test_a_model_without_mixers_has_no_cache():
    config = with_layers(LayerSpec((), MlpSpec()))
    assert xj.forward(random_params(config), config, np.ones((1, 3), np.int32))[0].shape == (
        1,
        3,
        config.vocab_size,
    )
    with pytest.raises(xj.InputError, match="no layer of this model has a cache: call forward"):
        xj.init_cache(config)


@pytest.mark.parametrize("is_gated", [True, False])
def test_specs_say_what_a_router_and_a_shared_expert_have(is_gated):
    router = SoftmaxRouterSpec(input_scale=True, per_expert_scale=is_gated)
    experts = ExpertsSpec(4, 2, 8, router, shared_intermediate_size=6, shared_gated=is_gated)
    specs = param_specs(with_layers(LayerSpec((FULL,), experts)))["layers"][0]
    assert specs["router"].keys() == {"weight", "scale"} | ({"per_expert_scale"} if is_gated else set())
    assert ("shared_gate" in specs) is is_gated
    pair = param_specs(with_layers(LayerSpec((FULL,), MlpAndExpertsSpec(MlpSpec(), experts))))["layers"][0]
    assert pair.keys() - specs.keys() == {
        "gate",
        "up",
        "down",
        "mlp_out_norm",
        "experts_norm",
        "experts_out_norm",
    }


def test_an_ungated_shared_expert_is_added():
    """It is what a gate that is wide open would give."""
    experts = [
        ExpertsSpec(4, 2, 8, shared_intermediate_size=6, shared_gated=gated) for gated in (True, False)
    ]
    gated, plain = (with_layers(LayerSpec((FULL,), spec)) for spec in experts)
    params = random_params(gated)
    layer = dict(params["layers"][0])
    gate = layer.pop("shared_gate")
    wide_open = dict(weight=np.zeros_like(gate["weight"]), bias=np.full(1, 100.0, np.float32))
    x_BTD = np.ones((1, 5, gated.hidden_size), np.float32)
    hidden = jax.jit(lambda *tree: xj.hidden_states(*tree, np.zeros((1, 5), np.int32), inputs_BTD=x_BTD)[0],
        static_argnums=1)  # fmt: skip
    outs = [
        hidden(params | dict(layers=(layer | dict(shared_gate=wide_open),)), gated),
        hidden(params | dict(layers=(layer,)), plain),
    ]
    np.testing.assert_allclose(*outs, atol=1e-6)


@pytest.mark.parametrize(
    ("feature", "layers", "part"),
    [
        ("draft model", [LayerSpec((DELTA,))], "linear attention"),
        ("draft model", [LayerSpec((FULL, DELTA))], "linear attention"),
        ("causal", [LayerSpec(), LayerSpec((AttentionSpec(ahead=3),))], "attention to later tokens"),
        ("scales", [LayerSpec((), MlpSpec(gated=False))], "an MLP without a gate"),
        ("leaf formats", [LayerSpec((DELTA,), ExpertsSpec(4, 2, 8))], "a mixture of experts"),
    ],
)
def test_parts_say_what_they_do_not_support(feature, layers, part):
    config = dataclasses.replace(with_layers(*layers), norm_offset=None)
    with pytest.raises(xj.InputError, match=f"is not supported for model_type .*, which has {part}: remedy"):
        check_supported(config, feature, "it is", "remedy")


@pytest.mark.soak
def test_states_of_several_sizes():
    """Cached equals uncached, and an engine gives the tokens of `generate`."""
    wide = dataclasses.replace(DELTA, num_key_heads=1, value_head_dim=24, conv_kernel_dim=3)
    config = with_layers(*(LayerSpec((mixer,)) for mixer in (DELTA, FULL, wide)))
    params = random_params(config)
    tokens_BT = np.random.RandomState(0).randint(2, config.vocab_size, (2, 12))
    want, _ = forward(params, config, tokens_BT)
    logits_BV, cache = xj.prefill(
        params, config, tokens_BT[:, :9], np.full(2, 9), xj.init_cache(config, 2, 32)
    )
    np.testing.assert_allclose(logits_BV, want[:, 8], atol=1e-4)
    for t in range(9, 12):
        logits_BV, cache = xj.decode_step(params, config, tokens_BT[:, t].astype(np.int32), cache)
        np.testing.assert_allclose(logits_BV, want[:, t], atol=1e-4)
    prompts = tokens_BT.tolist()
    options = xj.GenerateOptions(max_tokens=6, eos_token_ids=())
    generated = xj.generate(params, config, prompts, options).tokens
    engine = xj.Engine(xj.Model(params, config), rows=2, capacity=64)
    requests = [engine.submit(prompt, options) for prompt in prompts]
    assert [request.result().tokens[0] for request in requests] == generated


@pytest.mark.full
def test_a_model_of_such_layers_generates_alike_in_all_ways():
    """Attention and a short convolution side by side, a layer without a mixer, one without a feed-forward."""
    conv = ShortConvSpec(3)
    layers = (FULL, conv), (), (SLIDING,), (conv, SLIDING)
    feeds = MlpSpec(), MlpSpec(), None, MlpSpec()
    config = with_layers(*map(LayerSpec, layers, feeds))
    params = random_params(config)
    rows = [[3, 5, 7, 11, 13], [17, 19, 23]]
    want, _ = forward(params, config, np.array(rows[:1], np.int32))
    cache = xj.init_cache(config, 1, 16)
    logits_1V, cache = xj.prefill(params, config, np.array([rows[0][:3]]), np.array([3]), cache)
    for position, token in enumerate(rows[0][3:], 3):
        np.testing.assert_allclose(logits_1V[0], want[0, position - 1], atol=1e-5 * np.abs(want).max())
        logits_1V, cache = xj.decode_step(params, config, np.array([token]), cache)
    simple = generate_in_steps(params, config, rows, 8)
    options = xj.GenerateOptions(max_tokens=8, eos_token_ids=())
    assert simple.tokens_BT.tolist() == xj.generate(params, config, rows, options).tokens
    with xj.Engine(xj.Model(params, config, None), rows=2, capacity=64) as engine:
        assert [engine.submit(row, options).result().tokens[0] for row in rows] == simple.tokens_BT.tolist()


def test_mixers_of_a_layer_have_parameters_of_other_names():
    with pytest.raises(xj.InputError, match="parts of layer 1 have parameters of the same names: k, o, q, v"):
        param_specs(with_layers(LayerSpec(), LayerSpec((FULL, DELTA))))
