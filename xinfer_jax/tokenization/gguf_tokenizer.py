"""The tokenizer of a GGUF file, from its metadata: byte-level BPE, or SentencePiece's."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as Backend,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ..errors import InputError, format_value
from ..formats.gguf_file import GgufFile
from .tokenizer import Tokenizer, as_input_error, eos_ids
from .tokenizer_limits import check_added_tokens

_KEY = "tokenizer.ggml."
_MODELS = ("gpt2", "llama", "gemma4")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)  # types of tokens
_SPACE = "▁"  # that SentencePiece writes for a space
_NAMED = dict(bos="bos", eos="eos", unk="unknown", sep="seperator", pad="padding", mask="mask")  # sic
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_LLAMA_IDS = dict(bos=1, eos=2, unk=0)  # of a vocabulary of SentencePiece whose metadata have none
# Tokens by whose text llama.cpp knows that an answer ends; they are control tokens, whatever their types.
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
}  # fmt: skip
# The same, where the metadata have no id for this use.
_GAP_ENDS = dict(
    fim_pad={"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"},
    fim_rep={"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"},
    fim_sep={"<|file_sep|>"},
)
_GAPS = {  # control tokens by their text that end nothing
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
    "<|code_prefix|>", "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>",
    "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>", "<fim-middle>", "<fim_middle>",
    "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>",
}  # fmt: skip
_CALLS = {"<|call|>", "<|calls|>"}
_MAX_SQUARES = 2**26  # the sum of the squared lengths of tokens whose merges are sought; Qwen's have 2**23


class _Words(NamedTuple):
    """The rules that split a text before merges. The first pattern splits the text, the next pattern splits
    its parts, and so on.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is one
    add_bos: bool = False
    normalizer: Any = None


_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_WORD = _LEAD + r"\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_OR_PATH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (f"{_LEAD}{_UPPER}*{_LOWER}+", f"{_LEAD}{_UPPER}+{_LOWER}*")
_CASES_WITH_SUFFIX = (*(f"{case}{_SUFFIX}?" for case in _CASES), r"\p{N}{1,3}", _SIGNS_OR_PATH, _SPACES)
_NOT_HAN = r"\p{M}&&[^\p{Han}]]"
_KIMI = tuple(case.replace(r"\p{M}]", _NOT_HAN) + f"{_SUFFIX}?" for case in _CASES)
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
    "|".join((*(f"{case}{_SUFFIX}?" for case in _CASES), r"\p{N}", _SIGNS_OR_PATH, _SPACES)),
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = "|".join((_SUFFIX, _WORD, r"\p{N}{1,3}", _SIGNS, _SPACES))
_QWEN2 = "|".join((_SUFFIX, _WORD, r"\p{N}", _SIGNS, _SPACES))
_QWEN35 = (_SUFFIX, _LEAD + r"[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES)
_MARKS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", rf"{_MARKS}[\r\n]*|{_SPACES}")
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
_LATIN = (  # letters of alphabets with two cases; escapes keep characters that editors would replace
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "Ὗ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳ"
    "Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_NFC = normalizers.NFC()
# By the names of llama.cpp: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp.
_WORDS = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3", "falcon-h1", "midm-2.0", "lfm2"),
        _Words((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _Words((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "megrez", "f2llmv2"), _Words((_QWEN2,), normalizer=_NFC)),
    "qwen35": _Words(("|".join(_QWEN35),), normalizer=_NFC),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "kormo", "stablelm2", "hunyuan", "solar-open", "grok-2"), _Words((_QWEN2,))
    ),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _Words(("|".join(_CASES_WITH_SUFFIX),))
    ),
    "kimi-k2": _Words(("|".join((r"\p{Han}+", *_KIMI, r"\p{N}{1,3}", _SIGNS, _SPACES)),)),
    "youtu": _Words(_YOUTU, ignore_merges=True),
    "tekken": _Words(
        ("|".join((*_CASES, r"\p{N}", _SIGNS_OR_PATH, _SPACES)),), ignore_merges=True, add_bos=True
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion", "exaone4",
        "granite-docling"),
        _Words((_GPT2,)),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        _Words((r"\p{N}", _GPT2)),
    ),
    "default": _Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "deepseek-coder": _Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-llm": _Words(
        (r"[\r\n]", rf"\s?[{_LATIN}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _CJK, r"\p{N}+")
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _Words(_DEEPSEEK3)),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        _Words((rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",)),
    ),
    "seed-coder": _Words((rf"{_SUFFIX}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "minicpm5": _Words(
        (r"\p{N}{1,3}", rf"{_SUFFIX}|{_WORD}|\p{{N}}+|{_SIGNS}|{_SPACES}"), ignore_merges=True
    ),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _Words((" ?[^(\\s|.,!?…。，、।۔،)]+",))),
    "viking": _Words((" ?[^(\\s|.,!?…。，、।۔،)]+", r"\p{N}")),
}  # fmt: skip


