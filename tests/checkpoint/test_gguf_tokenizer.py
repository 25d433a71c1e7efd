"""Tokenizers in GGUF files give the ids of the tokenizer.json that they were made of."""

import json
import time

import numpy as np
import pytest
import tiny
import tokenizers
from paths import DATA, STORIES
from tokenizers import pre_tokenizers

import xinfer_jax as xj
from xinfer_jax.checkpoint.gguf_file import GgufFile, open_gguf
from xinfer_jax.checkpoint.gguf_tokenizer import read_gguf_tokenizer

pytest.importorskip("gguf")
import gguf_files as files  # noqa: E402

pytestmark = pytest.mark.oldest

QWEN = DATA / "qwen2.5-0.5b-instruct"
LETTERS = [*map(chr, (*range(32, 127), 9, 10, 13, 0xE9, 0x301, 0x4E2D, 0x1F600, 0x915, 0x94D, 0x627, 0xA0))]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"


def texts(count):
    """Random texts, and lines of this file."""
    random = np.random.default_rng(0)
    noise = ["".join(random.choice(LETTERS, random.integers(1, 60))) for _ in range(count // 2)]
    lines = [line for line in open(__file__, encoding="utf-8").read().splitlines() if line]
    return noise + [lines[i % len(lines)][i // len(lines) :] for i in range(count - len(noise))]


def tokenizer_of(metadata):
    """The tokenizer of metadata, without a file."""
    size = len(metadata["tokenizer.ggml.tokens"])
    return read_gguf_tokenizer(GgufFile("x.gguf", metadata, {}), size)


def assert_same_ids(found, backend, some):
    for text in some:
        ids = backend.encode(text).ids
        assert found.encode(text) == ids, text
        assert found.decode(ids, False) == backend.decode(ids, False), text


@pytest.mark.skipif(not QWEN.is_dir(), reason="the shared data are absent")
def test_ids_of_qwen(tmp_path):
    """1,000 texts; its chat template and EOS ids are those of the directory."""
    settings = json.loads((QWEN / "tokenizer_config.json").read_text())
    metadata = files.tokenizer_metadata(QWEN / "tokenizer.json", "qwen2", 151936)
    metadata |= {"tokenizer.ggml.eos_token_id": 151645, "tokenizer.ggml.bos_token_id": 151643}
    metadata |= {"tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": settings["chat_template"]}
    found = tokenizer_of(metadata)
    backend = tokenizers.Tokenizer.from_file(str(QWEN / "tokenizer.json"))
    assert_same_ids(found, backend, [*texts(1000), "<|im_start|>user\nHi<|im_end|>", "e\u0301 <tool_call>"])
    source = xj.Tokenizer.from_dir(QWEN)
    assert {*found.eos_token_ids} == {*source.eos_token_ids}
    talk = [dict(role="system", content="Be brief."), dict(role="user", content="Hi")]
    assert found.apply_chat_template(talk) == source.apply_chat_template(talk)


@pytest.mark.skipif(not STORIES.is_dir(), reason="the shared data are absent")
def test_ids_of_a_sentencepiece_vocabulary():
    """Its merges follow from scores; a text begins with BOS and a space, unknown characters are bytes."""
    metadata = files.tokenizer_metadata(STORIES / "tokenizer.json")
    found = tokenizer_of(metadata | {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2})
    backend = tokenizers.Tokenizer.from_file(str(STORIES / "tokenizer.json"))
    assert_same_ids(found, backend, ["Once upon a time", "  two  spaces ", "</s>x", *texts(200)])
    assert found.eos_token_ids == (2,) and found.encode("a")[0] == 1


def test_spaces_that_are_tokens():
    """Gemma's vocabulary: no prefix; user-defined tokens with spaces are merged first, end_of_turn ends."""
    plain = [*"abc▁\n", "▁a", "▁▁", "▁▁▁", "ab"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *plain, "<end_of_turn>"]
    kinds = [3, 3, 3, 3, *[1] * 6, 4, 4, 1, 3]
    tokens[10:12] = ["  ", "   "]
    scores = [0.0] * 4 + [-float(i) for i in range(len(plain))] + [0.0]
    metadata = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores}
    metadata |= dict(bos_token_id=2, eos_token_id=1, unknown_token_id=3, add_space_prefix=False)
    found = tokenizer_of({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    assert found.encode("a   ab") == [2, 4, 11, 12] and found.encode(" a  b") == [2, 9, 10, 5]
    assert found.decode([4, 11, 12, 9]) == "a   ab a" and found.eos_token_ids == (1, 13)
    metadata |= dict(model="gemma4", scores=None, merges=["▁ ▁", "▁▁ ▁", "▁ a", "a b"])  # Gemma 4 has merges
    again = tokenizer_of({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    assert again.encode("a   ab") == found.encode("a   ab") and again.encode("\n") == [2, 8]


SPLITS = {
    "llama-bpe": ["I", "'ll", " pay", " ", "123", "4", "!!\n", " ok"],
    "qwen2": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "!!\n", " ok"],
    "qwen35": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "!!\n", " ok"],
    "gpt-4o": ["I'll", " pay", " ", "123", "4", "!!\n", " ok"],
    "tekken": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "!!\n", " ok"],
    "gpt-2": ["I", "'ll", " pay", " 1234", "!!", "\n", " ok"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_words_of_byte_level_vocabularies(pre):
    """Texts are split as llama.cpp's names say: a vocabulary of bytes has no merges but one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "ab"]
    metadata = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [1] * 257, "merges": ["a b"]}
    found = tokenizer_of({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    pieces = found.backend.pre_tokenizer.pre_tokenize_str("I'll pay 1234!!\n ok")
    text = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in pieces]
    assert text == SPLITS[pre]


def test_a_template_with_named_tokens():
    metadata = files.tokenizer_metadata(tiny.tokenizer().to_str(), "gpt-2")
    metadata |= {"tokenizer.ggml.eos_token_id": tiny.IM_END, "tokenizer.chat_template": TEMPLATE}
    metadata |= {"tokenizer.chat_template.tool_use": "tools"}
    found = tokenizer_of(metadata)
    assert found.apply_chat_template([dict(role="user", content="Hi")]) == "<user>Hi<|im_end|>"
    assert found.tool_template == "tools" and found.eos_token_ids[0] == tiny.IM_END
    assert_same_ids(found, tiny.tokenizer(), ["the thing and the end", "<|im_start|>x", "你🚀"])


def test_a_large_vocabulary_opens_within_seconds(tmp_path):
    """250,000 tokens with scores, whose merges are found; in seconds of the processor."""
    letters = np.random.default_rng(1).integers(97, 123, (249_000, 7), np.uint8)
    words = {word.tobytes()[: 2 + i % 6].decode() for i, word in enumerate(letters)}
    tokens = ["<unk>", *(chr(c) for c in range(97, 123)), *sorted(words)]
    tokens += [f"▁{i}" for i in range(250_000 - len(tokens))]
    metadata = {"model": "llama", "tokens": tokens, "token_type": [2] + [1] * (len(tokens) - 1)}
    metadata["scores"] = [-float(i) for i in range(len(tokens))]
    path = tmp_path / "large.gguf"
    stored = {"token_embd.weight": (np.zeros((1, 32), np.float32), files.F32)}
    files.write_file(path, "llama", stored, {f"tokenizer.ggml.{key}": x for key, x in metadata.items()})
    start = time.process_time()
    found = read_gguf_tokenizer(open_gguf(path), 250_000)
    seconds = time.process_time() - start
    print(f"{seconds:.2f} s")
    assert seconds < 10 and found.backend.get_vocab_size() == 250_000
