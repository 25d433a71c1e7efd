"""Checkpoint directories in, parameter trees out: layouts, types, faults each with one clear error, and the memory it takes."""

import json
import os
import subprocess
import sys
import threading
import time

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.params import param_specs

UNTIED = tiny.CONFIG | dict(tie_word_embeddings=False)
LLAMA = UNTIED | dict(model_type="llama", architectures=["LlamaForCausalLM"], num_hidden_layers=1)
Q1 = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """One directory per layout asked for, written once."""
    written = {}

    def at(**options):
        name = json.dumps(options, sort_keys=True)
        if name not in written:
            written[name] = tiny.write(tmp_path_factory.mktemp("checkpoint"), **options)
        return written[name]

    return at


def refusal(path, **options) -> str:
    """The one line with which `load_model` refuses."""
    with pytest.raises(xj.InputError) as caught:
        xj.load_model(path, **options)
    assert len(str(caught.value).strip().splitlines()) == 1
    return str(caught.value)


# --- layouts and types ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3], ids=["one-file", "shards"])
@pytest.mark.parametrize("stored", tiny.DTYPES)
@pytest.mark.parametrize("target", tiny.DTYPES)
def test_every_type_in_and_out(checkpoint, stored, target, shards):
    model = xj.load_model(checkpoint(hf=UNTIED, dtype=stored, shards=shards), dtype=target)
    expected = {name: w.astype(tiny.DTYPES[stored]).astype(tiny.DTYPES[target]) for name, w in tiny.tensors(UNTIED).items()}
    specs = param_specs(model.config)
    assert jax.tree.structure(model.params) == jax.tree.structure(specs)
    for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(model.params), strict=True):
        assert isinstance(leaf, jax.Array) and leaf.dtype == tiny.DTYPES[target]
        np.testing.assert_array_equal(np.asarray(leaf), expected.pop(spec.hf_name), err_msg=spec.hf_name)
    assert not expected
    assert model.load_stats.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert model.load_stats.dtype == target and model.load_stats.seconds > 0


def test_names_in_the_file_and_in_the_tree(checkpoint):
    weights, model = tiny.tensors(UNTIED), xj.load_model(checkpoint(hf=UNTIED), dtype="float32")
    last = model.params["layers"][1]
    where = {
        "model.embed_tokens.weight": model.params["embed"]["weight"],
        "model.layers.1.input_layernorm.weight": last["attn_norm"],
        Q1: last["q"]["weight"],
        "model.layers.1.self_attn.k_proj.bias": last["k"]["bias"],
        "model.layers.1.self_attn.o_proj.weight": last["o"]["weight"],
        "model.layers.1.post_attention_layernorm.weight": last["mlp_norm"],
        "model.layers.1.mlp.gate_proj.weight": last["gate"]["weight"],
        "model.layers.1.mlp.up_proj.weight": last["up"]["weight"],
        "model.layers.1.mlp.down_proj.weight": last["down"]["weight"],
        "model.norm.weight": model.params["final_norm"],
        "lm_head.weight": model.params["lm_head"]["weight"],
    }
    for name, leaf in where.items():
        np.testing.assert_array_equal(np.asarray(leaf), weights[name], err_msg=name)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, np.dtype("float16")], ids=["default", "jnp", "numpy"])
def test_dtype_may_be_none_or_a_type(checkpoint, dtype):
    expected = jnp.float32 if dtype is None and jax.default_backend() == "cpu" else dtype or jnp.bfloat16
    assert xj.load_model(checkpoint(), dtype=dtype).params["embed"]["weight"].dtype == expected


@pytest.mark.parametrize("dtype", ["int8", "float64", "bf16", jnp.int32], ids=str)
def test_other_dtypes_are_refused(checkpoint, dtype):
    assert "is not supported: use one of float32, bfloat16, float16" in refusal(checkpoint(), dtype=dtype)


