"""Files in FP8 whose matrices stay as they are stored: quantize="fp8"."""

import jax
import numpy as np
import parity_cases as cases
import pytest
import tiny
from quick import full_except
from scaled_checkpoints import (
    BF16,
    assert_equal,
    checkpoint,
    compressed,
    convert,
    equal_model,
    fp8,
    fp8_settings,
    published_tensors,
    write,
)

import xinfer_jax as xj
from xinfer_jax.checkpoint.loading import open_checkpoint
from xinfer_jax.formats.tensors import open_tensors
from xinfer_jax.weights.fp8_weight import Fp8Weight
from xinfer_jax.weights.quantized_weight import is_quantized

pytestmark = pytest.mark.oldest

HF = tiny.UNTIED | dict(hidden_size=160, intermediate_size=200, num_hidden_layers=1, head_dim=16)
BLOCKS = fp8_settings([128, 128]), fp8((128, 128))
CASES = {
    "blocks": BLOCKS,
    "tensor": (fp8_settings(), fp8()),
    "rows": (fp8_settings(), fp8("row", end="_scale", scale_dtype=BF16)),
    "modelopt": (dict(quant_method="modelopt", quant_algo="FP8"), fp8(end="_scale")),
    "compressed-tensors": (compressed("float-quantized", 8, kind="float"), fp8("row", end="_scale")),
}


def leaves_of(params):
    return jax.tree.leaves(params, is_leaf=is_quantized)


@pytest.mark.parametrize("name", full_except(["blocks"], CASES))
def test_matrices_stay_as_they_are_stored(tmp_path, name):
    path, equal = checkpoint(tmp_path / "a", HF, *CASES[name])
    opened = open_checkpoint(path, "float32", "fp8")
    tiny.assert_same_shapes(opened)
    model = opened.read()
    wanted = equal_model(tmp_path / "b", HF, equal)
    assert_equal(model, wanted)
    kept = [leaf for leaf in leaves_of(model.params) if is_quantized(leaf)]
    assert len(kept) == 7 and {*map(type, kept)} == {Fp8Weight} and model.load_stats.dtype in ("fp8", name)
    if name in ("modelopt", "compressed-tensors"):
        with pytest.raises(xj.InputError, match="saved only in the files of a checkpoint"):
            xj.save_model(model.params, model.config, tmp_path / "c", like=path)
    else:
        xj.save_model(model.params, model.config, tmp_path / "c", like=path)
        again = xj.load_model(tmp_path / "c", "float32", "fp8")
        jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


@pytest.mark.full
@pytest.mark.parametrize("name", ["moe-defaults", "qwen3-next-sparse-step"])
def test_experts_stay_and_parts_that_blocks_cross_become_floats(tmp_path, name):
    hf = cases.CASES[name].hf
    path, equal = checkpoint(tmp_path / "a", hf, *BLOCKS, name != "moe-defaults")
    model = xj.load_model(path, "float32", "fp8")
    assert_equal(model, equal_model(tmp_path / "b", hf, equal))
    experts = [leaf for leaf in leaves_of(model.params) if len(leaf.shape) > 2 and is_quantized(leaf)]
    assert experts
    tokens = [[1, 2, 3]]
    xj.generate(model.params, model.config, tokens, xj.GenerateOptions(max_tokens=2))


@pytest.mark.parametrize(
    "name", full_except(["deepseek-v3-yarn-groups"], ["deepseek-v3-yarn-groups", "glm4-moe-groups"])
)
def test_experts_are_saved_as_they_are_stored(tmp_path, name):
    """Each has its bytes. Blocks of `kv_b_proj` cross its heads: its two parts are floats, and it is
    saved as a matrix of floats.
    """
    hf = cases.CASES[name].hf | dict(num_hidden_layers=2, moe_intermediate_size=136)
    stored, equal = convert(published_tensors(hf), fp8((128, 128)))
    path = write(tmp_path / "a", hf | dict(quantization_config=BLOCKS[0]), stored)
    model = xj.load_model(path, "float32", "fp8")
    assert_equal(model, equal_model(tmp_path / "b", hf, equal))
    assert isinstance(model.params["layers"][1]["experts"]["down"]["weight"], Fp8Weight)
    for like in (None, path):
        to = tmp_path / f"to{like is None}"
        xj.save_model(model.params, model.config, to, like=like)
        (source, saved) = (open_tensors(folder) for folder in (path, to))
        both = {name for name in source if ".kv_b_proj." in name}
        assert saved.keys() - both == source.keys() - both
        for name in source.keys() - both:
            assert saved[name].array().tobytes() == source[name].array().tobytes(), name
        assert all(saved[name].type == "F32" for name in both & saved.keys())
        again = xj.load_model(to, "float32", "fp8")
        jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


def test_what_cannot_stay(tmp_path):
    path, _ = checkpoint(tmp_path / "a", HF, *BLOCKS)
    odd, _ = checkpoint(tmp_path / "b", HF, fp8_settings([24, 40]), fp8((24, 40)))
    floats = write(tmp_path / "c", HF, {})
    for files, given in ((path, dict(dequantize=True)), (odd, {}), (floats, {})):
        with pytest.raises(xj.InputError, match="quantize='fp8' keeps matrices in FP8"):
            open_checkpoint(files, quantize="fp8", **given)
    with pytest.raises(xj.InputError, match="activations='int8' needs"):
        open_checkpoint(path, quantize="fp8", activations="int8")
