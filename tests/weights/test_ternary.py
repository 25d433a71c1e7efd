"""BitNet's weights: exact sums in every form, every file format, and tokens equal to those of
transformers.
"""

import contextlib
import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
import tiny
from bitnet_checkpoints import HF, LAYOUTS, checkpoint, is_ternary
from quick import full_except
from safetensors.numpy import load_file

import xinfer_jax as xj
from xinfer_jax.backends.cpu.ternary_products import ternary_form
from xinfer_jax.checkpoint.loading import open_checkpoint
from xinfer_jax.families.reading import from_hf
from xinfer_jax.formats.bitnet_format import BitNetFormat
from xinfer_jax.weights.quantized_weight import is_quantized, quantized_product
from xinfer_jax.weights.ternary import TernaryWeight, pack_ternary, plain_sums, ternary_leaf

pytestmark = pytest.mark.oldest

forward = jax.jit(xj.forward, static_argnames="config")


def leaf(outputs: int, inputs: int, seed: int = 0, scale: float = 0.7) -> tuple[TernaryWeight, np.ndarray]:
    """Returns a leaf and its levels."""
    levels_OI = np.random.default_rng(seed).integers(-1, 2, (outputs, inputs)).astype(np.int8)
    weight = pack_ternary(lambda at: levels_OI[at], levels_OI.shape, np.float32(scale))
    return jax.device_put(weight), levels_OI


def activations(rows: int, inputs: int) -> np.ndarray:
    x_MI = np.random.default_rng(rows).standard_normal((rows, inputs)).astype(np.float32)
    x_MI[-1] = 0  # padding
    return x_MI


@pytest.mark.parametrize("form", [ternary_form(None), plain_sums])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("outputs, inputs", [(5, 3), (130, 416)])
def test_sums_are_exact_in_every_form(outputs, inputs, rows, form):
    weight, levels_OI = leaf(outputs, inputs)
    assert weight.shape == levels_OI.shape
    x_MI = np.random.default_rng(rows).integers(-127, 128, (rows, inputs)).astype(np.int8)
    x_MI[0] = 127
    sign_I = np.where(levels_OI[0] == 0, 1, levels_OI[0])
    x_MI[0] *= sign_I  # the largest possible sum
    got_MO = jax.jit(form)(jnp.asarray(x_MI), weight.values)
    np.testing.assert_array_equal(got_MO, x_MI.astype(np.int64) @ levels_OI.T.astype(np.int64))


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 9])
def test_product_quantizes_each_token_and_has_gradients_of_the_dequantized_matrix(rows):
    weight, levels_OI = leaf(40, 72)
    x_MI = activations(rows, 72)
    factor_M1 = np.float32(127) / np.maximum(np.abs(x_MI).max(1, keepdims=True), np.float32(1e-5))
    wanted = (np.rint(x_MI * factor_M1) @ levels_OI.T.astype(np.float32)) / factor_M1 * np.float32(0.7)
    for product in (quantized_product, jax.jit(quantized_product), jax.vmap(quantized_product, (0, None))):
        np.testing.assert_allclose(product(x_MI, weight), wanted, rtol=1e-6)
    matrix_OI = np.asarray(weight.dequantize())
    np.testing.assert_array_equal(matrix_OI, levels_OI * np.float32(0.7))
    np.testing.assert_array_equal(weight.rows(jnp.array([[3, 0]])), matrix_OI[[[3, 0]]])
    x_bar = jax.grad(lambda x: quantized_product(x, weight).sum())(jnp.asarray(x_MI))
    np.testing.assert_allclose(x_bar, np.broadcast_to(matrix_OI.sum(0), x_MI.shape), atol=1e-5)


def test_other_rows_do_not_change_the_bits_of_a_row():
    weight, _ = leaf(96, 200)
    x_MI = activations(40, 200)
    product = jax.jit(quantized_product)
    alone = np.concatenate([product(x_MI[i : i + 1], weight) for i in range(40)])
    for rows in (2, 9, 40):
        np.testing.assert_array_equal(product(x_MI[:rows], weight), alone[:rows])


def test_float_weights_are_quantized_by_their_mean_magnitude():
    matrix_OI = np.random.default_rng(2).standard_normal((3000, 70)).astype(np.float32)
    weight = ternary_leaf(matrix_OI, "x")
    factor = np.float32(1) / np.abs(matrix_OI).mean()
    wanted = np.clip(np.rint(matrix_OI * factor), -1, 1) / factor
    np.testing.assert_allclose(jax.device_put(weight).dequantize(), wanted, rtol=1e-6)
    assert not np.any(jax.device_put(ternary_leaf(np.zeros((8, 8), np.float32), "x")).dequantize())
    matrix_OI[-1, -1] = np.nan
    with pytest.raises(xj.InputError, match="x holds NaN or inf"):
        ternary_leaf(matrix_OI, "x")


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", full_except(["bfloat16"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("way", LAYOUTS)
def test_every_file_layout_of_ternary_matrices_is_loaded(tmp_path, way, dtype):
    path, wide = checkpoint(tmp_path, way, dtype=dtype)
    opened = open_checkpoint(path, dtype="float32")
    tiny.assert_same_shapes(opened)
    model = opened.read()
    assert model.load_stats.dtype == "bitnet"
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        got = model.params["layers"][1][name]["weight"]
        assert isinstance(got, TernaryWeight)
        spec = next(n for n in wide if f"layers.1.{'mlp' if name in ('gate', 'up', 'down') else 'self_attn'}."
                    f"{name}_proj.weight" in n)  # fmt: skip
        np.testing.assert_allclose(got.dequantize(), wide[spec], rtol=1e-6)
    assert not is_quantized(model.params["embed"]["weight"])


