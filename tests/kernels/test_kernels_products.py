"""The product kernel against its reference, in Pallas's interpreter. Models whose products run on it."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import full_except
from random_matrices import BF16, F16, INT4, matrix

import xinfer_jax as xj
from xinfer_jax.backends.cpu.cpu_products import int8_activation_product
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.families.reading import from_hf
from xinfer_jax.kernels_pallas import reference_products, triton
from xinfer_jax.model.decoder import forward
from xinfer_jax.weights.grouped_weight import GroupedWeight
from xinfer_jax.weights.layers import Norm, linear, products, rms_norm
from xinfer_jax.weights.quantization import quantize_matrix, with_int8_activations

pytestmark = [
    pytest.mark.oldest,  # in two thirds of the time of the newest, which compiles these kernels
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


EPS = dict(eps=1e-6)
CASES = {  # kind, rows, inputs, outputs of each matrix, dtype, and what else there is
    "qkv-norm-bias": ("float", 1, 100, (40, 20, 24), BF16, "norm bias", EPS),
    "int4-gate-up-norm": (INT4, 3, 130, (40, 40), BF16, "norm", EPS | dict(activation="silu")),
    "qkv-of-two-formats": (("float", INT4), 2, 128, (40, 16), BF16, "norm bias", EPS),
    "float16-residual": ("float", 20, 70, (40,), F16, "residual bias", {}),
    "int8-gate-up-norm-offset": (
        "int8",
        3,
        130,
        (40, 40),
        BF16,
        "norm",
        EPS | dict(offset=1.0, activation="gelu_pytorch_tanh"),
    ),
    "relu2": ("int8", 17, 64, (33, 33), BF16, "bias", dict(activation="relu2")),
    "int4-without-zeros-f16": ((4, 128, False), 5, 200, (40,), F16, "residual", {}),
    "int8-in-groups": ((8, 32, False), 3, 130, (40,), BF16, "bias", {}),
    "int4-many-rows": (INT4, 130, 192, (70,), BF16, "residual", {}),
    "int8-many-rows-float32-result": ("int8", 70, 100, (70, 20), BF16, "", dict(dtype=jnp.float32)),
    "int8-activations": ("int8", 3, 100, (40, 20), BF16, "int8 activations bias", dict(dtype=jnp.float32)),
    "inputs-divided": ("float", 33, 4300, (70,), BF16, "residual bias", {}),
}


@pytest.mark.parametrize("name", full_except(["int4-gate-up-norm"], CASES))
def test_product(name):
    kind, rows, inputs, outputs, dtype, extra, options = CASES[name]
    draws = np.random.default_rng(0)
    kinds = kind if isinstance(kind[-1], tuple) else [kind] * len(outputs)
    matrices = [
        matrix(draws, kind, size, inputs, dtype, "bias" in extra)
        for kind, size in zip(kinds, outputs, strict=True)
    ]
    x_MI = jnp.asarray(draws.standard_normal((rows, inputs)), dtype)
    norm_I = jnp.asarray(draws.standard_normal(inputs), dtype) if "norm" in extra else None
    residual_MO = (
        jnp.asarray(draws.standard_normal((rows, outputs[0])), dtype) if "residual" in extra else None
    )
    step_M = None
    if "int8 activations" in extra:
        x_MI = jnp.asarray(draws.integers(-127, 128, x_MI.shape), jnp.int8)
        step_M = jnp.asarray(draws.random(rows), jnp.float32)
    args = (x_MI, matrices, norm_I, residual_MO, step_M)
    got = jax.jit(partial(triton.product, **options, interpret=True))(*args)
    want = reference_products.product(*args, **options)
    assert [y.dtype for y in got] == [options.get("dtype", dtype)] * len(want)
    for have, need in zip(got, want, strict=True):
        have, need = (np.asarray(y, np.float64) for y in (have, need))
        limit = (2**-7 if "norm" in extra else 2**-8) * np.linalg.norm(need, axis=-1)
        assert (np.linalg.norm(have - need, axis=-1) <= limit).all()


CONFIG = from_hf(
    dict(model_type="qwen2", vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128)
)


def model(method=None):
    """A bfloat16 model of one layer. method: "int4" for its layer's matrices."""
    params = xj.init_params(CONFIG, jax.random.key(0), "bfloat16")

    def leaf(path, x):
        if method is None or x.ndim != 2 or path[0].key != "layers":
            return x
        return jax.tree.map(jnp.asarray, quantize_matrix(np.asarray(x, np.float32), 4, 32))

    return jax.tree_util.tree_map_with_path(leaf, params)


