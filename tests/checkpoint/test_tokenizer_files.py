"""Tokenizer files: broken ones, special tokens declared in other files, no chat template; long prompts."""

import importlib.util
import json
import warnings

import pytest
import tiny
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import xinfer_jax as xj
from xinfer_jax.text import encode_prompt
from xinfer_jax.tokenization import tokenizer_limits

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

SMALL = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "model.safetensors.index.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("sharded"), shards=2)


@pytest.fixture
def copied(sharded, tmp_path):
    """A checkpoint with shards whose files a test may replace: links to one that is written once."""
    for file in sharded.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def replace_file(path, name: str, content: str | bytes) -> None:
    (path / name).unlink(missing_ok=True)
    (path / name).write_bytes(content.encode() if isinstance(content, str) else content)


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["directory", "loop", "broken-link"])
@pytest.mark.parametrize("name", SMALL)
def test_a_directory_or_broken_link_instead_of_a_file_is_rejected(copied, name, kind):
    (copied / name).unlink(missing_ok=True)
    if kind == "directory":
        (copied / name).mkdir()
    else:
        (copied / name).symlink_to(copied / (name if kind == "loop" else "nothing"))
    assert f"{copied / name} is a directory, a broken link" in tiny.load_error(copied)


def test_a_json_file_that_is_too_large_is_rejected(copied):
    replace_file(copied, "tokenizer_config.json", '{"a": 1}')
    with (copied / "tokenizer_config.json").open("r+b") as file:
        file.truncate(2**40)  # sparse
    assert "tokenizer_config.json has 1099511627776 bytes" in tiny.load_error(copied)


def test_shards_may_be_links(copied):
    """Files in a hub's cache are links to blobs elsewhere."""
    assert xj.load_model(copied).params


BASE = json.loads(tiny.tokenizer().to_str())


def template_of(*pieces: dict) -> dict:
    return BASE | dict(
        post_processor=dict(type="TemplateProcessing", single=pieces, pair=[], special_tokens={})
    )


BAD_TOKENIZERS = {
    "no-vocabulary": BASE | dict(model=BASE["model"] | dict(vocab={}, merges=[])),
    "no-model": {name: value for name, value in BASE.items() if name != "model"},
    "negative-id": BASE | dict(model=BASE["model"] | dict(vocab={"a": -1}, merges=[])),
    "unknown-merge": BASE | dict(model=BASE["model"] | dict(merges=["zz qq"])),
    "bad-expression": BASE
    | dict(pre_tokenizer=dict(type="Split", pattern=dict(Regex="("), behavior="Isolated", invert=False)),
    # These load, and fail on a text.
    "no-unknown-token": BASE | dict(model=dict(type="WordLevel", unk_token="?", vocab={"a": 0})),
    "no-second-text": template_of({"Sequence": {"id": "B", "type_id": 0}}),
    "no-such-token": template_of({"SpecialToken": {"id": "nope", "type_id": 0}}),
}


@pytest.mark.parametrize("name", BAD_TOKENIZERS)
def test_a_broken_tokenizer_is_rejected(tmp_path, name):
    """It is also rejected if the tokenizers library panics, which is not an Exception."""
    tiny.write_json(tmp_path / "tokenizer.json", BAD_TOKENIZERS[name])
    with pytest.raises(xj.InputError, match="vocabulary|not a readable tokenizer|cannot encode"):
        xj.Tokenizer.from_dir(tmp_path).encode("hello")


def test_truncation_and_padding_of_the_file_are_disabled(tmp_path):
    backend = tiny.tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert xj.Tokenizer.from_dir(tmp_path).encode("xyz") == tiny.tokenizer().encode("xyz").ids


DOUBLES = [normalizers.Replace("a", "aa")] * 16
TABLE = (4).to_bytes(4, "little") + bytes(4) + b"a" * 1000 + b"\0"  # a trie of 4 bytes, and a text
GROWTH = {
    "normalizer": dict(normalizer=normalizers.Sequence(DOUBLES)),
    "within": dict(normalizer=normalizers.Sequence([normalizers.Sequence(DOUBLES)])),
    "one-step": dict(normalizer=normalizers.Replace("a", "a" * 1000)),
    "pattern": dict(normalizer=normalizers.Replace(tokenizers.Regex("[a-z]"), "a" * 1000)),
    "prefix": dict(normalizer=normalizers.Prepend("a" * 100_000)),
    "table": dict(normalizer=normalizers.Precompiled(TABLE)),
    "many-steps": dict(normalizer=normalizers.Sequence([normalizers.NFC()] * 65)),
    "bytes": dict(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 10)),
    "decoder": dict(decoder=decoders.Sequence([decoders.Replace("a", "aa")] * 16)),
}


