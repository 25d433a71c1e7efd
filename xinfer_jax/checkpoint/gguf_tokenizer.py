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
from .gguf_file import GgufFile
from .tokenizer import Tokenizer, as_input_error, eos_ids

_KEY = "tokenizer.ggml."
_MODELS = ("gpt2", "llama", "gemma4")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)  # types of tokens
_SPACE = "▁"  # that SentencePiece writes for a space
_NAMED = dict(bos="bos", eos="eos", unk="unknown", sep="seperator", pad="padding", mask="mask")  # sic
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end_of_text|>")


class _Words(NamedTuple):
    """How a text is split before merges."""

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
_LLAMA3 = _Words((_SUFFIX, _WORD, r"\p{N}{1,3}", _SIGNS, _SPACES), ignore_merges=True, add_bos=True)
_QWEN2 = (_SUFFIX, _WORD, r"\p{N}", _SIGNS, _SPACES)
_QWEN35 = (_SUFFIX, _LEAD + r"[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES)
_GPT4O = _Words((*(f"{case}{_SUFFIX}?" for case in _CASES), r"\p{N}{1,3}", _SIGNS_OR_PATH, _SPACES))
_WORDS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "pixtral"), _LLAMA3),
    "qwen2": _Words(_QWEN2, normalizer=normalizers.NFC()),
    "qwen35": _Words(_QWEN35, normalizer=normalizers.NFC()),
    "deepseek-r1-qwen": _Words(_QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _Words((*_CASES, r"\p{N}", _SIGNS_OR_PATH, _SPACES), ignore_merges=True, add_bos=True),
    "gpt-2": _Words((r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)),
}


def read_gguf_tokenizer(file: GgufFile, vocab_size: int) -> Tokenizer | None:
    """Returns the tokenizer; None: there is none. vocab_size: rows of the embedding. Raises InputError."""
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
    tokens = _list(found, "tokens", str)
    kinds = _list(found, "token_type", int)
    if not len(tokens) == len(kinds) <= vocab_size:
        raise InputError(f"{len(tokens)} tokens, {len(kinds)} types and {vocab_size} embeddings do not fit")
    if bad := [text for text in templates.values() if not isinstance(text, str | None)]:
        raise InputError(f"tokenizer.chat_template must be a text, got {format_value(bad[0])}")
    ids = {name: found.get(f"{key}_token_id") for name, key in _NAMED.items()}
    named = {f"{name}_token": i for name, i in ids.items() if type(i) is int and 0 <= i < len(tokens)}
    if model == "gpt2":
        (backend, add_bos) = _byte_level(found, tokens, kinds)
    else:
        backend = _sentencepiece(found, tokens, kinds, named.get("unk_token", 0))
        add_bos = True
    special = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in special]
    backend.add_tokens([AddedToken(x, special=special[kind], normalized=False) for x, kind in added])
    ends = [found.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += [backend.token_to_id(token) for token, kind in added if kind == _CONTROL and token in _ENDS]
    eos_token_ids = eos_ids({}, {"eos_token_id": ends}, backend)
    texts = {name: tokens[i] for name, i in named.items()}
    add = dict(bos_token=found.get("add_bos_token", add_bos), eos_token=found.get("add_eos_token"))
    around = {name: texts[name] for name, flag in add.items() if flag and name in texts}
    if around:
        parts = [around.get("bos_token"), "$A", around.get("eos_token")]
        with_ids = [(token, backend.token_to_id(token)) for token in around.values()]
        template = [part for part in parts if part]
        backend.post_processor = processors.TemplateProcessing(template, special_tokens=with_ids)
    return Tokenizer(
        backend, chat_template=templates[""], special_tokens=texts, eos_token_ids=eos_token_ids,
        tool_template=templates[".tool_use"],
    )  # fmt: skip


def _list(found: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """An array of the metadata, not empty; its items have one type."""
    value = found.get(name)
    if not isinstance(value, list) or not value or not isinstance(value[0], kind):
        raise InputError(f"{_KEY}{name} must be an array of {kind.__name__}, got {format_value(value)}")
    return value


def _vocabulary(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Ids of tokens, without those that only fill rows of the embedding."""
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
    split = pre_tokenizers.Split(Regex("|".join(words.patterns)), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
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
    """All pairs of tokens that are a token, those of the highest score first; user-defined tokens have 0."""
    merges = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        for at in range(1, len(token) if kind in (_NORMAL, _USER_DEFINED) else 0):
            if token[:at] in vocabulary and token[at:] in vocabulary:
                rank = 0.0 if kind == _USER_DEFINED else -score
                merges.append((rank, -at, token[:at], token[at:]))
    merges.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in merges]
