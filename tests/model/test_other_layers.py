"""Parts of layers of GLM-4, ERNIE 4.5, Cohere 2, Hunyuan, Apertus, MiniMax-M2, dots.llm1 and OLMoE:
interleaved RoPE, norms after RoPE, LayerNorm, a parallel block, xIELU. Their files, and settings that are
rejected.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
import tiny
from safetensors.numpy import load_file

import xinfer_jax as xj
from xinfer_jax.config.rope import RopeConfig
from xinfer_jax.config.unsupported import check_supported
from xinfer_jax.families.reading import from_hf
from xinfer_jax.mixers.key_bias import rope_bias_fn
from xinfer_jax.mixers.rope_orders import halves_first
from xinfer_jax.weights.layers import apply_rope, rms_norm

pytestmark = pytest.mark.oldest


def model_of(name):
    config = cases.CASES[name].config
    return cases.params_from(config, cases.random_tensors(config, 1)), config


# --- RoPE ---------------------------------------------------------------------------------------------------


def rotated_in_pairs(x_TKH, pairs, theta=1e4):
    """Neighbours 2i and 2i + 1 of the leading part of a head as complex numbers, in float64."""
    position_T = np.arange(len(x_TKH))
    angle_TP = position_T[:, None] * theta ** (-np.arange(pairs) / pairs)
    z_TKP = x_TKH[..., : 2 * pairs : 2] + 1j * x_TKH[..., 1 : 2 * pairs : 2]
    z_TKP = z_TKP * np.exp(1j * angle_TP)[:, None]
    return np.concatenate([z_TKP.real, z_TKP.imag, x_TKH[..., 2 * pairs :]], -1), angle_TP


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_interleaved_pairs_by_complex_numbers(part):
    """Rotated pairs have the order of halves: the scores of queries and keys are the same in both orders."""
    rope = RopeConfig(partial_rotary_factor=part, interleaved=True)
    x_TKH = np.random.default_rng(0).standard_normal((9, 2, 16))
    want, angle_TP = rotated_in_pairs(x_TKH, rope.rotated_width(16) // 2)
    cos, sin = (f(angle_TP)[None].astype(np.float32) for f in (np.cos, np.sin))
    found = apply_rope(halves_first(jnp.asarray(x_TKH, jnp.float32)[None], rope), cos, sin)[0]
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_bias_of_keys_in_a_quantized_cache():
    """A large bias is added when keys are read. It is rotated in the order of the cached keys."""
    _, config = model_of("glm-published")
    bias_KH = np.random.default_rng(0).standard_normal((2, config.head_dim)).astype(np.float32)
    pairs = config.rope.rotated_width(config.head_dim) // 2
    want, _ = rotated_in_pairs(np.broadcast_to(bias_KH, (50, *bias_KH.shape)).astype(np.float64), pairs)
    halves_KH = halves_first(jnp.asarray(bias_KH), config.rope)
    found = rope_bias_fn(config, 0, halves_KH, 64)(np.arange(50)[None])
    np.testing.assert_allclose(np.swapaxes(found[0], 0, 1), want, atol=1e-5)


@pytest.mark.full
def test_a_large_bias_of_keys_costs_no_precision():
    """With int8 keys the next token's logits stay near those of a float cache."""
    params, config = model_of("glm-published")
    for layer in params["layers"]:
        layer["k"]["bias"] = layer["k"]["bias"] + 40.0 * np.eye(1, layer["k"]["bias"].size, 3)[0]
    prompt = np.array([cases.prompts(cases.CASES["glm-published"])[1]])
    lengths = np.array([prompt.shape[1]], np.int32)
    floats, levels = (
        xj.prefill(params, config, prompt, lengths, xj.init_cache(config, 1, 64, dtype))[1]
        for dtype in ("float32", "int8")
    )
    want, found = (xj.decode_step(params, config, np.array([5]), cache)[0] for cache in (floats, levels))
    np.testing.assert_allclose(found, want, atol=0.1 * np.abs(want).max())


