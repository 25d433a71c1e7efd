"""Inputs of matrices are rotated in blocks; int8 activations."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny
from parity_cases import CASES
from quick import full_except
from random_matrices import write_checkpoint

import xinfer_jax as xj
from xinfer_jax import kernels_pallas
from xinfer_jax.backends.cpu.cpu_products import int8_activation_product
from xinfer_jax.cache.fingerprint import fingerprint
from xinfer_jax.compress.awq import quantized_params, with_outliers
from xinfer_jax.weights.grouped_weight import unpack_int4
from xinfer_jax.weights.hadamard import (
    hadamard_rotate,
    hadamard_unrotate,
    input_block_width,
    rotate_on_host,
)
from xinfer_jax.weights.int8_weight import Int8Weight
from xinfer_jax.weights.params_like import params_like
from xinfer_jax.weights.quantized_weight import is_quantized, quantized_product

pytestmark = pytest.mark.oldest

INT8 = dict(quantize="int8", activations="int8")
INT4 = dict(quantize="int4", activations="int8")
# The loader rotates in blocks of rows: a few numbers round to another level.
NEAR = dict(int8=dict(atol=1), uint8=dict(atol=1), int16=dict(atol=4), float32=dict(atol=1e-6))
TOKENS = np.random.default_rng(0).integers(0, 250, (2, 24))


def assert_near(x, expected) -> None:
    is_packed = x.dtype == np.uint8 and x.ndim > 2
    x, expected = (unpack_int4(np.asarray(each)) if is_packed else each for each in (x, expected))
    np.testing.assert_allclose(*(np.asarray(each, float) for each in (x, expected)), **NEAR[x.dtype.name])


def logits(model, tokens_BT=TOKENS) -> np.ndarray:
    return np.asarray(jax.jit(xj.forward, static_argnums=1)(model.params, model.config, tokens_BT)[0])


@pytest.mark.parametrize("width", [16, 32, 64])
def test_a_rotation_is_orthogonal_and_spreads_outliers(width):
    matrix = np.asarray(hadamard_rotate(jnp.eye(width), width))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=1e-5)
    assert np.abs(matrix).max() < 1.5 / width**0.5
    assert np.abs(hadamard_rotate(jnp.ones((1, width)), width)).max() < 2.5  # not width**0.5
    np.testing.assert_allclose(
        hadamard_unrotate(hadamard_rotate(jnp.eye(width), width), width), np.eye(width), atol=1e-5
    )
    np.testing.assert_allclose(rotate_on_host(np.eye(width, dtype=np.float32), width), matrix, atol=1e-6)


MODELS = [
    ("qwen2-gqa-tied-old", INT8), ("gemma2-long-caps", INT4), ("moe-some-layers-dense", INT4),
    ("qwen3-5-tied", INT8),
]  # fmt: skip


@pytest.mark.parametrize("name, how", full_except(MODELS[:1], MODELS))
def test_models_with_int8_activations(tmp_path, name, how):
    """A dense one, norms after sublayers, a mixture, and linear attention."""
    source = write_checkpoint(tmp_path / "from", CASES[name].hf)
    plain = xj.load_model(source, "float32")
    model = xj.load_model(source, "float32", **how)
    matrices = list(filter(is_quantized, jax.tree.leaves(model.params, is_leaf=is_quantized)))
    assert any(len(weight.shape) > 2 for weight in matrices) == ("moe" in name)
    for weight in matrices:
        assert weight.int8_activations
        assert weight.input_block == input_block_width(weight.shape[-1])
    trees = [params_like(plain.params, model.config, model.params)]
    is_saved = name in ("qwen2-gqa-tied-old", "gemma2-long-caps")  # others cannot be
    trees += [quantized_params(plain.params, **how)] if is_saved else []
    for tree in trees:  # the loader rotates other rows at a time
        for new, old in zip(*map(jax.tree.leaves, (tree, model.params)), strict=True):
            assert_near(new, old)
        assert jax.tree.structure(tree) == jax.tree.structure(model.params)
    wanted = logits(plain, TOKENS % 90)
    found = logits(model, TOKENS % 90)
    most = 0.1 if how == INT8 else 0.35
    assert 0 < np.sqrt(np.square(found - wanted).mean()) < most * wanted.std()
    if is_saved:
        xj.save_model(model.params, model.config, tmp_path / "to")
        stored = json.loads((tmp_path / "to" / "config.json").read_text())["quantization_config"]
        assert stored == dict(quant_method="xinfer_jax", version=5, activations="int8")
        loaded = xj.load_model(tmp_path / "to", "float32")
        assert loaded.config == model.config
        layer = model.params["layers"][0]
        q = layer["q"] | {"weight": dataclasses.replace(layer["q"]["weight"], input_block=0)}
        mixed = model.params | {"layers": (layer | {"q": q}, *model.params["layers"][1:])}
        with pytest.raises(xj.InputError, match="rotated in blocks of 0, and the files would say"):
            xj.save_model(mixed, model.config, tmp_path / "mixed")
        np.testing.assert_array_equal(logits(loaded, TOKENS % 90), found)
        pair = xj.lora.init_adapter(plain.config, jax.random.key(0), rank=2)
        apart = xj.lora.split_adapter(xj.lora.with_adapter(loaded.params, pair))
        found = apart[0], apart[1].matrices
        jax.tree.map(np.testing.assert_array_equal, found, (loaded.params, pair.matrices))


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 8, 65])
def test_int8_activation_product_is_exact_and_independent_of_other_rows(rows):
    random = np.random.default_rng(1)
    x = random.standard_normal((rows, 130)).astype(np.float32)
    values = random.integers(-127, 128, (70, 130)).astype(np.int8)
    got = jax.jit(int8_activation_product)(x, values)
    factor = np.float32(127) / np.abs(x).max(1, keepdims=True)
    sums = np.rint(x * factor).astype(np.int64) @ values.T.astype(np.int64)
    np.testing.assert_array_equal(np.rint(got * factor), sums)
    np.testing.assert_allclose(got * factor, sums, rtol=1e-6)
    for row, row_product in zip(x, got, strict=True):
        np.testing.assert_array_equal(jax.jit(int8_activation_product)(row[None], values)[0], row_product)


@pytest.mark.full
def test_gradients_equal_those_of_the_dequantized_matrix():
    random = np.random.default_rng(2)
    values = random.integers(-127, 128, (70, 80)).astype(np.int8)
    weight = Int8Weight(jnp.asarray(values), jnp.ones(70) / 127, int8_activations=True)
    x = random.standard_normal((3, 80)).astype(np.float32)
    gradient = jax.grad(lambda x: quantized_product(x, weight).sum())(x)
    np.testing.assert_allclose(gradient, np.ones((3, 70)) @ np.asarray(weight.dequantize()), atol=1e-4)


@pytest.mark.full
def test_steps_stay_whole_numbers_where_a_tpu_takes_float32_scales(tmp_path):
    """Saved, loaded and made of floats again there. A file that lacks zero points is rejected."""
    plain = xj.load_model(dtype="float32")
    with kernels_pallas.assume_device(None, "a TPU", platform="tpu"):
        model = xj.load_model(dtype="float32", **INT4)
        xj.save_model(model.params, model.config, tmp_path / "to")
        loaded = xj.load_model(tmp_path / "to", "float32")
        params = quantized_params(plain.params, **INT4)
        jax.tree.map(assert_near, params_like(plain.params, plain.config, params), params)
    here = xj.load_model(tmp_path / "to", "float32")
    assert fingerprint(loaded.params, loaded.config) == fingerprint(here.params, here.config)
    file = tmp_path / "to" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    fewer = {name: x for name, x in tensors.items() if not name.endswith("q_proj.weight.zero")}
    safetensors.numpy.save_file(fewer, file)
    assert "q_proj.weight.zero" in tiny.load_error(tmp_path / "to")


@pytest.mark.full
def test_rotations_keep_errors_of_outliers_small():
    plain = xj.load_model(dtype="float32")
    params = with_outliers(plain.params, plain.config, 50)
    wanted = logits(plain)
    np.testing.assert_allclose(logits(dataclasses.replace(plain, params=params)), wanted, atol=1e-3)

    def error(quantized) -> float:
        return float(np.sqrt(np.square(logits(dataclasses.replace(plain, params=quantized)) - wanted).mean()))

    def not_rotated(x):
        return dataclasses.replace(x, int8_activations=True) if is_quantized(x) else x

    weights = quantized_params(params, "int8", 1 << 30)  # a scale for each output
    weights_only = error(weights)
    unrotated = error(jax.tree.map(not_rotated, weights, is_leaf=is_quantized))
    rotated = error(quantized_params(params, "int8", activations="int8"))
    assert rotated < 1.5 * weights_only and unrotated > 2.5 * rotated, (weights_only, rotated, unrotated)


def test_bad_options_for_int8_activations_raise(tmp_path):
    for options, message in (
        (dict(activations="int8"), "needs quantize='int8' or 'int4', got None"),
        (INT8 | dict(activations="int4"), "activations='int4' is not supported"),
    ):
        assert message in tiny.load_error(None, **options)
