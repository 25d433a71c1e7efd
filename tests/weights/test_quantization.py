"""Quantized weights: errors of rounding, products equal to those of the dequantized matrix, and identities of
generation.
"""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity_cases import CASES
from quick import full_except
from random_matrices import random_params

import xinfer_jax as xj
from xinfer_jax.backends.cpu import cpu_features, grouped_products, product_table
from xinfer_jax.feed_forward.experts import mixture_of_experts
from xinfer_jax.formats.files import BUNDLED
from xinfer_jax.ops.product import float_product
from xinfer_jax.weights.grouped_weight import GroupedWeight, unpack_int4
from xinfer_jax.weights.hadamard import input_block_width
from xinfer_jax.weights.int8_weight import Int8Weight
from xinfer_jax.weights.mxfp4 import mxfp4_struct
from xinfer_jax.weights.params import tree_bytes
from xinfer_jax.weights.quantization import quantize_matrix, quantized_leaf, with_int8_activations, with_steps
from xinfer_jax.weights.quantized_weight import quantize_activations, quantized_product
from xinfer_jax.weights.ternary import ternary_struct

pytestmark = pytest.mark.oldest

FORMATS = ("int8", "int4", "bfloat16")
MATRICES = [
    (96, 72, 8, None),
    (40, 64, 8, 8),
    (40, 72, 8, 32),
    (40, 72, 4, 64),
    (130, 96, 4, 96),
    (5, 2, 4, 64),
]


def matrix(outputs: int, inputs: int) -> np.ndarray:
    return np.random.default_rng(outputs + inputs).standard_normal((outputs, inputs)).astype(np.float32)


@pytest.mark.parametrize("outputs, inputs, bits, group", MATRICES)
def test_rounding_errors_are_at_most_half_a_step(outputs, inputs, bits, group):
    wanted = matrix(outputs, inputs)
    weight = quantize_matrix(wanted, bits, group)
    assert weight.shape == wanted.shape
    error = np.abs(np.asarray(weight.dequantize()) - wanted)
    if isinstance(weight, Int8Weight):
        assert np.all(error <= 0.5001 * np.abs(wanted).max(1, keepdims=True) / 127)
    else:
        assert weight.group == group
        step = np.repeat(np.asarray(weight.scale, np.float32), group, 0)[:inputs].T
        # 4 bits: the zero point is rounded too.
        assert np.all(error <= (0.5 if bits == 8 else 1.01) * step * 1.01)
        assert np.mean(error / step) < 0.3


@pytest.mark.parametrize("shape, group", [((65, 65), None), ((64, 900), 8), ((900, 64), 8)])
def test_int8_has_more_scales_in_small_matrices(shape, group):
    weight = quantize_matrix(matrix(*shape), 8)
    assert (
        type(weight) is (GroupedWeight if group else Int8Weight) and getattr(weight, "group", None) == group
    )


def test_int8_in_groups_has_the_step_of_least_error():
    wanted = matrix(40, 64)
    tried = []
    for stretch in (1, 1.03, 1.1):
        step = np.abs(wanted.reshape(40, 8, 8)).max(-1, keepdims=True) * stretch / 127
        tried.append(
            np.square(np.rint(wanted.reshape(40, 8, 8) / step) * step - wanted.reshape(40, 8, 8)).sum()
        )
    error = np.square(np.asarray(jax.device_put(quantize_matrix(wanted, 8, 8)).dequantize()) - wanted).sum()
    assert error < 0.75 * min(tried), (error, tried)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_any_float_matrix_is_quantized_as_its_float32_values(dtype):
    stored = jnp.asarray(matrix(16, 64), dtype)
    chex.assert_trees_all_equal(
        quantize_matrix(np.asarray(stored), 4), quantize_matrix(np.asarray(stored, np.float32), 4)
    )


