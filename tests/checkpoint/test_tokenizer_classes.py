"""Settings that transformers applies to tokenizer.json: its classes, spaces, special tokens, Mistral's words.

The ids are those of transformers 5.24; where it is installed, it is asked again.
"""

import logging
from logging.handlers import QueueHandler
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import tiny
import tokenizers
from paths import DATA
from tokenizers import decoders, models, normalizers, pre_tokenizers

import xinfer_jax as xj
from xinfer_jax.tokenization import tokenizer_classes
from xinfer_jax.tokenization.tokenizer_classes import tokenizer_class

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

LLAMA = dict(model_type="llama")
TEXT = "  Ab<s>a b"
TEXTS = (
    TEXT,
    "It's 12345 (the) cat",
    " hi<|im_end|> the</s> c  d",
    "e\u0301 你🚀\n\nx",
    "▁a b",
    "",
    "I'LL/x\r\n",
)


def sentencepiece() -> tokenizers.Tokenizer:
    """Returns a tokenizer in the form of Llama 2: the normalizer adds a space to each text between special
    tokens.
    """
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abA", "▁a", "▁A", "▁▁"]
    vocabulary = {text: i for i, text in enumerate(texts)}
    merges = [("▁", "a"), ("▁", "A"), ("▁", "▁")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return backend


def large(more: int = 100_000) -> tokenizers.Tokenizer:
    """Returns a tokenizer with the number of tokens that `fix_mistral_regex` asks for."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    texts = [*letters, *(f"{a}{b}" for a in "ABab" for b in "ABab"), *(f"<{i}>" for i in range(more))]
    merges = [(a, b) for a in "ABab" for b in "ABab"]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def directory(path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any], **settings: Any) -> Path:
    backend.save(str(path / "tokenizer.json"))
    tiny.write_json(path / "tokenizer_config.json", settings)
    tiny.write_json(path / "config.json", config)
    return path


def opened(path: Path) -> tuple[xj.Tokenizer, list[str]]:
    """The tokenizer, and what is said when it is read."""
    records = Queue[logging.LogRecord]()
    handler = QueueHandler(records)
    logging.getLogger("xinfer_jax").addHandler(handler)
    try:
        tokenizer = xj.Tokenizer.from_dir(path)
    finally:
        logging.getLogger("xinfer_jax").removeHandler(handler)
    return tokenizer, [records.get().getMessage() for _ in range(records.qsize())]


S, A, B, UPPER, SA, SUPPER, SS = 259, 260, 261, 262, 263, 264, 265  # "▁", "a", "b", "A", "▁a", "▁A", "▁▁"
# name: (tokenizer_config.json, ids of TEXT)
LLAMA_SETTINGS = {
    "as in the file": (dict(tokenizer_class="PreTrainedTokenizerFast"), [SS, SUPPER, B, 1, SA, S, B]),
    "not legacy": (dict(tokenizer_class="LlamaTokenizer"), [S, SUPPER, B, 1, A, S, B]),
    "fast": (dict(tokenizer_class="LlamaTokenizerFast", legacy=False), [S, SUPPER, B, 1, A, S, B]),
    "legacy": (dict(tokenizer_class="LlamaTokenizer", legacy=True), [S, SUPPER, B, 1, SA, S, B]),
    "no prefix": (
        dict(tokenizer_class="LlamaTokenizer", add_prefix_space=False, legacy=True),
        [S, SUPPER, B, 1, A, S, B],
    ),
    "code": (dict(tokenizer_class="CodeLlamaTokenizer", legacy=True), [S, SUPPER, B, 1, A, S, B]),
}


@pytest.mark.parametrize("name", LLAMA_SETTINGS)
def test_spaces_before_text_follow_the_settings_of_llama(tmp_path, name):
    settings, ids = LLAMA_SETTINGS[name]
    tokenizer, said = opened(directory(tmp_path, sentencepiece(), LLAMA, **settings))
    assert tokenizer.encode(TEXT) == ids and not said
    has_prefix = tokenizer.encode("a") == [SA]
    assert has_prefix == (name != "no prefix") and tokenizer.decode(tokenizer.encode("a")) == "a"


def test_special_tokens_that_a_class_has(tmp_path):
    """A template may name them although tokenizer_config.json does not, unless it says null."""
    path = directory(tmp_path, sentencepiece(), LLAMA, tokenizer_class="LlamaTokenizer", eos_token=None)
    assert opened(path)[0].special_tokens == dict(unk_token="<unk>", bos_token="<s>")


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer"])
def test_a_space_before_a_text_of_bytes(tmp_path, name):
    config = dict(model_type="qwen3")
    path = directory(tmp_path, tiny.tokenizer(), config, tokenizer_class=name, add_prefix_space=True)
    tokenizer, said = opened(path)
    assert tokenizer.decode(tokenizer.encode("the")) == " the" and not said
    path = directory(tmp_path, tiny.tokenizer(), config, tokenizer_class=f"{name}Fast")
    assert opened(path)[0].decode(tokenizer.encode("the")) == " the"
    assert opened(path)[0].encode("the") == tiny.tokenizer().encode("the").ids


def test_other_words_than_those_of_the_file_are_said(tmp_path):
    """A warning says that the words differ, for example for SmolLM2, whose file splits digits and whose class
    does not.
    """
    backend = tiny.tokenizer()
    backend.pre_tokenizer = pre_tokenizers.Split("e", "isolated")
    path = directory(tmp_path, backend, LLAMA, tokenizer_class="GPT2Tokenizer")
    tokenizer, (said,) = opened(path)
    assert tokenizer.encode("the") == backend.encode("the").ids
    assert "not by the rules of GPT2Tokenizer" in said and "set tokenizer_class to PreTrained" in said
    unigram = tokenizers.Tokenizer(models.Unigram([("a", 0.0), ("b", 0.0)], 0))
    path = directory(tmp_path, unigram, LLAMA, tokenizer_class="LlamaTokenizer")
    assert "not by the rules of LlamaTokenizer" in opened(path)[1][0]
    path = directory(tmp_path, tiny.tokenizer(), LLAMA, tokenizer_class="CohereTokenizer")
    assert "the rules of CohereTokenizer are not followed" in opened(path)[1][0]


def test_special_tokens_may_be_split(tmp_path):
    path = directory(tmp_path, tiny.tokenizer(), LLAMA, split_special_tokens=True)
    tokenizer, (said,) = opened(path)
    assert tiny.IM_END not in tokenizer.encode("a<|im_end|>") and "split_special_tokens is true" in said
    for name, text in tokenizer.files().items():
        (tmp_path / name).write_text(text)
    assert tiny.IM_END not in opened(tmp_path)[0].encode("a<|im_end|>")


def test_cleaned_spaces_are_said(tmp_path):
    settings = dict(clean_up_tokenization_spaces=True)
    assert not opened(directory(tmp_path, tiny.tokenizer(), LLAMA, **settings))[1]
    unigram = tokenizers.Tokenizer(models.Unigram([("a", 0.0), ("b", 0.0)], 0))
    assert (
        "clean_up_tokenization_spaces is not" in opened(directory(tmp_path, unigram, LLAMA, **settings))[1][0]
    )


def test_tokens_of_earlier_versions(tmp_path):
    """added_tokens.json counts unless tokenizer_config.json has its own list."""
    path = directory(tmp_path, tiny.tokenizer(), LLAMA, eos_token="<x>")
    tiny.write_json(path / "added_tokens.json", {"<x>": 272, "<y>": 273})
    tokenizer = opened(path)[0]
    assert tokenizer.encode("<x><y>") == [272, 273] and tokenizer.decode([272, 273]) == "<y>"
    tiny.write_json(path / "tokenizer_config.json", dict(added_tokens_decoder={}))
    assert 272 not in opened(path)[0].encode("<x><y>")
    tiny.write_json(path / "tokenizer_config.json", {})
    tiny.write_json(path / "added_tokens.json", {"<x>": "272"})
    with pytest.raises(xj.InputError, match="special tokens cannot be read"):
        xj.Tokenizer.from_dir(path)


OLD = dict(model_type="mistral3", transformers_version="4.50.1")
MISTRAL = [
    (True, OLD, True), (True, dict(model_type="mistral"), True), (True, LLAMA, False), (False, OLD, False),
    (True, OLD | dict(transformers_version="5.0.0.dev0"), True), (None, OLD, None),
    (True, OLD | dict(transformers_version="5.0.0"), False),
    (True, OLD | dict(model_type="ministral3"), False),
]  # fmt: skip


@pytest.mark.parametrize("fix, config, is_fixed", MISTRAL, ids=range(len(MISTRAL)))
def test_words_of_mistral(tmp_path, fix, config, is_fixed, monkeypatch):
    """The regular expression splits "aB", as the one of bytes does not. is_fixed: None: a warning instead."""
    monkeypatch.setattr(tokenizer_classes, "_MISTRAL_LEAST_VOCABULARY", 1)
    settings = {} if fix is None else dict(fix_mistral_regex=fix)
    tokenizer, said = opened(directory(tmp_path, large(0), config, **settings))
    assert (len(tokenizer.encode("aB")) == 2) == bool(is_fixed)
    assert len(said) == (is_fixed is None)
    assert all("set fix_mistral_regex to true" in one for one in said)


CLASSES = [
    ("LlamaTokenizerFast", "llama", False, "LlamaTokenizer"),
    ("LlamaTokenizer", "llama", True, "TokenizersBackend"),  # Llama 3's bytes
    ("LlamaTokenizerFast", "mistral", False, "TokenizersBackend"),
    ("LlamaTokenizerFast", "qwen2", True, "Qwen2Tokenizer"),  # distilled from DeepSeek-R1
    ("PreTrainedTokenizerFast", "qwen3", True, "PreTrainedTokenizer"),
    (None, "gemma3", False, "GemmaTokenizer"),
    (None, "llama", False, "TokenizersBackend"),
    (None, ["x"], False, "TokenizersBackend"),
]


@pytest.mark.parametrize("declared, model_type, is_byte_level, expected", CLASSES, ids=range(len(CLASSES)))
def test_class_of_a_checkpoint(declared, model_type, is_byte_level, expected):
    config = dict(model_type=model_type)
    assert tokenizer_class(dict(tokenizer_class=declared), config, is_byte_level) == expected
    assert tokenizer_class({}, config | dict(tokenizer_class=declared), is_byte_level) == expected


SPM = DATA / "stories260K" / "tokenizer.json"
QWEN = DATA / "qwen2.5-0.5b-instruct" / "tokenizer.json"
LIVE = [
    # of code's class they add BOS although the file does not
    *((sentencepiece, LLAMA, settings) for name, (settings, _) in LLAMA_SETTINGS.items() if name != "code"),
    *((SPM, LLAMA, dict(tokenizer_class="LlamaTokenizer", legacy=legacy)) for legacy in (True, False)),
    (sentencepiece, dict(model_type="mistral"), dict(tokenizer_class="LlamaTokenizer")),
    *(
        (tiny.tokenizer, dict(model_type=model_type), dict(tokenizer_class=name, add_prefix_space=prefix))
        for model_type in ("qwen2", "qwen3", "qwen3_5", "llama")
        for name in ("Qwen2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast")
        for prefix in (False, True)
    ),
    (tiny.tokenizer, LLAMA, dict(tokenizer_class="PreTrainedTokenizerFast", split_special_tokens=True)),
    (QWEN, dict(model_type="qwen2"), dict(tokenizer_class="Qwen2Tokenizer")),
    (QWEN, dict(model_type="qwen2"), dict(tokenizer_class="Qwen2Tokenizer", add_prefix_space=True)),
    *((large, config, dict(fix_mistral_regex=fix)) for fix, config, _ in MISTRAL),
]


@pytest.mark.full
@pytest.mark.parametrize("file, config, settings", LIVE, ids=range(len(LIVE)))
def test_transformers_gives_the_same_ids(tmp_path, file, config, settings):
    transformers = pytest.importorskip("transformers")
    if isinstance(file, Path) and not file.is_file():
        pytest.skip(f"{file} is not there")
    backend = tokenizers.Tokenizer.from_file(str(file)) if isinstance(file, Path) else file()
    path = directory(tmp_path, backend, config, **settings)
    own = opened(path)[0]
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert own.encode(text) == ids, text
        assert own.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
