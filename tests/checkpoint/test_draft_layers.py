"""Layers that draft tokens (multi-token prediction) in files, after the last layer of the model: they are not
read, one line names them, and `like=` copies them.
"""

import jax
import numpy as np
import parity_cases as cases
import pytest
from quantized_checkpoints import AWQ, pack_matrix
from quick import full_except
from scaled_checkpoints import (
    assert_equal,
    convert,
    equal_model,
    fp8,
    fp8_settings,
    integers,
    published_tensors,
    w4,
    write,
)

import xinfer_jax as xj
from xinfer_jax.formats.tensors import open_tensors

pytestmark = pytest.mark.oldest

FAMILIES = ("glm4-moe-groups", "deepseek-v3-yarn-groups", "glm4-moe-lite-defaults")


def awq(name, x):
    parts, equal = pack_matrix(AWQ, np.random.default_rng(len(name)), *x.shape)
    return {name.removesuffix("weight") + part: array for part, array in parts.items()}, equal


FORMATS = {  # settings, and how matrices are stored
    "floats": (None, lambda name, x: ({name: x}, x)),
    "fp8": (fp8_settings([24, 40]), fp8((24, 40))),
    "w4a16": (w4(16), integers(4, 16)),
    "awq": (AWQ, awq),
}
WIDE = dict(kv_lora_rank=32, q_lora_rank=24)  # AWQ needs words that are full


def with_draft_layer(tensors, layer):
    """The tensors, and those of a layer after the last one: copies of the last layer's, and its own."""
    last = f"model.layers.{layer - 1}."
    more = {name.replace(last, f"model.layers.{layer}."): x for name, x in tensors.items() if last in name}
    width = len(tensors["model.norm.weight"])
    own = {f"{name}.weight": np.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj.weight"] = np.ones((width, 2 * width))
    return tensors | more | {f"model.layers.{layer}.{name}": x for name, x in own.items()}


PAIRS = [(FAMILIES[1], form) for form in FORMATS] + [(family, "floats") for family in FAMILIES[::2]]


@pytest.mark.parametrize("family, stored_as", full_except(PAIRS[:1], PAIRS))
def test_layers_that_draft_are_named_and_copied(tmp_path, family, stored_as):
    hf = dict(cases.CASES[family].hf)
    hf |= {name: width for name, width in WIDE.items() if hf.get(name) and stored_as == "awq"}
    layers = hf["num_hidden_layers"]
    (settings, encode) = FORMATS[stored_as]
    (plain, equal) = convert(published_tensors(hf), encode)
    (stored, _) = convert(with_draft_layer(published_tensors(hf), layers), encode)
    path = write(tmp_path / "a", hf | dict(quantization_config=settings), stored)
    model = xj.load_model(path, "float32", dequantize=settings is not None)
    assert model.load_stats.skipped == (f"model.layers.{layers}.* ({len(stored) - len(plain)})",)
    assert_equal(model, equal_model(tmp_path / "b", hf, equal))
    xj.save_model(model.params, model.config, tmp_path / "c", like=path)
    (source, saved) = (open_tensors(folder) for folder in (path, tmp_path / "c"))
    drafts = {name for name in source if name.startswith(f"model.layers.{layers}.")}
    assert len(drafts) > 4 and drafts == {
        name for name in saved if name.startswith(f"model.layers.{layers}.")
    }
    for name in drafts:
        np.testing.assert_array_equal(saved[name].array(), source[name].array(), err_msg=name)
    again = xj.load_model(tmp_path / "c", "float32")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
