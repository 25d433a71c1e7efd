"""Checkpoints that are quantized for MLX: their leaves have the numbers that the packed words mean."""

import jax
import numpy as np
import pytest
import tiny

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

HF = tiny.CONFIG | dict(hidden_size=64, intermediate_size=96, vocab_size=272)


def pack(levels_OI, bits):
    """Words of 32 bits, lowest bits first, by Python's integers."""
    rows = []
    for row in levels_OI:
        number = sum(int(level) << (bits * i) for i, level in enumerate(row))
        rows.append(np.frombuffer(number.to_bytes(len(row) * bits // 8, "little"), "<u4"))
    return np.stack(rows)


def quantized(tensors, sizes, scale_type=np.float16):
    """The tensors of a checkpoint and those that it means. sizes: bits and group of a matrix by name."""
    random = np.random.default_rng(0)
    stored, equal = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or not sizes(name):
            stored[name] = equal[name] = tensor
            continue
        (bits, J) = sizes(name)
        levels = random.integers(0, 2**bits, tensor.shape)
        step = (random.uniform(0.5, 1.5, (len(tensor), tensor.shape[1] // J)) / 2**bits / 4).astype(
            scale_type
        )
        least = (-step.astype(np.float32) * 2 ** (bits - 1)).astype(scale_type)
        module = name.removesuffix(".weight")
        stored |= {name: pack(levels, bits), f"{module}.scales": step, f"{module}.biases": least}
        by_input = [np.repeat(x.astype(np.float32), J, axis=1) for x in (step, least)]
        equal[name] = levels.astype(np.float32) * by_input[0] + by_input[1]
    return stored, equal


def test_all_sizes(tmp_path):
    """Bits and groups may differ by module. A module that is false stays float."""
    of_module = {"q": (2, 32), "k": (3, 32), "v": (5, 32), "o": (6, 64), "gate": (8, 64), "up": None}

    def sizes(name):
        return of_module.get(name.split(".")[-2].removesuffix("_proj"), (4, 32))

    stored, equal = quantized(tiny.tensors(HF), sizes)
    settings = dict(group_size=32, bits=4, mode="affine")
    for name in tiny.tensors(HF):
        if name.endswith(".weight") and "norm" not in name:
            own = sizes(name)
            settings[name.removesuffix(".weight")] = own and dict(bits=own[0], group_size=own[1])
    hf = HF | dict(quantization=settings, quantization_config=settings)
    model = xj.load_model(tiny.write(tmp_path / "mlx", hf, weights=stored), "float32")
    float_model = xj.load_model(tiny.write(tmp_path / "float", HF, weights=equal), "float32")
    for name, leaf in model.params["layers"][1].items():
        if hasattr(leaf, "keys") and hasattr(leaf["weight"], "dequantize"):
            wanted = np.asarray(float_model.params["layers"][1][name]["weight"])
            tolerance = 1e-6 if name == "gate" else 0  # of 8 bits the middle is part of the offset
            np.testing.assert_allclose(leaf["weight"].dequantize(), wanted, atol=tolerance, err_msg=name)
    assert model.params["layers"][0]["up"]["weight"].dtype == "float32"
    floats = xj.load_model(tmp_path / "mlx", "float32", dequantize=True)
    jax.tree.map(np.testing.assert_array_equal, floats.params, float_model.params)


def test_a_model_that_sees(tmp_path):
    """Settings of modules have their names in the whole model."""
    up = "model.layers.1.mlp.up_proj"
    whole = "language_model."
    stored, equal = quantized(tiny.tensors(HF), lambda name: (8 if name == f"{up}.weight" else 4, 32))
    stored = {whole + name: x for name, x in stored.items()}
    settings = {"group_size": 32, "bits": 4, whole + up: dict(bits=8)}
    hf = dict(model_type="mistral3", text_config=HF, vision_config={}, quantization=settings)
    model = xj.load_model(tiny.write(tmp_path, hf, weights=stored), "float32", dequantize=True)
    np.testing.assert_array_equal(model.params["layers"][1]["up"]["weight"], equal[f"{up}.weight"])


@pytest.mark.parametrize(
    "settings, change, message",
    [
        (
            dict(bits=7),
            {},
            "bits, group_size and mode [7, 32, 'affine'] of MLX are not supported",
        ),
        (
            dict(mode="mxfp4"),
            {},
            "bits, group_size and mode [4, 32, 'mxfp4'] of MLX are not supported",
        ),
        (dict(group_size=64), {}, "down_proj.weight has 96 inputs, which groups of 64 do not divide"),
        ({}, {"model.layers.0.mlp.up_proj.biases": None}, "missing model.layers.0.mlp.up_proj.biases"),
        ({}, {"model.layers.0.mlp.up_proj.scales": np.full((96, 2), np.nan, np.float16)}, "NaN or inf"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, settings, change, message):
    stored, _ = quantized(tiny.tensors(HF), lambda name: (4, 32))
    stored = {name: x for name, x in (stored | change).items() if x is not None}
    hf = HF | dict(quantization=dict(group_size=32, bits=4) | settings)
    assert message in tiny.load_error(tiny.write(tmp_path, hf, weights=stored))
