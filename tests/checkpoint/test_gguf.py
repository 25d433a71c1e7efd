"""GGUF files: each architecture has the leaves of its Hugging Face checkpoint, bit by bit."""

import dataclasses
import json

import jax
import numpy as np
import parity_cases as cases
import pytest
import tiny
from paths import STORIES
from quick import full_except

import xinfer_jax as xj
from xinfer_jax.weights.mxfp4 import NUMBERS
from xinfer_jax.weights.quantized_weight import is_quantized

pytest.importorskip("gguf")
import gguf_files as files

pytestmark = pytest.mark.oldest

_KINDS = (files.Q8_0, files.Q4_0, files.F16, files.Q5_0, files.MXFP4, files.BF16, files.Q4_1, files.Q5_1)
_KEPT = dict.fromkeys(("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"), "GroupedWeight") | {"MXFP4": "Mxfp4Weight"}
IDS = np.random.default_rng(0).integers(0, 96, (1, 12)).astype(np.int32)


def mixed(name, shape):
    """Types by turns, as files have that mix them."""
    if name.endswith(("ffn_gate_inp.weight", "ssm_conv1d.weight", "shortconv.conv.weight")):
        return files.F32
    return _KINDS[sum(name.encode()) % len(_KINDS)]


def numbers(leaf):
    """A leaf's numbers by NumPy, as ggml's types say."""
    if not is_quantized(leaf):
        return np.asarray(leaf, np.float32)
    values, scale = np.asarray(leaf.values), np.asarray(leaf.scale)
    levels = np.concatenate([values & 15, values >> 4], -2) if values.dtype == np.uint8 else values
    if scale.dtype == np.uint8:  # MXFP4: neighbours in a byte
        levels = np.stack([values & 15, values >> 4], -2).reshape(levels.shape)
        blocks = np.ldexp(NUMBERS[levels], (scale.astype(np.int32) - 127)[..., None, :])
    else:
        zero = 0 if leaf.zero is None else np.asarray(leaf.zero)[..., None, :].astype(np.float32)
        offset = 0 if leaf.offset is None else np.asarray(leaf.offset, np.float32)[..., None, :]
        blocks = (levels.astype(np.float32) - zero) * scale.astype(np.float32)[..., None, :] + offset
    return blocks.reshape(*blocks.shape[:-3], -1, blocks.shape[-1]).swapaxes(-1, -2)


def leaves(params):
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


def assert_same_numbers(params, wanted):
    found = leaves(params)
    for name, leaf in leaves(wanted).items():
        np.testing.assert_array_equal(numbers(found[name]), leaf, err_msg=name)


@pytest.mark.parametrize("name", files.CONFIGS)
def test_an_architecture(tmp_path, name):
    """Its config and leaves are those of the Hugging Face checkpoint. Groups of 32 stay as they are."""
    path = tmp_path / "model.gguf"
    kinds = {}

    def kind_of(own, shape):
        kinds[own] = mixed(own, shape).name
        return mixed(own, shape)

    config, tensors = files.write(path, name, kind_of)
    model = xj.load_model(path, "float32")
    own = dataclasses.replace(model.config, rope=config.rope) if name == "llama" else model.config
    assert own == config
    assert_same_numbers(model.params, cases.params_from(config, tensors))
    kept = {type(leaf).__name__ for leaf in leaves(model.params).values() if is_quantized(leaf)}
    assert kept == {_KEPT[kind] for kind in kinds.values() if kind in _KEPT}
    tiny.assert_same_shapes(xj.checkpoint.loading.open_checkpoint(path, "float32"))


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "qwen35moe", "gpt-oss", "deepseek2", "glm4moe", "nemotron_h_moe"])
def test_logits(tmp_path, name):
    """Kept groups give the logits of dequantized weights, also of experts, and with llama's divisors."""
    path = tmp_path / "model.gguf"
    kinds = {"llama": files.Q4_1, "gpt-oss": files.MXFP4, "glm4moe": files.MXFP4}.get(name, files.Q8_0)
    plain = ("ffn_gate_inp.weight", "conv1d.weight", "attn_k.weight")
    of = lambda own, shape: files.F32 if own.endswith(plain) else kinds  # noqa: E731
    config, tensors = files.write(path, name, of)
    model = xj.load_model(path, "float32")
    forward = jax.jit(xj.forward, static_argnums=1)
    (want, _) = forward(cases.params_from(config, tensors), config, IDS)
    (got, _) = forward(model.params, model.config, IDS)
    print(name, float(abs(want).max()), float(abs(want - got).max()))
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_types_with_scales_of_two_levels_in_splits(tmp_path):
    """Mixed K-quants become floats, or int8 or int4 anew. A model may be in three files."""
    types = {"q": files.Q4_K, "k": files.Q5_K, "v": files.Q6_K, "output": files.Q6_K, "gate": files.Q4_K}
    path = tmp_path / "model.gguf"
    config, tensors = files.write(
        path, "llama", lambda own, shape: types.get(own.split("_")[-1].removesuffix(".weight"), files.Q8_0),
        hf=dict(hidden_size=256, head_dim=64), splits=("blk.0.attn_k.weight", "blk.1.attn_norm.weight"),
    )  # fmt: skip
    wanted = cases.params_from(config, tensors)
    first = tmp_path / "model-00001-of-00003.gguf"
    assert_same_numbers(xj.load_model(first, "float32").params, wanted)
    path = tmp_path / "model-00002-of-00003.gguf"
    floats = xj.load_model(path, "bfloat16", dequantize=True).params
    assert all(leaf.dtype == "bfloat16" for leaf in jax.tree.leaves(floats))
    model = xj.load_model(path, "float32", "int4")
    assert {type(model.params["layers"][0][name]["weight"]).__name__ for name in "qko"} == {"GroupedWeight"}
    q = model.params["layers"][0]["q"]["weight"]
    assert abs(numbers(q) - wanted["layers"][0]["q"]["weight"]).max() <= q.scale.max()


