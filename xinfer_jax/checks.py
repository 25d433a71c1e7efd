"""What a caller gives, each checked by its kind: whole numbers, numbers, token ids, arrays. Traced values are
taken as they are.
"""

import operator
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import InputError, shown

_TEXT = str | bytes | bytearray | memoryview


def traced(value: Any) -> bool:
    """Whether it is a tracer, or a list that holds one."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, jax.core.Tracer) or (
        isinstance(value, list | tuple) and any(isinstance(x, jax.core.Tracer) for x in value)
    )


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The value as an int; InputError where it is no whole number in least … most (bools and floats are
    none).
    """
    number = _index(value)
    if number is None or number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} must be a whole number {bounds}, got {shown(value)}")
    return number


def numbers(value: Any) -> Any:
    """A number, or numbers in lists or an array, as float64 (a jax array where they are traced); None where
    it is anything else, bools and texts too.
    """
    if _holds_bool(value):
        return None
    try:
        array = jnp.asarray(value) if traced(value) else np.asarray(value)
    except (TypeError, ValueError):  # rows of different lengths; what has no array
        return None
    if not (jnp.issubdtype(array.dtype, np.integer) or jnp.issubdtype(array.dtype, np.floating)):
        return None
    return array if traced(array) else array.astype(np.float64)


def token_ids(name: str, ids: Any, vocab_size: int | None = None) -> list[int]:
    """Any collection of ids as a list of ints.

    Raises:
        InputError: no collection of whole numbers, or one outside the vocabulary.
    """
    if isinstance(ids, np.ndarray | jax.Array):
        array = np.asarray(ids)
        good = array.ndim == 1 and (np.issubdtype(array.dtype, np.integer) or not array.size)
        found: list[Any] = array.tolist() if good else [None]
    elif isinstance(ids, Collection) and not isinstance(ids, _TEXT | Mapping):
        found = [i if type(i) is int else _index(i) for i in ids]
    else:
        found = [None]
    if None in found:
        raise InputError(f"{name} must be a list of token ids, got {shown(ids)}")
    if vocab_size is not None and found and not (min(found) >= 0 and max(found) < vocab_size):
        bad = next(i for i in found if not 0 <= i < vocab_size)
        raise InputError(f"{name} holds token id {shown(bad)}, outside the vocabulary of {vocab_size}")
    return found


def in_order(value: Any) -> bool:
    """Whether it is a list or an array: neither a text nor a set."""
    if isinstance(value, _TEXT | Mapping | Set):
        return False
    return isinstance(value, Sequence) or (hasattr(value, "__array__") and np.ndim(value) > 0)


def array_of(name: str, value: Any, kind: Any, *shape: int | str) -> None:
    """Raises InputError unless it is an array of that kind (`np.integer`, `np.floating` or `np.bool_`) and
    shape, in which a name stands for any size.
    """
    words = {np.integer: "integers", np.floating: "floats", np.bool_: "bools"}
    wanted = f"{name} must be an array of {words[kind]} of the shape [{', '.join(map(str, shape))}]"
    if not isinstance(value, np.ndarray | jax.Array):
        raise InputError(f"{wanted}, got {shown(value)}")
    fits = len(value.shape) == len(shape) and all(
        isinstance(want, str) or size == want for size, want in zip(value.shape, shape, strict=True)
    )
    if not fits or not jnp.issubdtype(value.dtype, kind):
        raise InputError(f"{wanted}, got {value.dtype} of {list(value.shape)}")


def within(name: str, values: Any, least: int, most: int) -> None:
    """Raises InputError where a number of an array that is not traced lies outside least … most."""
    if isinstance(values, jax.core.Tracer):
        return
    values = np.asarray(values)
    if np.any(bad := (values < least) | (values > most)):
        raise InputError(f"{name} {values[bad][0]} is outside {least} … {most}")


def _index(value: Any) -> int | None:
    """As an int where it is a whole number, and no bool."""
    try:
        return None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        return None


def _holds_bool(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_bool, value))
    return isinstance(value, bool | np.bool_)