def test_alpha_is_a_larger_base():
    config = cases.CASES["hunyuan-alpha-tied"].config
    assert config.rope.rope_type == "default"
    assert config.rope.rope_theta == 1e4 * 1000 ** (16 / 14)


# --- norms --------------------------------------------------------------------------------------------------


def test_a_centered_norm_is_layer_norm():
    x, weight = (np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate([(3, 48), 48]))
    want = weight * (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    found = rms_norm(jnp.asarray(x + 7, jnp.float32), jnp.asarray(weight, jnp.float32), 1e-5, centered=True)
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_a_parallel_block_has_one_norm():
    params, config = model_of("cohere2-published")
    assert {"attn_norm", "q", "k", "v", "o", "gate", "up", "down"} == params["layers"][0].keys()
    assert [layer.attention.uses_rope for layer in config.layers] == [True, True, True, False, True]
    other = dataclasses.replace(config.layers[0], centered_norms=False)
    with pytest.raises(xj.InputError, match="layers with different centered_norms are not supported"):
        dataclasses.replace(config, layers=(other, *config.layers[1:]))
    with pytest.raises(xj.InputError, match="cohere2', which has norms of another kind"):
        check_supported(config, "scales", "they are", "leave them out")


# --- files --------------------------------------------------------------------------------------------------

SAVED = (
    "ernie4-5-moe-published", "minimax-m2-published", "dots1-published", "hunyuan-moe-published",
    "olmoe-published", "apertus-published", "cohere2-published",
)  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_saved_files_have_the_bytes_of_published_ones(tmp_path, name):
    params, config = model_of(name)
    tensors = {key: np.asarray(x) for key, x in xj.params.params_to_tensors(params, config).items()}
    path = tiny.write(tmp_path / "a", cases.CASES[name].hf, weights=tensors, with_tokenizer=False)
    model = xj.load_model(path, "float32")
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
    xj.save_model(model.params, model.config, tmp_path / "b")
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert again.keys() == tensors.keys()
    jax.tree.map(np.testing.assert_array_equal, again, tensors)
    assert from_hf(json.loads((tmp_path / "b" / "config.json").read_text())) == config


def test_tensors_that_draft_are_skipped_and_copied(tmp_path):
    """ERNIE 4.5's multi-token prediction. The bias of the router is one row."""
    params, config = model_of("ernie4-5-moe-published")
    tensors = {key: np.asarray(x) for key, x in xj.params.params_to_tensors(params, config).items()}
    assert tensors["model.layers.1.mlp.moe_statics.e_score_correction_bias"].shape == (1, 8)
    drafting = {f"model.mtp_{x}.0.weight": np.ones(3, np.float32) for x in ("emb_norm", "linear_proj")}
    hf = cases.CASES["ernie4-5-moe-published"].hf
    path = tiny.write(tmp_path / "a", hf, weights=tensors | drafting, with_tokenizer=False)
    model = xj.load_model(path, "float32")
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
    xj.save_model(model.params, config, tmp_path / "b", like=path)
    assert load_file(tmp_path / "b" / "model.safetensors").keys() == (tensors | drafting).keys()


@pytest.mark.parametrize("name", ["minimax-m2-published", "dots1-published", "ernie4-5-moe-published"])
def test_routers_stay_float32(name):
    params, config = model_of(name)
    tensors = xj.params.params_to_tensors(params, config)
    loaded = xj.params.params_from_tensors(config, tensors, dtype="bfloat16")
    for x, y in zip(params["layers"], loaded["layers"], strict=True):
        jax.tree.map(np.testing.assert_array_equal, x.get("router"), y.get("router"))
        assert y["q"]["weight"].dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["minimax-m2-published", "ernie4-5-moe-published", "hunyuan-moe-published"])
