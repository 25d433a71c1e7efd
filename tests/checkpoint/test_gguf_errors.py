"""GGUF files that are broken, or not supported: one line each."""

import os
import struct
import sys

import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.checkpoint import loading

pytest.importorskip("gguf")
import gguf_files as files

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

FLOAT = np.zeros((4, 32), np.float32)
WORDS = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["a", "b", "ab"],
    "token_type": [1, 1, 1],
    "merges": ["a b"],
}


def tokens(**changes):
    return {f"tokenizer.ggml.{key}": value for key, value in (WORDS | changes).items()}


def value(kind, data):
    """A file with one value of metadata, and no tensors."""
    return struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", kind) + data


# Of each case: the bytes of a file, and what the error says.
BYTES = {
    "empty": (b"", "is truncated or not a GGUF file"),
    "short": (b"GG", "is truncated or not a GGUF file"),
    "other-format": (b"PK\3\4" + bytes(60), "is not a GGUF file of version 2 or 3"),
    "version-1": (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "of version 2 or 3"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "of version 2 or 3"),
    "tensors": (struct.pack("<4sIQQ", b"GGUF", 3, 2**63, 0), "tensors, the limit is 65536"),
    "keys": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**24) + bytes(13 * 2**15), "16777216 keys, the limit"),
    "key-twice": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + bytes(26), "has the key '' twice"),
    "empty-texts": (value(9, struct.pack("<IQ", 8, 2**23)), "8388608 values in the arrays of its"),
    "axes": (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 1, 0, 1, b"x", 2**20), "1048576 axes of 'x', the"),
    "long-text": (value(8, struct.pack("<Q", 2**63)), "is truncated or not"),
    "long-array": (value(9, struct.pack("<IQ", 4, 2**20)), "is truncated or not"),
    "long-texts": (value(9, struct.pack("<IQ", 8, 2**20) + bytes(2**20)), "is truncated or not"),
    "array-of-arrays": (value(9, struct.pack("<IQ", 9, 1) * 2), "a value of type 9"),
    "unknown-value": (value(77, bytes(64)), "a value of type 77"),
    "nothing": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "architecture None is not read: only llama, qwen2"),
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_bytes(tmp_path, name):
    (data, message) = BYTES[name]
    (tmp_path / "x.gguf").write_bytes(data)
    assert message in tiny.load_error(tmp_path / "x.gguf")


