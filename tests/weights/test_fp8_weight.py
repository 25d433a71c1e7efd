"""Weights in FP8: their products, rows and gradients are those of the dequantized matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import full_except
from random_matrices import FP8, matrix

from xinfer_jax.weights.fp8_weight import Fp8Weight, fp8_struct

pytestmark = pytest.mark.oldest


def weight_of(kind, outputs=200, inputs=300):
    made = matrix(np.random.default_rng(0), kind, outputs, inputs, jnp.float32, False)
    return Fp8Weight(made.values, made.scale)


@pytest.mark.parametrize("kind", full_except(["fp8 by output"], FP8))
def test_products_rows_and_gradients(kind):
    weight = weight_of(kind)
    shapes = fp8_struct(weight.shape, kind == "fp8")
    jax.tree.map(lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype) or pytest.fail(kind), weight, shapes)
    scale = np.asarray(weight.scale)
    spread = np.kron(scale, np.ones((128, 128)))[:200, :300] if scale.ndim == 2 else scale[:, None]
    want_OI = np.asarray(weight.values, np.float64) * spread
    np.testing.assert_allclose(weight.dequantize(), want_OI, rtol=1e-6)
    index = jnp.array([[3, 199], [128, 127]])
    np.testing.assert_array_equal(weight.rows(index), weight.dequantize()[index])
    x_BTI = jax.random.normal(jax.random.key(1), (2, 3, 300))
    out_BTO = jax.jit(type(weight).product)(weight, x_BTI)
    np.testing.assert_allclose(out_BTO, np.asarray(x_BTI, np.float64) @ want_OI.T, atol=1e-4)
    np.testing.assert_allclose(weight.plain_product(x_BTI[0]), out_BTO[0], atol=1e-4)
    gradient_BTI = jax.grad(lambda x: weight.product(x).sum())(x_BTI)
    np.testing.assert_allclose(gradient_BTI, np.broadcast_to(want_OI.sum(0), x_BTI.shape), atol=1e-4)