@pytest.mark.parametrize("name", GROWTH)
def test_steps_that_lengthen_a_text_are_limited(tmp_path, name):
    """A short text would take gigabytes."""
    backend = tiny.tokenizer()
    for what, component in GROWTH[name].items():
        setattr(backend, what, component)
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    with pytest.raises(xj.InputError, match=f"the {what} of .* steps may make a text .* times as long"):
        xj.Tokenizer.from_dir(tmp_path)


def test_what_is_added_to_a_text_is_limited(tmp_path, monkeypatch):
    backend = tiny.tokenizer()
    token = backend.id_to_token(tiny.IM_END)
    backend.post_processor = processors.TemplateProcessing(
        [*[token] * 1025, "$A"], special_tokens=[(token, tiny.IM_END)]
    )
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    with pytest.raises(xj.InputError, match="adds 1025 tokens to each text, the limit is 1024"):
        xj.Tokenizer.from_dir(tmp_path)
    monkeypatch.setattr(tokenizer_limits, "_MAX_AROUND", 2000)
    monkeypatch.setattr(tokenizer_limits, "_MAX_ADDED", 100)
    tiny.write_json(
        tmp_path / "tokenizer_config.json", {"extra_special_tokens": [f"<{i}>" for i in range(101)]}
    )
    with pytest.raises(xj.InputError, match="101 control and user-defined tokens, the limit is 100"):
        xj.Tokenizer.from_dir(tmp_path)
    monkeypatch.setattr(tokenizer_limits, "_MAX_BYTES", 100)
    with pytest.raises(xj.InputError, match="tokenizer.json has .* bytes, the limit is 100"):
        xj.Tokenizer.from_dir(tmp_path)


# --- special tokens -----------------------------------------------------------------------------------------


def added(content: str, **options) -> dict:
    return dict(content=content, lstrip=False, rstrip=False, single_word=False, normalized=False) | options


TEXT = "a <x> the <y><|im_end|> b"
PLAIN = "a <x> the <y> b"  # the decoded text without further special tokens
DECLARED = {
    # name: (tokenizer_config.json, special_tokens_map.json, the text decoded: what transformers gives)
    "none": ({}, {}, PLAIN),
    "decoder": ({"added_tokens_decoder": {"300": added("<x>", special=True)}}, {}, "a  the <y> b"),
    "decoder-old": ({"added_tokens_decoder": {"257": added("the", special=True)}}, {}, "a <x>  <y> b"),
    "decoder-not-special": ({"added_tokens_decoder": {"300": added("<x>", special=False)}}, {}, PLAIN),
    "decoder-eats-spaces": (
        {"added_tokens_decoder": {"300": added("<x>", special=True, rstrip=True)}}, {}, "a the <y> b",
    ),
    "no-longer-special": ({"added_tokens_decoder": {"271": added("<|im_end|>", special=False)}}, {}, PLAIN),
    "eos": ({"eos_token": "<x>"}, {}, "a  the <y> b"),
    "eos-object": ({"eos_token": added("<x>", __type="AddedToken")}, {}, "a  the <y> b"),
    "eos-in-decoder": (
        {"eos_token": "<x>", "added_tokens_decoder": {"300": added("<x>", special=False)}},
        {}, "a  the <y> b",
    ),
    "custom-name": ({"image_token": "<x>", "add_bos_token": True}, {}, "a  the <y> b"),
    "extra": ({"extra_special_tokens": ["<x>", "<y>"]}, {}, "a  the  b"),
    "extra-by-name": ({"extra_special_tokens": {"image_token": "<x>"}}, {}, "a  the <y> b"),
    "additional": ({"additional_special_tokens": ["<y>"]}, {}, "a <x> the  b"),
    "map": ({}, {"eos_token": added("<x>"), "additional_special_tokens": ["<y>"]}, "a  the  b"),
    "map-overrides": ({"eos_token": "<y>"}, {"eos_token": "<x>"}, "a  the <y> b"),
    "map-ignored-with-decoder": ({"added_tokens_decoder": {}}, {"eos_token": "<x>"}, PLAIN),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", DECLARED)
def test_special_tokens_declared_beside_the_tokenizer(tmp_path, name):
    """The expected texts are those of transformers; where it is installed, its results are compared."""
    settings, mapped, text = DECLARED[name]
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    tiny.write_json(tmp_path / "tokenizer_config.json", settings)
    tiny.write_json(tmp_path / "special_tokens_map.json", mapped)
    tokenizer = xj.Tokenizer.from_dir(tmp_path)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == text
    if "no-longer" not in name:
        assert tokenizer.decode(ids, skip_special_tokens=False).replace(" ", "") == TEXT.replace(" ", "")
    if importlib.util.find_spec("transformers"):
        from transformers import PreTrainedTokenizerFast

        theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        assert ids == theirs.encode(TEXT) and text == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"x": added("<x>")}},
        {"added_tokens_decoder": {"300": "<x>", "301": 5}},
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"300": {"content": 5}}},
        {"added_tokens_decoder": {"300": {"lstrip": "x", "content": "<x>"}}},
        {"extra_special_tokens": 5},
        {"extra_special_tokens": [None]},
        {"eos_token": {"text": "<x>"}},
        {"eos_token": "\ud800"},
    ],
    ids=lambda settings: ascii(settings)[:60],
)
def test_invalid_special_tokens_are_rejected(tmp_path, settings):
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    tiny.write_json(tmp_path / "tokenizer_config.json", settings)
    with pytest.raises(xj.InputError, match="special tokens cannot be read"):
        xj.Tokenizer.from_dir(tmp_path)