METADATA = {
    "architecture": ({"general.architecture": "mamba"}, "architecture 'mamba' is not read: only llama"),
    "long-architecture": ({"general.architecture": "x" * 10_000_000}, "architecture 'xxx"),
    "alignment": ({"general.alignment": 0}, "general.alignment is 0"),
    "no-layers": ({"ARCH.block_count": 0}, "block_count must be a whole number above 0, got 0"),
    "layers": ({"ARCH.block_count": 10**9}, "block_count 1000000000 and nextn_predict_layers 0 do not fit"),
    "draft-layers": ({"ARCH.nextn_predict_layers": 5}, "block_count 2 and nextn_predict_layers 5 do not fit"),
    "heads": ({"ARCH.attention.head_count": "many"}, "num_attention_heads must be a number above 0"),
    "no-heads": ({"ARCH.attention.head_count": 0}, "num_attention_heads must be a number above 0"),
    "width": ({"ARCH.embedding_length": 128}, "blk.0.attn_k.weight has shape [64, 64], the metadata ask for"),
    "scaling": ({"ARCH.rope.scaling.type": "su"}, "rope.scaling.type 'su' is not supported"),
    "pre": (tokens(pre="a-new-one"), "tokenizer.ggml.pre 'a-new-one' is not supported: only llama-bpe"),
    "no-pre": (tokens(pre=None), "tokenizer.ggml.pre None is not supported"),
    "model": (tokens(model="rwkv"), "tokenizer.ggml.model 'rwkv' is not read"),
    "no-tokens": (tokens(tokens=None), "tokenizer.ggml.tokens must be an array of str, got None"),
    "no-types": (tokens(token_type=["a", "b", "c"]), "tokenizer.ggml.token_type must be an array of int"),
    "few-types": (tokens(token_type=[1]), "3 tokens, 1 types and 96 embeddings do not fit"),
    "many-tokens": (tokens(tokens=[str(i) for i in range(97)], token_type=[1] * 97), "97 tokens, 97 types"),
    "merges": (tokens(merges=["a c"]), "has no readable tokenizer"),
    "no-scores": (tokens(model="llama", merges=None), "tokenizer.ggml.scores must be an array of float"),
    "scores": (tokens(model="llama", merges=None, scores=["a"]), "scores must be an array of float, got"),
    "long-token": (tokens(model="llama", merges=None, scores=[0.0] * 3, tokens=["a", "b", "c" * 9000]),
        "tokens has tokens of up to 9000 characters: too long"),
    "long-control": (tokens(tokens=["a", "b", "ab", "c" * 3_000_000], token_type=[1, 1, 1, 3]),
        "control and user-defined tokens have 3000000 characters, the limit is 2097152"),
    "end": (tokens(eos_token_id="a"), "eos_token_id must be a token id or a list of them"),
    "template": ({**tokens(), "tokenizer.chat_template": 5}, "tokenizer.chat_template must be a text, got 5"),
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
def test_metadata(tmp_path, name):
    (metadata, message) = METADATA[name]
    path = tmp_path / "x.gguf"
    files.write(path, "qwen3", metadata=metadata)
    assert message in tiny.load_error(path)


def change_of(name, array, kind):
    return lambda stored: stored.update({name: (array, kind)}) if array is not None else stored.pop(name)


NAN = np.full((64, 68), 255, np.uint8)  # Q8_0 with scales that are NaN
TENSORS = {
    "missing": ("qwen3", "blk.1.ffn_up.weight", None, "missing blk.1.ffn_up.weight [96, 64]"),
    "unexpected": ("qwen3", "blk.1.ffn_up.lora", FLOAT, "unexpected blk.1.ffn_up.lora"),
    "shape": ("qwen3", "output_norm.weight", FLOAT, "output_norm.weight has shape [4, 32], the metadata ask"),
    "no-embedding": ("qwen3", "token_embd.weight", None, "only language models with token_embd.weight"),
    "four-axes": ("qwen3", "blk.0.x", np.zeros((1, 1, 2, 2), np.float32), "blk.0.x of type F32 has shape"),
    "no-rows": ("qwen3", "blk.0.x", np.zeros((0, 32), np.float32), "blk.0.x of type F32 has shape [0, 32]"),
    "nan": ("qwen3", "blk.0.attn_k.weight", NAN, "blk.0.attn_k.weight holds NaN or inf"),
    "keys-by-head": ("deepseek2", "blk.0.attn_k_b.weight", np.zeros((4, 64, 32), np.float32),
        "blk.0.attn_k_b.weight has shape [4, 64, 32], the metadata ask for [4, 32, 64]"),
    "values-by-head": ("deepseek2", "blk.1.attn_v_b.weight", None, "missing blk.1.attn_v_b.weight [4, 96"),
    "softmax-bias": ("deepseek2-softmax", "blk.1.exp_probs_b.bias", np.zeros(8, np.float32),
        "unexpected blk.1.exp_probs_b.bias"),
    "growth": ("qwen35", "blk.0.ssm_a", np.ones(4, np.float32), "A_log holds NaN or inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(tmp_path, name):
    (model, own, array, message) = TENSORS[name]
    kind = files.Q8_0 if array is NAN else files.F32
    path = tmp_path / "x.gguf"
    files.write(path, model, change=change_of(own, array, kind))
    assert message in tiny.load_error(path)


def test_a_file_that_ends_early_or_repeats_itself(tmp_path):
    """The error is one line at any end of the file. Ranges of tensors neither overlap nor leave the file."""
    path = tmp_path / "x.gguf"
    files.write(path, "qwen3", metadata=tokens())
    data = path.read_bytes()
    for size in (*range(0, 4000, 97), len(data) - 1):
        path.write_bytes(data[:size])
        tiny.load_error(path)
    at = data.index(b"output_norm.weight") + 18
    info = struct.unpack_from("<IQIQ", data, at)
    other = 0 if info[3] else 32  # into the first tensor, or the second
    for offset, message in {other: "overlap", 2**40: "is truncated: output_norm.weight ends"}.items():
        path.write_bytes(data[:at] + struct.pack("<IQIQ", *info[:3], offset) + data[at + 24 :])
        assert message in tiny.load_error(path)
    for kind in (99, 26):
        path.write_bytes(data[:at] + struct.pack("<IQIQ", *info[:2], kind, info[3]) + data[at + 24 :])
        assert f"output_norm.weight has type {kind}, which" in tiny.load_error(path)
    path.write_bytes(data.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"))
    assert "has the name of one" in tiny.load_error(path)
    path.write_bytes(data)
    opened = loading.open_checkpoint(path)
    path.write_bytes(data[:-2000])
    with pytest.raises(xj.InputError, match="has become shorter while it was read"):
        opened.read()


def test_splits(tmp_path):
    """Absent, in a circle, or of another file."""
    files.write(tmp_path / "x.gguf", "qwen3", splits=("blk.0.attn_k.weight", "blk.1.attn_k.weight"))
    (first, second, third) = (tmp_path / f"x-0000{i}-of-00003.gguf" for i in (1, 2, 3))
    xj.load_model(second)
    third.rename(tmp_path / "third")
    assert "x-00003-of-00003.gguf, a split of the model, is absent" in tiny.load_error(first)
    third.symlink_to(second)
    assert "says that it is split (1, 3), and its name (2, 3)" in tiny.load_error(first)
    third.unlink()
    third.symlink_to(third)
    assert "x-00003-of-00003.gguf" in tiny.load_error(first)
    assert "is truncated or not" not in tiny.load_error(third)
    alone = tmp_path / "alone.gguf"
    alone.symlink_to(second)
    assert "says that it is split (1, 3), and its name (0, 1)" in tiny.load_error(alone)
    none = tmp_path / "x-00000-of-00000.gguf"
    none.symlink_to(first)
    assert "its splits have tensors twice, or lack some" in tiny.load_error(none)


def test_the_command_ends_with_exit_code_2(tmp_path, command):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    code, out, err = command(f"--model={path}", "--prompt=x")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1 and "is truncated or not" in err
    os.remove(path)
    assert command(f"--model={path}", "--prompt=x")[0] == 2
    path.mkdir()
    assert command(f"--model={path}", "--prompt=x")[0] == 2


def test_without_the_package(tmp_path, monkeypatch):
    files.write(tmp_path / "x.gguf", "qwen3")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "needs the package gguf: pip install gguf" in tiny.load_error(tmp_path / "x.gguf")
