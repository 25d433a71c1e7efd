"""The bytes of each token, which are all that a grammar knows of a vocabulary."""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import InputError


def token_bytes(tokenizer: Any, vocab_size: int) -> tuple[list[bytes], list[int]]:
    """Returns the bytes of each id below `vocab_size`, and the ids of special tokens. Ids that have no text,
    as in a model with a padded vocabulary, have no bytes. Raises InputError if no token has bytes.
    """
    backend = tokenizer.backend
    decode = _token_decoder(backend)
    added = backend.get_added_tokens_decoder()
    found = [b""] * vocab_size
    for name, i in backend.get_vocab(with_added_tokens=False).items():
        if i < vocab_size:
            found[i] = decode(name)
    for i, token in added.items():
        if i < vocab_size:
            found[i] = token.content.encode()
    return found, [i for i, token in added.items() if token.special and i < vocab_size]


class TokenSearch:
    """Finds the tokens that contain a text, in an array of the bytes of all tokens: without a loop in Python
    over the vocabulary, and mostly without the GIL.
    """

    def __init__(self, tokens: Sequence[bytes]):
        # A separator after each: UTF-8 has no such byte, so a text is found within a token only.
        self._bytes = np.frombuffer(b"".join(token + b"\xff" for token in tokens), np.uint8)
        sizes = np.fromiter((len(token) + 1 for token in tokens), np.int32, len(tokens))
        self._token_of_byte = np.repeat(np.arange(len(tokens), dtype=np.int32), sizes)
        places = np.argsort(self._bytes, kind="stable").astype(np.int32)
        counts = np.bincount(self._bytes, minlength=256)
        self._places = np.split(places, np.cumsum(counts)[:-1])  # of each byte

    def containing(self, text: str) -> np.ndarray:
        """Returns int32: the ids of the tokens that contain a text, ascending. A token with several places
        has its id several times.
        """
        data = text.encode()
        rarest = min(range(len(data)), key=lambda i: len(self._places[data[i]]))
        at = self._places[data[rarest]] - rarest
        for i, byte in enumerate(data):
            at = at[self._bytes[at + i] == byte]  # the last separator ends what would go beyond either end
        return self._token_of_byte[at]


def keep_latest(kept: OrderedDict, key: Any, value: Any, most: int) -> None:
    """Keeps a value as the latest one, and drops the oldest values if there are too many."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


def _token_decoder(backend: Any) -> Callable[[str], bytes]:
    """Returns the function that gives the bytes of a token that was not added: byte-level, or with ▁ and
    <0xNN>.
    """
    settings = (
        json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else dict(decoders=[])
    )
    steps = {step["type"] for step in settings.get("decoders", [settings])}
    if "ByteLevel" in steps:
        return _byte_level_bytes
    if steps & {"ByteFallback", "Metaspace"}:
        return _sentencepiece_bytes
    found = ", ".join(steps) or "no decoder"
    raise InputError(f"a grammar needs tokens that are bytes or characters, this tokenizer has {found}")


def _bytes_of_letters() -> dict[str, int]:
    printable = {byte for byte in range(256) if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


# The byte that each letter of a byte-level vocabulary stands for (GPT-2).
BYTES_OF_LETTERS = _bytes_of_letters()
_TO_LATIN_1 = {ord(letter): chr(byte) for letter, byte in BYTES_OF_LETTERS.items()}


def _byte_level_bytes(name: str) -> bytes:
    return name.translate(_TO_LATIN_1).encode("latin-1", "ignore")


def _sentencepiece_bytes(name: str) -> bytes:
    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", name):
        return bytes.fromhex(byte[1])
    return name.replace("▁", " ").encode()
