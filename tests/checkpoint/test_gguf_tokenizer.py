"""Tokenizers in GGUF files give the ids of the tokenizer.json that they were made of."""

import json
import time

import numpy as np
import pytest
import tiny
import tokenizers
from paths import DATA, STORIES
from tokenizers import Regex, pre_tokenizers

import xinfer_jax as xj
from xinfer_jax.formats.gguf_file import GgufFile, open_gguf
from xinfer_jax.tokenization.gguf_tokenizer import _WORDS, read_gguf_tokenizer

pytest.importorskip("gguf")
import gguf_files as files

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

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
    """1,000 texts. Its chat template and EOS ids are those of the directory."""
    settings = json.loads((QWEN / "tokenizer_config.json").read_text())
    metadata = files.tokenizer_metadata(QWEN / "tokenizer.json", "qwen2", 151936)
    metadata |= {"tokenizer.ggml.eos_token_id": 151645, "tokenizer.ggml.bos_token_id": 151643}
    metadata |= {"tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": settings["chat_template"]}
    found = tokenizer_of(metadata)
    backend = tokenizers.Tokenizer.from_file(str(QWEN / "tokenizer.json"))
    assert_same_ids(found, backend, [*texts(1000), "<|im_start|>user\nHi<|im_end|>", "e\u0301 <tool_call>"])
    source = xj.Tokenizer.from_dir(QWEN)
    gaps = {source.backend.token_to_id(f"<|{name}|>") for name in ("fim_pad", "repo_name", "file_sep")}
    assert {*found.eos_token_ids} == {*source.eos_token_ids} | gaps  # as in llama.cpp
    talk = [dict(role="system", content="Be brief."), dict(role="user", content="Hi")]
    assert found.apply_chat_template(talk) == source.apply_chat_template(talk)


@pytest.mark.skipif(not STORIES.is_dir(), reason="the shared data are absent")
def test_ids_of_a_sentencepiece_vocabulary():
    """Its merges follow from scores. A text begins with BOS and a space, unknown characters are bytes."""
    metadata = files.tokenizer_metadata(STORIES / "tokenizer.json")
    found = tokenizer_of(metadata | {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2})
    backend = tokenizers.Tokenizer.from_file(str(STORIES / "tokenizer.json"))
    assert_same_ids(found, backend, ["Once upon a time", "  two  spaces ", "</s>x", *texts(200)])
    assert found.eos_token_ids == (2,) and found.encode("a")[0] == 1


def test_spaces_that_are_tokens():
    """Gemma's vocabulary: no prefix. User-defined tokens with spaces are merged first, end_of_turn ends."""
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
    "kimi-k2": ["I'll", " pay", " ", "123", "4", "!!\n", " ok"],
    "youtu": ["I'll", " pay", " ", "1", "2", "3", "4", "!!\n", " ok"],
    "tekken": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "!!\n", " ok"],
    "gpt-2": ["I", "'ll", " pay", " 1234", "!!", "\n", " ok"],
    "smollm": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "!!", "\n", " ok"],
    "default": ["I", "'", "ll", " pay", " ", "123", "4", "!!", "\n", " ok"],
    "deepseek-coder": ["I", "'", "ll", " pay", " ", "1", "2", "3", "4", "!!", "\n", " ok"],
    "deepseek-llm": ["I", "'", "ll", " pay", " ", "1234", "!!", "\n", " ok"],
    "deepseek-v3": ["I", "'ll", " pay", " ", "123", "4", "!!\n", " ok"],
    "bailingmoe": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "!!\n", " ok"],
    "seed-coder": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "!!", "\n", " ok"],
    "minicpm5": ["I", "'ll", " pay", " ", "123", "4", "!!\n", " ok"],
    "viking": ["I'll", " pay", " ", "1", "2", "3", "4", "!!\n", " ok"],
}


def byte_level(pre):
    """A tokenizer whose vocabulary of bytes has no merges but one."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    metadata = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [1] * 257, "merges": ["a b"]}
    metadata["add_bos_token"] = False
    return tokenizer_of({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


@pytest.mark.parametrize("pre", SPLITS)
def test_words_of_byte_level_vocabularies(pre):
    """Texts are split as llama.cpp's names say."""
    pieces = byte_level(pre).backend.pre_tokenizer.pre_tokenize_str("I'll pay 1234!!\n ok")
    text = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in pieces]
    assert text == SPLITS[pre]


def in_turn(*parts):
    """Pre-tokenizers as the tokenizer.json of a model has them."""
    splits = [pre_tokenizers.Split(Regex(x), "isolated") if isinstance(x, str) else x for x in parts]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])


