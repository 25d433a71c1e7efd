"""Adapters of rows in the kernels of products, emulated: against the reference, with gradients."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_matrices import BF16, matrix

import xinfer_jax as xj
from xinfer_jax import kernels_pallas
from xinfer_jax.backends.kernels import product_kernels
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.kernels_pallas import reference_products
from xinfer_jax.kernels_pallas.reference_products import RowAdapters
from xinfer_jax.weights.adapted_weight import AdaptedWeight
from xinfer_jax.weights.layers import Norm, products

pytestmark = [
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
IMPLS = {"interpret": BF16, "interpret_tpu": jnp.float32}


@pytest.mark.parametrize("impl", IMPLS)
def test_products(impl):
    """The products are q, k without an adapter, and v. The last row's adapter is NaN, and no other row reads
    it. Adapters of other rows do not change a row's bits.
    """
    draws = np.random.default_rng(0)
    dtype = IMPLS[impl]
    adapter_M = jnp.array([1, -1, 0, 1, 2], jnp.int32)

    def adapters(outputs, rank):
        a_NRI = draws.standard_normal((4, rank, 100)) / 10
        b_NOR = draws.standard_normal((4, outputs, rank))
        b_NOR[2] = np.nan
        return RowAdapters(jnp.asarray(a_NRI, dtype), jnp.asarray(b_NOR, dtype), adapter_M, 0.5)

    matrices = [matrix(draws, "float", size, 100, dtype, True) for size in (40, 20, 24)]
    matrices = [
        matrices[0]._replace(adapters=adapters(40, 3)), matrices[1],
        matrices[2]._replace(adapters=adapters(24, 8)),
    ]  # fmt: skip
    x_MI, norm_I = (jnp.asarray(draws.standard_normal(shape), dtype) for shape in ((5, 100), 100))
    args = (x_MI, matrices, norm_I)
    run = jax.jit(partial(kernels_pallas.run_kernel, impl, "product", eps=1e-6))
    limit = 1e-5 if dtype == jnp.float32 else 2**-7
    reference = jax.jit(partial(reference_products.product, eps=1e-6))
    alone = reference(x_MI, [each._replace(adapters=None) for each in matrices], norm_I)
    want = reference(*args)
    got = run(*args)
    others = [
        each._replace(adapters=dataclasses.replace(each.adapters, adapter_M=adapter_M.at[1:].set(0)))
        if each.adapters is not None else each
        for each in matrices
    ]  # fmt: skip
    for have, beside_others in zip(got, run(x_MI, others, norm_I), strict=True):
        np.testing.assert_array_equal(have[0], beside_others[0])
    for n, (have, need, without) in enumerate(zip(got, want, alone, strict=True)):
        have, need, without = (np.asarray(y, np.float64) for y in (have, need, without))
        assert np.isnan(have[4]).all() == (n != 1)
        error = np.linalg.norm(have[:4] - need[:4], axis=-1)
        assert (error <= limit * np.linalg.norm(need[:4], axis=-1)).all()
        assert (n == 1) == (np.abs(need[0] - without[0]).max() < 0.1), "adapters must change something"


@pytest.mark.full
@pytest.mark.parametrize("impl", IMPLS)
def test_leaves(impl):
    """The leaves gate and up run in one launch for few rows, and in parts for many. Results and gradients are
    compared.
    """
    dtype = IMPLS[impl]
    keys = iter(jax.random.split(jax.random.key(0), 20))

    def draw(*shape):
        return jax.random.normal(next(keys), shape, dtype) / shape[-1] ** 0.5

    norm = Norm(draw(64), 1e-6, None)
    pairs = [(draw(3, 4, 64), draw(3, 40, 4).at[-1].set(0)) for _ in range(2)]
    bases = [draw(40, 64) for _ in range(2)]

    def run(pairs, x, adapter_B, impl):
        scale = 2.0 if adapter_B is None else 1.0
        weights = [
            AdaptedWeight(base, *pair, adapter_B, scale) for base, pair in zip(bases, pairs, strict=True)
        ]
        leaves = [{"weight": weight} for weight in weights]
        return products(x, leaves, before=norm, activation="silu", run_config=RunConfig(impl))[0].astype(
            jnp.float32
        )

    def loss(*args, **kwargs):
        return jnp.sum(run(*args, **kwargs) ** 2)

    limit = 1e-5 if dtype == jnp.float32 else 0.02
    rows_B = jnp.array([1, -1, 0], jnp.int32)
    cases = (2, rows_B, (run, jax.grad(loss))), (2, None, (run,)), (30, rows_B, (run,))
    for tokens, adapter_B, functions in cases:
        x = draw(3, tokens, 64)
        kernels = str(jax.make_jaxpr(partial(run, impl=impl))(pairs, x, adapter_B)).count("name=product")
        assert kernels == (tokens == 2)
        for function in functions:
            call = jax.jit(partial(function, adapter_B=adapter_B), static_argnames="impl")
            want, got = (jax.tree.leaves(call(pairs, x, impl=name)) for name in ("xla", impl))
            for need, have in zip(want, got, strict=True):
                need, have = (np.asarray(y, np.float64) for y in (need, have))
                assert np.linalg.norm(have - need) <= limit * np.linalg.norm(need)
    with pytest.raises(xj.InputError, match="adapters for 3 rows, the call has 2"):
        run(pairs, draw(2, 1, 64), rows_B, impl)


@pytest.mark.parametrize(("outputs", "rank", "chosen"), [(4096, 64, "interpret_tpu"), (151936, 128, "xla")])
def test_adapters_that_do_not_fit_on_a_chip_have_no_kernel(outputs, rank, chosen):
    shape = jax.ShapeDtypeStruct
    pair = shape((3, rank, 896), jnp.bfloat16), shape((3, outputs, rank), jnp.bfloat16)
    weight = AdaptedWeight(shape((outputs, 896), jnp.bfloat16), *pair, np.zeros(8, int), 1.0)
    operands = product_kernels.Operands(shape((8, 1, 896), jnp.bfloat16), [dict(weight=weight)])
    assert product_kernels.select_product("interpret_tpu", operands, None).impl == chosen