# --- no chat template ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A checkpoint without a chat template, and without ChatML's tokens."""
    path = tiny.write(tmp_path_factory.mktemp("plain"), tokenizer_config=None)
    backend = tokenizers.Tokenizer(tiny.tokenizer().model)
    backend.pre_tokenizer = tiny.tokenizer().pre_tokenizer
    backend.decoder = tiny.tokenizer().decoder
    backend.save(str(path / "tokenizer.json"))
    return path


def test_without_a_template_a_text_is_continued_as_it_is(plain):
    model = xj.load_model(plain)
    with pytest.warns(UserWarning, match="no chat template: the prompt is continued as it is"):
        ids = encode_prompt(model, "the thing")
    assert ids == model.tokenizer.encode("the thing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert encode_prompt(model, "the thing", raw=True) == ids


@pytest.mark.parametrize("system, prompt", [("s", "a"), (None, [{"role": "user", "content": "a"}])])
def test_without_a_template_a_conversation_is_rejected(plain, system, prompt):
    with pytest.raises(xj.InputError, match="no chat template: it takes neither a conversation nor a system"):
        encode_prompt(xj.load_model(plain), prompt, system=system)


# --- prompts that are certainly too long --------------------------------------------------------------------


def test_ten_megabytes_are_rejected_without_tokenizing(good, monkeypatch):
    model = xj.load_model(good)
    monkeypatch.setattr(model.tokenizer, "encode", lambda *_, **__: pytest.fail("tokenized"))
    with pytest.raises(xj.InputError, match="at least [0-9]+ tokens .* context limit 256: shorten"):
        encode_prompt(model, "the " * 2_500_000)


def byte_fallback() -> tokenizers.Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "aa": 258}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "a")], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


@pytest.mark.parametrize(
    "text",
    ["the the the", "a" * 100, "e\u0301" * 40, "K" * 50, "<|im_start|>" * 9, "한" * 20, "🚀 x"],
    ids=ascii,
)
@pytest.mark.parametrize("kind", ["bytes", "composed", "fallback"])
def test_fewest_ids_is_a_lower_bound(kind, text):
    backend = byte_fallback() if kind == "fallback" else tiny.tokenizer()
    if kind == "composed":
        backend.normalizer = normalizers.NFC()
    tokenizer = xj.Tokenizer(backend, chat_template=None, special_tokens={}, eos_token_ids=())
    assert 0 < tokenizer.fewest_ids(text) <= len(tokenizer.encode(text))


def _strips(backend):
    backend.normalizer = normalizers.Strip()


def _drops_spaces(backend):
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), backend.pre_tokenizer])


def _removes(backend):
    backend.pre_tokenizer = pre_tokenizers.Split("a", "removed")


def _absorbs_spaces(backend):
    backend.add_special_tokens([tokenizers.AddedToken("<x>", rstrip=True)])


def _replaces(backend):
    backend.normalizer = normalizers.Replace("aaaa", "b")


@pytest.mark.parametrize("lossy", [_strips, _drops_spaces, _removes, _absorbs_spaces, _replaces])
def test_fewest_ids_is_0_for_lossy_tokenizers(lossy):
    backend = tiny.tokenizer()
    lossy(backend)
    tokenizer = xj.Tokenizer(backend, chat_template=None, special_tokens={}, eos_token_ids=())
    assert tokenizer.fewest_ids(" " * 1000) == 0