@pytest.mark.parametrize("bits, group, axis", [(8, None, 0), (8, 40, -1), (4, 40, -1)])
@pytest.mark.parametrize("shape", [(3000, 200), (129, 9000)])  # several blocks, and a last one of one row
def test_a_large_matrix_is_quantized_like_its_parts(shape, bits, group, axis):
    large = matrix(*shape)
    group = group or shape[1]
    wanted, *parts = (quantize_matrix(rows, bits, group) for rows in (large, large[:50], large[50:]))
    chex.assert_trees_all_equal(jax.tree.map(lambda *x: np.concatenate(x, axis), *parts), wanted)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_nan_inf_and_too_large_numbers_raise(quantize):
    """The error names NaN first, in any row."""
    large = matrix(3000, 64)
    large[0, :2] = 3e38
    with pytest.raises(xj.InputError, match="x.weight holds numbers too large to be quantized"):
        quantized_leaf(large, "x.weight", quantize)
    large[-1, -1] = np.nan
    with pytest.raises(xj.InputError, match="x.weight holds NaN or inf"):
        quantized_leaf(large, "x.weight", quantize)


def test_a_matrix_of_zeros_stays_zero():
    for bits in (8, 4):
        assert not np.any(quantize_matrix(np.zeros((80, 72), np.float32), bits).dequantize())


@pytest.mark.full
@pytest.mark.parametrize("rows, ways", [(1, ("eager", "jit")), (2, ("vmap",)), (9, ("jit", "vmap"))])
@pytest.mark.parametrize("outputs, inputs, bits, group", MATRICES)
def test_product_equals_the_product_of_the_dequantized_matrix(outputs, inputs, bits, group, rows, ways):
    weight = jax.device_put(quantize_matrix(matrix(outputs, inputs), bits, group))
    x = np.random.default_rng(1).standard_normal((rows, inputs)).astype(np.float32)
    wanted = x @ np.asarray(weight.dequantize()).T
    vmapped = jax.vmap(quantized_product, (0, None))
    for way in ways:
        got = dict(eager=quantized_product, jit=jax.jit(quantized_product), vmap=vmapped)[way](x, weight)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(x).max() * np.abs(wanted).max())


def test_int4_with_int8_activations_is_int8_in_its_product(monkeypatch):
    """The product takes all groups at once, or some at a time. Activations stay floats up to three rows."""
    shape = (70, 130)
    weight = with_steps(quantize_matrix(matrix(*shape), 4))
    on_device = with_steps(jax.device_put(quantize_matrix(matrix(*shape), 4)))
    jax.tree.map(np.testing.assert_array_equal, weight, on_device)
    levels = unpack_int4(weight.values).astype(np.int64) - weight.zero[:, None]
    steps = (levels * weight.scale[:, None]).reshape(-1, shape[0])[: shape[1]].T
    np.testing.assert_allclose(weight.dequantize(), steps * weight.step[:, None], rtol=1e-5)
    np.testing.assert_allclose(
        weight.dequantize(), quantize_matrix(matrix(*shape), 4).dequantize(), rtol=5e-3
    )
    values = steps + 128 >> 8
    assert np.abs(values).max() == 127
    x = np.random.default_rng(2).standard_normal((9, shape[1])).astype(np.float32)
    factor = np.float32(127) / np.abs(x).max(1, keepdims=True)
    wanted = np.rint(x * factor).astype(np.int64) @ values.T * (weight.step.astype(np.float64) * 256) / factor
    for numbers in (1 << 23, 1):
        monkeypatch.setattr(grouped_products, "_INT8_NUMBERS", numbers)
        got = jax.jit(quantized_product)(x, on_device)
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(jax.jit(quantized_product)(x[4:], on_device), got[4:])
        jax.clear_caches()
    dense = np.asarray(jax.jit(type(weight).dequantize)(on_device))
    np.testing.assert_allclose(jax.jit(quantized_product)(x[:3], on_device), x[:3] @ dense.T, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, with_int8_activations(weight), weight)

    def total(product, step):
        return product(x, dataclasses.replace(on_device, step=step)).sum()

    gradient, wanted = (
        jax.jit(jax.grad(partial(total, product)))(on_device.step)
        for product in (quantized_product, lambda x, weight: x @ weight.dequantize().T)
    )
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-3 * np.abs(wanted).max())
    blocks = dataclasses.replace(on_device, input_block=input_block_width(shape[1]))  # as on a GPU
    plain, dense = jax.jit(lambda x, weight: (weight.plain_product(x), weight.dequantize()))(x, blocks)
    np.testing.assert_allclose(plain, x @ dense.T, atol=1e-4)


