"""Rows of a batch get the same bits in every place, at numbers of rows that are no multiple of a vector."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
from quick import full_except

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf
from xinfer_jax.ops.product import float_product
from xinfer_jax.weights.quantization import quantized_leaf
from xinfer_jax.weights.quantized_weight import quantized_product

ROWS = (9, 13, 33)


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype", full_except(["float32", "int8"], ["float32", "bfloat16", "float16", "int8", "int4"])
)
def test_products_of_few_outputs(dtype):
    """One row is repeated in all places. A product of one output is no product with a vector."""
    random = np.random.RandomState(0)
    x_1I = random.standard_normal((1, 96)).astype(np.float32)
    xs_MI = [np.repeat(x_1I, rows, 0) for rows in ROWS]
    for outputs in (1, 2, 7):
        matrix_OI = random.standard_normal((outputs, 96)).astype(np.float32)
        if dtype.startswith("int"):
            product, matrix = quantized_product, quantized_leaf(matrix_OI, "weight", dtype)
        else:
            product, matrix = float_product, jnp.asarray(matrix_OI, dtype)
        for y_MO in jax.jit(lambda xs, matrix: [product(x_MI, matrix) for x_MI in xs])(xs_MI, matrix):  # noqa: B023
            equal_MO = np.repeat(np.asarray(y_MO[:1]), len(y_MO), 0)
            np.testing.assert_array_equal(y_MO, equal_MO, f"{outputs} outputs, {len(y_MO)} rows")


@pytest.mark.full
@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_a_model(rows):
    """Linear attention with few heads, a router of few experts, the gate of a shared one."""
    hf = cases.CASES["qwen3-next-sparse-step"].hf
    sparse = dict(full_attention_interval=2, decoder_sparse_step=1, mlp_only_layers=[])
    config = from_hf(hf | dict(num_hidden_layers=2) | sparse)
    params = cases.params_from(config, cases.random_tensors(config, 3))
    forward = jax.jit(functools.partial(xj.forward, config=config))
    logits_B1V = np.asarray(forward(params, tokens_BT=np.full((rows, 1), 7))[0])
    np.testing.assert_array_equal(logits_B1V, logits_B1V[:1].repeat(rows, 0))