@pytest.mark.parametrize("dtype", tiny.DTYPES)
def test_the_weights_outlive_the_files(tmp_path, dtype):
    """Also where stored and target type are the same, nothing may still point into the memory map."""
    tiny.write(tmp_path, dtype=dtype)
    model = xj.load_model(tmp_path, dtype=dtype)
    file = tmp_path / "model.safetensors"
    with open(file, "r+b") as handle:
        handle.write(b"\xff" * file.stat().st_size)
    np.testing.assert_array_equal(np.asarray(model.params["layers"][1]["q"]["weight"]), tiny.tensors()[Q1].astype(tiny.DTYPES[dtype]))


def test_a_path_under_home(checkpoint, monkeypatch):
    path = checkpoint()
    monkeypatch.setenv("HOME", str(path.parent))
    assert xj.load_model(f"~/{path.name}").config.vocab_size == tiny.CONFIG["vocab_size"]


def test_old_rotary_tables_are_ignored(tmp_path):
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    tiny.write(tmp_path, LLAMA, weights=tiny.tensors(LLAMA) | tables)
    assert len(xj.load_model(tmp_path).params["layers"]) == 1


def test_without_tokenizer_and_generation_config(checkpoint):
    model = xj.load_model(checkpoint(with_tokenizer=False))
    assert model.tokenizer is None and model.generation_config == {}
    with pytest.raises(xj.InputError, match="tokenizer.json"):
        xj.generate_text(model, "hello")


# --- the matrix that a tied model shares ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [tiny.EMBED, tiny.HEAD])
def test_tied_matrix_under_either_name(checkpoint, name):
    model = xj.load_model(checkpoint(tied_name=name))
    assert "lm_head" not in model.params
    np.testing.assert_array_equal(np.asarray(model.params["embed"]["weight"]), tiny.tensors()[tiny.EMBED])


@pytest.mark.parametrize("shards", [1, 2], ids=["one-file", "shards"])
def test_tied_matrix_under_both_names(tmp_path, shards):
    weights = tiny.tensors()
    tiny.write(tmp_path / "same", weights=weights | {tiny.HEAD: weights[tiny.EMBED].copy()}, shards=shards)
    np.testing.assert_array_equal(np.asarray(xj.load_model(tmp_path / "same").params["embed"]["weight"]), weights[tiny.EMBED])
    other = weights[tiny.EMBED].copy()
    other[-1, -1] += 1
    tiny.write(tmp_path / "differs", weights=weights | {tiny.HEAD: other}, shards=shards)
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(tmp_path / "differs")


def test_tied_matrix_under_no_name(tmp_path):
    tiny.write(tmp_path, weights={name: w for name, w in tiny.tensors().items() if name != tiny.EMBED})
    assert "missing model.embed_tokens.weight [288, 32]" in refusal(tmp_path)


def test_an_untied_model_needs_both(tmp_path):
    tiny.write(tmp_path, UNTIED, weights=tiny.tensors(tiny.CONFIG))
    assert "missing lm_head.weight" in refusal(tmp_path)


# --- weights that do not fit ------------------------------------------------------------------------------------------


def test_every_fault_in_one_error(tmp_path):
    weights = tiny.tensors()
    del weights["model.norm.weight"], weights["model.layers.0.mlp.up_proj.weight"]
    weights["model.layers.2.input_layernorm.weight"] = np.ones(32, np.float32)
    weights["model.layers.0.self_attn.q_norm.weight"] = np.ones(8, np.float32)
    weights[Q1] = weights[Q1][:, :-1].copy()
    weights["model.layers.0.self_attn.k_proj.bias"] = np.ones((16, 1), np.float32)
    weights["model.layers.0.self_attn.v_proj.bias"] = np.ones(16, np.int8)
    message = refusal(tiny.write(tmp_path, weights=weights))
    for fault in (
        "missing model.norm.weight [32]",
        "missing model.layers.0.mlp.up_proj.weight [48, 32]",
        "unexpected model.layers.2.input_layernorm.weight",
        "unexpected model.layers.0.self_attn.q_norm.weight",
        f"{Q1} has shape [32, 31], the config asks for [32, 32]",
        "model.layers.0.self_attn.k_proj.bias has shape [16, 1], the config asks for [16]",
        "model.layers.0.self_attn.v_proj.bias has type I8",
    ):
        assert fault in message
    assert message.count(";") == 6  # and no other


