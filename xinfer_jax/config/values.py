"""Values of config.json, each checked: a missing or impossible one is named in an InputError."""

from collections.abc import Mapping
from typing import Any

from ..errors import InputError, shown

LONGEST = 2**30  # tokens of a context: positions, and what is padded to powers of two, stay int32
# Least and most that a model could ask for; beyond, norms vanish, angles overflow, building never ends.
_THETA = (2, 1e12)
_RANGES = dict(
    num_hidden_layers=(1, 10_000), num_attention_heads=(1, 2**16), num_key_value_heads=(1, 2**16),
    head_dim=(1, 2**16), num_experts=(1, 2**16), num_local_experts=(1, 2**16),
    max_position_embeddings=(1, LONGEST), original_max_position_embeddings=(2, LONGEST),
    rms_norm_eps=(1e-30, 1), rope_theta=_THETA, rope_local_base_freq=_THETA,
    factor=(1e-6, 1e6), attention_factor=(1e-3, 1e3), mscale=(1e-3, 1e3), mscale_all_dim=(1e-3, 1e3),
)  # fmt: skip
_INTEGER = (1, 2**31 - 1)
_NUMBER = (1e-6, 1e9)  # all others


def number(hf: Mapping, name: str, otherwise: tuple[float, float] = _NUMBER) -> float:
    """otherwise: least and most of a name that has no range of its own."""
    value = hf.get(name)
    (least, most) = _RANGES.get(name, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InputError(f"config.json: {name} must be a number above 0, got {shown(value)}")
    if not least <= value <= most:
        raise InputError(
            f"config.json: {name} must lie between {least:.10g} and {most:.10g}, got {shown(value)}"
        )
    return value


def number_or_none(hf: Mapping, name: str) -> float | None:
    return None if hf.get(name) is None else number(hf, name)


def integer(hf: Mapping, name: str) -> int:
    value = number(hf, name, _INTEGER)
    if not isinstance(value, int):
        raise InputError(f"config.json: {name} must be an integer, got {shown(value)}")
    return value


def boolean(hf: Mapping, name: str) -> bool:
    value = hf.get(name)
    if not isinstance(value, bool):
        raise InputError(f"config.json: {name} must be true or false, got {shown(value)}")
    return value


def numbers(hf: Mapping, name: str) -> tuple[float, ...]:
    value = hf.get(name)
    if not isinstance(value, list | tuple):
        raise InputError(f"config.json: {name} must be a list of numbers, got {shown(value)}")
    return tuple(number({name: item}, name) for item in value)


def objects(hf: Mapping, name: str) -> Mapping:
    """An object, empty where there is none."""
    value = {} if hf.get(name) is None else hf[name]
    if not isinstance(value, Mapping):
        raise InputError(f"config.json: the rope parameters in {name} must be an object, got {shown(value)}")
    return value


def refuse(hf: Mapping, name: str) -> None:
    """Raises InputError where it is set: the family has no such setting, or it is not supported for it."""
    if hf.get(name) is not None and hf[name] is not False:
        raise InputError(f"{name} {shown(hf[name])} is not supported for model_type {hf['model_type']!r}")


def at_most(hf: Mapping, name: str, limit: int) -> Any:
    if integer(hf, name) > limit:
        raise InputError(f"config.json: {name} {hf[name]} is above {limit}")
    return hf[name]
