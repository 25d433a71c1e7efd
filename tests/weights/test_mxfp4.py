"""MXFP4 weights: numbers equal to transformers', and products equal to those of the dequantized matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
from mxfp4_checkpoints import CONFIG

from xinfer_jax.feed_forward.experts import mixture_of_experts
from xinfer_jax.weights.mxfp4 import NUMBERS, Mxfp4Weight, mxfp4_struct
from xinfer_jax.weights.quantized_weight import quantized_product

pytestmark = pytest.mark.oldest


def random_leaf(shape: tuple[int, ...], seed: int = 0) -> Mxfp4Weight:
    draw = np.random.default_rng(seed).integers
    struct = mxfp4_struct(shape)
    values = draw(0, 256, struct.values.shape, np.uint8)
    return jax.device_put(Mxfp4Weight(values, draw(116, 124, struct.scale.shape, np.uint8)))


def test_numbers_of_every_byte():
    """Low half first. The smallest and largest exponents whose numbers are float32's."""
    halves = np.arange(256) & 15, np.arange(256) >> 4
    values = jnp.arange(256, dtype=jnp.uint8).reshape(1, 16, 16)
    for exponent in (-125, -1, 0, 1, 125):
        leaf = Mxfp4Weight(values, jnp.full((1, 16), exponent + 127, jnp.uint8))
        assert leaf.shape == (16, 32) and leaf.group == leaf.inputs == 32
        matrix_OI = np.asarray(leaf.dequantize()).reshape(16, 16, 2)
        for half in (0, 1):
            wanted = np.ldexp(NUMBERS[halves[half]], exponent).reshape(16, 16).T
            np.testing.assert_array_equal(matrix_OI[..., half], wanted)
            np.testing.assert_array_equal(np.signbit(matrix_OI[..., half]), np.signbit(wanted))
    index = jnp.array([[3, 0]])
    np.testing.assert_array_equal(leaf.rows(index), np.asarray(leaf.dequantize())[index])
    few = Mxfp4Weight(jnp.full((1, 16, 1), 0xE3, jnp.uint8), jnp.full((1, 1), 128, jnp.uint8))
    assert np.asarray(few.dequantize())[0, :4].tolist() == [3, -8, 3, -8]


@pytest.mark.full
def test_numbers_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    leaf = random_leaf((2, 24, 96))
    files = (np.moveaxis(np.asarray(x), -1, 1) for x in (leaf.values, leaf.scale))
    blocks, scales = (torch.tensor(np.ascontiguousarray(x)) for x in files)
    for dtype in (torch.float32, torch.bfloat16):
        wanted_XIO = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype).float().numpy()
        got_XOI = np.asarray(jax.vmap(type(leaf).dequantize)(leaf))
        np.testing.assert_array_equal(got_XOI.view(np.int32), wanted_XIO.swapaxes(1, 2).view(np.int32))


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("outputs, inputs", [(5, 32), (130, 320)])
def test_product_and_its_gradient(outputs, inputs, rows):
    leaf = random_leaf((outputs, inputs))
    matrix_OI = np.asarray(leaf.dequantize())
    x_MI = np.random.default_rng(rows).standard_normal((rows, inputs)).astype(np.float32)
    bound = 1e-6 * (np.abs(x_MI) @ np.abs(matrix_OI).T).max()
    product = jax.vmap(quantized_product, (0, None)) if rows == 2 else quantized_product

    def total(x_MI):
        y_MO = product(x_MI, leaf)
        return y_MO.sum(), y_MO

    slope, got_MO = jax.jit(jax.grad(total, has_aux=True))(x_MI)
    np.testing.assert_allclose(got_MO, x_MI @ matrix_OI.T, atol=bound)
    np.testing.assert_allclose(slope, np.broadcast_to(matrix_OI.sum(0), x_MI.shape), rtol=1e-5, atol=bound)


@pytest.mark.full
def test_experts_equal_those_of_dequantized_matrices():
    layer = cases.params_from(CONFIG, cases.random_tensors(CONFIG, 3))["layers"][0]
    packed = {**layer, "experts": {}}
    for seed, (name, leaf) in enumerate(layer["experts"].items()):
        packed["experts"][name] = {**leaf, "weight": random_leaf(leaf["weight"].shape, seed)}
        layer["experts"][name]["weight"] = jax.vmap(Mxfp4Weight.dequantize)(packed["experts"][name]["weight"])
    x_BTD = jax.random.normal(jax.random.key(1), (1, 9, CONFIG.hidden_size))

    def total(x_BTD, layer):
        out_BTD = mixture_of_experts(x_BTD, layer, CONFIG)
        return out_BTD.sum(), out_BTD

    run = jax.jit(jax.grad(total, has_aux=True))
    (slope, out), (wanted_slope, wanted) = (run(x_BTD, either) for either in (packed, layer))
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slope, wanted_slope, rtol=1e-3, atol=1e-4)
