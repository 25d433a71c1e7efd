"""GLM-4.5: a router by sigmoid scores with a bias for the choice and groups; drafting layers in its files."""

import dataclasses
import json
import math
from functools import cache

import family_checks
import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
import tiny
from safetensors.numpy import load_file

import xinfer_jax as xj
from xinfer_jax.config.layer_spec import ExpertsSpec
from xinfer_jax.feed_forward.grouped_topk import GroupedTopkRouter, GroupedTopkSpec
from xinfer_jax.weights.param_specs import param_specs

pytestmark = pytest.mark.oldest

NAME = "glm4-moe-groups"
CASE = cases.CASES[NAME]
BF16 = jnp.bfloat16


@pytest.fixture(scope="module")
def model():
    """A dense layer and a mixture."""
    return family_checks.small_model(CASE, num_hidden_layers=2)


@cache
def published() -> dict[str, np.ndarray]:
    """The tensors of the case as files have them."""
    params, config, _ = family_checks.small_model(CASE)
    return {name: np.asarray(x) for name, x in xj.params.params_to_tensors(params, config).items()}


def with_draft_layer(tensors, layer=3):
    """The tensors, and those of a layer that drafts after the last one."""
    of_layer = {name: x for name, x in tensors.items() if name.startswith("model.layers.2.")}
    own = {name.replace(".2.", f".{layer}.", 1): x for name, x in of_layer.items()}
    wide = np.ones((CASE.config.hidden_size, 2 * CASE.config.hidden_size), np.float32)
    names = ("enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens")
    own |= {f"model.layers.{layer}.{name}.weight": np.ones(7, np.float32) for name in names}
    return tensors | own | {f"model.layers.{layer}.eh_proj.weight": wide}


# --- the router ---------------------------------------------------------------------------------------------


def routed_by_numpy(logit_MX, bias_X, spec, count):
    """Weights and experts of each token, in float64, sorted by expert."""
    if spec.scoring_func == "sigmoid":
        score_MX = 1 / (1 + np.exp(-logit_MX))
    else:
        score_MX = np.exp(logit_MX) / np.exp(logit_MX).sum(-1, keepdims=True)
    choice_MX = score_MX + bias_X if spec.correction_bias else score_MX.copy()
    groups = choice_MX.reshape(len(choice_MX), spec.n_group, -1)
    best = -np.sort(-groups, -1)
    group_score = best[..., :2].sum(-1) if spec.group_score == "top2" else best[..., 0]
    kept = np.argsort(-group_score, -1, kind="stable")[:, : spec.topk_group]
    for row, own in zip(groups, kept, strict=True):
        row[[g for g in range(spec.n_group) if g not in own]] = spec.masked_score
    expert_MU = np.sort(np.argsort(-groups.reshape(choice_MX.shape), -1, kind="stable")[:, :count], -1)
    weight_MU = np.take_along_axis(score_MX, expert_MU, -1)
    if spec.norm_topk_prob:
        sum_M1 = weight_MU.sum(-1, keepdims=True) + spec.norm_epsilon
        weight_MU = weight_MU / np.maximum(sum_M1, spec.norm_minimum)
    return weight_MU * spec.routed_scaling_factor, expert_MU


SPECS = {
    "deepseek_v3": GroupedTopkSpec(n_group=4, topk_group=2, routed_scaling_factor=2.5),
    "minimax_m2": GroupedTopkSpec(norm_epsilon=0.0),
    "ernie4_5_moe": GroupedTopkSpec("softmax", norm_epsilon=0.0, norm_minimum=0.2),
    "mistral4": GroupedTopkSpec("softmax", False, 4, 2, masked_score=0.0),
    "deepseek_v2": GroupedTopkSpec("softmax", False, 4, 2, "max", 0.0, norm_topk_prob=False),
    "longcat_flash": GroupedTopkSpec("softmax", norm_topk_prob=False, routed_scaling_factor=6.0),
    "lfm2_moe": GroupedTopkSpec(norm_epsilon=1e-6),
    "a large epsilon": GroupedTopkSpec(n_group=2, topk_group=1, norm_epsilon=0.5),
    "a mask of 0": GroupedTopkSpec(n_group=4, topk_group=2, masked_score=0.0),
}


def router_and_params(spec):
    """A router of 16 experts, 3 of a token, and its parameters."""
    experts = ExpertsSpec(16, 3, 8, spec)
    draws = np.random.default_rng(0)
    params = {"weight": draws.standard_normal((16, 48), np.float32) / 7}
    if spec.correction_bias:
        params["correction_bias"] = 0.5 * draws.standard_normal(16, np.float32) - 0.4
    return GroupedTopkRouter(CASE.config, experts), params, draws.standard_normal((1, 200, 48), np.float32)


