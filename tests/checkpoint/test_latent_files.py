"""Checkpoints of latent attention: their settings, tensors, quantized matrices, and what is rejected."""

import json

import family_checks
import jax
import numpy as np
import parity_cases as cases
import pytest
import tiny
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
from xinfer_jax.checkpoint.config_difference import find_config_difference
from xinfer_jax.families.writing import to_hf
from xinfer_jax.weights.quantized_weight import is_quantized
from xinfer_jax.weights.resharding import with_repeated_kv_heads

pytestmark = pytest.mark.oldest

CASE = cases.CASES["deepseek-v3-yarn-groups"]
BIAS = cases.CASES["deepseek-v3-bias-one-query-matrix-halves"]


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


def test_saved_settings(tmp_path):
    for case in (CASE, BIAS):
        params, config, _ = family_checks.small_model(case)
        xj.save_model(params, config, tmp_path, overwrite=True)
        settings = json.loads((tmp_path / "config.json").read_text())
        assert settings["qk_head_dim"] == 20 and settings["head_dim"] == 8
        assert xj.ModelConfig.from_hf(settings) == config


def test_copies_of_latents_on_a_mesh_are_in_no_file():
    config = CASE.config
    for devices in (2, 4):
        over = with_repeated_kv_heads(config, devices)
        assert find_config_difference(over, config) is None
        written = xj.ModelConfig.from_hf(to_hf(over))
        assert find_config_difference(over, written) is None and written.layers == config.layers


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