def test_modules_to_not_convert_and_a_packed_lm_head(tmp_path):
    hf = HF | dict(tie_word_embeddings=False, vocab_size=96)
    path, wide = checkpoint(tmp_path, "master", hf, modules_to_not_convert=["model.layers.0", "v_proj"])
    model = xj.load_model(path, dtype="float32")
    kinds = [is_quantized(layer[name]["weight"]) for layer in model.params["layers"] for name in "qv"]
    assert kinds == [False, False, True, False, True, False]
    assert is_quantized(model.params["lm_head"]["weight"])  # only named modules are left out, as transformers


@pytest.mark.parametrize(
    "way, dtype", [("bitlinear", "bfloat16"), ("autobitlinear", "float32"), ("master", "float32")]
)
def test_saved_as_packed_files(tmp_path, way, dtype):
    path, _ = checkpoint(tmp_path / "from", way, dtype=dtype)
    model = xj.load_model(path, dtype=dtype)
    xj.save_model(model.params, model.config, tmp_path / "to")
    again = xj.load_model(tmp_path / "to", dtype=dtype)
    assert again.load_stats.dtype == "bitnet"
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    (stored, saved) = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "to"))
    for name in [x for x in stored if way != "master" or not is_ternary(x)]:
        assert stored[name].dtype == saved[name].dtype
        np.testing.assert_array_equal(stored[name], saved[name])


@pytest.mark.parametrize("divides", [True, False])
def test_stored_scales_give_the_same_bits(divides):
    stored = np.random.default_rng(0).uniform(1e-3, 1e3, 2000).astype(np.float32)
    form = BitNetFormat(divides, False, ())
    for scale in 1 / stored:
        (found,) = form._stored_scale(np.full(4, scale), jnp.bfloat16)
        assert (1 / np.float32(found) if divides else np.float32(found)) == scale
    (found,) = form._stored_scale(np.full(4, np.float32(0.25)), jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    assert form._stored_scale(np.array([1, 2], np.float32), jnp.bfloat16) is None


def test_matrices_that_bitnet_cannot_have(tmp_path):
    """One that became float is listed. Scales that differ are rejected, and are written in our own format."""
    model = xj.load_model(checkpoint(tmp_path / "from", "bitlinear")[0], dtype="float32")
    (first, second, *_) = model.params["layers"]
    first["q"]["weight"] = first["q"]["weight"].dequantize()
    xj.save_model(model.params, model.config, tmp_path / "to")
    again = xj.load_model(tmp_path / "to", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    listed = again.config.quantization_config["modules_to_not_convert"]
    assert listed == ["lm_head", "model.layers.0.self_attn.q_proj"]
    weight = second["up"]["weight"]
    second["up"]["weight"] = dataclasses.replace(weight, scale=weight.scale.at[0].set(2))
    with pytest.raises(
        xj.InputError, match="layers.1.mlp.up_proj.weight cannot be written in the format bitnet"
    ):
        xj.save_model(model.params, model.config, tmp_path / "out")
    xj.save_model(model.params, dataclasses.replace(model.config, quantization_config=None), tmp_path / "own")
    again = xj.load_model(tmp_path / "own", dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(linear_class="linear"), "bitnet with linear_class 'linear' is not supported"),
        (dict(quantization_mode="dynamic"), "bitnet with quantization_mode 'dynamic'"),
        (dict(use_rms_norm=True), "bitnet with use_rms_norm True"),
        (dict(modules_to_not_convert="lm_head"), "bitnet with modules_to_not_convert 'lm_head'"),
        (dict(modules_to_not_convert=["(a+)+"]), r"bitnet with modules_to_not_convert \['\(a"),
    ],
)
def test_unsupported_settings_raise(tmp_path, settings, message):
    path, _ = checkpoint(tmp_path, "bitlinear", **settings)
    with pytest.raises(xj.InputError, match=message):
        xj.load_model(path)