@pytest.mark.parametrize("family", SPECS)
def test_choices_and_weights_by_numpy(family):
    spec = SPECS[family]
    router, params, x_BTD = router_and_params(spec)
    assert router.param_specs().keys() == params.keys()
    logit_MX = x_BTD[0].astype(np.float64) @ params["weight"].T
    want = routed_by_numpy(logit_MX, params.get("correction_bias"), spec, 3)
    weight_MU, expert_MU = map(np.asarray, jax.jit(router.choose)(params, x_BTD))
    order = expert_MU.argsort(-1)
    np.testing.assert_array_equal(np.take_along_axis(expert_MU, order, -1), want[1])
    np.testing.assert_allclose(np.take_along_axis(weight_MU, order, -1), want[0], rtol=1e-5)


def test_given_experts_have_their_own_scores():
    """A token with -1 has those of the router."""
    router, params, x_BTD = router_and_params(SPECS["deepseek_v3"])
    free = router.choose(params, x_BTD)
    given_BTU = np.broadcast_to(np.array([15, 0, 7], np.int32), (1, 200, 3)).copy()
    given_BTU[:, ::2, 1] = -1
    weight_MU, expert_MU = router.choose(params, x_BTD, given_BTU)
    np.testing.assert_array_equal(expert_MU[::2], free[1][::2])
    np.testing.assert_array_equal(expert_MU[1::2], given_BTU[0, 1::2])
    score_MX = jax.nn.sigmoid(x_BTD[0] @ params["weight"].T)
    want = np.asarray(score_MX)[:, [15, 0, 7]]
    np.testing.assert_allclose(weight_MU[1::2], 2.5 * (want / want.sum(-1, keepdims=True))[1::2], rtol=1e-5)


# --- dtypes -------------------------------------------------------------------------------------------------


def test_a_router_in_bfloat16_would_choose_others(tmp_path):
    """Loaded in bfloat16 it is that of the files to the last bit, also saved again in bfloat16."""
    path = tiny.write(tmp_path / "float32", CASE.hf, weights=published(), with_tokenizer=False)
    loaded = xj.load_model(path, "bfloat16")
    xj.save_model(loaded.params, loaded.config, tmp_path / "bfloat16")
    again = xj.load_model(tmp_path / "bfloat16", "bfloat16")
    stored = load_file(tmp_path / "bfloat16" / "model.safetensors")
    names = {name for name, x in stored.items() if x.dtype == np.float32}
    assert names == {name for name in stored if ".mlp.gate." in name} and len(names) == 4
    for tree in (loaded, again):
        router = tree.params["layers"][1]["router"]
        for leaf, name in (("weight", "weight"), ("correction_bias", "e_score_correction_bias")):
            np.testing.assert_array_equal(router[leaf], published()[f"model.layers.1.mlp.gate.{name}"])
        assert tree.params["layers"][1]["q"]["weight"].dtype == BF16
    rounded = jax.tree.map(lambda x: x.astype(BF16).astype(jnp.float32), router)
    x_BTD = jax.random.normal(jax.random.key(0), (1, 3000, loaded.config.hidden_size), BF16)
    choose = GroupedTopkRouter(loaded.config, loaded.config.experts).choose
    (weight_MU, expert_MU), (_, other_MU) = choose(router, x_BTD), choose(rounded, x_BTD)
    changed_M = (np.sort(expert_MU) != np.sort(other_MU)).any(-1)
    assert 0.001 < changed_M.mean() < 0.1 and weight_MU.dtype == jnp.float32


# --- the model ----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_generated_tokens_by_cache_and_drafts(model):
    family_checks.check_tokens(model)


@pytest.mark.full
def test_engine_bits_alone_and_beside_others(model):
    family_checks.check_engine_bits(model)


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_layers_that_draft_are_not_read(tmp_path, quantize):
    plain, drafting = (
        tiny.write(tmp_path / name, CASE.hf, weights=tensors, with_tokenizer=False)
        for name, tensors in (("plain", published()), ("drafting", with_draft_layer(published())))
    )
    models = [xj.load_model(path, "float32", quantize) for path in (plain, drafting)]
    jax.tree.map(np.testing.assert_array_equal, *(x.params for x in models))
    params = models[1].params
    if quantize is not None:
        with pytest.raises(xj.InputError, match="experts in int8 or int4 cannot be saved"):
            xj.save_model(params, models[1].config, tmp_path / "saved")
        return
    given = xj.params.params_from_tensors(CASE.config, with_draft_layer(published()))
    jax.tree.map(np.testing.assert_array_equal, given, params)
    xj.save_model(params, CASE.config, tmp_path / "saved")
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert settings["num_nextn_predict_layers"] == 0 and xj.ModelConfig.from_hf(settings) == CASE.config
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == published().keys()
    xj.save_model(params, CASE.config, tmp_path / "like", like=drafting)
    assert load_file(tmp_path / "like" / "model.safetensors").keys() == with_draft_layer(published()).keys()