def test_a_config_of_another_model(tmp_path, checkpoint):
    tiny.write(tmp_path, tiny.CONFIG | dict(num_hidden_layers=3), weights=tiny.tensors())
    message = refusal(tmp_path)
    assert message.count("missing model.layers.2.") == 12 and "unexpected" not in message


# --- files that are absent or broken ----------------------------------------------------------------------------------


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
    "an-lfs-pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1000\n",
}


@pytest.mark.parametrize("shards", [1, 2], ids=["one-file", "shards"])
@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_broken_safetensors(tmp_path, name, shards):
    file = sorted(tiny.write(tmp_path, shards=shards).glob("*.safetensors"))[-1]
    file.write_bytes(BROKEN_WEIGHTS[name](file.read_bytes()))
    message = refusal(tmp_path)
    assert str(file) in message and "truncated or no safetensors file" in message


def test_index_names_an_absent_shard(tmp_path):
    (tiny.write(tmp_path, shards=3) / "model-00002-of-00003.safetensors").unlink()
    assert "absent: model-00002-of-00003.safetensors" in refusal(tmp_path)


def test_index_names_a_tensor_that_its_shard_lacks(tmp_path):
    file = tiny.write(tmp_path, shards=2) / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    others = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors"}
    index["weight_map"][tiny.EMBED] = others.get(index["weight_map"][tiny.EMBED], "model-00001-of-00002.safetensors")
    tiny.write_json(file, index)
    assert "holds model.embed_tokens.weight, but it does not" in refusal(tmp_path)


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": ["b"]}}], ids=json.dumps
)
def test_index_without_a_usable_map(tmp_path, index):
    tiny.write_json(tiny.write(tmp_path, shards=2) / "model.safetensors.index.json", index)
    assert "holds no weight_map" in refusal(tmp_path)


BROKEN_JSON = {
    "empty": b"",
    "cut": b'{"model_type": "qwen2", ',
    "not-an-object": b"[1, 2]",
    "not-utf8": b'{"model_type": "\xff"}',
    "too-deep": b"[" * 200_000,
}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("name", BROKEN_JSON)
def test_malformed_json(tmp_path, file, name):
    tiny.write(tmp_path, shards=2)
    (tmp_path / file).write_bytes(BROKEN_JSON[name])
    assert str(tmp_path / file) in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": 1}', b"\xff\xfe"], ids=["empty", "no-model", "wrong-model", "not-utf8"])
def test_malformed_tokenizer(tmp_path, content):
    (tiny.write(tmp_path) / "tokenizer.json").write_bytes(content)
    assert f"{tmp_path / 'tokenizer.json'} is no readable tokenizer" in refusal(tmp_path)


def test_empty_directory(tmp_path):
    assert f"{tmp_path} holds no config.json" in refusal(tmp_path)


def test_directory_without_safetensors(tmp_path):
    tiny.write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "only safetensors weights are read" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/directory", "nowhere", "./no/such", "owner/name/more", "owner/", "../name"])
