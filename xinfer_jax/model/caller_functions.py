"""Checks of functions of callers (edits of taps, logits processors), and of their results."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputError, format_value


def check_function(name: str, value: Any) -> None:
    """Raises InputError unless it is None or a function that a program can be known by, because it has a
    hash.
    """
    try:
        is_right = value is None or (callable(value) and hash(value) is not None)
    except TypeError:
        is_right = False
    if not is_right:
        raise InputError(f"{name} must be a function with a hash, got {format_value(value)}")


def function_name(function: Callable) -> str:
    """Returns the name of a function, or of the function that a `functools.partial` calls."""
    return getattr(getattr(function, "func", function), "__qualname__", None) or format_value(function)


def call_function(what: str, function: Callable, *args: Any) -> Any:
    """Calls function(*args) within a trace. Raises InputError, which names the function, if it takes a traced
    value for a number.
    """
    try:
        return function(*args)
    except jax.errors.JAXTypeError as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"{what} {function_name(function)} cannot be traced: {first}") from error


def check_result(what: str, function: Callable, got: Any, like: Any, where: str = "") -> None:
    """Raises InputError if a caller's function has not returned arrays like these. where: the place of the
    call, for the message.
    """

    def shapes(tree: Any) -> str:
        leaves = [f"{jnp.result_type(x)}{list(np.shape(x))}" for x in jax.tree.leaves(tree)]
        return ", ".join(leaves) or "no array"

    called = f"{what} {function_name(function)}{where}"
    try:
        found = shapes(got)
    except (TypeError, ValueError) as error:
        raise InputError(f"{called} must return arrays, got {format_value(got)}") from error
    wanted = shapes(like)
    if found == wanted:  # in other trees?
        found += f" in {jax.tree.structure(got)}"
        wanted += f" in {jax.tree.structure(like)}"
    if found != wanted:
        raise InputError(f"{called} returned {found}, expected {wanted}")
