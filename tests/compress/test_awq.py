"""Activation-aware quantization: scales keep the function, quantization loses little, `xinfer-jax quantize`
reports the loss.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_script
import tiny
from parity_cases import CASES, Case, params_from, random_tensors
from paths import STORIES

import xinfer_jax as xj
from xinfer_jax.compress import awq
from xinfer_jax.compress.gptq import fake_quantize, gptq_matrix
from xinfer_jax.model.forward_parts import embed_tokens, final_norm
from xinfer_jax.weights.layers import linear
from xinfer_jax.weights.quantization import quantize_matrix
from xinfer_jax.weights.quantized_weight import is_quantized

pytestmark = pytest.mark.oldest

FAMILIES = ("qwen2-gqa-tied-old", "granite-tied-old")


def one_layer(name: str) -> xj.ModelConfig:
    return Case(CASES[name].hf | dict(num_hidden_layers=1)).config


def rows_for(config: xj.ModelConfig, lengths=(40, 7, 23), seed: int = 0) -> list[list[int]]:
    return [np.random.RandomState(seed + n).randint(0, config.vocab_size, n).tolist() for n in lengths]


def dequantized(params):
    """Returns the parameters with dequantized matrices."""
    return jax.tree.map(
        lambda leaf: leaf.dequantize() if is_quantized(leaf) else leaf, params, is_leaf=is_quantized
    )


# --- identities ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_layers_are_those_of_the_model():
    """The layers have factors on the outputs that they add."""
    config = CASES["granite-tied-old"].config
    params = params_from(config, random_tensors(config, seed=3))
    tokens_BT, calibration = awq._calibration_batch(config, rows_for(config, (30, 30)))
    x_BTD = embed_tokens(params, config, tokens_BT)
    for key, layer in awq._keyed_layers(params, config):
        inputs, x_BTD = awq._matrix_inputs(layer, key, x_BTD, calibration)
    hidden_BTD = final_norm(params, config, x_BTD)
    np.testing.assert_allclose(hidden_BTD, xj.hidden_states(params, config, tokens_BT)[0], atol=1e-5)
    added_BTD = linear(inputs["down"], layer["down"])
    output_BTD = config.residual_multiplier * (inputs["xdown"] + added_BTD)
    np.testing.assert_allclose(output_BTD, x_BTD, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_scales_do_not_change_the_function(name):
    config = one_layer(name)
    params = params_from(config, random_tensors(config, seed=3))
    scaled = awq.scaled_params(params, config, rows_for(config), "int4", 16)
    changed = [
        not np.array_equal(a["down"]["weight"], b["down"]["weight"])
        for a, b in zip(params["layers"], scaled["layers"], strict=True)
    ]
    assert any(changed), "nothing was scaled"
    tokens_BT = jnp.array(rows_for(config, (30, 30), seed=9))
    before, after = (np.asarray(xj.forward(tree, config, tokens_BT)[0]) for tree in (params, scaled))
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-4 * np.abs(before).max())


@pytest.mark.full
@pytest.mark.parametrize("bits, group, inputs", [(8, None, 70), (8, 16, 70), (4, 16, 64), (4, 128, 70)])
def test_fake_quantize_equals_quantize_matrix(bits, group, inputs):
    matrix_NK = np.random.RandomState(0).standard_normal((24, inputs)).astype(np.float32)
    stored = jax.tree.map(jnp.asarray, quantize_matrix(matrix_NK, bits, group)).dequantize()
    searched = np.asarray(fake_quantize(jnp.array(matrix_NK), bits, group))
    np.testing.assert_allclose(searched, stored, rtol=0, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("bits, group", [(8, None), (8, 16), (4, 16)])
def test_gptq_has_smaller_errors_than_rounding_to_nearest(bits, group):
    """Errors are smaller on correlated inputs, and the leaf has the type and shapes of `quantize_matrix`."""
    rng = np.random.RandomState(1)
    matrix_NK = rng.standard_normal((24, 70)).astype(np.float32)
    x_MK = (
        rng.standard_normal((600, 20)) @ rng.standard_normal((20, 70)) + 0.1 * rng.standard_normal((600, 70))
    ).astype(np.float32)
    wanted_MN = x_MK @ matrix_NK.T
    nearest = quantize_matrix(matrix_NK, bits, group)
    compensated = gptq_matrix(jnp.array(matrix_NK), jnp.array(x_MK), jnp.array(wanted_MN), bits, group)
    assert type(compensated) is type(nearest)
    described = [
        jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), weight) for weight in (compensated, nearest)
    ]
    assert described[0] == described[1]
    off = [
        np.square(x_MK @ np.asarray(jax.tree.map(jnp.asarray, weight).dequantize()).T - wanted_MN).sum()
        for weight in (compensated, nearest)
    ]
    assert off[0] < 0.5 * off[1], off


@pytest.mark.full
@pytest.mark.parametrize("quantize, dtype", [("int8", "int8"), ("int4", "uint8")])
def test_every_matrix_is_quantized(quantize, dtype):
    config = one_layer("qwen2-mqa-untied-new")
    params = params_from(config, random_tensors(config, seed=3))
    for quantized in (
        awq.quantized_params(params, quantize),
        awq.awq_params(params, config, rows_for(config), quantize),
    ):
        assert all(
            layer[name]["weight"].values.dtype == dtype
            for layer in quantized["layers"]
            for name in awq.MATRICES
        )
        assert all(quantized[name]["weight"].values.dtype == "int8" for name in ("embed", "lm_head"))
        assert quantized["layers"][0]["q"]["bias"].shape == params["layers"][0]["q"]["bias"].shape
        assert quantized["final_norm"] is params["final_norm"]


@pytest.mark.full
def test_bfloat16_norms_lose_no_precision():
    """The columns compensate the rounding of scaled norms."""
    config = CASES["llama2-mha-old"].config
    params = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16), params_from(config, random_tensors(config, seed=3))
    )
    scaled = awq.scaled_params(params, config, rows_for(config), "int4")
    for before, after in zip(params["layers"], scaled["layers"], strict=True):
        assert after["attn_norm"].dtype == jnp.bfloat16
        folded = [
            np.asarray(layer["q"]["weight"], np.float32) * np.asarray(layer["attn_norm"], np.float32)
            for layer in (before, after)
        ]
        np.testing.assert_allclose(folded[1], folded[0], rtol=1e-6)


@pytest.mark.parametrize(
    "rows, quantize, group, named",
    [([], "int4", None, "calibration"), ([[1], []], "int4", None, "none empty"),
     ([[1, 2]], "int3", None, "int3"),
     ([[1, 2]], None, None, "int8 or int4"), ([[1, 2]], "int4", 31, "group=31")],
)  # fmt: skip
def test_bad_arguments_of_awq_raise(rows, quantize, group, named):
    config = CASES["llama2-mha-old"].config
    with pytest.raises(xj.InputError, match=named):
        awq.awq_params(params_from(config, random_tensors(config, seed=3)), config, rows, quantize, group)


# --- loss of trained models ---------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=1)
def scores(params, config, tokens_BT):
    """Log-probabilities of tokens, and the most probable ones."""
    logits_BTV = xj.forward(params, config, tokens_BT)[0][:, :-1]
    logprobs_BTV = jax.nn.log_softmax(logits_BTV)
    return jnp.take_along_axis(logprobs_BTV, tokens_BT[:, 1:, None], 2)[..., 0], logits_BTV.argmax(-1)


@pytest.mark.soak
@pytest.mark.skipif(not STORIES.is_dir(), reason=f"the real data is missing: {STORIES}")
def test_loss_of_a_trained_model():
    """Measures, on text that the model itself generates, the change of perplexity, as a fraction, and top-1
    agreement. int8 loses almost nothing. int4 with AWQ loses at most 5 %, and less than with rounding to
    nearest.
    """
    model = xj.load_model(STORIES, dtype="float32")
    options = xj.GenerateOptions(
        max_tokens=127, sampling=xj.SamplingConfig(temperature=1.0), eos_token_ids=()
    )
    out = xj.generate(model.params, model.config, [[1]] * 40, options, key=jax.random.key(0))
    rows = [[1, *ids] for ids in out.tokens]
    calibration, tokens_BT = rows[:24], np.array(rows[24:], np.int32)
    before = scores(model.params, model.config, tokens_BT)

    def loss(params) -> tuple[float, float]:
        after = scores(dequantized(params), model.config, tokens_BT)
        return np.exp(before[0].mean() - after[0].mean()) - 1, (before[1] == after[1]).mean()

    change, same = loss(awq.quantized_params(model.params, "int8"))
    assert abs(change) < 0.01 and same >= 0.99  # stories have many near ties
    nearest, same_nearest = loss(awq.quantized_params(model.params, "int4"))
    change, same = loss(awq.awq_params(model.params, model.config, calibration, "int4"))
    assert change < 0.05 and change < nearest and same > same_nearest


# --- xinfer-jax quantize ------------------------------------------------------------------------------------


quantize = partial(run_script.command, "quantize")


@pytest.mark.full
@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_command_writes_a_checkpoint(tmp_path, method):
    source = tiny.write(tmp_path / "source", generation_config={"eos_token_id": [271]})
    for name, text in (
        ("calibration", "the thing and the other\n<|endoftext|>\nanother one"),
        ("eval", "in the end"),
    ):
        (tmp_path / f"{name}.txt").write_text(text * 3, encoding="utf-8")
    done = quantize(
        f"--model={source}", f"--output={tmp_path / 'out'}", f"--method={method}", "--group=16",
        f"--calibration={tmp_path / 'calibration.txt'}", f"--eval={tmp_path / 'eval.txt'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (
        report["mib"] < report["mib_float32"]
        and 0 <= report["top1_agreement"] <= 1
        and report["perplexity"] > 1
    )
    assert (report.get("calibration_tokens", 0) > 0) == (method == "awq")
    loaded = xj.load_model(tmp_path / "out", dtype="float32")
    assert loaded.params["layers"][0]["q"]["weight"].group == 16
    assert loaded.tokenizer.eos_token_ids == xj.load_model(source).tokenizer.eos_token_ids
