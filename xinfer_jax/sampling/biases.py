"""What a caller says about single tokens (biases, allowed and forbidden ids), as one bias [B, V]; and the
sequences of tokens that must not occur.

What is said about single tokens may be traced in a caller's jit: then its values are not checked, and the
bias is made on the device.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import numbers, token_ids, traced
from ..errors import InputError, shown

MOST_BAD_WORDS = 64
LONGEST_BAD_WORD = 8  # sequences of a row that it must not hold, and tokens of each
_MOST = 1e30  # of a bias: the penalties that come after it leave float32 then


def bias_rows(settings: Sequence[tuple[Any, Any, Any]], batch: int, vocab_size: int) -> Any:
    """float32 [B, V]; 0 where nothing is said.

    Args:
        settings: logit_bias, allowed_token_ids and forbidden_token_ids: for all rows, or of each row.
        batch: B.
        vocab_size: V.

    Raises:
        InputError: ids outside the vocabulary, another shape, numbers that are no bias, or nothing left.
    """
    made = [_bias(*parts, batch if len(settings) == 1 else 1, vocab_size) for parts in settings]
    xp = jnp if any(map(traced, made)) else np
    return xp.broadcast_to(xp.concatenate(made), (batch, vocab_size))


def check_ids(allowed: Any, forbidden: Any) -> None:
    """Raises InputError for ids that contradict each other, as far as that is known without a vocabulary."""
    allowed, forbidden = (
        None if ids is None or traced(ids) else set(token_ids(name, ids))
        for name, ids in (("allowed_token_ids", allowed), ("forbidden_token_ids", forbidden))
    )
    if allowed == set():
        raise InputError("allowed_token_ids is empty: name the ids that may be chosen, or give None")
    if both := (allowed or set()) & (forbidden or set()):
        where = "both in allowed_token_ids and in forbidden_token_ids"
        raise InputError(f"token id {min(both)} is {where}: leave it out of one")


def check_bad_words(words: Any, vocab_size: int | None = None) -> list[list[int]]:
    """Sequences of ids that a row must not hold, each once; InputError where they are none."""
    if isinstance(words, np.ndarray | jax.Array):
        raise InputError("bad_words_ids must be a list of lists of token ids, got an array")
    if not isinstance(words, list | tuple):
        raise InputError(f"bad_words_ids must be a list of lists of token ids, got {shown(words)}")
    found = dict.fromkeys(tuple(token_ids("bad_words_ids", ids, vocab_size)) for ids in words)
    most = MOST_BAD_WORDS
    longest = LONGEST_BAD_WORD
    if len(found) > most:
        raise InputError(
            f"bad_words_ids: {len(found)} sequences are more than the {most} of a row: give fewer"
        )
    for ids in found:
        if not 1 <= len(ids) <= longest or min(ids) < 0:
            raise InputError(f"bad_words_ids: each has from 1 to {longest} token ids, got {shown([*ids])}")
    return [[*ids] for ids in found]


def is_bad_word_rows(words: Any) -> bool:
    """Whether it is an array that `bad_word_rows` gave, traced or not."""
    kept = MOST_BAD_WORDS, LONGEST_BAD_WORD
    return isinstance(words, np.ndarray | jax.Array) and words.ndim == 3 and words.shape[1:] == kept


def bad_word_rows(settings: Sequence[Any], batch: int, vocab_size: int) -> Any:
    """int32 [B, W, L]: the sequences of each row, at the end of L places; -1 where there is none.

    Args:
        settings: bad_words_ids for all rows, or of each row; or one array, which this function gave.
        batch: B.
        vocab_size: the ids lie below it.
    """
    words_BWL: Any = np.full((len(settings), MOST_BAD_WORDS, LONGEST_BAD_WORD), -1, np.int32)
    if len(settings) == 1 and is_bad_word_rows(settings[0]):
        return settings[0]
    for words_WL, words in zip(words_BWL, settings, strict=True):
        for word_L, ids in zip(words_WL, check_bad_words(words or [], vocab_size), strict=False):
            word_L[-len(ids) :] = ids
    return np.broadcast_to(words_BWL, (batch, *words_BWL.shape[1:]))


def _bias(given: Any, allowed: Any, forbidden: Any, rows: int, V: int) -> Any:
    """[1 or rows, V]."""
    bias_BV = np.zeros((1, V), np.float32)
    if isinstance(given, Mapping):
        bias_BV = _of_ids(given, V)
    elif given is not None:
        bias_BV = _of_all(given, rows, V)
    for name, ids, kept in (("allowed_token_ids", allowed, True), ("forbidden_token_ids", forbidden, False)):
        if ids is not None:
            named_V = _named(name, ids, V)
            xp = jnp if traced(named_V) or traced(bias_BV) else np
            bias_BV = xp.where(named_V == kept, bias_BV, np.float32(-np.inf))
    if not traced(bias_BV):
        if np.any(np.isnan(bias_BV) | (bias_BV > _MOST)):
            raise InputError(f"logit_bias must be finite or -inf, and at most {_MOST:g}, got {shown(given)}")
        if np.any(np.all(bias_BV == -np.inf, -1)):
            settings = "logit_bias, allowed_token_ids and forbidden_token_ids"
            raise InputError(f"{settings} leave no token that can be chosen: loosen them")
    return bias_BV


def _of_ids(given: Mapping, V: int) -> Any:
    """The bias of a {id: number}, [1, V]."""
    ids = token_ids("logit_bias", list(given), V)
    if traced(given):
        return jnp.zeros((1, V)).at[0, np.array(ids)].set(jnp.asarray(list(given.values()), jnp.float32))
    values = numbers(list(given.values()))
    if values is None or values.shape != (len(ids),):
        raise InputError(f"logit_bias must be finite or -inf for each id, got {shown(given)}")
    bias_BV = np.zeros((1, V), np.float32)
    bias_BV[0, ids] = _single(values)
    return bias_BV


def _of_all(given: Any, rows: int, V: int) -> Any:
    """The bias of numbers for every token, [1 or rows, V]."""
    array: Any = jnp.asarray(given, jnp.float32) if traced(given) else numbers(given)
    if array is None or array.shape not in ((V,), (1, V), (rows, V)):
        kind = shown(given) if array is None else f"numbers of the shape {list(array.shape)}"
        forms = f"{{id: number}}, or numbers of the shape [{V}] or [{rows}, {V}]"
        raise InputError(f"logit_bias must be {forms}, got {kind}")
    array = array if traced(array) else _single(array)
    return array.reshape(-1, V)


def _named(name: str, ids: Any, V: int) -> Any:
    """bool [V]: which tokens are named."""
    if traced(ids):
        return jnp.zeros(V, bool).at[jnp.asarray(ids)].set(True, mode="drop")
    named_V = np.zeros(V, bool)
    named_V[token_ids(name, ids, V)] = True
    return named_V


def _single(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # what is too large becomes inf, which is refused
        return values.astype(np.float32)