def test_a_block_of_several_heads(tmp_path):
    """Groups of K-quants stay as they are where a block of 256 has those of heads that are apart."""
    of = lambda own, shape: files.Q4_K if "ssm_out" in own else files.F32  # noqa: E731
    config, tensors = files.write(tmp_path / "m.gguf", "qwen35", of, hf=dict(linear_value_head_dim=64))
    params = xj.load_model(tmp_path / "m.gguf", "float32").params
    assert is_quantized(params["layers"][0]["o"]["weight"])
    assert_same_numbers(params, cases.params_from(config, tensors))


def test_keys_and_values_of_latents_in_one_tensor_and_apart(tmp_path):
    """A file may have both. The tensor with both is read."""

    def change(stored):
        for name in ("attn_k_b", "attn_v_b"):
            stored[f"blk.0.{name}.weight"] = (np.zeros((1, 64, 32), np.float32), files.F32)

    config, tensors = files.write(tmp_path / "x.gguf", "deepseek2-softmax", change=change)
    model = xj.load_model(tmp_path / "x.gguf", "float32")
    assert_same_numbers(model.params, cases.params_from(config, tensors))


@pytest.mark.parametrize("name", full_except(["qwen35"], ["qwen35", "deepseek2", "glm4moe"]))
def test_layers_that_draft_are_left_out(tmp_path, name):
    """Files may have one layer more, for multi-token prediction."""

    def change(stored):
        stored["blk.2.nextn.eh_proj.weight"] = stored["blk.1.attn_output.weight"]

    path = tmp_path / "model.gguf"
    more = {"ARCH.nextn_predict_layers": 1, "ARCH.block_count": 3}
    files.write(path, name, metadata=more, change=change)
    model = xj.load_model(path)
    assert model.config.num_hidden_layers == 2 and model.load_stats.skipped == ("blk.2.* (1)",)


@pytest.mark.full
@pytest.mark.skipif(not STORIES.is_dir(), reason="the shared data are absent")
def test_a_trained_llama(tmp_path, command):
    """The command answers by a GGUF file as by the directory that it was made of."""
    model = xj.load_model(STORIES, "float32")
    hf = json.loads((STORIES / "config.json").read_text())
    tensors = {n: np.asarray(x) for n, x in xj.params.params_to_tensors(model.params, model.config).items()}
    path = tmp_path / "stories.gguf"
    metadata = files.tokenizer_metadata(STORIES / "tokenizer.json")
    files.write_leaves(path, "llama", hf, tensors, metadata=metadata)
    assert_same_numbers(xj.load_model(path, "float32").params, model.params)
    answers = [
        command(f"--model={x}", "--prompt=Once upon a time", "--temperature=0") for x in (STORIES, path)
    ]
    assert answers[0][:2] == answers[1][:2] and answers[0][0] == 0, answers
    assert answers[0][1].strip()
