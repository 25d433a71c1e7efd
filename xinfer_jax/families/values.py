"""Typed values of config.json: a missing or impossible one raises an InputError with its name."""

from collections.abc import Mapping
from typing import Any

from ..errors import InputError, format_value

MAX_CONTEXT = 2**30  # tokens; positions, also padded to powers of two, stay within int32
# Least and most values of real models. Beyond, norms vanish, angles overflow, or initialisation never ends.
_THETA = (2, 1e12)
_RANGES = dict(
    num_hidden_layers=(1, 10_000), num_attention_heads=(1, 2**16), num_key_value_heads=(1, 2**16),
    num_global_key_value_heads=(1, 2**16), head_dim=(1, 2**16), global_head_dim=(1, 2**16),
    num_experts=(1, 2**16), num_local_experts=(1, 2**16), n_routed_experts=(1, 2**16),
    moe_num_experts=(1, 2**16),
    max_position_embeddings=(1, MAX_CONTEXT), original_max_position_embeddings=(2, MAX_CONTEXT),
    rms_norm_eps=(1e-30, 1), rope_theta=_THETA, rope_local_base_freq=_THETA,
    factor=(1e-6, 1e6), attention_factor=(1e-3, 1e3), mscale=(1e-3, 1e3), mscale_all_dim=(1e-3, 1e3),
)  # fmt: skip
_INTEGER = (1, 2**31 - 1)
_NUMBER = (1e-6, 1e9)  # all others


def get_number(hf: Mapping, name: str, default_range: tuple[float, float] = _NUMBER) -> float:
    """Returns a positive number. default_range: least and most for a name that has no range."""
    value = hf.get(name)
    (least, most) = _RANGES.get(name, default_range)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InputError(f"config.json: {name} must be a number above 0, got {format_value(value)}")
    if not least <= value <= most:
        raise InputError(
            f"config.json: {name} must lie between {least:.10g} and {most:.10g}, got {format_value(value)}"
        )
    return value


def get_optional_number(hf: Mapping, name: str) -> float | None:
    return None if hf.get(name) is None else get_number(hf, name)


def get_integer(hf: Mapping, name: str) -> int:
    value = get_number(hf, name, _INTEGER)
    if not isinstance(value, int):
        raise InputError(f"config.json: {name} must be an integer, got {format_value(value)}")
    return value


def get_count(hf: Mapping, name: str, most: int = _INTEGER[1]) -> int:
    """Returns an integer from 0 on."""
    value = hf[name]
    if type(value) is not int or not 0 <= value <= most:
        raise InputError(
            f"config.json: {name} must be an integer from 0 to {most}, got {format_value(value)}"
        )
    return value


def get_boolean(hf: Mapping, name: str) -> bool:
    value = hf.get(name)
    if not isinstance(value, bool):
        raise InputError(f"config.json: {name} must be true or false, got {format_value(value)}")
    return value


def get_numbers(hf: Mapping, name: str) -> tuple[float, ...]:
    value = hf.get(name)
    if not isinstance(value, list | tuple):
        raise InputError(f"config.json: {name} must be a list of numbers, got {format_value(value)}")
    return tuple(get_number({name: item}, name) for item in value)


def get_object(hf: Mapping, name: str) -> Mapping:
    """Returns an object, or an empty one if there is none."""
    value = {} if hf.get(name) is None else hf[name]
    if not isinstance(value, Mapping):
        raise InputError(f"config.json: {name} must be an object, got {format_value(value)}")
    return value


def reject_setting(hf: Mapping, name: str) -> None:
    """Raises InputError if a setting that this family does not support is set."""
    if hf.get(name) is not None and hf[name] is not False:
        raise InputError(
            f"{name} {format_value(hf[name])} is not supported for model_type {hf['model_type']!r}"
        )


def get_integer_at_most(hf: Mapping, name: str, limit: int) -> Any:
    if get_integer(hf, name) > limit:
        raise InputError(f"config.json: {name} {hf[name]} is above {limit}")
    return hf[name]


def no_indexer(hf: Mapping, name: str) -> InputError:
    """Returns the error for a setting of sparse attention (DeepSeek-V3.2, GLM-5)."""
    return InputError(
        f"{name} {format_value(hf[name])} is not supported: there is no indexer for sparse attention, use a"
        " model whose attention sees all tokens"
    )