CPU_INFOS = {
    "none": "flags : fpu avx avx2 fma f16c",
    "int8": "Features : fp asimd asimddp",
    "int8,bfloat16": "flags : avx2 avx512f avx512_vnni avx512_bf16",
    "int8,bfloat16,amx": "flags : avx512_vnni amx_bf16 amx_tile amx_int8",
}


@pytest.mark.full
@pytest.mark.parametrize("has", CPU_INFOS)
def test_cpu_features_choose_the_form_of_products(has, tmp_path, monkeypatch):
    """Every form computes the same product. The environment variable overrides the flags."""
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor : 0\n{CPU_INFOS[has]}\n")
    monkeypatch.setattr(cpu_features, "_INFO", file)
    monkeypatch.setattr(cpu_features, "_flags", cpu_features._flags.__wrapped__)
    monkeypatch.setattr(cpu_features, "fast_matmul_types", cpu_features.fast_matmul_types.__wrapped__)
    monkeypatch.setattr(product_table, "fast_matmul_types", cpu_features.fast_matmul_types)
    assert ",".join(
        name for name in cpu_features._FLAGS if name in cpu_features.fast_matmul_types()
    ) == has.replace("none", "")
    weight = jax.device_put(quantize_matrix(matrix(96, 128)))
    half = jnp.asarray(matrix(96, 128), jnp.bfloat16)
    once = dataclasses.replace(weight, int8_activations=True)
    for rows in (1, 20, 80):
        x = np.random.default_rng(rows).standard_normal((rows, 128)).astype(jnp.bfloat16).astype(np.float32)
        for got, matrix_float32 in (
            (quantized_product(x, weight), weight.dequantize()),
            (float_product(jnp.asarray(x, jnp.bfloat16), half), half.astype(jnp.float32)),
        ):
            wanted = x @ np.asarray(matrix_float32).T
            np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(x).max() * np.abs(wanted).max())
        int8, factor = quantize_activations(x)
        wanted = int8.astype(np.float32) @ np.asarray(weight.dequantize()).T / factor
        np.testing.assert_allclose(quantized_product(x, once), wanted, atol=1e-5 * np.abs(wanted).max())
    monkeypatch.setenv(cpu_features.CPU_VARIABLE, "bfloat16")
    assert cpu_features.fast_matmul_types() == {"bfloat16"} and "bfloat16" in product_table.describe_cpu()
    monkeypatch.setenv(cpu_features.CPU_VARIABLE, "sse")
    with pytest.raises(xj.InputError, match="XINFER_JAX_CPU='sse': give some of int8,bfloat16,amx, or none"):
        cpu_features.fast_matmul_types()


@pytest.mark.parametrize("jax_version", [(0, 10, 2), (0, 12, 0)])
@pytest.mark.parametrize("has", CPU_INFOS)
def test_each_number_of_rows_has_a_form(has, jax_version, monkeypatch):
    monkeypatch.setattr(product_table, "fast_matmul_types", lambda: frozenset(has.split(",")))
    monkeypatch.setattr(jax, "__version_info__", jax_version)
    forms = {
        kind: [product_table.fastest_form(kind, rows, 896, 4864) for rows in (1, 3, 8, 33, 300)]
        for kind in (
            "float32",
            "bfloat16",
            "float16",
            "int8",
            "int8 activations",
            "int4",
            "mxfp4",
            "ternary",
            "int4 activations",
        )
    }
    assert forms["float32"] == ["x first", *["matrix first"] * 3, "x first"]
    assert set(forms["float16"]) == {"float32 tiles"}
    assert (forms["int8"][-1] == "float32 tiles") != ("amx" in has or "int8" in has and jax_version[1] == 12)
    for packed in ("int4", "mxfp4", "ternary"):
        assert forms[packed][0] == "row by row" and forms[packed][-1] == "float32 tiles"
    assert forms["int4 activations"] == [*["row by row"] * 2, *["int8"] * 3]
    if has == "int8,bfloat16" and jax_version[1] == 12:
        # As measured: the matrix as left operand is not faster.
        assert set(forms["int8"]) == set(forms["int8 activations"]) == {"x first"}


