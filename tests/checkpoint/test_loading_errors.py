"""Checkpoints that cannot be loaded, each with one clear error, and hub names."""

import json
import os
import re
import shutil
import subprocess
import sys

import huggingface_hub
import numpy as np
import pytest
import tiny

import xinfer_jax as xj

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

Q1 = "model.layers.1.self_attn.q_proj.weight"


# --- files that are absent or broken ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "model.gguf"])
def test_a_git_lfs_pointer_is_named(tmp_path, name):
    file = tiny.write(tmp_path, shards=2 if name == "model.safetensors" else 1) / name
    if not file.exists() and name == "model.safetensors":
        file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n")
    message = tiny.load_error(file if name == "model.gguf" else tmp_path)
    assert f"{file} is a git-LFS pointer, not the file: run `git lfs pull`" in message


def test_a_long_header_is_not_read(tmp_path):
    """It could name more than a million tensors, and take seconds and gigabytes."""
    size = 2**24 + 8
    with open(tiny.write(tmp_path) / "model.safetensors", "wb") as file:
        file.write(size.to_bytes(8, "little") + b"{")
        file.truncate(size + 100)
    assert "model.safetensors has a header of 16777224 bytes, the limit is 16777216" in tiny.load_error(
        tmp_path
    )


def test_index_names_a_tensor_that_its_shard_lacks(tmp_path):
    file = tiny.write(tmp_path, shards=2) / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    others = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors"}
    index["weight_map"][tiny.EMBED] = others.get(
        index["weight_map"][tiny.EMBED], "model-00001-of-00002.safetensors"
    )
    tiny.write_json(file, index)
    assert "holds model.embed_tokens.weight, but it does not" in tiny.load_error(tmp_path)


OTHER_FORMATS = {
    # name: (files, what the message says)
    "pickled": (
        ["config.json", "pytorch_model.bin"],
        r"pickled weights \(pytorch_model.bin\): only safetensors",
    ),
    "lora": (
        ["adapter_config.json", "adapter_model.safetensors"],
        "a LoRA adapter, not a model: merge it into",
    ),
    "gguf": (
        ["qwen2-Q4_K_M.gguf"],
        r"a GGUF file \(qwen2-Q4_K_M.gguf\): to load a model, give the path of the file",
    ),
    "gguf-and-config": (["config.json", "a.gguf", "b.gguf"], r"a GGUF file \(a.gguf and 1 more\)"),
    "mistral": (["config.json", "params.json", "consolidated.safetensors"], "Mistral's or Meta's own format"),
    "shards": (
        ["config.json", *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2))],
        "holds model-00001-of-00002.safetensors and 1 more without model.safetensors.index.json, .* fetch",
    ),
    "another-name": (
        ["config.json", "gptq_model.safetensors"],
        "or rename a single file to model.safetensors",
    ),
    "no-weights": (
        ["config.json", "README.md"],
        "neither model.safetensors nor model.safetensors.index.json",
    ),
    "no-config": (["model.safetensors"], "holds no config.json: give the directory of a Hugging Face"),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_a_directory_of_another_format_is_named(tmp_path, name):
    files, message = OTHER_FORMATS[name]
    tiny.write(tmp_path / "whole")
    for file in files:
        (tmp_path / "whole" / file).touch()
    for file in {"config.json", "model.safetensors"} - {*files}:
        (tmp_path / "whole" / file).unlink()
    assert re.search(message, tiny.load_error(tmp_path / "whole"))


def test_other_names_of_models(tmp_path):
    for file in ("model.safetensors", "config.json"):
        (tmp_path / file).touch()
    for name, message in {
        "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main": "is a web address: give 'Qwen/Qwen3-0.6B'",
        "hf.co/Qwen/Qwen3-0.6B": "does not exist: give a directory, or a hub name owner/name",
        "https://example.com/model.zip": "is a web address: give a hub name owner/name or a directory",
        "http://": "is a web address: give a hub name",
        tmp_path / "model.safetensors": (
            "is a safetensors file, neither a directory nor a hub name: give its directory, "
            f"{str(tmp_path)!r}"
        ),
        tmp_path / "config.json": "is a file, neither a directory nor a hub name: give its directory, ",
    }.items():
        assert f"model {str(name)!r} {message}" in tiny.load_error(name)


