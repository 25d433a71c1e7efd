"""Checkpoints that cannot be loaded, each with one clear error; and hub names."""

import json
import os
import re
import subprocess
import sys

import huggingface_hub
import numpy as np
import pytest
import tiny

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

Q1 = "model.layers.1.self_attn.q_proj.weight"


# --- tensors that do not fit the config ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, fault",
    [
        ({"model.norm.weight": None}, "missing model.norm.weight [32]"),
        ({"model.layers.0.mlp.up_proj.weight": None}, "missing model.layers.0.mlp.up_proj.weight [48, 32]"),
        (
            {"model.layers.2.input_layernorm.weight": np.ones(32, np.float32)},
            "unexpected model.layers.2.input_layernorm.weight",
        ),
        (
            {"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)},
            "unexpected model.layers.0.self_attn.q_norm.weight",
        ),
        ({Q1: np.ones((32, 31), np.float32)}, f"{Q1} has shape [32, 31], the config asks for [32, 32]"),
        (
            {"model.layers.0.self_attn.k_proj.bias": np.ones((16, 1), np.float32)},
            "model.layers.0.self_attn.k_proj.bias has shape [16, 1], the config asks for [16]",
        ),
        (
            {"model.layers.0.self_attn.v_proj.bias": np.ones(16, np.int8)},
            "model.layers.0.self_attn.v_proj.bias has type I8",
        ),
    ],
)
def test_a_tensor_that_does_not_fit(tmp_path, changed, fault):
    weights = {name: array for name, array in (tiny.tensors() | changed).items() if array is not None}
    message = tiny.load_error(tiny.write(tmp_path, weights=weights))
    assert fault in message and "more" not in message  # the only fault


def test_many_unfitting_tensors_are_counted(tmp_path):
    weights = {name: array for name, array in tiny.tensors().items() if "layers.0" not in name}
    message = tiny.load_error(tiny.write(tmp_path, weights=weights))
    assert re.search(r"missing model.layers.0.*, missing model.layers.0.* and 10 more", message)


def test_weights_of_a_model_with_fewer_layers(tmp_path, checkpoint):
    tiny.write(tmp_path, tiny.CONFIG | dict(num_hidden_layers=3), weights=tiny.tensors())
    message = tiny.load_error(tmp_path)
    assert message.count("missing model.layers.2.") == 2 and message.endswith(" and 10 more")


# --- files that are absent or broken ------------------------------------------------------------------------


def _keep(count):
    return lambda data: data[:count]


BROKEN_WEIGHTS = {
    "empty": lambda data: b"",
    "a-few-bytes": _keep(5),
    "header-cut": _keep(100),
    "data-cut": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "header-length-wrong": lambda data: b"\xff" * 8 + data[8:],
    "header-not-json": lambda data: data[:8] + b"\x00" * 64 + data[72:],
    "another-format": lambda data: b"PK\x03\x04" + bytes(range(256)) * 8,
    "an-lfs-pointer": (
        lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1000\n"
    ),
}


@pytest.mark.parametrize("shards", [1, 2], ids=["one-file", "shards"])
@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_broken_safetensors(tmp_path, name, shards):
    file = sorted(tiny.write(tmp_path, shards=shards).glob("*.safetensors"))[-1]
    file.write_bytes(BROKEN_WEIGHTS[name](file.read_bytes()))
    message = tiny.load_error(tmp_path)
    assert str(file) in message and "truncated or not a safetensors file" in message


def test_index_names_an_absent_shard(tmp_path):
    (tiny.write(tmp_path, shards=3) / "model-00002-of-00003.safetensors").unlink()
    assert "absent: model-00002-of-00003.safetensors" in tiny.load_error(tmp_path)


def test_index_names_a_tensor_that_its_shard_lacks(tmp_path):
    file = tiny.write(tmp_path, shards=2) / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    others = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors"}
    index["weight_map"][tiny.EMBED] = others.get(
        index["weight_map"][tiny.EMBED], "model-00001-of-00002.safetensors"
    )
    tiny.write_json(file, index)
    assert "holds model.embed_tokens.weight, but it does not" in tiny.load_error(tmp_path)


@pytest.mark.parametrize(
    "index",
    [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": ["b"]}}],
    ids=json.dumps,
)
def test_index_without_a_usable_map(tmp_path, index):
    tiny.write_json(tiny.write(tmp_path, shards=2) / "model.safetensors.index.json", index)
    assert "holds no weight_map" in tiny.load_error(tmp_path)


BROKEN_JSON = {
    "empty": b"",
    "cut": b'{"model_type": "qwen2", ',
    "not-an-object": b"[1, 2]",
    "not-utf8": b'{"model_type": "\xff"}',
    "too-deep": b"[" * 200_000,
}


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("name", BROKEN_JSON)
def test_malformed_json(tmp_path, file, name):
    tiny.write(tmp_path, shards=2)
    (tmp_path / file).write_bytes(BROKEN_JSON[name])
    assert str(tmp_path / file) in tiny.load_error(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b'{"model": 1}', b"\xff\xfe"],
    ids=["empty", "no-model", "wrong-model", "not-utf8"],
)
def test_malformed_tokenizer(tmp_path, content):
    (tiny.write(tmp_path) / "tokenizer.json").write_bytes(content)
    assert f"{tmp_path / 'tokenizer.json'} is not a readable tokenizer" in tiny.load_error(tmp_path)


def test_empty_directory(tmp_path):
    assert f"{tmp_path} holds no config.json" in tiny.load_error(tmp_path)


def test_directory_without_safetensors(tmp_path):
    tiny.write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "only safetensors weights are read" in tiny.load_error(tmp_path)


@pytest.mark.parametrize(
    "name", ["/no/such/directory", "nowhere", "./no/such", "owner/name/more", "owner/", "../name"]
)
def test_neither_a_directory_nor_a_hub_name(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    assert f"model {name!r} is neither a directory nor a hub name" in tiny.load_error(name)


def test_a_file_instead_of_a_directory_is_rejected(checkpoint):
    assert "neither a directory nor" in tiny.load_error(checkpoint() / "model.safetensors")


# --- the hub ------------------------------------------------------------------------------------------------


def test_hub_name_is_downloaded(checkpoint, monkeypatch):
    calls = []

    def snapshot_download(repo_id, **options):
        calls.append((repo_id, options))
        return str(checkpoint())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert xj.load_model("Some-Owner/name-0.5B_x").tokenizer is not None
    ((repo_id, options),) = calls
    assert repo_id == "Some-Owner/name-0.5B_x"
    files = [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "model.safetensors",
        "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "pytorch_model.bin", "consolidated.safetensors", "README.md", "model.gguf", "tf_model.h5",
        "tokenizer.model",
    ]  # fmt: skip
    fetched = list(huggingface_hub.utils.filter_repo_objects(files, **options))
    assert fetched == files[:8]


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
        == f"model 'owner/name' is not a directory and could not be fetched from the hub: {reason}"
    )


def test_offline_hub_error_is_one_line(tmp_path):
    """With the real huggingface_hub in offline mode."""
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            (
                "import sys, xinfer_jax.cli.answer_flags as c; c.main(['x', '--model=owner/name', "
                "'--prompt=hi', '--compilation_cache='])"
            ),
        ],
        env=os.environ
        | {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 2 and run.stdout == ""
    assert len(run.stderr.splitlines()) == 1 and "owner/name" in run.stderr