def read_gguf_tokenizer(file: GgufFile, vocab_size: int) -> Tokenizer | None:
    """Returns the tokenizer. None: there is none. vocab_size: rows of the embedding. Raises InputError."""
    found = {key.removeprefix(_KEY): x for key, x in file.metadata.items() if key.startswith(_KEY)}
    if found.get("model", "none") in ("none", "no_vocab"):
        return None
    templates = {end: file.metadata.get(f"tokenizer.chat_template{end}") for end in ("", ".tool_use")}
    with as_input_error(f"{file.path} has no readable tokenizer"):
        return _tokenizer(found, templates, vocab_size)


def _tokenizer(found: Mapping[str, Any], templates: Mapping[str, Any], vocab_size: int) -> Tokenizer:
    model = found["model"]
    if model not in _MODELS:
        raise InputError(f"{_KEY}model {format_value(model)} is not read: only {', '.join(_MODELS)} are")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_list(found, "tokens", str))]
    kinds = [*_list(found, "token_type", int)] if "token_type" in found else [_NORMAL] * len(tokens)
    if not len(tokens) == len(kinds) <= vocab_size:
        raise InputError(f"{len(tokens)} tokens, {len(kinds)} types and {vocab_size} embeddings do not fit")
    if bad := [text for text in templates.values() if not isinstance(text, str | None)]:
        raise InputError(f"tokenizer.chat_template must be a text, got {format_value(bad[0])}")
    ends = _end_ids(found, tokens, kinds)
    ids = {name: found.get(f"{key}_token_id") for name, key in _NAMED.items()}
    ids = (_LLAMA_IDS if model == "llama" else {}) | {name: i for name, i in ids.items() if i is not None}
    named = {f"{name}_token": i for name, i in ids.items() if type(i) is int and 0 <= i < len(tokens)}
    if model == "gpt2":
        (backend, add_bos) = _byte_level(found, tokens, kinds)
    else:
        backend = _sentencepiece(found, tokens, kinds, named.get("unk_token", 0))
        add_bos = True
    special = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in special]
    check_added_tokens([token for token, _ in added])
    backend.add_tokens([AddedToken(x, special=special[kind], normalized=False) for x, kind in added])
    texts = {name: tokens[i] for name, i in named.items()}
    add = dict(bos=found.get("add_bos_token", add_bos) or model == "gemma4", eos=found.get("add_eos_token"))
    backend.post_processor = _around(backend, texts, [name for name, flag in add.items() if flag])
    return Tokenizer(
        backend, chat_template=templates[""], special_tokens=texts, tool_template=templates[".tool_use"],
        eos_token_ids=eos_ids({}, {"eos_token_id": ends}, backend),
    )  # fmt: skip


