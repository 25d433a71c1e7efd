"""The changes that transformers makes to tokenizer.json by the settings in tokenizer_config.json.

Some classes of tokenizers take vocabulary and merges alone from tokenizer.json, and split text by their own
rules. These rules are followed if they differ from the file in details, such as the space before a text. If
such a class would split words in other places, tokenizer.json is followed, with a warning.

Source: transformers 5.24, models/auto/tokenization_auto.py, tokenization_utils_tokenizers.py and the classes.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from .tokenizer_limits import step_settings

_LOGGER = logging.getLogger(__name__)

_PLAIN = "TokenizersBackend"  # the class that follows tokenizer.json
_CLASS_BY_TYPE = {  # the class by the model type of config.json, for families that are served
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_next", "qwen3_vl", "qwen3_vl_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"
    ),
    **dict.fromkeys(("granite", "ministral3", "mistral", "mistral3", "mixtral"), _PLAIN),
    **dict.fromkeys(("olmo2", "olmo3", "phi3"), _PLAIN),
}  # fmt: skip
# Model types whose class does not depend on the one that tokenizer_config.json names.
_FIXED_TYPES = ("phi3", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
_SPACE = "▁"
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN35_WORDS = _QWEN_WORDS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"s\p{L}", r"s\p{L}\p{M}")
_END_OF_TEXT = "<|endoftext|>"
_LLAMA_TOKENS = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>")
# Attributes of BPE models.
_SENTENCEPIECE = dict(fuse_unk=True, byte_fallback=True, ignore_merges=False)
_BYTE_LEVEL = dict(unk_token=None, fuse_unk=False, byte_fallback=False, ignore_merges=False)
# Words that the rules of classes split in different places.
_PROBE = "It's WE'LL 12345 (the) cat's tokens:\n\n  x_y = {'a': 3.14};\tNaïve 你好，世界! user@example.com"
_MOST_OF_FIRST_WORD = 4  # ids of the probe, which a space before the text changes
_MISTRAL_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
_MISTRAL_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MISTRAL_LEAST_VOCABULARY = 100_001
_BEFORE_5 = re.compile(r"[0-4]\b|5(\.0)*\.?(dev|a|b|rc)")


@dataclasses.dataclass(frozen=True)
class _Rules:
    """The rules by which a class of tokenizers splits text.

    Attributes:
        steps: the normalizer, pre_tokenizer and decoder.
        model: the attributes of the BPE model that are set.
        tokens: the special tokens, used if tokenizer_config.json does not name others.
    """

    steps: dict[str, Any]
    model: dict[str, Any]
    tokens: dict[str, str]


def _llama(settings: Mapping[str, Any]) -> _Rules:
    has_prefix = settings.get("add_prefix_space") in (None, True)
    scheme = ("always" if settings.get("legacy") else "first") if has_prefix else "never"
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    steps = dict(
        normalizer=None,
        pre_tokenizer=pre_tokenizers.Metaspace(_SPACE, scheme, split=False),
        decoder=decoders.Sequence(parts),
    )
    return _Rules(steps, _SENTENCEPIECE | dict(unk_token=None), _LLAMA_TOKENS)


def _code_llama(settings: Mapping[str, Any]) -> _Rules:
    rules = _llama({**settings, "legacy": False})
    names = dict(prefix="▁<PRE>", middle="▁<MID>", suffix="▁<SUF>", eot="▁<EOT>", fill="<FILL_ME>")
    tokens = {f"{name}_token": text for name, text in names.items()}
    always_stripped = dict(decoder=_llama({}).steps["decoder"])
    return _Rules(rules.steps | always_stripped, rules.model, _LLAMA_TOKENS | tokens)


def _gemma(_: Mapping[str, Any]) -> _Rules:
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    steps = dict(
        normalizer=normalizers.Replace(" ", _SPACE),
        pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
        decoder=decoders.Sequence(parts),
    )
    names = dict(unk="<unk>", bos="<bos>", eos="<eos>", pad="<pad>", mask="<mask>")
    return _Rules(steps, _SENTENCEPIECE, {f"{name}_token": text for name, text in names.items()})


def _qwen(settings: Mapping[str, Any], words: str = _QWEN_WORDS) -> _Rules:
    has_prefix = bool(settings.get("add_prefix_space"))
    split = pre_tokenizers.Split(Regex(words), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix, use_regex=False)
    steps = dict(
        normalizer=normalizers.NFC(),
        pre_tokenizer=pre_tokenizers.Sequence([split, byte_level]),
        decoder=decoders.ByteLevel(),
    )
    return _Rules(steps, _BYTE_LEVEL, dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END_OF_TEXT))


def _gpt2(settings: Mapping[str, Any]) -> _Rules:
    has_prefix = bool(settings.get("add_prefix_space"))
    steps = dict(
        normalizer=None,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=has_prefix),
        decoder=decoders.ByteLevel(),
    )
    return _Rules(steps, _BYTE_LEVEL, dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT))


_RULES: dict[str, Callable[[Mapping[str, Any]], _Rules]] = {
    "LlamaTokenizer": _llama,
    "CodeLlamaTokenizer": _code_llama,
    "GemmaTokenizer": _gemma,
    "Qwen2Tokenizer": _qwen,
    "Qwen3_5Tokenizer": functools.partial(_qwen, words=_QWEN35_WORDS),
    "GPT2Tokenizer": _gpt2,
}
# Other classes with rules of their own: tokenizer.json is followed.
_OTHER_CLASSES = (
    "AlbertTokenizer", "BertTokenizer", "BigBirdTokenizer", "CohereTokenizer",
    "DebertaV2Tokenizer", "GPTNeoXTokenizer", "MPNetTokenizer", "NllbTokenizer", "RobertaTokenizer",
    "T5Tokenizer", "XLMRobertaTokenizer",
)  # fmt: skip


def follow_settings(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, str]:
    """Changes the tokenizer as transformers does. Warns, with a sentence, of settings that are not followed.

    Args:
        backend: the tokenizer from tokenizer.json.
        settings: the content of tokenizer_config.json.
        config: the content of config.json.

    Returns:
        The special tokens by name that the settings do not name.
    """
    tokens = _follow_class(backend, settings, config)
    _fix_mistral_words(backend, settings, config)
    if settings.get("split_special_tokens") is True:
        backend.encode_special_tokens = True
        _say(
            "split_special_tokens is true: as in transformers, special tokens are encoded as ordinary text,"
            " also those that the chat template writes; remove the setting if the model should see them"
        )
    is_bpe = isinstance(backend.model, models.BPE)
    forced = settings.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    if settings.get("clean_up_tokenization_spaces") and (forced or not is_bpe):
        _say(
            "clean_up_tokenization_spaces is not followed: transformers removes spaces before punctuation"
            " from decoded text, which is returned here as the model wrote it"
        )
    return tokens


def _say(sentence: str) -> None:
    _LOGGER.warning("tokenizer_config.json: %s", sentence)


def tokenizer_class(settings: Mapping[str, Any], config: Mapping[str, Any], is_byte_level: bool) -> str:
    """Returns the name of transformers' class, without "Fast" at its end.

    is_byte_level: tokenizer.json has steps for bytes.
    """
    model_type = config.get("model_type")
    of_type = _CLASS_BY_TYPE.get(model_type) if isinstance(model_type, str) else None
    declared = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if not isinstance(declared, str):
        return of_type or _PLAIN
    declared = declared.removesuffix("Fast")
    is_fixed = model_type in _FIXED_TYPES
    if declared == "LlamaTokenizer" and is_byte_level and not is_fixed:
        return _PLAIN
    if of_type == _PLAIN or of_type and is_fixed:
        return of_type
    return declared


def _follow_class(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, str]:
    components = (backend.normalizer, backend.pre_tokenizer, backend.post_processor, backend.decoder)
    is_byte_level = any(step["type"] == "ByteLevel" for step in step_settings(*components))
    name = tokenizer_class(settings, config, is_byte_level)
    if name not in _RULES:
        if name in _OTHER_CLASSES:
            _say(f"the rules of {name} are not followed: text is split as tokenizer.json says")
        return {}
    without_prefix = {key: value for key, value in settings.items() if key != "add_prefix_space"}
    rules = _RULES[name](settings)
    if _set_if_alike(backend, _RULES[name](without_prefix)):
        _set(backend, rules)
    else:
        _say(
            f"text is split as tokenizer.json says, and not by the rules of {name}, which differ and which"
            " transformers follows: set tokenizer_class to PreTrainedTokenizerFast so that both agree"
        )
    return {key: text for key, text in rules.tokens.items() if backend.token_to_id(text) is not None}


def _set_if_alike(backend: tokenizers.Tokenizer, rules: _Rules) -> bool:
    """Sets the rules of a class unless they split words in other places than the tokenizer does. Returns True
    if they are set.
    """
    if not isinstance(backend.model, models.BPE):
        return False
    steps = {step: getattr(backend, step) for step in rules.steps}
    options = {option: getattr(backend.model, option) for option in rules.model}
    before = _probed(backend)
    _set(backend, rules)
    after = _probed(backend)
    rest = min(len(before), len(after)) - _MOST_OF_FIRST_WORD
    is_alike = rest <= 0 or before[-rest:] == after[-rest:]
    if not is_alike:
        _set(backend, _Rules(steps, options, {}))
    return is_alike


def _set(backend: tokenizers.Tokenizer, rules: _Rules) -> None:
    for step, value in rules.steps.items():
        setattr(backend, step, value)
    for option, value in rules.model.items():
        setattr(backend.model, option, value)


def _probed(backend: tokenizers.Tokenizer) -> list[int]:
    return backend.encode(_PROBE, add_special_tokens=False).ids


def _fix_mistral_words(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Replaces the regular expression of words. Some of Mistral's tokenizers were published with an older
    one.
    """
    is_large = backend.get_vocab_size() >= _MISTRAL_LEAST_VOCABULARY
    model_type = config.get("model_type")
    version = config.get("transformers_version")
    is_old = not version or bool(_BEFORE_5.match(str(version)))
    is_of_mistral = bool(config) and (model_type is None or model_type in _MISTRAL_TYPES)
    if not (is_large and is_old and is_of_mistral) or backend.pre_tokenizer is None:
        return
    fixed = pre_tokenizers.Split(Regex(_MISTRAL_WORDS), "isolated")
    steps = _steps(backend.pre_tokenizer)
    if settings.get("fix_mistral_regex") is True:
        is_metaspace = isinstance(steps[0], pre_tokenizers.Metaspace)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        is_sequence = isinstance(backend.pre_tokenizer, pre_tokenizers.Sequence)
        rest = steps[1:] if is_sequence else [byte_level] if is_metaspace else steps
        backend.pre_tokenizer = pre_tokenizers.Sequence([fixed, *rest])
    elif settings.get("fix_mistral_regex") is None and steps[0].__getstate__() != fixed.__getstate__():
        _say(
            "tokenizer.json may have a regular expression of words with which Mistral's models were not"
            " trained: set fix_mistral_regex to true to replace it, or to false to keep it"
        )


def _steps(pre_tokenizer: Any) -> list[Any]:
    is_sequence = isinstance(pre_tokenizer, pre_tokenizers.Sequence)
    return [*pre_tokenizer] if is_sequence else [pre_tokenizer]