def test_wrong_tensors_raise_by_name(tmp_path):
    bad = "model.layers.1.mlp.up_proj.weight"

    def broken(folder: str, way: str, **changes) -> str:
        path, _ = checkpoint(tmp_path / folder, way)
        weights = load_file(path / "model.safetensors") | changes
        tiny.write_weights(path, {name: tensor for name, tensor in weights.items() if tensor is not None})
        return tiny.load_error(path, dtype="float32")

    assert f"{bad} holds a number that is not -1" in broken(
        "3", "bitlinear", **{bad: np.full((20, 48), 255, np.uint8)}
    )
    assert f"{bad}_scale is 0.0" in broken("0", "bitlinear", **{f"{bad}_scale": np.zeros(1, np.float32)})
    other = np.linspace(-1, 1, 80 * 48, dtype=np.float32).reshape(80, 48)
    assert "say 'online'" in broken("other", "float-ternary", **{bad: other})
    assert f"missing {bad}_scale" in broken("none", "autobitlinear", **{f"{bad}_scale": None})
    biased, _ = checkpoint(tmp_path / "biased", "autobitlinear", HF | dict(attention_bias=True))
    assert "biases with linear_class 'autobitlinear'" in tiny.load_error(biased)
    assert "already quantized (bitnet)" in tiny.load_error(biased, quantize="int8")


def test_another_head_dim_raises():
    with pytest.raises(xj.InputError, match="head_dim 16 is not supported for model_type 'bitnet'"):
        from_hf(HF | dict(head_dim=16))


# --- models -------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_ternary_rows_of_a_batch_equal_rows_alone_and_random_parameters_generate(tmp_path):
    path, _ = checkpoint(tmp_path, "autobitlinear", HF | dict(num_hidden_layers=1))
    model = xj.load_model(path, dtype="float32")
    prompts = [[5, 7, 9], list(range(12))]
    options = xj.GenerateOptions(max_tokens=6, eos_token_ids=())
    both = xj.generate(model.params, model.config, prompts, options)
    alone = [xj.generate(model.params, model.config, [p], options) for p in prompts]
    assert both.tokens == [out.tokens[0] for out in alone]
    params = xj.init_params(model.config, jax.random.key(0), quantize="ternary")
    assert isinstance(params["layers"][0]["up"]["weight"], TernaryWeight)
    assert xj.generate(params, model.config, prompts, options).tokens


# --- transformers -------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("way", LAYOUTS)
def test_tokens_equal_those_of_transformers(tmp_path, way):
    """Runs where torch is installed. An activation half way between two levels may round to either: the
    median of the errors is small, but such an activation changes later logits by a hundredth of the largest.
    """
    pytest.importorskip("torch", reason="the live comparison needs torch: pip install -e '.[parity]'")
    hf = cases.CASES["bitnet-defaults"].hf
    path, _ = checkpoint(tmp_path, way, hf)
    model = xj.load_model(path, dtype="float32")
    prompts = cases.prompts(cases.CASES["bitnet-defaults"])
    with transformers_model(hf, path, way) as theirs:
        answers = [cases.hf_greedy(theirs, prompt, 12) for prompt in prompts]
        wanted = [cases.hf_logits(theirs, prompt) for prompt in prompts]
    assert min(gaps.min() for _, gaps in answers) > 1e-3
    rows = cases.pad_prompts([prompt + ids for prompt, (ids, _) in zip(prompts, answers, strict=True)])
    logits_BTV = np.asarray(forward(model.params, model.config, rows[0], None, rows[1])[0])
    for i, prompt in enumerate(prompts):
        off = np.abs(logits_BTV[i, : len(prompt)] - wanted[i]).max(-1)
        print(way, len(prompt), np.median(off), off.max())
        assert np.median(off) < 1e-4 and off.max() < 0.02 * np.abs(wanted[i]).max()
        assert logits_BTV[i, len(prompt) - 1 :][:12].argmax(-1).tolist() == answers[i][0]
    if way == "bitlinear":
        out = xj.generate(
            model.params, model.config, prompts, xj.GenerateOptions(max_tokens=12, eos_token_ids=())
        )
        assert out.tokens == [ids for ids, _ in answers]


@contextlib.contextmanager
def transformers_model(hf, path, way: str):
    """transformers' own modules for this layout, not compiled, with the tensors of the files."""
    import torch
    import transformers
    from transformers.integrations import bitnet

    linear_class, mode, how = LAYOUTS[way]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only wait for the other threads
    torch.compiler.set_stance("force_eager")
    settings = transformers.BitNetQuantConfig(linear_class=linear_class, quantization_mode=mode)
    model = cases.hf_model(hf, cases.random_tensors(from_hf(copy.deepcopy(hf)), 0))
    rotary = model.model.rotary_emb
    model = bitnet.replace_with_bitnet_linear(model, ["lm_head"], settings).to_empty(device="cpu").eval()
    model.model.rotary_emb = type(rotary)(model.config)  # its table is in no file
    tensors = {n: torch.from_numpy(x) for n, x in load_file(path / "model.safetensors").items()}
    if how == "packed" and linear_class == "autobitlinear":  # as its loader does
        tensors |= {n: bitnet.unpack_weights(x, torch.float32) for n, x in tensors.items() if is_ternary(n)}
    if model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True)
    try:
        yield model
    finally:
        torch.compiler.set_stance("default")
        torch.set_num_threads(threads)