@pytest.mark.full
@pytest.mark.parametrize("has", ["bfloat16", "bfloat16,amx", "none"])
def test_experts_narrower_than_the_model_in_bfloat16(has, monkeypatch):
    """64 tokens at once: XLA has no bfloat16 product with a transposed result of `matrix_lhs_dot`."""
    monkeypatch.setattr(product_table, "fast_matmul_types", lambda: frozenset(has.split(",")))
    config = CASES["moe-some-layers-dense"].config
    assert config.experts.intermediate_size < config.hidden_size
    params = random_params(config, dtype="bfloat16")
    layer = next(layer for layer in params["layers"] if "experts" in layer)
    x_BTD = jax.random.normal(jax.random.key(1), (1, 64, config.hidden_size), "bfloat16")
    in_float32 = jax.tree.map(lambda x: x.astype("float32"), (x_BTD, layer))
    got, wanted = (
        jax.jit(mixture_of_experts, static_argnums=2)(*args, config) for args in ((x_BTD, layer), in_float32)
    )
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype("float32"), wanted, atol=0.03 * np.abs(wanted).max())


def zeros(struct):
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), struct)


WHOLE = {  # a leaf whose matrix has 2²² numbers, and bytes of temporaries for each number
    "int4": (lambda: quantize_matrix(matrix(2048, 2048), 4), 2.4),
    "ternary": (lambda: zeros(ternary_struct((2048, 2048))), 0.8),
    "mxfp4": (lambda: zeros(mxfp4_struct((2048, 2048))), 2.1),
}


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("kind", WHOLE)
def test_no_product_dequantizes_the_whole_matrix(kind, rows):
    make, limit = WHOLE[kind]
    compiled = jax.jit(quantized_product).lower(jnp.ones((rows, 2048)), jax.device_put(make())).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < limit * 2048 * 2048


