"""A regular expression as a finite automaton over the tokens of a vocabulary, in NumPy arrays."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from .byte_automaton import byte_automaton
from .regex_parser import NotRegularError, parse_regex

MAX_ENTRIES = 2**16  # of a table: states x classes of tokens
ENDS = 0  # the class of ids that end a row
NEVER = 1  # the class of tokens that no state allows
_MOST_WALKS = 2**24  # states x tokens that may occur: about a second
_PART = 2**22  # entries of the arrays that are computed at a time


def token_automaton(
    pattern: str, tokens: Sequence[bytes], special: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the arrays of a `Dfa` over tokens of these bytes. Raises NotRegularError."""
    next_SX, accepts_S = byte_automaton(parse_regex(pattern))
    if not accepts_S.any():
        raise NotRegularError("no text matches")
    class_V = np.full(len(tokens), NEVER, np.int16)
    columns = {np.full(len(next_SX), -1, np.int16).tobytes(): NEVER}
    known = bytes(byte for byte in range(256) if (next_SX[:, byte] >= 0).any())
    groups = _by_length(tokens, {*special}, known)
    if len(next_SX) * sum(len(ids) for ids, _ in groups) > _MOST_WALKS:
        raise NotRegularError(f"more than {_MOST_WALKS} states x tokens that occur")
    for ids, bytes_NL in groups:
        part = max(1, _PART // len(next_SX))
        for first in range(0, len(ids), part):
            to_NS = _walk(next_SX, bytes_NL[first : first + part])
            for token, row in zip(ids[first : first + part], to_NS, strict=True):
                class_V[token] = columns.setdefault(row.tobytes(), len(columns) + 1)
            if len(next_SX) * (len(columns) + 1) > MAX_ENTRIES:
                raise NotRegularError(f"more than {MAX_ENTRIES} states x classes of tokens")
    table_CS = [np.frombuffer(column, np.int16) for column in columns]
    ends_S = np.where(accepts_S, np.arange(len(next_SX)), -1).astype(np.int16)
    assert (ENDS, NEVER) == (0, 1)  # the order of the columns
    return class_V, np.stack([ends_S, *table_CS], 1)


def _by_length(tokens: Sequence[bytes], without: set[int], known: bytes) -> list[Any]:
    """Returns ids and bytes, uint8 [N, L], of the tokens whose bytes are all known, by length."""
    groups: dict[int, list[int]] = defaultdict(list)
    for i, token in enumerate(tokens):
        if token and i not in without and not token.translate(None, known):
            groups[len(token)].append(i)
    return [
        (ids, np.frombuffer(b"".join(tokens[i] for i in ids), np.uint8).reshape(-1, length))
        for length, ids in groups.items()
    ]


def _walk(next_SX: np.ndarray, bytes_NL: np.ndarray) -> np.ndarray:
    """Returns, int16 [N, S], the states to which the bytes of each token lead from each state."""
    dead = len(next_SX)
    table_SX = np.vstack([np.where(next_SX < 0, dead, next_SX), np.full((1, 256), dead)]).astype(np.int16)
    at_NS = np.broadcast_to(np.arange(dead, dtype=np.int16), (len(bytes_NL), dead))
    for byte_N in bytes_NL.T:
        at_NS = table_SX[at_NS, byte_N[:, None]]
    return np.where(at_NS == dead, -1, at_NS).astype(np.int16)
