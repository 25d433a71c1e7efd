"""Checkpoints in MXFP4: kept as they are, or dequantized; the same tokens in both, everywhere."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
import tiny
from mxfp4_checkpoints import HF, tensors

import xinfer_jax as xj
from xinfer_jax.cache.fingerprint import fingerprint
from xinfer_jax.checkpoint.loading import open_checkpoint
from xinfer_jax.formats.tensors import open_tensors
from xinfer_jax.weights.grouped_weight import GroupedWeight
from xinfer_jax.weights.mxfp4 import Mxfp4Weight

pytestmark = pytest.mark.oldest

OPTIONS = xj.GenerateOptions(max_tokens=8, eos_token_ids=())


def checkpoint(path, settings=HF, **changed):
    return tiny.write(path, settings, weights=tensors() | changed, with_tokenizer=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("mxfp4"))


@pytest.fixture(scope="module")
def kept(path):
    return xj.load_model(path, dtype="float32")


@pytest.fixture(scope="module")
def exact(path):
    return xj.load_model(path, dtype="float32", dequantize=True)


def test_kept_and_dequantized(path, kept, exact):
    """The same logits. All bytes are in the leaves."""
    tiny.assert_same_shapes(open_checkpoint(path, dtype="bfloat16"))
    assert kept.load_stats.dtype == "mxfp4"
    stored = tensors()
    dequantize = jax.jit(jax.vmap(Mxfp4Weight.dequantize))
    for i, layer in enumerate(kept.params["layers"]):
        for name, rows in (("gate", np.s_[:, ::2]), ("up", np.s_[:, 1::2]), ("down", np.s_[:])):
            leaf = layer["experts"][name]["weight"]
            assert isinstance(leaf, Mxfp4Weight)
            stem = f"model.layers.{i}.mlp.experts.{'down' if name == 'down' else 'gate_up'}_proj"
            np.testing.assert_array_equal(np.moveaxis(leaf.values, -1, 1), stored[f"{stem}_blocks"][rows])
            np.testing.assert_array_equal(np.moveaxis(leaf.scale, -1, 1), stored[f"{stem}_scales"][rows])
            wanted = exact.params["layers"][i]["experts"][name]["weight"]
            np.testing.assert_array_equal(dequantize(leaf), wanted)
    tokens_BT = np.array([cases.prompts(cases.CASES["gpt-oss-published"])[0]])
    forward = jax.jit(xj.forward, static_argnames="config")
    logits, wanted = (forward(model.params, model.config, tokens_BT)[0] for model in (kept, exact))
    assert jnp.abs(wanted).max() > 1
    np.testing.assert_allclose(logits, wanted, atol=1e-4)


@pytest.mark.full
def test_engine_and_prefix(kept, exact):
    """An engine's tokens are those of dequantized experts. Prefixes know a model by its bytes."""
    prompts = cases.prompts(cases.CASES["gpt-oss-published"])
    wanted = xj.generate(exact.params, exact.config, prompts, OPTIONS).tokens
    with xj.Engine(kept, rows=2, capacity=128, chunk=64) as engine:
        requests = [engine.submit(prompt, OPTIONS) for prompt in prompts]
        assert [request.result().tokens[0] for request in requests] == wanted
    known = fingerprint(kept.params, kept.config)
    changed = jax.tree.map(lambda x: x + 1 if x.dtype == np.uint8 and x.ndim == 3 else x, kept.params)
    assert fingerprint(changed, kept.config) != known


@pytest.mark.parametrize("quantize, kind", [(None, jax.Array), ("int4", GroupedWeight)])
def test_dequantized_in_other_dtypes(path, kept, quantize, kind):
    model = xj.load_model(path, "bfloat16", quantize, dequantize=True)
    tiny.assert_same_shapes(open_checkpoint(path, "bfloat16", quantize, dequantize=True))
    leaf = model.params["layers"][0]["experts"]["down"]["weight"]
    exact_XOI = jax.vmap(Mxfp4Weight.dequantize)(kept.params["layers"][0]["experts"]["down"]["weight"])
    assert isinstance(leaf, kind)
    if quantize is None:
        np.testing.assert_array_equal(leaf, exact_XOI.astype(jnp.bfloat16))
        return
    assert jnp.abs(jax.vmap(type(leaf).dequantize)(leaf) - exact_XOI).max() < jnp.abs(exact_XOI).max() / 6


STEM = "model.layers.1.mlp.experts.gate_up_proj"
OTHER = dict(HF, intermediate_size=80)


@pytest.mark.parametrize(
    "settings, changed, given, message",
    [
        (HF, {}, dict(quantize="int8"), r"\(mxfp4\), and quantize='int8' .* quantize, or with dequantize"),
        (OTHER, {}, {}, "down_proj has 80 inputs, which groups of 32 do not divide"),
        (HF, {f"{STEM}_scales": np.full((8, 192, 2), 255, np.uint8)}, {}, "its scales hold NaN"),
        (HF, {f"{STEM}_scales": np.zeros((8, 192, 3), np.uint8)}, {}, r"has shape \[8, 192, 3\]"),
        (HF, {f"{STEM}_scales": np.zeros((8, 3), np.uint8)}, dict(dequantize=True), r"has shape \[8, 3\]"),
        (HF, {STEM: np.zeros((8, 64, 192), np.float32)}, dict(dequantize=True), "unexpected .*proj_blocks"),
        (dict(HF, quantization_config=None), {}, dict(dequantize=True), "has float numbers: leave it out"),
    ],
)  # fmt: skip
def test_rejected_by_name(tmp_path, settings, changed, given, message):
    with pytest.raises(xj.InputError, match=message):
        xj.load_model(checkpoint(tmp_path, settings, **changed), "float32", **given)


@pytest.mark.parametrize("settings", [HF["quantization_config"], None], ids=["of-files", "of-leaves"])
def test_saved_with_the_bytes_of_the_files(tmp_path, path, kept, settings):
    config = dataclasses.replace(kept.config, quantization_config=settings)
    xj.save_model(kept.params, config, tmp_path / "to", max_shard_bytes=100_000)
    saved = open_tensors(tmp_path / "to")
    stored = open_tensors(path)
    assert saved.keys() == stored.keys()
    for name, tensor in stored.items():
        assert tensor.type == saved[name].type
        np.testing.assert_array_equal(tensor.array(), saved[name].array())
    again = xj.load_model(tmp_path / "to", "float32")
    jax.tree.map(np.testing.assert_array_equal, again.params, kept.params)
    floats = again.config.quantization_config["modules_to_not_convert"]
    assert {"model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"} <= {*floats}


def test_dequantized_experts_beside_the_checkpoint_that_they_are_from(tmp_path, path, exact):
    xj.save_model(exact.params, exact.config, tmp_path / "to", like=path)
    again = xj.load_model(tmp_path / "to", "float32")
    jax.tree.map(np.testing.assert_array_equal, again.params, exact.params)
    assert again.load_stats.dtype == "float32"


def test_half_of_a_stored_tensor_is_rejected_by_name(tmp_path, kept, exact):
    params = jax.tree.map(lambda x: x, kept.params)
    params["layers"][1]["experts"]["up"] = exact.params["layers"][1]["experts"]["up"]
    with pytest.raises(xj.InputError, match="layers.1.mlp.experts.gate_proj.weight cannot be written in the"):
        xj.save_model(params, kept.config, tmp_path / "to")
