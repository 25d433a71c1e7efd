"""Values of config.json, each checked: a missing or impossible one is named in an InputError."""

import math
from collections.abc import Mapping
from typing import Any

from .errors import InputError


def number(hf: Mapping, name: str) -> float:
    value = hf.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"config.json: {name} must be a number above 0, got {value!r}")
    return value


def number_or_none(hf: Mapping, name: str) -> float | None:
    return None if hf.get(name) is None else number(hf, name)


def integer(hf: Mapping, name: str) -> int:
    value = number(hf, name)
    if not isinstance(value, int):
        raise InputError(f"config.json: {name} must be an integer, got {value!r}")
    return value


def boolean(hf: Mapping, name: str) -> bool:
    value = hf.get(name)
    if not isinstance(value, bool):
        raise InputError(f"config.json: {name} must be true or false, got {value!r}")
    return value


def numbers(hf: Mapping, name: str) -> tuple[float, ...]:
    value = hf.get(name)
    if not isinstance(value, list | tuple):
        raise InputError(f"config.json: {name} must be a list of numbers, got {value!r}")
    return tuple(number({name: item}, name) for item in value)


def refuse(hf: Mapping, *names: str) -> None:
    """Raises InputError where one of these is set: the family has no such setting, or it is not supported for
    it.
    """
    for name in names:
        if hf.get(name):
            raise InputError(f"{name} {hf[name]!r} is not supported for model_type {hf['model_type']!r}")


def at_most(hf: Mapping, name: str, limit: int) -> Any:
    if integer(hf, name) > limit:
        raise InputError(f"config.json: {name} {hf[name]} is above {limit}")
    return hf[name]
