"""Trees of quantized parameters as floats, and as shapes."""

import jax
import numpy as np
import pytest
from quick import full_except
from small_models import QWEN

import xinfer_jax as xj
from xinfer_jax.weights.quantized_weight import is_quantized

pytestmark = pytest.mark.oldest

SIZES = QWEN | dict(hidden_size=64, intermediate_size=128)
CONFIGS = dict(
    dense=xj.ModelConfig.from_hf(SIZES),
    experts=xj.ModelConfig.from_hf(
        SIZES | dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    ),
)
FORMS = [("dense", "int8"), ("dense", "int4"), ("dense", "ternary"), ("experts", "int4"), ("experts", "int8")]


init = jax.jit(xj.init_params, static_argnums=(0, 2, 3))


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name, quantize", full_except([("dense", "int8")], FORMS))
def test_a_float_tree_multiplies_as_the_quantized_one(name, quantize):
    config = CONFIGS[name]
    params = init(config, jax.random.key(0), "bfloat16", quantize)
    dequantize = jax.jit(xj.params.dequantize, static_argnums=1)
    floats = dequantize(params, None)
    assert {x.dtype.name for x in jax.tree.leaves(floats)} == {"bfloat16"}
    assert jax.tree.structure(floats) == jax.tree.structure(params, is_leaf=is_quantized)
    leaf = params["layers"][1]["q"]["weight"]
    matrix = dequantize(params, "float32")["layers"][1]["q"]["weight"]
    x = np.eye(leaf.shape[1], dtype=np.float32)[:2]
    np.testing.assert_allclose(leaf.product(x), matrix.T[:2], atol=1e-2)
    if quantize == "int8":  # the other forms are tried stacked and adapted
        return
    stacked = xj.params.stack_layers(jax.tree.map(np.asarray, params), config)
    assert_equal(dequantize(stacked, None), xj.params.stack_layers(jax.tree.map(np.asarray, floats), config))
    adapter = xj.lora.init_adapter(config, jax.random.key(1), rank=2)
    with_adapter = xj.lora.with_adapter(floats, adapter)
    assert_equal(dequantize(xj.lora.with_adapter(params, adapter), None), with_adapter)


def test_floats_of_rotated_matrices_are_not_rotated():
    plain, rotated = (xj.load_model(quantize="int8", activations=how).params for how in (None, "int8"))
    for x, y in zip(*(jax.tree.leaves(xj.params.dequantize(tree)) for tree in (plain, rotated)), strict=True):
        np.testing.assert_allclose(x, y, atol=0.02 * np.abs(y).max())


@pytest.mark.parametrize("name, quantize", full_except([("dense", "int8")], FORMS))
def test_shapes_of_quantized_parameters(name, quantize):
    """The numbers are compared too under `jax.jit`."""

    def init(key):
        return xj.init_params(CONFIGS[name], key, "float32", quantize)

    key = jax.random.key(0)
    want = init(key)
    types = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert types(jax.eval_shape(init, key)) == types(want)
    if quantize == "int4":
        trees = (jax.tree.leaves(xj.params.dequantize(tree)) for tree in (jax.jit(init)(key), want))
        for got, wanted in zip(*trees, strict=True):  # rounding chooses another step for some groups
            np.testing.assert_allclose(got, wanted, atol=0.05)


def test_shapes_need_no_memory():
    huge = xj.ModelConfig.from_hf(
        SIZES | dict(hidden_size=2**15, intermediate_size=2**17, num_hidden_layers=80)
    )
    with pytest.raises(xj.InputError, match="memory"):
        xj.init_params(huge, jax.random.key(0), "float32")
    shapes = jax.eval_shape(lambda key: xj.init_params(huge, key, "float32"), jax.random.key(0))
    assert shapes["layers"][79]["up"]["weight"].shape == (2**17, 2**15)
