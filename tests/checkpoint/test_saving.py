"""`save_model`: what is written is what is loaded, beside tensors of others too. A target is always whole."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import parity_cases as cases
import pytest
import tiny
from safetensors.numpy import load_file, save_file

import xinfer_jax as xj
from xinfer_jax.formats import tensor_files

pytestmark = pytest.mark.oldest


def build(name: str) -> tuple[xj.ModelConfig, dict]:
    config = cases.CASES[name].config
    return config, cases.params_from(config, cases.random_tensors(config, seed=1))


def tensors_in(path: Path) -> dict[str, np.ndarray]:
    return {name: x for file in path.glob("*.safetensors") for name, x in load_file(file).items()}


def assert_same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture
def small():
    config, params = build("qwen2-gqa-tied-old")
    return params, config


@pytest.mark.parametrize(
    "name", ["qwen2-gqa-tied-old", "phi3-defaults", "moe-some-layers-dense", "gpt-oss-published"]
)
def test_saved_in_shards_and_loaded_has_the_same_bits(tmp_path, name):
    config, params = build(name)
    xj.save_model(params, config, tmp_path / "out", max_shard_bytes=60_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1 and all(file.stat().st_size < 80_000 for file in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert {*index["weight_map"].values()} == {file.name for file in files}
    model = xj.load_model(tmp_path / "out", "float32")
    assert model.config == config
    assert_same(model.params, params)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_dtype_is_that_of_the_files(tmp_path, small):
    params, config = small
    xj.save_model(params, config, tmp_path / "out", dtype="bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert_same(xj.load_model(tmp_path / "out", "bfloat16").params, xj.params.params_from_tensors(
        config, xj.params.params_to_tensors(params, config), dtype="bfloat16"
    ))  # fmt: skip
    large = jax.tree.map(lambda x: 1e6 * x, params)
    with pytest.raises(xj.InputError, match="beyond float16's range: save in bfloat16 or float32"):
        xj.save_model(large, config, tmp_path / "half", dtype="float16")
    assert not (tmp_path / "half").exists() and not (tmp_path / "half.saving").exists()


def test_files_of_the_tokenizer(tmp_path, good):
    model = xj.load_model(good)
    xj.save_model(model.params, model.config, tmp_path / "read", tokenizer=model.tokenizer)
    made = xj.Tokenizer(
        model.tokenizer.backend, chat_template="{{ messages[0]['content'] }}", eos_token_ids=(271,),
        special_tokens=dict(eos_token="<|im_end|>"),
    )  # fmt: skip
    xj.save_model(model.params, model.config, tmp_path / "made", tokenizer=made)
    for name, template in ("read", model.tokenizer.chat_template), ("made", made.chat_template):
        again = xj.load_model(tmp_path / name)
        assert again.config.eos_token_ids[0] == model.config.eos_token_ids[0] == 271
        assert again.tokenizer.chat_template == template
        assert again.tokenizer.encode("the hi<|im_end|>") == model.tokenizer.encode("the hi<|im_end|>")


def sees(path: Path) -> tuple[dict, xj.ModelConfig, dict[str, np.ndarray]]:
    """Writes a checkpoint that sees images, too, with files of its own: its text model, and its tensors."""
    case = cases.CASES["qwen3-5-tied"]
    config, params = build("qwen3-5-tied")
    text = {
        name.replace("model.", "model.language_model.", 1): np.asarray(x)
        for name, x in xj.params.params_to_tensors(params, config).items()
    }
    others = {
        "model.visual.proj.weight": np.arange(7, dtype=np.float16),
        "mtp.fc.weight": np.ones((2, 3), np.int8),
    }
    hf = dict(
        architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", text_config=case.hf,
        vision_config=dict(depth=3), torch_dtype="float32", tie_word_embeddings=True,
    )  # fmt: skip
    path.mkdir()
    save_file(text | others, path / "model.safetensors")
    tiny.write_json(path / "config.json", hf)
    tiny.write_json(path / "preprocessor_config.json", dict(size=3))
    return params, config, text | others


@pytest.mark.parametrize("itself", [False, True], ids=["beside", "itself"])
def test_like_a_model_that_sees(tmp_path, itself):
    """Names are as there, what is not read is copied, and the settings of images stay."""
    _, config, tensors = sees(tmp_path / "whole")
    model = xj.load_model(tmp_path / "whole", "float32")
    params = jax.tree.map(lambda x: 2 * x, model.params)
    target = tmp_path / ("whole" if itself else "out")
    xj.save_model(
        params, model.config, target, like=tmp_path / "whole", max_shard_bytes=50_000, overwrite=itself
    )
    found = tensors_in(target)
    changed = {name: 2 * x if "language_model" in name else x for name, x in tensors.items()}
    assert_same(found, changed)
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in tensors.items()}
    settings = json.loads((target / "config.json").read_text())
    assert settings["vision_config"] == dict(depth=3) and settings["dtype"] == "float32"
    assert json.loads((target / "preprocessor_config.json").read_text()) == dict(size=3)
    assert_same(xj.load_model(target, "float32").params, params)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"whole", target.name})


@pytest.mark.parametrize(
    "model_type, text_says, is_headless",
    [("mistral3", {}, False), ("mistral3", {}, True), ("qwen3_vl", dict(tie_word_embeddings=True), True)],
    ids=["head", "no-head", "text-says-tied"],
)
def test_a_model_that_sees_and_does_not_say_whether_it_is_tied(tmp_path, model_type, text_says, is_headless):
    """Its default, or its text model, says that it is. It is not if its files have a head."""
    text = {name: x for name, x in tiny.UNTIED.items() if name != "tie_word_embeddings"} | text_says
    hf = dict(model_type=model_type, text_config=text, vision_config={})
    tensors = {
        name: x for name, x in tiny.tensors(tiny.UNTIED).items() if name != tiny.HEAD or not is_headless
    }
    path = tiny.write(tmp_path / "whole", hf, weights=tensors)
    model = xj.load_model(path, "float32")
    assert model.config.tie_word_embeddings == is_headless
    assert_same(xj.params.params_to_tensors(model.params, model.config), tensors)
    xj.save_model(model.params, model.config, tmp_path / "like", like=path)
    assert_same(tensors_in(tmp_path / "like"), tensors)


def test_like_another_model(tmp_path, small):
    params, config = small
    sees(tmp_path / "whole")
    with pytest.raises(xj.InputError, match="model_type is 'qwen3_5_text' in .*whole, and 'qwen2' here"):
        xj.save_model(params, config, tmp_path / "out", like=tmp_path / "whole")
    xj.save_model(params, config, tmp_path / "own")
    wide = dataclasses.replace(config, rms_norm_eps=1e-3)
    with pytest.raises(xj.InputError, match="like: rms_norm_eps is 1e-06 in .*own, and 0.001 here"):
        xj.save_model(params, wide, tmp_path / "out", like=tmp_path / "own")
    slides = tuple(layer.with_mixer(window=7) for layer in config.layers)
    other = dataclasses.replace(config, layers=slides)
    with pytest.raises(xj.InputError, match="like: layers.0.mixers.0.window is None in .*own, and 7 here"):
        xj.save_model(params, other, tmp_path / "out", like=tmp_path / "own")
    stored = load_file(tmp_path / "own" / "model.safetensors")
    more = {"model.layers.0.mlp.odd.weight": np.ones(3, np.float32)}
    save_file(stored | more, tmp_path / "own" / "model.safetensors")
    with pytest.raises(xj.InputError, match=r"tensors that the model lacks: model.layers.0.mlp.odd.weight"):
        xj.save_model(params, config, tmp_path / "out", like=tmp_path / "own")


@pytest.mark.parametrize("stored", [("lm_head.weight",), ("model.embed_tokens.weight", "lm_head.weight")])
def test_like_a_tied_matrix_under_its_other_name(tmp_path, small, stored):
    params, config = small
    xj.save_model(params, config, tmp_path / "own")
    tensors = load_file(tmp_path / "own" / "model.safetensors")
    matrix = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | dict.fromkeys(stored, matrix), tmp_path / "own" / "model.safetensors")
    xj.save_model(params, config, tmp_path / "out", like=tmp_path / "own")
    assert_same(tensors_in(tmp_path / "out"), tensors_in(tmp_path / "own"))


def test_targets_that_are_not_replaced(tmp_path, small):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    (tmp_path / "empty").mkdir()
    with pytest.raises(xj.InputError, match="exists: give another directory, or overwrite=True"):
        xj.save_model(*small, tmp_path / "mine")
    with pytest.raises(xj.InputError, match="no config.json, so it is no checkpoint to overwrite"):
        xj.save_model(*small, tmp_path / "mine", overwrite=True)
    with pytest.raises(xj.InputError, match="max_shard_bytes must be a whole number from 1 on, got 0"):
        xj.save_model(*small, tmp_path / "out", max_shard_bytes=0)
    xj.save_model(*small, tmp_path / "empty")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "words" and xj.load_model(tmp_path / "empty")


def test_what_is_no_part_of_a_checkpoint(tmp_path, small):
    params, config = small
    wide = params | dict(final_norm=np.ones(config.hidden_size))
    with pytest.raises(xj.InputError, match="model.norm.weight is float64: give a dtype, as dtype='float32'"):
        xj.save_model(wide, config, tmp_path / "out")
    xj.save_model(wide, config, tmp_path / "out", dtype="float32")
    assert xj.load_model(tmp_path / "out").params["final_norm"].dtype == np.float32
    with pytest.raises(xj.InputError, match="config must be a ModelConfig, as model.config is, got dict"):
        xj.save_model(config, params, tmp_path / "other")
    with pytest.raises(xj.InputError, match="must be a Tokenizer, as model.tokenizer is, got 'gpt2'"):
        xj.save_model(params, config, tmp_path / "other", tokenizer="gpt2")


def test_a_link_stays_and_what_is_beside_the_target_too(tmp_path, small, monkeypatch):
    params, config = small
    (tmp_path / "latest").symlink_to(tmp_path / "step1")
    xj.save_model(params, config, tmp_path / "latest")
    xj.save_model(params, config, tmp_path / "latest", overwrite=True)
    assert (tmp_path / "latest").is_symlink() and xj.load_model(tmp_path / "step1").config == config
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step1"}
    (tmp_path / "step1.old").mkdir()
    (tmp_path / "step1.old" / "thesis.txt").write_text("words")
    with pytest.raises(xj.InputError, match="step1.old exists, .*: move it away"):
        xj.save_model(params, config, tmp_path / "step1", overwrite=True)
    assert (tmp_path / "step1.old" / "thesis.txt").read_text() == "words"
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "volume")
    with pytest.raises(xj.InputError, match="volume is where a disk is mounted: give a directory within it"):
        xj.save_model(params, config, tmp_path / "volume")


def test_a_full_disk_loses_nothing(tmp_path, small, monkeypatch):
    params, config = small
    xj.save_model(params, config, tmp_path / "out")
    before = tensors_in(tmp_path / "out")
    written = [0]

    class Full:
        def __init__(self, *args, **options):
            self.file = open(*args, **options)

        def __enter__(self):
            return self

        def __exit__(self, *args):
            self.file.close()

        def write(self, data):
            written[0] += len(data)
            if written[0] > 100_000:
                raise OSError(28, "No space left on device")
            return self.file.write(data)

        def fileno(self):
            return self.file.fileno()

    monkeypatch.setattr(tensor_files, "open", Full, raising=False)
    twice = jax.tree.map(lambda x: 2 * x, params)
    for target in "out", "new":
        written[0] = 0
        with pytest.raises(xj.InputError, match="cannot be written: .*No space left on device"):
            xj.save_model(twice, config, tmp_path / target, overwrite=True, max_shard_bytes=50_000)
    assert_same(tensors_in(tmp_path / "out"), before)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.full
def test_killed_at_any_moment_one_directory_is_whole(tmp_path, small):
    """A process saves again and again over its own checkpoint; another kills it at moments all over."""
    params, config = small
    xj.save_model(params, config, tmp_path / "out", max_shard_bytes=50_000)
    code = (
        "import sys, jax, xinfer_jax as xj\n"
        "m = xj.load_model(sys.argv[1], 'float32')\n"
        "print('ready', flush=True)\n"
        "while True: xj.save_model(sys.argv[1], m.params, m.config, overwrite=True, max_shard_bytes=50_000)"
    )
    for moment in range(6):
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        try:
            child.wait(0.05 + 0.013 * moment)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        whole = tmp_path / "out" if (tmp_path / "out").exists() else tmp_path / "out.old"
        assert_same(xj.load_model(whole, "float32").params, params)
        if whole.name == "out.old":
            os.rename(whole, tmp_path / "out")
    xj.save_model(params, config, tmp_path / "out", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    shutil.rmtree(tmp_path / "out")