@pytest.mark.parametrize("router", ["float32", "bfloat16"])
def test_saved_routers_have_the_dtypes_of_the_files(tmp_path, name, router):
    """A checkpoint in bfloat16, whose routers are in either dtype, and a bias that bfloat16 does not hold."""
    params, config = model_of(name)
    tensors = {key: np.asarray(x) for key, x in xj.params.params_to_tensors(params, config).items()}
    kinds = {key: router if ".gate." in key and "bias" not in key else "bfloat16" for key in tensors}
    kinds |= {key: "float32" for key in tensors if "correction_bias" in key}
    tensors = {key: x.astype(kinds[key]) for key, x in tensors.items()}
    path = tiny.write(tmp_path / "a", cases.CASES[name].hf, weights=tensors, with_tokenizer=False)
    model = xj.load_model(path, "bfloat16")
    for options in ({}, dict(like=path), dict(dtype="bfloat16")):
        xj.save_model(model.params, model.config, tmp_path / "b", overwrite=True, **options)
        again = load_file(tmp_path / "b" / "model.safetensors")
        assert {key: x.dtype.name for key, x in again.items()} == kinds
        jax.tree.map(np.testing.assert_array_equal, again, tensors)
        assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"


def test_constants_of_xielu_have_no_gradient():
    params, config = model_of("apertus-published")
    tokens_BT = np.array([cases.prompts(cases.CASES["apertus-published"])[0]])
    gradients = jax.grad(lambda params: xj.forward(params, config, tokens_BT)[0].std())(params)
    for layer in gradients["layers"]:
        size = {name: float(jnp.abs(x).max()) for name, x in layer["xielu"].items()}
        assert size["beta"] == size["eps"] == 0 < min(size["alpha_p"], size["alpha_n"])


# --- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("ernie4-5-moe-published", dict(use_bias=True), "use_bias True is not supported for model_type"),
        ("ernie4-5-moe-published", dict(moe_k=9), "moe_k 9 is above 8"),
        ("ernie4-5-moe-published", dict(moe_norm_min=0), "moe_norm_min must be a number above 0, got 0"),
        ("ernie4-5-published", dict(use_bias=None), "use_bias must be true or false, got None"),
        ("dots1-published", dict(n_group=3), "n_routed_experts 8 is not a multiple of n_group 3"),
        ("dots1-published", dict(n_shared_experts=None), "n_shared_experts must be an integer from 0"),
        ("dots1-groups-windows-tied", dict(num_experts_per_tok=5), "num_experts_per_tok 5 is above 4"),
        ("minimax-m2-published", dict(rotary_dim=5), "partial_rotary_factor 0.3125 rotates 5 of 16"),
        ("minimax-m2-published", dict(num_experts_per_tok=9), "num_experts_per_tok 9 is above 8"),
        ("olmoe-published", dict(clip_qkv=8.0), "clip_qkv 8.0 is not supported for model_type 'olmoe'"),
        ("olmoe-published", dict(head_dim=16), "head_dim 16 is not supported for model_type 'olmoe'"),
        ("hunyuan-moe-published", dict(moe_topk=[3, 3, 2]), "give one number for all 3 layers"),
        ("hunyuan-alpha-tied", dict(rope_scaling=dict(type="dynamic", alpha=0)), "alpha must be a number"),
        ("cohere2-published", dict(use_qk_norm=True), "use_qk_norm True is not supported"),
        ("cohere2-published", dict(head_dim=16), "head_dim 16 is not supported for model_type 'cohere2'"),
        ("cohere2-published", dict(logit_scale=0), "logit_scale must be a number above 0, got 0"),
        ("apertus-published", dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported: use one of"),
        ("llama2-mha-old", dict(hidden_act="xielu"), "hidden_act 'xielu' is not supported"),
        ("glm-published", dict(rope_scaling=dict(rope_type="su")), "rope type 'su' is not supported"),
    ],
)
def test_rejected_settings(name, change, message):
    with pytest.raises(xj.InputError, match=message):
        from_hf(cases.CASES[name].hf | change)


def test_a_config_that_its_family_cannot_say_is_not_written(tmp_path):
    """A Llama with interleaved RoPE has no place in config.json."""
    params, config = model_of("llama2-mha-old")
    config = dataclasses.replace(config, rope=dataclasses.replace(config.rope, interleaved=True))
    with pytest.raises(xj.InputError, match="has no place for its rope"):
        xj.save_model(params, config, tmp_path / "a")
