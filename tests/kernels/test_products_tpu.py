"""The TPU kernels of products and of the greedy token, emulated on a CPU with race detection, against their
references; models and derivatives on them.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import full_except
from random_matrices import BF16, INT4, matrix

from xinfer_jax import kernels_pallas
from xinfer_jax.backends.kernels.product_kernels import Operands, select_product
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.kernels_pallas import reference, reference_products
from xinfer_jax.kernels_pallas.tpu import streaming
from xinfer_jax.weights.fp8_weight import Fp8Weight
from xinfer_jax.weights.layers import Norm, products
from xinfer_jax.weights.quantization import device_form, quantize_matrix

pytestmark = pytest.mark.newest
F32 = jnp.float32
NORM = dict(eps=1e-6)
SILU = NORM | dict(activation="silu")
GELU = dict(eps=1e-6, offset=1.0, activation="gelu_pytorch_tanh")
CASES = {  # kind, rows, inputs, outputs of each matrix, what else there is, options
    "qkv-norm-bias": ("float", 3, 200, (300, 130, 24), "norm bias", NORM),
    "float32-residual": (F32, 20, 100, (400,), "norm bias residual", NORM),
    "int8-gate-up-norm-offset": ("int8", 9, 200, (300, 300), "norm bias", GELU),
    "int4-gate-up-norm": (INT4, 3, 450, (300, 300), "norm", SILU),
    "int4-loop-of-groups": ((4, 64, True), 3, 1024, (300,), "", {}),
    "int4-many-rows": (INT4, 33, 256, (300,), "norm", NORM),
}


def run(kernel, *args, **options):
    return jax.jit(partial(kernels_pallas.run_kernel, "interpret_tpu", kernel, **options))(*args)


def case(name):
    kind, rows, inputs, outputs, extra, options = CASES[name]
    draws = np.random.default_rng(0)
    dtype = F32 if kind == F32 else BF16
    form = "float" if kind == F32 else kind
    matrices = [matrix(draws, form, size, inputs, dtype, "bias" in extra) for size in outputs]
    x_MI = jnp.asarray(draws.standard_normal((rows, inputs)), dtype)
    norm_I = jnp.asarray(draws.standard_normal(inputs), dtype) if "norm" in extra else None
    residual_MO = jnp.asarray(draws.standard_normal((rows, outputs[0])), dtype)
    return (x_MI, matrices, norm_I, residual_MO if "residual" in extra else None), options


@pytest.fixture
def streamed(monkeypatch):
    """Matrices are read in several steps."""
    monkeypatch.setattr(streaming, "RESIDENT_BYTES", 0)
    monkeypatch.setattr(streaming, "STEP_BYTES", 2**15)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qkv-norm-bias", "int8-gate-up-norm-offset", "int4-gate-up-norm"])
def test_product_of_resident_matrices(name):
    check_product(name)


@pytest.mark.parametrize("name", full_except(["int4-gate-up-norm"], CASES))
def test_product_of_streamed_matrices(name, streamed):
    check_product(name)


def check_product(name):
    args, options = case(name)
    got = run("product", *args, **options)
    want = reference_products.product(*args, **options)
    limit = 1e-5 if CASES[name][0] == F32 else 2**-7 if args[2] is not None else 2**-8
    assert [y.dtype for y in got] == [options.get("dtype", args[0].dtype)] * len(want)
    for have, need in zip(got, want, strict=True):
        have, need = (np.asarray(y, np.float64) for y in (have, need))
        assert have.shape == need.shape
        assert (np.linalg.norm(have - need, axis=-1) <= limit * np.linalg.norm(need, axis=-1)).all()


def test_sums_of_large_equal_numbers_fit():
    x_MI = jnp.ones((1, 1024), BF16)
    matrix = reference_products.Matrix(jnp.full((128, 1024), 127, jnp.int8), jnp.ones(128))
    np.testing.assert_array_equal(run("product", x_MI, [matrix], dtype=F32)[0], 127 * 1024)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qkv-norm-bias", "int4-gate-up-norm"])
def test_a_row_has_the_same_bits_beside_others(name):
    (x_MI, matrices, norm_I, residual_MO), options = case(name)
    together = run("product", x_MI, matrices, norm_I, residual_MO, **options)
    other = jnp.concatenate([x_MI[:1], 100 * x_MI[1:]])
    beside = run("product", other, matrices, norm_I, residual_MO, **options)
    for one, two in zip(together, beside, strict=True):
        np.testing.assert_array_equal(np.asarray(one[0], F32), np.asarray(two[0], F32))


@pytest.mark.full
@pytest.mark.parametrize("kind", [F32, BF16, "int8"])
def test_greedy_token(kind, streamed):
    """The first of equal logits is returned, and the first NaN. The rows are more than the number that reads
    the matrix once.
    """
    draws = np.random.default_rng(0)
    dtype = F32 if kind == F32 else BF16
    rows = 65 if kind == BF16 else 5
    x_BD = jnp.asarray(draws.standard_normal((rows, 100)), dtype)
    weight_VD = draws.integers(-127, 128, (1300, 100)).astype(np.int8)
    weight_VD[1200] = weight_VD[7] = np.where(
        np.asarray(x_BD[2], F32) > 0, 127, -127
    )  # the third row's largest
    if kind == "int8":
        args, kernel = (x_BD, jnp.asarray(weight_VD), jnp.full(1300, 0.01)), "int8_head_argmax"
    else:
        args, kernel = (x_BD.at[1].set(np.nan), jnp.asarray(weight_VD / 100, dtype)), "lm_head_argmax"
    for cap in (None, 5.0):
        id_B, logprob_B = run(kernel, *args, soft_cap=cap)
        want_B, of_want_B = getattr(reference, kernel)(*args, soft_cap=cap)
        np.testing.assert_array_equal(id_B, want_B)
        assert id_B[2] == 7
        np.testing.assert_allclose(logprob_B, of_want_B, atol=2e-3)


def test_what_the_kernel_takes():
    """One launch for matrices of one format. Others go to XLA, or one by one."""
    x = jnp.ones((2, 64), BF16)
    w = jnp.ones((16, 64), BF16)

    def kernels(x, *weights, **options):
        leaves = [{"weight": w} for w in weights]
        return str(
            jax.make_jaxpr(lambda x: products(x, leaves, run_config=RunConfig("interpret_tpu"), **options))(x)
        ).count("pallas_call")

    int4, int8 = (
        jax.tree.map(jnp.asarray, quantize_matrix(np.ones((16, 64), np.float32), *of))
        for of in ((4, 64), (8, 64))
    )
    small = jax.tree.map(jnp.asarray, quantize_matrix(np.ones((16, 64), np.float32), 4, 32))
    assert kernels(x, w, w, w) == kernels(x, int4, int4) == kernels(x, int8) == 1
    assert kernels(x.astype(F32), w.astype(F32)) == 1
    blocks, by_output = (Fp8Weight(w.astype(jnp.float8_e4m3fn), jnp.ones(axes)) for axes in ((1, 1), 16))
    assert kernels(x, blocks, blocks) == 1 and kernels(x, blocks, by_output) == 2
    assert kernels(x.astype(F32), blocks) == 0
    assert kernels(x, w, int4) == kernels(x, w, int4, activation="silu") == 2
    assert kernels(x, small) == kernels(x.astype(F32), w) == kernels(jnp.ones((65, 64), BF16), w) == 0
    ordered = dataclasses.replace(int4, order=jnp.arange(64, dtype=jnp.int32)[::-1])
    assert kernels(x, ordered) == 1 and kernels(x, ordered, int4) == 2
    with kernels_pallas.assume_device(None, "a TPU", "tpu"):
        assert select_product(None, Operands(x, [{"weight": w}]), None) == ("tpu", "a TPU")
        assert device_form(int4).scale.dtype == F32 and device_form(int8) is int8
    assert device_form(int4) is int4


@pytest.mark.full
def test_derivatives_and_vmap_are_those_of_plain_jnp():
    draws = np.random.default_rng(0)
    (x, w, bias, norm, residual) = (
        jnp.asarray(draws.standard_normal(shape), F32)
        for shape in ((2, 3, 20), (30, 20), (30,), (20,), (2, 3, 30))
    )

    def loss(x, w, impl):
        leaf = {"weight": w, "bias": bias}
        return jnp.sum(
            products(
                x, [leaf], before=Norm(norm, 1e-6, 0.0), residual=residual[0], run_config=RunConfig(impl)
            )[0]
            ** 2
        )

    def of_all(x, w, impl):
        return jax.vmap(partial(loss, w=w, impl=impl))(x).sum()

    for function, rows in ((loss, x[0]), (of_all, x)):
        derivative = jax.jit(jax.value_and_grad(function, (0, 1)), static_argnums=2)
        want, got = (derivative(rows, w, impl) for impl in ("xla", "interpret_tpu"))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)