def test_quantized_product_with_reordered_inputs():
    plain = jax.device_put(quantize_matrix(matrix(24, 128), 4, 32))
    order = np.random.default_rng(2).permutation(128).astype(np.int32)
    weight = dataclasses.replace(plain, order=jnp.asarray(order))
    x = np.random.default_rng(3).standard_normal((2, 128)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(weight.dequantize())[:, order], plain.dequantize())
    for rows in (x, x[:1]):
        got = jax.jit(quantized_product)(rows, weight)
        np.testing.assert_allclose(got, rows @ np.asarray(weight.dequantize()).T, atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("inputs", [64, 72])
def test_rows_of_a_quantized_matrix(bits, inputs):
    weight = jax.device_put(quantize_matrix(matrix(80, inputs), bits))
    index = jnp.array([[3, 39], [0, 3]])
    np.testing.assert_array_equal(weight.rows(index), np.asarray(weight.dequantize())[np.asarray(index)])


@pytest.mark.full
@pytest.mark.parametrize("bits", [8, 4])
def test_gradients_equal_those_of_the_dequantized_product(bits):
    weight = jax.device_put(quantize_matrix(matrix(24, 64), bits, 64))
    x = jnp.asarray(matrix(3, 64))

    def loss(product, x, scale):
        return jnp.sum(jnp.sin(product(x, dataclasses.replace(weight, scale=scale))))

    got = jax.grad(loss, (1, 2))(quantized_product, x, weight.scale)
    wanted = jax.grad(loss, (1, 2))(lambda x, w: x @ w.dequantize().T, x, weight.scale)
    chex.assert_trees_all_close(got, wanted, rtol=2e-2 if bits == 4 else 1e-2, atol=2e-3)


def test_nan_activations_give_nan():
    weight = jax.device_put(quantize_matrix(matrix(24, 64), 8))
    assert np.all(np.isnan(jax.jit(quantized_product)(np.full((1, 64), np.nan, np.float32), weight)))


# --- in generation ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=full_except(["int8"], FORMATS))
def model(request):
    quantize = request.param if request.param.startswith("int") else None
    return xj.load_model(dtype=None if quantize else request.param, quantize=quantize)


@pytest.fixture(scope="module")
def shallow(model):
    """Its first layer: programs compile in a fraction of the time."""
    config = dataclasses.replace(model.config, num_hidden_layers=1)
    return dataclasses.replace(
        model, config=config, params=model.params | {"layers": model.params["layers"][:1]}
    )


@pytest.fixture(scope="module")
def wanted():
    return xj.load_model(dtype="float32")


def prompts(model):
    questions = ("What is the capital of France?", "What is the capital of Japan?", "The capital of Spain is")
    return [model.tokenizer.encode(question) for question in questions]


def test_leaf_types_and_bytes(model, wanted):
    large = ("q", "o", "gate", "up", "down")  # k and v have 64 outputs
    kinds = {type(model.params["layers"][0][name]["weight"]) for name in large}
    name = model.load_stats.dtype
    assert kinds == {{"int8": Int8Weight, "int4": GroupedWeight}.get(name, type(wanted.params["final_norm"]))}
    if name == "int4":
        assert isinstance(model.params["embed"]["weight"], Int8Weight)
    ratio = tree_bytes(model.params) / tree_bytes(wanted.params)
    assert ratio < {"int8": 0.27, "int4": 0.21, "bfloat16": 0.501}[name]


def teacher_forced(model, ids):
    return np.asarray(
        jax.jit(xj.forward, static_argnums=1)(model.params, model.config, jnp.array([ids]))[0][0]
    )


def test_prefill_and_decode_equal_the_full_forward(shallow):
    model = shallow
    ids = prompts(model)[0]
    full = teacher_forced(model, ids)
    cache = xj.init_cache(model.config, 1, 32)
    logits, cache = xj.prefill(model.params, model.config, jnp.array([ids[:4]]), jnp.array([4]), cache)
    steps = [logits[0]]
    for token in ids[4:]:
        logits, cache = xj.decode_step(model.params, model.config, jnp.array([token]), cache)
        steps.append(logits[0])
    bound = 0.08 if model.load_stats.dtype == "bfloat16" else 5e-3  # on logits of order 10
    np.testing.assert_allclose(np.array(steps), full[3:], atol=bound)


@pytest.mark.full
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_no_weight_is_dequantized_outside_the_loop(quantize):
    config = xj.load_model().config
    config = dataclasses.replace(
        config, hidden_size=256, intermediate_size=1024, vocab_size=8192, num_hidden_layers=2,
    )  # fmt: skip
    config = dataclasses.replace(config, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    params = jax.eval_shape(lambda: xj.init_params(config, jax.random.key(0), quantize=quantize))

    def loop(params, logits, cache, key):
        return xj.decode_loop(
            params, config, logits, cache, key, xj.SamplingConfig(), np.array([-1]), 8
        ).tokens_BT

    cache = xj.init_cache(config, 1, 64)
    compiled = (
        jax.jit(loop)
        .lower(params, jnp.zeros((1, config.vocab_size)), cache, jax.random.split(jax.random.key(0), 1))
        .compile()
    )
    cache_bytes = tree_bytes((cache.k, cache.v))
    weights = tree_bytes(params)
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * cache_bytes + weights / 5 + 2**20


@pytest.mark.full
def test_init_params_quantizes(wanted):
    params = xj.init_params(wanted.config, jax.random.key(0), quantize="int8")
    plain = xj.init_params(wanted.config, jax.random.key(0), "float32")
    leaf = params["layers"][0]["q"]["weight"]
    matrix = plain["layers"][0]["q"]["weight"]
    np.testing.assert_allclose(leaf.dequantize(), matrix, atol=0.5001 * float(jnp.abs(matrix).max()) / 127)


@pytest.mark.parametrize(
    "call",
    [
        lambda q: xj.load_model(BUNDLED, quantize=q),
        lambda q: xj.init_params(xj.load_model().config, jax.random.key(0), None, q),
    ],
)
def test_unknown_method_raises(call):
    with pytest.raises(
        xj.InputError, match="quantize='int3' is not supported: use None or one of int8, int4"
    ):
        call("int3")
