"""Products and embeddings in the form for TPUs are those of other devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xinfer_jax import kernels_pallas
from xinfer_jax.backends.tpu.tpu_embedding import tpu_embedding_form
from xinfer_jax.backends.tpu.tpu_products import row_form, tpu_grouped_form
from xinfer_jax.config.run_config import PLAIN
from xinfer_jax.ops.operation import Call, run
from xinfer_jax.ops.product import dot
from xinfer_jax.weights.grouped_weight import GroupedWeight
from xinfer_jax.weights.int8_weight import Int8Weight

pytestmark = pytest.mark.newest


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 3, 65])
@pytest.mark.parametrize("kind", ["int4", "int8 groups", "order"])
def test_grouped_products_of_tpus(kind, rows):
    """They are those of other devices, up to rounding: packed or not, with inputs that do not fill groups."""
    rng = np.random.RandomState(0)
    Q, Y, O, inputs = 3, 8, 20, 3 * (16 if kind != "int8 groups" else 8) - 2  # noqa: E741
    numbers = np.int8 if kind == "int8 groups" else np.uint8
    weight = GroupedWeight(
        rng.randint(-100 if numbers == np.int8 else 0, 100, (Q, Y, O)).astype(numbers),
        rng.rand(Q, O).astype(np.float16),
        None if kind == "int8 groups" else rng.randint(0, 15, (Q, O)).astype(np.uint8),
        rng.permutation(inputs) if kind == "order" else None,
        inputs,
    )
    x_MI = rng.randn(rows, inputs).astype(np.float32)
    wanted = x_MI @ np.asarray(weight.dequantize()).T
    operands = dict(x=jnp.asarray(x_MI), matrix=weight)
    form = tpu_grouped_form(Call(None, operands, {}, PLAIN))
    np.testing.assert_allclose(form(**operands), wanted, atol=2e-5 * np.abs(wanted).max())


def test_a_single_row_is_multiplied_as_eight():
    matrix_OI = jax.random.normal(jax.random.key(0), (40, 24))
    x_1I = jax.random.normal(jax.random.key(1), (1, 24))
    operands = dict(x=x_1I, matrix=matrix_OI)
    form = jax.jit(row_form(Call(dot, operands, {}, PLAIN)))
    np.testing.assert_allclose(form(**operands), x_1I @ matrix_OI.T, atol=1e-5)
    assert "8x24xf32" in form.lower(**operands).as_text()
    assert row_form(Call(dot, dict(x=x_1I.repeat(2, 0), matrix=matrix_OI), {}, PLAIN)) is None


def test_many_rows_keep_their_norm_apart():
    """The operation takes its operand by name, as all do."""
    with kernels_pallas.assume_device(None, "a TPU", platform="tpu"):
        apart = jax.jit(lambda x: run("apart", lambda x: x, x=x)).trace(jnp.zeros((65, 8)))
        assert "optimization_barrier" in apart.lower(lowering_platforms=("tpu",)).as_text()


def test_a_single_row_of_an_int8_embedding():
    weight = Int8Weight(jnp.arange(40, dtype=jnp.int8).reshape(10, 4), jnp.arange(1.0, 11), False)
    for index in (jnp.array([[7]]), jnp.array(3), jnp.array([2, 5])):
        wanted = weight.rows(index)
        with kernels_pallas.assume_device(None, "a TPU", platform="tpu"):
            np.testing.assert_array_equal(weight.rows(index), wanted)


def test_rows_of_an_embedding_that_a_tpu_stores_by_inputs():
    """They are those of indexing, also of tokens outside the table, and beside rows that are NaN."""
    numbers = np.random.default_rng(0).standard_normal((1024, 24)).astype(np.float32)
    numbers[3] = np.nan
    table = jnp.asarray(numbers)
    token = jnp.array([[3, 5, -1024], [-1025, 130, 1023], [1024, 3, 2]])

    def form(token, table):
        chosen = tpu_embedding_form(Call(None, dict(token=token, table=table), {}, PLAIN))
        return chosen and (lambda token, table: chosen(token=token, table=table))

    assert form(token, jnp.asarray(numbers[:1000])) is None  # stored by rows
    assert form(token, jnp.asarray(numbers[:512])) is None  # a copy takes less time
    for tokens in (token, token[0, 1]):
        np.testing.assert_array_equal(jax.jit(form(tokens, table))(tokens, table), table[tokens])
    levels = np.arange(1024 * 24).reshape(1024, 24).astype(np.int8)
    weight = Int8Weight(jnp.asarray(levels), jnp.ones(1024))
    levels = jax.jit(form(token, weight.values))(token, weight.values)
    np.testing.assert_array_equal(levels, weight.values[token])
    with kernels_pallas.assume_device(None, "a TPU", platform="tpu"):
        text = jax.jit(weight.rows).trace(token).lower(lowering_platforms=("tpu",)).as_text()
    assert "stablehlo.dynamic_slice" in text and "24x128xi8" in text
