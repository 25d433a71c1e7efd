"""Encoding, incremental detokenizing, chat templates in their sandbox, and the EOS ids of a checkpoint."""

import random
from datetime import datetime

import pytest
import tiny
import tokenizers
from paths import DATA
from tokenizers import processors

import xinfer_jax as xj
from xinfer_jax.tokenization.detokenizer import IncrementalDetokenizer
from xinfer_jax.tokenization.tokenizer import CHATML

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 你好"}]

TEXTS = {
    "ascii": "The cat and the other thing, singing on a hall.\n\n  Two spaces\ttab",
    "accents": "déjà vu, naïve Ångström",
    "combining": "e\u0301a\u0308\u0323 क्षि กำ",
    "cjk": "你好，世界。こんにちは 한국어",
    "emoji": "🚀🙂 👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🇫🇷",
    "right-to-left": "שלום مرحبا \u202eabc",
    "rare": "\U0010fffd\ue000\u2028𝔘𐍈",
    "control": "\x00\x01\x7f\x80",
    "replacement": "a\ufffdb\ufffd",
    "special-inside": "a <|im_end|> b",
    "spaces": "   leading and trailing   ",
}


def make_tokenizer(**options) -> xj.Tokenizer:
    """A tokenizer that does not come from a directory."""
    return xj.Tokenizer(
        tiny.tokenizer(), **dict(chat_template=None, special_tokens={}, eos_token_ids=()) | options
    )


def random_text(seed: int) -> str:
    """Characters of one to four bytes, without surrogates and U+FFFD."""
    draw = random.Random(seed)
    ranges = [
        (32, 126),
        (0xA0, 0x7FF),
        (0x800, 0xD7FF),
        (0xE000, 0xFFFC),
        (0x10000, 0x10FFFF),
        (0x1F300, 0x1F6FF),
        (0x300, 0x36F),
    ]
    return "".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.randint(1, 60)))


VALID = {name: text for name, text in TEXTS.items() if name != "replacement"} | {
    f"random-{seed}": random_text(seed) for seed in range(20)
}


# --- encode, decode -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_encode_and_decode_round_trip(name):
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(TEXTS[name])
    assert all(0 <= i < 272 for i in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXTS[name]
    assert tokenizer.decode(ids) == TEXTS[name].replace("<|im_end|>", "")


def test_special_tokens_around_a_text_can_be_left_out():
    tokenizer = make_tokenizer()
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tiny.ENDOFTEXT)]
    )
    inner = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [tiny.ENDOFTEXT, *inner] and tiny.ENDOFTEXT not in inner


@pytest.mark.parametrize("text", ["a\udcffb", "\ud83d", None, b"bytes", 7], ids=repr)
def test_encoding_rejects_what_is_not_text(text):
    with pytest.raises(xj.InputError, match="only valid Unicode text can be encoded"):
        make_tokenizer().encode(text)


# --- incremental detokenizing -------------------------------------------------------------------------------


def complete_prefix(data: bytes) -> str:
    """The text of the longest prefix of UTF-8 bytes that ends with a complete character."""
    for cut in range(4):
        try:
            return data[: len(data) - cut].decode()
        except UnicodeDecodeError:
            pass
    raise AssertionError("more than a character is missing")


@pytest.mark.parametrize("name", VALID)
def test_complete_characters_are_returned_at_once(name):
    """One id per byte, the hardest split: after each id, exactly the complete characters are returned."""
    text = VALID[name]
    data = VALID[name].encode()
    byte_ids = [_BYTE_IDS[byte] for byte in data]
    decoder = IncrementalDetokenizer(make_tokenizer())
    out = ""
    for i, token in enumerate(byte_ids):
        out += decoder.push(token)
        assert out == complete_prefix(data[: i + 1])
    assert out == text and decoder.finish() == ""