DIGITS = pre_tokenizers.Digits(individual_digits=True)
PUBLISHED = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([DIGITS, pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "deepseek-coder": in_turn(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGITS),
    "kimi-k2": in_turn(
        r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "bloom": in_turn(" ?[^(\\s|[.,!?…。，、।۔،])]+"),
}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_words_are_those_of_published_tokenizers(pre):
    ours = byte_level(pre).backend.pre_tokenizer
    for text in texts(400):
        assert ours.pre_tokenize_str(text) == PUBLISHED[pre].pre_tokenize_str(text), text


@pytest.mark.parametrize("pre", [pre for pre in _WORDS if pre not in SPLITS])
def test_every_name_splits_without_loss(pre):
    for text in texts(20):
        parts = byte_level(pre).backend.pre_tokenizer.pre_tokenize_str(text)
        assert [span for _, span in parts] and sum(end - start for _, (start, end) in parts) == len(text)


WORDS = {"model": "gpt2", "pre": "gpt-2", "merges": ["a b"], "add_bos_token": False}


def named(**changes):
    """A small vocabulary, with changes."""
    return tokenizer_of({f"tokenizer.ggml.{key}": x for key, x in (WORDS | changes).items() if x is not None})


def test_tokens_that_end_an_answer():
    """The tokens are found by id and by text, as llama.cpp knows them. Control tokens that are typed as text
    become control tokens.
    """
    tokens = ["a", "b", "ab", "<|im_end|>", "<|fim_pad|>", "</s>", "<|end|>", "<|fim_prefix|>"]
    kinds = [1, 1, 1, 1, 3, 1, 4, 1]
    found = named(tokens=tokens, token_type=kinds, eot_token_id=2)
    assert {*found.eos_token_ids} == {2, 3, 4, 6} and kinds[3] == 1
    assert found.encode("a<|im_end|><|fim_prefix|>b", False) == [0, 3, 7, 1]
    assert found.decode([0, 3, 7, 1]) == "ab"
    assert {*named(tokens=tokens, token_type=kinds, fim_pad_token_id=2).eos_token_ids} == {2, 3, 6}
    assert {*named(tokens=tokens, token_type=kinds, eos_token_ids=[0, 1]).eos_token_ids} >= {0, 1, 3}
    with pytest.raises(xj.InputError, match="eos_token_ids must be an array of int, got 3"):
        named(tokens=tokens, token_type=kinds, eos_token_ids=3)
    harmony = [*tokens[:6], "<|end|>", "<|return|>", "<|call|>"]
    assert {*named(tokens=harmony, token_type=None).eos_token_ids} == {3, 4, 7, 8}
    scores = dict(model="llama", pre=None, merges=None, scores=[0] * 8, add_space_prefix=False)
    assert 5 in named(**scores, tokens=tokens, token_type=kinds, eos_token_id=3).eos_token_ids
    gemma = [*tokens[:7], "<|tool_response>"]
    assert 5 not in named(**scores, tokens=gemma, token_type=kinds, eos_token_id=3).eos_token_ids


def test_tokens_that_metadata_leave_out():
    """The ids that llama.cpp takes, and an error where a token that shall be added is unknown."""
    tokens = ["<unk>", "<s>", "<end>", "a"]
    metadata = dict(
        model="llama", pre=None, merges=None, scores=[0.0] * 4, tokens=tokens, token_type=[2, 3, 3, 1]
    )
    found = named(**metadata, add_bos_token=None, add_space_prefix=False)
    assert found.encode("a") == [1, 3] and found.eos_token_ids == (2,)
    for changes, message in (
        (dict(add_bos_token=True), "add_bos_token is true, and tokenizer.ggml.bos_token_id is no token"),
        (dict(add_eos_token=True, eos_token_id=9), "add_eos_token is true, and tokenizer.ggml.eos_token_id"),
        (dict(tokens=["a", "b", "a"]), "the vocabulary has the token 'a' twice"),
    ):
        with pytest.raises(xj.InputError, match=message):
            named(**dict(tokens=["a", "b", "ab"], token_type=[1, 1, 1]) | changes)


def test_a_template_with_named_tokens():
    metadata = files.tokenizer_metadata(tiny.tokenizer().to_str(), "gpt-2")
    metadata |= {"tokenizer.ggml.eos_token_id": tiny.IM_END, "tokenizer.chat_template": TEMPLATE}
    metadata |= {"tokenizer.chat_template.tool_use": "tools"}
    found = tokenizer_of(metadata)
    assert found.apply_chat_template([dict(role="user", content="Hi")]) == "<user>Hi<|im_end|>"
    assert found.tool_template == "tools" and found.eos_token_ids[0] == tiny.IM_END
    assert_same_ids(found, tiny.tokenizer(), ["the thing and the end", "<|im_start|>x", "你🚀"])


@pytest.mark.full
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