def test_neither_a_directory_nor_a_hub_name(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    assert f"model {name!r} is neither a directory nor a hub name" in refusal(name)


def test_a_file_instead_of_a_directory(checkpoint):
    assert "neither a directory nor" in refusal(checkpoint() / "model.safetensors")


# --- the hub ----------------------------------------------------------------------------------------------------------


def test_hub_name_is_fetched(checkpoint, monkeypatch):
    calls = []

    def snapshot_download(repo_id, **options):
        calls.append((repo_id, options))
        return str(checkpoint())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert xj.load_model("Some-Owner/name-0.5B_x").tokenizer is not None
    ((repo_id, options),) = calls
    assert repo_id == "Some-Owner/name-0.5B_x"
    files = [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors",
        "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "pytorch_model.bin", "consolidated.safetensors", "README.md", "model.gguf", "tf_model.h5", "tokenizer.model",
    ]  # fmt: skip
    fetched = list(huggingface_hub.utils.filter_repo_objects(files, **options))
    assert fetched == files[:8]


@pytest.mark.parametrize("error", [ConnectionError("no route\nto host"), ValueError("")], ids=["two-lines", "no-text"])
def test_hub_that_cannot_be_had(monkeypatch, error):
    def snapshot_download(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    reason = str(error).split("\n")[0] or "ValueError"
    assert refusal("owner/name") == f"model 'owner/name' is no directory and could not be fetched from the hub: {reason}"


def test_offline_hub_is_one_line(tmp_path):
    """The real huggingface_hub, forbidden to ask."""
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, xinfer_jax.cli as c; c.main(['x', '--model=owner/name', '--prompt=hi', '--compilation_cache='])",
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 2 and run.stdout == ""
    assert len(run.stderr.splitlines()) == 1 and "owner/name" in run.stderr


# --- memory -----------------------------------------------------------------------------------------------------------

LARGE = dict(
    model_type="qwen2", vocab_size=16384, hidden_size=1024, intermediate_size=4096, num_hidden_layers=5, num_attention_heads=16,
    num_key_value_heads=4, max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=True,
)  # fmt: skip
LOAD = """
import pathlib, sys
import jax, xinfer_jax as xj
large, small, dtype = sys.argv[1:]
xj.load_model(small, dtype=dtype)  # starts the backend: part of the interpreter
print("ready", flush=True)
sys.stdin.readline()
model = xj.load_model(large, dtype=dtype)
print(model.load_stats.weight_bytes, max(leaf.nbytes for leaf in jax.tree.leaves(model.params)), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """About 190 MB of bfloat16."""
    random = np.random.default_rng(0)

    def bits(shape):
        return (random.integers(0, 2**16, shape, np.uint16) & 0xBDFF).view(ml_dtypes.bfloat16)  # finite: the exponent is not all ones

    weights = {name: bits(tensor.shape) for name, tensor in _shapes(LARGE).items()}
    return tiny.write(tmp_path_factory.mktemp("large"), LARGE, weights=weights, shards=2, with_tokenizer=False)


def _shapes(hf):
    from xinfer_jax.config import from_hf

    return {s.hf_name: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16) for s in jax.tree.leaves(param_specs(from_hf(hf)))}


def _rss_anon(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="RssAnon is Linux's")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_is_the_weights_and_one_tensor(checkpoint, large, dtype):
    """Peak of anonymous memory (mapped file pages do not count) above that of an interpreter which has loaded a tiny model."""
    child = subprocess.Popen(
        [sys.executable, "-c", LOAD, large, checkpoint(), dtype],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )
    peak, done = 0, threading.Event()

    def sample():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, _rss_anon(child.pid))
            time.sleep(0.001)

    try:
        assert child.stdout.readline() == "ready\n"
        before = _rss_anon(child.pid)
        sampler = threading.Thread(target=sample)
        sampler.start()
        child.stdin.write("\n")
        child.stdin.flush()
        reply = child.stdout.readline()
        done.set()
        sampler.join()
    finally:
        done.set()
        child.kill()
        child.wait()
    weights, largest = map(int, reply.split())
    assert weights > 180e6 * (2 if dtype == "float32" else 1)
    print(f"{dtype}: weights {weights / 2**20:.0f} MiB, peak {(peak - before) / 2**20:.0f} MiB above the interpreter")
    assert 0.95 * weights < peak - before <= weights + largest + 40 * 2**20