def _byte_ids() -> list[int]:
    """The id of every byte. Byte-level vocabularies write unprintable bytes as characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [
        tiny.tokenizer().token_to_id(chr(byte if byte in printable else next(others))) for byte in range(256)
    ]


_BYTE_IDS = _byte_ids()


def chunks_of(tokenizer: xj.Tokenizer, ids: list[int]) -> list[str]:
    decoder = IncrementalDetokenizer(tokenizer)
    return [*map(decoder.push, ids), decoder.finish()]


@pytest.mark.parametrize("seed", range(20))
def test_incremental_text_of_random_ids_equals_decode(seed):
    """The ids have bytes that are not UTF-8, special tokens, and ids without a token."""
    draw = random.Random(seed)
    ids = [draw.randrange(280) for _ in range(200)]
    chunks = chunks_of(make_tokenizer(), ids)
    assert "".join(chunks) == make_tokenizer().decode(ids) and sum(map(bool, chunks)) > 20


def test_a_replacement_character_in_the_text_is_kept():
    ids = make_tokenizer().encode("a\ufffdb\ufffd")
    assert "".join(chunks_of(make_tokenizer(), ids)) == "a\ufffdb\ufffd"


def test_a_push_decodes_few_ids():
    counts = []

    class Counting:
        def decode(self, ids, skip_special_tokens):
            counts.append(len(ids))
            return tokenizer_once.decode(ids)

    tokenizer_once = make_tokenizer()
    ids = tokenizer_once.encode("The cat and 你 🚀 the other thing. " * 20)
    assert "".join(chunks_of(Counting(), ids)) == tokenizer_once.decode(ids)
    assert max(counts) <= 8 and len(ids) > 500


REAL = {"sentencepiece": DATA / "stories260K", "qwen2.5": DATA / "qwen2.5-0.5b-instruct"}


@pytest.fixture(scope="module", params=REAL)
def real(request) -> xj.Tokenizer:
    if not (REAL[request.param] / "tokenizer.json").is_file():
        pytest.skip(f"{REAL[request.param]} is not there")
    return xj.Tokenizer.from_dir(REAL[request.param])


@pytest.mark.parametrize("name", VALID)
def test_real_tokenizers_detokenize_incrementally(real, name):
    ids = real.encode(VALID[name], add_special_tokens=False)
    chunks = chunks_of(real, ids)
    assert "".join(chunks) == real.decode(ids)
    assert not any("\ufffd" in chunk for chunk in chunks)


# --- chat template ------------------------------------------------------------------------------------------


def render(template: str | None, messages=MESSAGES, *, special_tokens=None, **kwargs) -> str:
    return make_tokenizer(chat_template=template, special_tokens=special_tokens or {}).apply_chat_template(
        messages, **kwargs
    )


def test_chatml_where_there_is_no_template():
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 你好<|im_end|>\n"
    assert render(None) == expected + "<|im_start|>assistant\n"
    assert render(None, add_generation_prompt=False) == expected


TEMPLATES = {
    # name: (template, text)
    "special-tokens": ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
    "no-tools-by-default": ("{% if tools %}T{% endif %}{{ tools is none }}", "True"),
    "kwargs": ("{{ enable_thinking }}{{ nothing is defined }}", "FalseFalse"),
    "blocks-are-trimmed": ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
    "tojson-keeps-unicode-and-html": (
        "{{ {'b': '<你>&\\'', 'a': [1, none, true]} | tojson }}",
        '{"b": "<你>&\'", "a": [1, null, true]}',
    ),
    "tojson-indent": ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
    "tojson-sorted-compact": (
        "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}",
        '{"a":2,"b":1}',
    ),
    "generation-tag": (
        "{% for m in messages %}[{% generation %}{{ m.role }}{% endgeneration %}]{% endfor %}",
        "[system][user]",
    ),
    "break": ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "system"),
    "continue": (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
        "user",
    ),
    "unused-exception": ("{% if false %}{{ raise_exception('no') }}{% endif %}ok", "ok"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_template_renders_as_expected(name):
    template, expected = TEMPLATES[name]
    assert (
        render(template, special_tokens=dict(bos_token="<s>", eos_token="</s>"), enable_thinking=False)
        == expected
    )


def test_strftime_now():
    before = datetime.now()
    text = render("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}")
    after = datetime.now()
    assert before.replace(microsecond=0) <= datetime.fromisoformat(text) <= after


ESCAPES = {
    "class": "{{ ''.__class__ }}",
    "subclasses": "{{ messages.__class__.__base__.__subclasses__() }}",
    "item": "{{ ''['__class__'] }}",
    "attr-filter": "{{ ''|attr('__class__') }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "format-map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "globals-of-a-helper": "{{ raise_exception.__globals__ }}",
    "closure-of-a-helper": "{{ strftime_now.__code__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
    "self": "{{ self.__init__.__globals__ }}",
    "loop": "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
    "mutation": "{{ messages.append(1) }}",
    "mutation-of-a-message": "{{ messages[0].update({'role': 'x'}) }}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_cannot_leave_its_sandbox(name):
    messages = [dict(m) for m in MESSAGES]
    with pytest.raises(xj.InputError, match="unsafe|not safely callable"):
        render(ESCAPES[name], messages)
    assert messages == MESSAGES


# --- the files of a checkpoint ------------------------------------------------------------------------------


def from_files(path, *, jinja=None, additional=(), config=None, generation=None, **settings) -> xj.Tokenizer:
    tiny.tokenizer().save(str(path / "tokenizer.json"))
    tiny.write_json(path / "tokenizer_config.json", settings)
    for name, value in (("config", config), ("generation_config", generation)):
        if value is not None:
            tiny.write_json(path / f"{name}.json", value)
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    for name in additional:
        (path / "additional_chat_templates").mkdir(exist_ok=True)
        (path / "additional_chat_templates" / f"{name}.jinja").write_text(additional[name], encoding="utf-8")
    return xj.Tokenizer.from_dir(path)


NAMED = [dict(name="tool_use", template="with tools"), dict(name="default", template="the default")]
BY_NAME = dict(default="the default", tool_use="with tools", rag="another")
NO_DEFAULT = "none of its chat templates"  # of the error


@pytest.mark.parametrize(
    "files, expected, with_tools",
    [
        (dict(), render(None), None),
        (dict(chat_template="one 你"), "one 你", None),
        (dict(chat_template=None), render(None), None),
        (dict(chat_template=NAMED), "the default", "with tools"),
        (dict(chat_template=NAMED[1:]), "the default", None),
        (dict(chat_template=NAMED[:1]), NO_DEFAULT, "with tools"),
        (dict(chat_template=BY_NAME), "the default", "with tools"),
        (dict(chat_template=dict(rag="another")), NO_DEFAULT, NO_DEFAULT),
        (dict(jinja="from the file 你"), "from the file 你", None),
        (dict(jinja="from the file", chat_template=NAMED), "from the file", None),
        (dict(jinja="from the file", additional=dict(tool_use="tools")), "from the file", "tools"),
        (dict(chat_template=NAMED, additional=dict(tool_use="tools")), NO_DEFAULT, "tools"),
        (dict(jinja="from the file", additional=dict(default="later")), "later", None),
    ],
    ids=[
        "none", "string", "null", "list", "list-without-tools", "list-without-default", "object",
        "object-without-both", "jinja-file", "jinja-file-first", "additional", "additional-first",
        "additional-default",
    ],
)  # fmt: skip
@pytest.mark.parametrize("library", ["ours", pytest.param("transformers", marks=pytest.mark.full)])
def test_source_of_the_chat_template(tmp_path, files, expected, with_tools, library):
    """The template is found with and without tools, and as transformers finds it. with_tools: None: the same
    template.
    """
    own = from_files(tmp_path, **files)
    if library == "transformers":
        transformers = pytest.importorskip("transformers")
        own = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text, tools in ((expected, None), (with_tools or expected, [])):
        options = dict(tools=tools, add_generation_prompt=True)
        options |= dict(tokenize=False) if library == "transformers" else {}
        if text == NO_DEFAULT:
            with pytest.raises(ValueError, match=f"{NO_DEFAULT}|no default"):
                own.apply_chat_template(MESSAGES, **options)
        elif text != render(None):
            assert own.apply_chat_template(MESSAGES, **options) == text
        elif library == "ours":  # Qwen's format is our default
            assert own.apply_chat_template(MESSAGES, **options) == text


def test_the_chat_template_of_a_processor_is_the_last(tmp_path):
    tiny.write_json(tmp_path / "chat_template.json", dict(chat_template="of a processor"))
    assert from_files(tmp_path).chat_template == "of a processor"
    assert from_files(tmp_path, chat_template="one").chat_template == "one"


@pytest.mark.parametrize(
    "template",
    [[], {}, 7, ["text"], [dict(name="default")], {"default": 1}, [dict(name=1, template="x")]],
    ids=str,
)
def test_chat_template_setting_of_another_form_is_rejected(tmp_path, template):
    with pytest.raises(
        xj.InputError, match="tokenizer_config.json: chat_template must be a text, or several"
    ):
        from_files(tmp_path, chat_template=template)


def test_special_tokens_as_text_or_object(tmp_path):
    bos = dict(__type="AddedToken", content="<s>", lstrip=False)
    tokenizer = from_files(
        tmp_path,
        bos_token=bos,
        eos_token="</s>",
        unk_token=None,
        chat_template="{{ bos_token }}{{ eos_token }}{{ unk_token }}",
    )
    assert tokenizer.apply_chat_template(MESSAGES) == "<s></s>"


def test_only_tokenizer_json_is_needed(tmp_path):
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = xj.Tokenizer.from_dir(tmp_path)
    assert tokenizer.chat_template == CHATML and tokenizer.eos_token_ids == (tiny.IM_END, tiny.ENDOFTEXT)


def test_without_tokenizer_json(tmp_path):
    with pytest.raises(xj.InputError, match="holds no tokenizer.json"):
        xj.Tokenizer.from_dir(tmp_path)


EOS = {
    # name: (files, ids) for a tokenizer without Qwen's stop tokens, of which "a" is one id
    "generation-int": (dict(generation=dict(eos_token_id=5), config=dict(eos_token_id=6), eos_token="a"),
        [5]),
    "generation-list": (dict(generation=dict(eos_token_id=[5, 7]), config=dict(eos_token_id=6)), [5, 7]),
    "generation-zero": (dict(generation=dict(eos_token_id=0), config=dict(eos_token_id=6)), [0]),
    "generation-silent": (dict(generation=dict(do_sample=True), config=dict(eos_token_id=6)), [6]),
    "generation-null": (dict(generation=dict(eos_token_id=None), config=dict(eos_token_id=[6, 8])), [6, 8]),
    "config-int": (dict(config=dict(eos_token_id=6), eos_token="a"), [6]),
    "tokenizer-text": (dict(config=dict(eos_token_id=None), eos_token="a"), ["a"]),
    "tokenizer-object": (dict(eos_token=dict(content="a")), ["a"]),
    "tokenizer-new": (dict(eos_token="not a token"), ["new"]),
    "twice": (dict(generation=dict(eos_token_id=[5, 5])), [5]),
    "nowhere": (dict(), []),
}  # fmt: skip


@pytest.mark.parametrize("name", EOS)
@pytest.mark.parametrize("qwen", [False, True], ids=["other", "qwen"])
def test_eos_ids_of_each_checkpoint_layout(tmp_path, name, qwen, monkeypatch):
    files, expected = EOS[name]
    plain = tokenizers.Tokenizer(tiny.tokenizer().model)
    a = plain.token_to_id("a")
    if not qwen:
        monkeypatch.setattr(tiny, "tokenizer", lambda: plain)
    named = {"a": a, "new": tiny.tokenizer().get_vocab_size()}
    expected = [named.get(i, i) for i in expected] + ([tiny.IM_END, tiny.ENDOFTEXT] if qwen else [])
    assert from_files(tmp_path, **files).eos_token_ids == tuple(expected)


def test_qwen_stops_are_not_repeated(tmp_path):
    ids = from_files(tmp_path, generation=dict(eos_token_id=[tiny.ENDOFTEXT, tiny.IM_END])).eos_token_ids
    assert ids == (tiny.ENDOFTEXT, tiny.IM_END)


@pytest.mark.parametrize("value", ["2", [2, "3"], True, 2.0, {"a": 1}], ids=repr)
def test_invalid_eos_ids_are_rejected(tmp_path, value):
    with pytest.raises(xj.InputError, match="eos_token_id must be a token id or a list of them"):
        from_files(tmp_path, generation=dict(eos_token_id=value))
