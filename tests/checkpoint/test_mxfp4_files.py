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
from xinfer_jax.checkpoint.loading import open_checkpoint
from xinfer_jax.checkpoint.own_format import save_checkpoint
from xinfer_jax.weights.mxfp4 import Mxfp4Weight
from xinfer_jax.weights.quantized_weights import GroupedWeight, dequantize

pytestmark = pytest.mark.oldest

OPTIONS = xj.GenerateOptions(8, eos_token_ids=(), capacity=128)


def checkpoint(path, settings=HF, **changed):
    return tiny.write(path, settings, weights=tensors() | changed, with_tokenizer=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("mxfp4"))


@pytest.fixture(scope="module")
def kept(path):
    return xj.load_model(path, dtype="float32")


def test_kept_and_dequantized(path, kept):
    """The same logits and tokens; all bytes are in the leaves."""
    tiny.assert_same_shapes(open_checkpoint(path, dtype="bfloat16"))
    assert kept.load_stats.dtype == "mxfp4"
    exact = xj.load_model(path, dtype="float32", dequantize=True)
    stored = tensors()
    for i, layer in enumerate(kept.params["layers"]):
        for name, rows in (("gate", np.s_[:, ::2]), ("up", np.s_[:, 1::2]), ("down", np.s_[:])):
            leaf = layer["experts"][name]["weight"]
            assert isinstance(leaf, Mxfp4Weight)
            stem = f"model.layers.{i}.mlp.experts.{'down' if name == 'down' else 'gate_up'}_proj"
            np.testing.assert_array_equal(np.moveaxis(leaf.values, -1, 1), stored[f"{stem}_blocks"][rows])
            np.testing.assert_array_equal(np.moveaxis(leaf.scale, -1, 1), stored[f"{stem}_scales"][rows])
            wanted = exact.params["layers"][i]["experts"][name]["weight"]
            np.testing.assert_array_equal(jax.vmap(dequantize)(leaf), wanted)
    prompts = cases.prompts(cases.CASES["gpt-oss-published"])
    tokens_BT, num_tokens_B = cases.pad_prompts(prompts)
    forward = jax.jit(xj.forward, static_argnames="config")
    logits, wanted = (
        forward(model.params, model.config, tokens_BT, None, num_tokens_B)[0] for model in (kept, exact)
    )
    assert jnp.abs(wanted).max() > 1
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    out, wanted = (xj.generate(model.params, model.config, prompts, OPTIONS) for model in (kept, exact))
    assert out.tokens == wanted.tokens
