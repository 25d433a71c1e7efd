"""The amount of text that one token can cover. With it, a long text is rejected by its length, without
tokenizing it.
"""

from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from .tokenizer_limits import step_settings


def token_coverage(backend: tokenizers.Tokenizer) -> tuple[bool, int, int] | None:
    """Returns three values, or None if the tokenizer may drop parts of a text:

    - True if the unit is bytes, False if it is characters,
    - the factor by which the normalizer can reduce their number,
    - the most units that a token covers.
    """
    added = backend.get_added_tokens_decoder().values()
    normalizers = step_settings(backend.normalizer)
    pre_tokenizer = step_settings(backend.pre_tokenizer)
    in_bytes = any(part["type"] == "ByteLevel" for part in pre_tokenizer)
    vocabulary = backend.get_vocab(with_added_tokens=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    byte_tokens = alphabet if in_bytes else (f"<0x{byte:02X}>" for byte in range(256))
    if (
        not all(map(_keeps_text, normalizers + pre_tokenizer))
        or not isinstance(backend.model, models.BPE)
        or not (in_bytes or backend.model.byte_fallback)
        or not vocabulary.keys() >= set(byte_tokens)  # every byte is known
        or any(token.lstrip or token.rstrip for token in added)  # these absorb the spaces beside them
    ):
        return None
    # NFC composes at most four characters into one, or three times the bytes.
    normalizer_factor = (3 if in_bytes else 4) if {"type": "NFC"} in normalizers else 1
    longest = max(map(len, vocabulary))  # a character of a byte-level vocabulary is a byte
    texts = (token.content.encode() if in_bytes else token.content for token in added)
    return in_bytes, normalizer_factor, max(longest, *map(len, texts), 1)


def _keeps_text(part: dict[str, Any]) -> bool:
    """Returns True if a normalizer or a pre-tokenizer is known to drop nothing of a text."""
    kept = ("NFC", "Prepend", "ByteLevel", "Digits", "Metaspace")
    return (
        part["type"] in kept
        or (part["type"] == "Split" and part["behavior"] != "Removed")
        or (part["type"] == "Replace" and len(part["pattern"].get("String", "")) == len(part["content"]) == 1)
    )