@pytest.mark.parametrize(
    "name",
    ["/no/such/directory", "nowhere", "./no/such", "owner/name/more", "owner/", "../name", "owner/name.gguf"],
)
def test_a_path_that_does_not_exist(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    assert f"model {name!r} does not exist: give a directory, " in tiny.load_error(name)


# --- the hub ------------------------------------------------------------------------------------------------


class Hub:
    """A stand-in for the hub's package, with one repository: a directory."""

    def __init__(self, monkeypatch, repository, snapshots):
        self.repository = repository
        self.snapshot = snapshots / "0123456789abcdef"
        for name in ("snapshot_download", "list_repo_files"):
            monkeypatch.setattr(huggingface_hub, name, getattr(self, name))

    def list_repo_files(self, repo_id, *, revision=None, token=None):
        assert repo_id == "Some-Owner/name-0.5B_x"
        assert revision in (None, self.snapshot.name) and token is None
        files = (file for file in self.repository.rglob("*") if file.is_file())
        return sorted(str(file.relative_to(self.repository)) for file in files)

    def snapshot_download(
        self, repo_id, *, allow_patterns, revision=None, token=None, local_files_only=False
    ):
        assert not local_files_only
        files = self.list_repo_files(repo_id, revision=revision, token=token)
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for name in huggingface_hub.utils.filter_repo_objects(files, allow_patterns=allow_patterns):
            (self.snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.repository / name, self.snapshot / name)
        return str(self.snapshot)

    def fetched(self):
        return {str(file.relative_to(self.snapshot)) for file in self.snapshot.rglob("*") if file.is_file()}


# Of transformers, Qwen3.5 and DeepSeek; of scripts; in a folder; with characters of patterns.
SHARD_NAMES = [
    "model-{:05}-of-00002.safetensors", "model.safetensors-{:05}-of-00002.safetensors",
    "model-{:05}-of-000002.safetensors", "model-{:05}.safetensors",
    "pytorch_model-{:05}-of-00002.safetensors",
    "consolidated-{:05}-of-00002.safetensors", "weights_{}.safetensors", "layers/model_{}.safetensors",
    "model[{}].safetensors", "model-{:05}-of-00002",
]  # fmt: skip
OTHERS = [
    "pytorch_model.bin", "consolidated.safetensors", "README.md", "model.gguf", "tf_model.h5",
    "tokenizer.model", "original/model.safetensors", "model-00001-of-00003.safetensors",
    "onnx/model.onnx", "model1.safetensors", "adapter_model.safetensors", "additional_chat_templates/x.txt",
]  # fmt: skip
TEXT = [
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "chat_template.json", "special_tokens_map.json", "additional_chat_templates/tool_use.jinja",
]  # fmt: skip


@pytest.mark.parametrize("shards", [None, *SHARD_NAMES])
def test_a_hub_name_is_downloaded(tmp_path, monkeypatch, shards):
    """The index decides which shards. Files of other uses are not fetched."""
    path = tiny.write(tmp_path / "repository", shards=2 if shards else 1)
    weights = {"model.safetensors"}
    if shards:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        renamed = {f"model-{i:05}-of-00002.safetensors": shards.format(i) for i in (1, 2)}
        (path / "layers").mkdir()
        for old, new in renamed.items():
            (path / old).rename(path / new)
        index["weight_map"] = {name: renamed[file] for name, file in index["weight_map"].items()}
        tiny.write_json(path / "model.safetensors.index.json", index)
        weights = {*renamed.values(), "model.safetensors.index.json"}
    for name in [*OTHERS, *TEXT]:
        (path / name).parent.mkdir(exist_ok=True)
        if not (path / name).exists():
            (path / name).write_text("{}")
    hub = Hub(monkeypatch, path, tmp_path / "snapshots")
    model = xj.load_model("Some-Owner/name-0.5B_x", dtype="float32")
    assert hub.fetched() == {"config.json", *TEXT, *weights}
    np.testing.assert_array_equal(model.params["embed"]["weight"], tiny.tensors()[tiny.EMBED])
    np.testing.assert_array_equal(model.params["layers"][1]["q"]["weight"], tiny.tensors()[Q1])
    assert (model.tokenizer.chat_template, model.tokenizer.tool_template) == ("{}", "{}")


@pytest.mark.parametrize(
    "files, message",
    [
        (["config.json", "model-q4.gguf"], "holds a GGUF file (model-q4.gguf)"),
        (["adapter_config.json", "adapter_model.safetensors"], "holds a LoRA adapter, not a model"),
        (["config.json", "pytorch_model.bin"], "holds pickled weights (pytorch_model.bin)"),
        (["README.md"], "holds neither model.safetensors nor"),
    ],
)
def test_a_hub_repository_of_another_format_is_named(tmp_path, monkeypatch, files, message):
    (tmp_path / "repository").mkdir()
    for name in files:
        (tmp_path / "repository" / name).touch()
    Hub(monkeypatch, tmp_path / "repository", tmp_path / "snapshots")
    name = "Some-Owner/name-0.5B_x"
    assert tiny.load_error(name).startswith(f"model {name!r} {message}")


@pytest.mark.parametrize(
    "error", [ConnectionError("no route\nto host"), ValueError("")], ids=["two-lines", "no-text"]
)
def test_hub_error_is_reported_in_one_line(monkeypatch, error):
    def snapshot_download(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    reason = str(error).split("\n")[0] or "ValueError"
    assert (
        tiny.load_error("owner/name")
        == f"model 'owner/name' does not exist here, and it could not be fetched from the hub: {reason}:"
        " check the connection, or give a directory"
    )


@pytest.mark.full
def test_offline_the_error_has_no_traceback_of_the_hub(tmp_path):
    """The real huggingface_hub in offline mode gives one traceback from Python, and one line from a
    command.
    """
    load = "import xinfer_jax as xj; xj.load_model('owner/name')"
    command = (
        "import xinfer_jax.cli.answer_flags as c;"
        " c.main(['x', '--model=owner/name', '--prompt=hi', '--compilation_cache='])"
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    for program, code, lines in ((load, 1, 20), (command, 2, 1)):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | offline,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == code and run.stdout == "" and "owner/name" in run.stderr
        assert len(run.stderr.splitlines()) <= lines and run.stderr.count("Traceback") == code % 2
        assert "huggingface_hub" not in run.stderr
