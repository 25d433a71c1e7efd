"""Biases, allowed ids and forbidden ids as one bias [B, V], and forbidden sequences of tokens as arrays.

Biases and ids may be traced in a caller's jit. Then their values are not checked, and the bias is computed on
the device.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import check_token_ids, is_traced, number_array
from ..errors import InputError, NoTokenLeftError, format_value
from .sampling_config import SamplingConfig
from .settings import LISTS

MOST_BAD_WORDS = 64  # forbidden sequences of each row
LONGEST_BAD_WORD = 8  # tokens of each forbidden sequence
_MAX_BIAS = 1e30  # with a larger one penalties could overflow float32


def rows_of_lists(lists: Mapping[str, Any], batch: int, vocab_size: int) -> dict[str, Any]:
    """Returns the arrays of the settings that are lists, as `settings_per_row` has them.

    Args:
        lists: for each setting its values for all rows, or its values of each row.
        batch: B.
        vocab_size: V.

    Raises:
        InputError: ids outside the vocabulary, a wrong shape, invalid numbers, or no token left.
    """
    parts = (lists[setting.name] for setting in LISTS if setting.kind in ("bias", "ids"))
    settings = list(zip(*parts, strict=True))
    rows = batch if len(settings) == 1 else 1
    biases = [_bias(own, allowed, forbidden, rows, vocab_size) for own, allowed, forbidden in settings]
    xp = jnp if any(map(is_traced, biases)) else np
    arrays = dict(logit_bias=xp.broadcast_to(xp.concatenate(biases), (batch, vocab_size)))
    for setting in LISTS:
        rows_of = dict(texts=listed_rows, words=bad_word_rows).get(setting.kind)
        if rows_of is not None:
            arrays[setting.name] = rows_of(setting.name, lists[setting.name], batch, vocab_size)
    return arrays


def check_lists(sampling: SamplingConfig) -> None:
    """Raises InputError if allowed and forbidden ids contradict each other, or a list has no valid ids."""
    allowed, forbidden = (
        None if ids is None or is_traced(ids) else set(check_token_ids(name, ids))
        for name in ("allowed_token_ids", "forbidden_token_ids")
        for ids in [getattr(sampling, name)]
    )
    if allowed == set():
        raise InputError("allowed_token_ids is empty: give the ids that may be sampled, or None")
    if both := (allowed or set()) & (forbidden or set()):
        where = "both in allowed_token_ids and in forbidden_token_ids"
        raise InputError(f"token id {min(both)} is {where}: leave it out of one")
    words = sampling.bad_words_ids
    if words is not None and not is_bad_word_rows(words):
        check_bad_words("bad_words_ids", words)


def check_min_tokens(sampling: SamplingConfig, eos_ids: Sequence[int]) -> None:
    """Raises InputError if only `eos_ids` are allowed, and `min_tokens` forbids them."""
    min_tokens = sampling.min_tokens
    allowed = sampling.allowed_token_ids
    if allowed is None or any(map(is_traced, (allowed, min_tokens))):
        return
    if not np.any(np.asarray(min_tokens) > 0):
        return
    forbidden = sampling.forbidden_token_ids
    bias = sampling.logit_bias
    banned = {*eos_ids, *(() if forbidden is None or is_traced(forbidden) else map(int, forbidden))}
    if isinstance(bias, Mapping) and not is_traced(bias):
        banned |= {int(i) for i, value in bias.items() if value == -np.inf}
    if {*map(int, allowed)} <= banned:
        raise InputError(
            f"min_tokens {format_value(min_tokens)} forbids the ids that end an answer, and"
            " allowed_token_ids has no others: the settings leave no token, allow more"
        )


def check_bad_words(name: str, words: Any, vocab_size: int | None = None) -> list[list[int]]:
    """Returns the distinct sequences of ids. Raises InputError if they are not lists of token ids."""
    if isinstance(words, np.ndarray | jax.Array):
        raise InputError(f"{name} must be a list of lists of token ids, got an array")
    if not isinstance(words, list | tuple):
        raise InputError(f"{name} must be a list of lists of token ids, got {format_value(words)}")
    sequences = dict.fromkeys(tuple(check_token_ids(name, ids, vocab_size)) for ids in words)
    most = MOST_BAD_WORDS
    longest = LONGEST_BAD_WORD
    if len(sequences) > most:
        raise InputError(f"{name}: {len(sequences)} sequences are more than the {most} of a row: give fewer")
    for ids in sequences:
        if not 1 <= len(ids) <= longest or min(ids) < 0:
            raise InputError(f"{name}: each has from 1 to {longest} token ids, got {format_value([*ids])}")
    return [[*ids] for ids in sequences]


def is_bad_word_rows(words: Any) -> bool:
    """Returns True if a value is an array from `bad_word_rows`, traced or not."""
    if not isinstance(words, np.ndarray | jax.Array):
        return False
    return words.ndim == 3 and words.shape[1:] == (MOST_BAD_WORDS, LONGEST_BAD_WORD)


def bad_word_rows(name: str, settings: Sequence[Any], batch: int, vocab_size: int) -> Any:
    """Returns the sequences of each row, int32 [B, W, L]: each at the end of its L places, and -1 in the
    other places.

    Args:
        name: the name of the setting, for errors.
        settings: its value for all rows, or of each row, or one array from this function.
        batch: B.
        vocab_size: V.
    """
    words_BWL: Any = np.full((len(settings), MOST_BAD_WORDS, LONGEST_BAD_WORD), -1, np.int32)
    if len(settings) == 1 and is_bad_word_rows(settings[0]):
        return settings[0]
    for words_WL, words in zip(words_BWL, settings, strict=True):
        for word_L, ids in zip(words_WL, check_bad_words(name, words or [], vocab_size), strict=False):
            word_L[-len(ids) :] = ids
    return np.broadcast_to(words_BWL, (batch, *words_BWL.shape[1:]))


def listed_rows(name: str, settings: Sequence[Any], batch: int, vocab_size: int) -> Any:
    """Returns which tokens are listed, bool [B, V]. settings: ids of all rows or of each, or bool [B, V]."""
    shape = batch, vocab_size
    rows: list[Any] = [() if x is None else x for x in settings]
    for i, x in enumerate(rows):
        if getattr(x, "shape", None) != shape or x.dtype != bool:
            rows[i] = _listed(name, x, vocab_size)[None]
    xp = jnp if any(map(is_traced, rows)) else np
    return xp.broadcast_to(xp.concatenate(rows), shape)


def _bias(logit_bias: Any, allowed: Any, forbidden: Any, rows: int, V: int) -> Any:
    """Returns the bias of one setting, [1 or rows, V]."""
    bias_BV = np.zeros((1, V), np.float32)
    if isinstance(logit_bias, Mapping):
        bias_BV = _bias_of_ids(logit_bias, V)
    elif logit_bias is not None:
        bias_BV = _bias_of_vocab(logit_bias, rows, V)
    for name, ids, keep in (("allowed_token_ids", allowed, True), ("forbidden_token_ids", forbidden, False)):
        if ids is not None:
            listed_V = _listed(name, ids, V)
            xp = jnp if is_traced(listed_V) or is_traced(bias_BV) else np
            bias_BV = xp.where(listed_V == keep, bias_BV, np.float32(-np.inf))
    if not is_traced(bias_BV):
        if np.any(np.isnan(bias_BV) | (bias_BV > _MAX_BIAS)):
            raise InputError(
                f"logit_bias must be finite or -inf, and at most {_MAX_BIAS:g}, got"
                f" {format_value(logit_bias)}"
            )
        if np.any(np.all(bias_BV == -np.inf, -1)):
            settings = "logit_bias, allowed_token_ids and forbidden_token_ids"
            raise NoTokenLeftError(f"{settings} leave no token that can be sampled: loosen them")
    return bias_BV


def _bias_of_ids(logit_bias: Mapping, V: int) -> Any:
    """Returns the bias of {id: number}, [1, V]."""
    ids = check_token_ids("logit_bias", list(logit_bias), V)
    if is_traced(logit_bias):
        return jnp.zeros((1, V)).at[0, np.array(ids)].set(jnp.asarray(list(logit_bias.values()), jnp.float32))
    values = number_array(list(logit_bias.values()))
    if values is None or values.shape != (len(ids),):
        raise InputError(f"logit_bias must be finite or -inf for each id, got {format_value(logit_bias)}")
    bias_BV = np.zeros((1, V), np.float32)
    bias_BV[0, ids] = _to_float32(values)
    return bias_BV


def _bias_of_vocab(logit_bias: Any, rows: int, V: int) -> Any:
    """Returns the bias of an array with a number for each token, [1 or rows, V]."""
    array: Any = jnp.asarray(logit_bias, jnp.float32) if is_traced(logit_bias) else number_array(logit_bias)
    if array is None or array.shape not in ((V,), (1, V), (rows, V)):
        kind = format_value(logit_bias) if array is None else f"numbers of the shape {list(array.shape)}"
        forms = f"{{id: number}}, or numbers of the shape [{V}] or [{rows}, {V}]"
        raise InputError(f"logit_bias must be {forms}, got {kind}")
    array = array if is_traced(array) else _to_float32(array)
    return array.reshape(-1, V)


def _listed(name: str, ids: Any, V: int) -> Any:
    """Returns a mask of the tokens that the ids list, bool [V]."""
    if is_traced(ids):
        return jnp.zeros(V, bool).at[jnp.asarray(ids)].set(True, mode="drop")
    listed_V = np.zeros(V, bool)
    is_array = isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu" and ids.size
    good = is_array and ids.min() >= 0 and ids.max() < V  # without a loop in Python
    listed_V[ids if good else check_token_ids(name, ids, V)] = True
    return listed_V


def _to_float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # too large a number becomes inf, which is rejected later
        return values.astype(np.float32)
