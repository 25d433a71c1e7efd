"""A quantized format is one class in one file: a class of this file reads, keeps and writes matrices."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file

import xinfer_jax as xj
from xinfer_jax.families.conversion import TensorOfLeaves, itself
from xinfer_jax.formats import quantized_formats
from xinfer_jax.formats.kept_leaves import whole_numbers_form
from xinfer_jax.formats.scaled_tensor import MatrixFormat, ScaledNumbers, ScaledTensor, read_bytes
from xinfer_jax.weights.grouped_weight import GroupedWeight

BYTES = np.arange(256).astype(np.uint8).view(np.int8)[:, None]


@dataclasses.dataclass(frozen=True)
class Steps(MatrixFormat):
    """X.weight is X.numbers, int8, times `step` of config.json."""

    method = "steps"
    methods = (method,)
    step: float = 1.0

    @classmethod
    def from_config(cls, config, require):
        require(isinstance(config.get("step"), float), "step")
        return cls(config["step"])

    def find(self, tensors):
        names = [name for name in tensors if name.endswith(".numbers")]
        return {f"{name.removesuffix('.numbers')}.weight": tensors[name].shape for name in names}

    def tensor_specs(self, name, shape, tensors):
        return {_numbers(name): (shape, {"I8"})}

    def open(self, name, shape, tensors):
        def scales(rows, columns):
            return np.full((rows.stop - rows.start, columns.stop - columns.start), self.step, np.float32)

        read = read_bytes(tensors[_numbers(name)], BYTES)
        numbers = ScaledNumbers(name, shape, (1, shape[1]), read, scales, kept=whole_numbers_form, bits=8)
        return ScaledTensor(numbers, shape)

    def pack(self, leaves, dtype):
        values = {name: np.asarray(leaf.values)[0].T for name, leaf in leaves.items()}
        return {
            _numbers(name): TensorOfLeaves(x.shape, np.int8, partial(itself, np.ascontiguousarray(x)))
            for name, x in values.items()
        }


def _numbers(name: str) -> str:
    return f"{name.removesuffix('.weight')}.numbers"


def test_a_class_is_all_that_a_format_needs(tmp_path, monkeypatch):
    step = 2.0**-6
    plain = tiny.write(tmp_path / "plain")
    weights = load_file(plain / "model.safetensors")
    numbers = {
        name: np.random.default_rng(len(name)).integers(-99, 99, x.shape).astype(np.int8)
        for name, x in weights.items()
        if name.endswith("_proj.weight")
    }
    stored = {name: x for name, x in weights.items() if name not in numbers}
    stored |= {_numbers(name): x for name, x in numbers.items()}
    settings = dict(quant_method="steps", step=step)
    path = tiny.write(tmp_path / "steps", tiny.CONFIG | dict(quantization_config=settings), weights=stored)
    with pytest.raises(xj.InputError, match="quant_method 'steps' is not supported"):
        xj.load_model(path)
    monkeypatch.setitem(quantized_formats._BY_METHOD, "steps", Steps)
    kept = xj.load_model(path, "float32")
    assert kept.load_stats.dtype == "steps"
    assert isinstance(kept.params["layers"][0]["q"]["weight"], GroupedWeight)
    floats = xj.load_model(path, "float32", dequantize=True)
    matrix = floats.params["layers"][0]["q"]["weight"]
    np.testing.assert_array_equal(
        matrix, numbers["model.layers.0.self_attn.q_proj.weight"] * np.float32(step)
    )
    xj.save_model(kept.params, kept.config, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == stored.keys()
    for name in again:
        np.testing.assert_array_equal(again[name], stored[name])