def _end_ids(found: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> list[Any]:
    """Returns the ids that end an answer, by their keys and by their texts. Makes these control tokens."""
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise InputError(f"the vocabulary has the token {format_value(twice)} twice")
    named = _ENDS & ids.keys()
    if "</s>" in named and _is_html(found["model"], kinds[ids["</s>"]], ids):
        named -= {"</s>"}
    for key, names in _GAP_ENDS.items():
        named |= names & ids.keys() if f"{key}_token_id" not in found else set()
    for token in named | _GAPS & ids.keys():
        kinds[ids[token]] = _CONTROL
    ends_with_call = named >= {"<|return|>", "<|call|>"} or "<|flush|>" in named and named & _CALLS
    named -= {"<|end|>"} if ends_with_call else set()
    defaults = {"eos": _LLAMA_IDS["eos"]} if found["model"] == "llama" else {}
    by_key = [found.get(f"{key}_token_id", defaults.get(key)) for key in _END_KEYS]
    listed = _list(found, "eos_token_ids", int) if found.get("eos_token_ids") else []
    return by_key + listed + sorted(ids[token] for token in named)


def _is_html(model: str, kind: int, ids: Mapping[str, int]) -> bool:
    """Returns True if </s> is a word of the vocabulary, not its end token."""
    return kind == _USER_DEFINED or kind != _CONTROL and model != "llama" or "<|tool_response>" in ids


def _around(backend: Backend, texts: Mapping[str, str], names: list[str]) -> Any:
    """Returns a post-processor that adds BOS before a text, or EOS after it. None: neither is added."""
    if absent := [name for name in names if f"{name}_token" not in texts]:
        name = absent[0]
        raise InputError(f"{_KEY}add_{name}_token is true, and {_KEY}{name}_token_id is no token")
    if not names:
        return None
    tokens = {name: texts[f"{name}_token"] for name in names}
    template = [part for part in (tokens.get("bos"), "$A", tokens.get("eos")) if part]
    with_ids = [(token, backend.token_to_id(token)) for token in tokens.values()]
    return processors.TemplateProcessing(template, special_tokens=with_ids)


def _list(found: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """Returns an array of the metadata, which is not empty. Its items have one type."""
    value = found.get(name)
    types = (int, float) if kind is float else kind
    if not isinstance(value, list) or not value or not isinstance(value[0], types):
        raise InputError(f"{_KEY}{name} must be an array of {kind.__name__}, got {format_value(value)}")
    return value


def _vocabulary(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Returns ids of tokens, without the ones that only fill rows of the embedding."""
    is_filling = lambda i: kinds[i] == _UNUSED and tokens[i] == f"[PAD{i}]"  # noqa: E731
    return {token: i for i, token in enumerate(tokens) if not is_filling(i)}


def _merges(texts: Sequence[str]) -> list[tuple[str, str]]:
    places = [text.find(" ", 1) for text in texts]
    return [(text[:at], text[at + 1 :]) for text, at in zip(texts, places, strict=True)]


def _byte_level(found: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> tuple[Backend, bool]:
    pre = found.get("pre")
    if not isinstance(pre, str) or pre not in _WORDS:
        known = ", ".join(_WORDS)
        raise InputError(f"{_KEY}pre {format_value(pre)} is not supported: only {known} are")
    words = _WORDS[pre]
    merges = _merges(_list(found, "merges", str))
    backend = Backend(models.BPE(_vocabulary(tokens, kinds), merges, ignore_merges=words.ignore_merges))
    if words.normalizer:
        backend.normalizer = words.normalizer
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend, words.add_bos


def _sentencepiece(found: Mapping[str, Any], tokens: list[str], kinds: list[int], unknown: int) -> Backend:
    for i, kind in enumerate(kinds):
        if kind == _USER_DEFINED:  # converters write its spaces plainly
            tokens[i] = tokens[i].replace(" ", _SPACE)
    vocabulary = _vocabulary(tokens, kinds)
    if "merges" in found:
        merges = _merges(_list(found, "merges", str))
    else:
        merges = _scored_merges(_list(found, "scores", float), tokens, kinds, vocabulary)
    backend = Backend(
        models.BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    has_prefix = found.get("add_space_prefix", found["model"] == "llama")
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(parts)
    return backend


def _scored_merges(
    scores: list[float], tokens: list[str], kinds: list[int], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Returns all pairs of tokens that are a token, the pairs of the highest score first. User-defined tokens
    have score 0.
    """
    if sum(len(token) ** 2 for token in tokens) > _MAX_SQUARES:
        raise InputError(f"{_KEY}tokens has tokens of up to {max(map(len, tokens))} characters: too long")
    merges = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        for at in range(1, len(token) if kind in (_NORMAL, _USER_DEFINED) else 0):
            if token[:at] in vocabulary and token[at:] in vocabulary:
                rank = 0.0 if kind == _USER_DEFINED else -score
                merges.append((rank, -at, token[:at], token[at:]))
    merges.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in merges]