def test_other_layers_after_the_last_one_are_an_error():
    """The config has too few layers, or the layer before the one that drafts is no layer of the model."""
    fewer = dataclasses.replace(CASE.config, num_hidden_layers=2)
    with pytest.raises(xj.InputError, match="unknown model.layers.2"):
        xj.params.params_from_tensors(fewer, with_draft_layer(published()))
    without = {name: x for name, x in with_draft_layer(published()).items() if ".eh_proj" not in name}
    with pytest.raises(xj.InputError, match="unknown model.layers.3"):
        xj.params.params_from_tensors(CASE.config, without)
    lost = {name: x for name, x in published().items() if "layers.1.mlp.gate.e_score" not in name}
    with pytest.raises(xj.InputError, match=r"missing model.layers.1.mlp.gate.e_score_correction_bias \[8\]"):
        xj.params.params_from_tensors(CASE.config, lost)
    without = cases.Case(CASE.hf | dict(n_shared_experts=0)).config
    with pytest.raises(xj.InputError, match="unknown model.layers.1.mlp.shared_experts.down_proj.weight"):
        xj.params.params_from_tensors(without, published())


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(topk_group=5), "topk_group 5 is above n_group 4"),
        (dict(n_group=3), "n_routed_experts 8 is not a multiple of n_group 3"),
        (dict(n_group=8), "n_group 8 makes groups of one expert, .* must be at most 4"),
        (dict(num_experts_per_tok=5), "num_experts_per_tok 5 is above 4, the experts in topk_group 2 of"),
        (dict(num_experts_per_tok=9), "num_experts_per_tok 9 is above 8"),
        (dict(n_group=0), "n_group must be a number above 0, got 0"),
        (dict(n_routed_experts=2**17), "n_routed_experts must lie between 1 and 65536, got 131072"),
        (dict(n_routed_experts=None), "n_routed_experts must be a number above 0, got None"),
        (dict(n_shared_experts=-1), "n_shared_experts must be an integer from 0"),
        (dict(first_k_dense_replace=None), "first_k_dense_replace must be an integer from 0"),
        (dict(routed_scaling_factor=0), "routed_scaling_factor must be a number above 0, got 0"),
        (dict(norm_topk_prob=1), "norm_topk_prob must be true or false, got 1"),
        (dict(use_qk_norm=None), "use_qk_norm must be true or false"),
        (dict(rope_scaling=dict(rope_type="su")), "rope type 'su' is not supported"),
    ],
)
def test_rejected_settings(change, message):
    with pytest.raises(xj.InputError, match=message):
        xj.ModelConfig.from_hf(CASE.hf | change)


def test_defaults_are_those_of_air():
    """An almost empty config.json, and the parameters of GLM-4.5-Air: 107 billion, 12 of a token without its
    embeddings.
    """
    sizes = dict(vocab_size=151552, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46)
    hf = dict(model_type="glm4_moe", num_attention_heads=96, head_dim=128, attention_bias=True, **sizes)
    config = xj.ModelConfig.from_hf(hf)
    attention, router = config.layers[0].attention, config.experts.router
    assert (attention.qkv_bias, attention.o_bias, attention.qk_norm) == (True, False, None)
    assert [layer.experts is None for layer in config.layers[:3]] == [True, False, False]
    assert router == GroupedTopkSpec() and config.rope.partial_rotary_factor == 0.5
    assert (config.num_experts, config.num_experts_per_tok, config.rms_norm_eps) == (128, 8, 1e-5)
    specs = jax.tree.leaves(param_specs(config))
    numbers = sum(math.prod(spec.shape) for spec in specs)
    idle = sum(math.prod(spec.shape) for spec in specs if ".experts." in spec.name) * 120 // 128
    embeddings = 2 * config.vocab_size * config.hidden_size
    assert round(numbers / 1e9) == 107 and round((numbers - idle - embeddings) / 1e9) == 12
