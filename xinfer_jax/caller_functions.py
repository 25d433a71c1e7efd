"""Functions of callers that are traced in our programs: what they have to be, and what messages call them."""

from collections.abc import Callable
from typing import Any

import jax

from .errors import InputError, format_value


def check_function(name: str, value: Any) -> None:
    """Raises InputError unless it is None or a function that a program can be known by: with a hash."""
    try:
        is_right = value is None or (callable(value) and hash(value) is not None)
    except TypeError:
        is_right = False
    if not is_right:
        raise InputError(f"{name} must be a function with a hash, got {format_value(value)}")


def function_name(function: Callable) -> str:
    """Its name, or that of the function that a `functools.partial` calls."""
    return getattr(getattr(function, "func", function), "__qualname__", None) or format_value(function)


def call_function(what: str, function: Callable, *args: Any) -> Any:
    """function(*args) within a trace. Raises InputError, which names it, where it takes a traced value for a
    number.
    """
    try:
        return function(*args)
    except jax.errors.JAXTypeError as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"{what} {function_name(function)} cannot be traced: {first}") from error
