"""Packed experts with padding, as TPUs have them: nothing but memory knows it."""

import jax
import mxfp4_checkpoints
import numpy as np
import parity_cases as cases
import pytest
import tiny
from scaled_checkpoints import integers, w4
from test_scaled_files import checkpoint, logits

import xinfer_jax as xj
from xinfer_jax import kernels_pallas
from xinfer_jax.cache.fingerprint import fingerprint
from xinfer_jax.checkpoint.loading import open_checkpoint
from xinfer_jax.formats.tensors import open_tensors
from xinfer_jax.weights.padded_weight import PaddedWeight, without_padding
from xinfer_jax.weights.params_like import params_like

pytestmark = pytest.mark.oldest


def write(path, kind):
    if kind == "int4":
        return checkpoint(path, cases.CASES["moe-defaults"].hf, w4(16), integers(4, 16), False)[0]
    return tiny.write(path, mxfp4_checkpoints.HF, weights=mxfp4_checkpoints.tensors(), with_tokenizer=False)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["mxfp4", "int4"])
def test_files_and_results_are_those_without_padding(tmp_path, kind):
    path = write(tmp_path / "from", kind)
    usual = xj.load_model(path, "float32")
    with kernels_pallas.assume_device(None, "a TPU", "tpu"):
        opened = open_checkpoint(path, "float32")
        tiny.assert_same_shapes(opened)
        model = opened.read()
        over_mesh = xj.load_model(path, "float32", mesh=jax.make_mesh((1,), ("model",)))
        floats = xj.load_model(path, "float32", dequantize=True).params
        if kind == "int4":
            again = params_like(floats, model.config, like=model.params)
            assert jax.tree.structure(again) == jax.tree.structure(model.params)
    leaf = model.params["layers"][-1]["experts"]["up"]["weight"]
    plain = usual.params["layers"][-1]["experts"]["up"]["weight"]
    assert isinstance(leaf, PaddedWeight) and leaf.shape == plain.shape and plain.shape[1] % 128 > 0
    assert {x.shape[-1] % 128 for x in jax.tree.leaves(leaf)} == {0}
    for tree in (model.params, over_mesh.params):
        jax.tree.map(np.testing.assert_array_equal, without_padding(tree), usual.params)
    np.testing.assert_allclose(logits(model), logits(usual), atol=1e-4, rtol=0)
    assert fingerprint(model.params, model.config) == fingerprint(usual.params, usual.config)
    for name, saved in (("padded", model), ("usual", usual)):
        xj.save_model(saved.params, saved.config, tmp_path / name)
    found, wanted = (open_tensors(tmp_path / name) for name in ("padded", "usual"))
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.array(), wanted[name].array())
