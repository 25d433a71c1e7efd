"""Checks of arguments by type. Traced values are not checked."""

import operator
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import InputError, format_value

_TEXT = str | bytes | bytearray | memoryview


def is_traced(value: Any) -> bool:
    """Returns True if a value is a tracer, or a list or mapping that contains one."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, jax.core.Tracer) or (
        isinstance(value, list | tuple) and any(issubclass(x, jax.core.Tracer) for x in {*map(type, value)})
    )


def array_module(*sizes: Any) -> Any:
    """Returns NumPy, with which nothing is compiled, or `jax.numpy` if a size is symbolic, as in
    `jax.export`.
    """
    return np if all(isinstance(size, int | np.integer) for size in sizes) else jnp


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Returns the value as an int. Raises InputError if it is not an integer in least … most. Bools and
    floats are rejected.
    """
    number = _index(value)
    if number is None or number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name} must be a whole number {bounds}, got {format_value(value)}")
    return number


def number_array(value: Any) -> Any:
    """Returns a number, a list or an array of numbers as float64, or as a jax array if it is traced. Returns
    None for anything else, also for bools and texts.
    """
    if _holds_bool(value):
        return None
    try:
        array = jnp.asarray(value) if is_traced(value) else np.asarray(value)
    except (TypeError, ValueError):  # rows of different lengths, or no numbers
        return None
    if not (jnp.issubdtype(array.dtype, np.integer) or jnp.issubdtype(array.dtype, np.floating)):
        return None
    return array if is_traced(array) else array.astype(np.float64)


def check_token_ids(
    name: str, ids: Any, vocab_size: int | None = None, images: Mapping[int, str] | None = None
) -> list[int]:
    """Returns any collection of ids as a list of ints. Raises InputError if it is not a collection of
    integers, or an id is outside the vocabulary or one of `images`, as in `ModelConfig.placeholder_ids`.
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
        raise InputError(f"{name} must be a list of token ids, got {format_value(ids)}")
    if vocab_size is not None and found and not (min(found) >= 0 and max(found) < vocab_size):
        bad = next(i for i in found if not 0 <= i < vocab_size)
        raise InputError(f"{name} holds token id {format_value(bad)}, outside the vocabulary of {vocab_size}")
    for image, kind in (images or {}).items():
        if image in found:
            what = f"token id {image}, which is {kind} in config.json"
            raise InputError(f"{name} holds {what}: only text is served, leave out images, video and sound")
    return found


def is_sequence(value: Any) -> bool:
    """Returns True if a value is a list or an array. Texts, sets and mappings are not sequences."""
    if isinstance(value, _TEXT | Mapping | Set):
        return False
    return isinstance(value, Sequence) or (hasattr(value, "__array__") and np.ndim(value) > 0)


def check_array(name: str, value: Any, kind: Any, *shape: int | str) -> None:
    """Raises InputError unless it is an array of this kind (`np.integer`, `np.floating` or `np.bool_`) and
    shape, in which a name stands for any size.
    """
    nouns = {np.integer: "integers", np.floating: "floats", np.bool_: "bools"}
    wanted = f"{name} must be an array of {nouns[kind]} of the shape [{', '.join(map(str, shape))}]"
    if not isinstance(value, np.ndarray | jax.Array):
        raise InputError(f"{wanted}, got {format_value(value)}")
    fits = len(value.shape) == len(shape) and all(
        isinstance(want, str) or size == want for size, want in zip(value.shape, shape, strict=True)
    )
    if not fits or not jnp.issubdtype(value.dtype, kind):
        raise InputError(f"{wanted}, got {value.dtype} of {list(value.shape)}")


def check_range(name: str, values: Any, least: int, most: int) -> None:
    """Raises InputError if an array has a number outside least … most."""
    if isinstance(values, jax.core.Tracer):
        return
    values = np.asarray(values)
    if np.any(bad := (values < least) | (values > most)):
        raise InputError(f"{name} {values[bad][0]} is outside {least} … {most}")


def _index(value: Any) -> int | None:
    """Returns an integer as an int. Returns None for anything else, also for bools."""
    try:
        return None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        return None


def _holds_bool(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_bool, value))
    return isinstance(value, bool | np.bool_)