@pytest.mark.full
@pytest.mark.parametrize("method", [None, "int4"])
def test_gradients_through_the_kernel_are_those_of_plain_jnp(method):
    params = model(method)
    tokens_BT = np.arange(5)[None]
    floats, rest = [
        jax.tree.map(lambda x, keep=keep: x if jnp.issubdtype(x.dtype, jnp.inexact) == keep else None, params)
        for keep in (True, False)
    ]

    def loss(floats, impl):
        whole = jax.tree.map(lambda a, b: b if a is None else a, floats, rest, is_leaf=lambda x: x is None)
        return jnp.sum(forward(whole, CONFIG, tokens_BT, impl=impl)[0] ** 2)

    want, got = (jax.jit(jax.grad(loss), static_argnums=1)(floats, impl) for impl in ("xla", "interpret"))
    for path, need in jax.tree_util.tree_leaves_with_path(want):
        have = dict(jax.tree_util.tree_leaves_with_path(got))[path]
        have, need = (np.asarray(x, np.float64) for x in (have, need))
        assert np.linalg.norm(have - need) <= 0.03 * np.linalg.norm(need) + 1e-6, path


def test_what_the_kernel_does_not_take_stays_with_xla():
    """float32, floats of many rows, ternary and small groups; matrices in an order one by one."""
    x = jnp.ones((2, 32), BF16)
    w = jnp.ones((16, 32), BF16)

    def kernels(x, *weights, **options):
        leaves = [{"weight": w} for w in weights]
        run = partial(products, leaves=leaves, run_config=RunConfig("interpret"), **options)
        return str(jax.make_jaxpr(run)(x)).count("pallas_call")

    assert kernels(x, w) == kernels(x, w, w) == 1
    assert kernels(x.astype(jnp.float32), w) == kernels(jnp.ones((65, 32), BF16), w) == 0
    int4 = jax.tree.map(jnp.asarray, quantize_matrix(np.ones((16, 32), np.float32), 4, 32))
    assert kernels(jnp.ones((65, 32), BF16), int4, int4) == 1
    assert kernels(x, w, int4) == 1
    assert kernels(x, w, int4, activation="silu") == 2
    ordered = dataclasses.replace(int4, order=jnp.arange(32, dtype=jnp.int32)[::-1])
    assert kernels(x, ordered, int4) == 2
    small = jax.tree.map(jnp.asarray, quantize_matrix(np.ones((16, 32), np.float32), 8, 8))
    assert isinstance(small, GroupedWeight) and kernels(x, small) == 0


@pytest.mark.full
def test_int8_activations():
    """They are rotated and quantized as on a CPU, after the norm."""
    draws = np.random.default_rng(0)
    matrix_OI = draws.standard_normal((40, 128)).astype(np.float32)
    int8 = jax.tree.map(jnp.asarray, quantize_matrix(matrix_OI, 8, 128))
    leaf = {"weight": with_int8_activations(int8)}
    x = jnp.asarray(draws.standard_normal((3, 128)), BF16)
    norm = Norm(jnp.asarray(draws.standard_normal(128), BF16), 1e-6, 0.0)
    (got,) = products(x, [leaf], before=norm, dtype=jnp.float32, run_config=RunConfig("interpret"))
    inputs = leaf["weight"].rotated_inputs(rms_norm(x, norm.weight, norm.eps, norm.offset))
    want = int8_activation_product(inputs, int8.values) * int8.scale
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_inputs_in_another_order():
    draws = np.random.default_rng(0)
    weight = jax.tree.map(
        jnp.asarray, quantize_matrix(draws.standard_normal((40, 64)).astype(np.float32), 4, 32)
    )
    ordered = dataclasses.replace(weight, order=jnp.asarray(draws.permutation(64), jnp.int32))
    x = jnp.asarray(draws.standard_normal((2, 3, 64)), BF16)
    want, got = (
        linear(x, {"weight": ordered}, jnp.float32, run_config=RunConfig(impl))
        for impl in ("xla", "interpret")
    )
    assert np.linalg.norm(got - want) <= 0.01 * np.linalg.norm(want)
