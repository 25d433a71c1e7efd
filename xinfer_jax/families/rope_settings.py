"""The rotary embedding of layers from config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config.model_config import ModelConfig
from ..config.rope import RopeConfig
from ..errors import InputError, format_value
from .layer_fields import FULL, SLIDING
from .values import get_boolean, get_integer, get_number, get_numbers, get_object

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_OF_FAMILY = ("head_dim", "interleaved")  # fields that are not in `rope_parameters`
_NONE_IF_0 = ("mscale", "mscale_all_dim")
_STRETCHED = ("yarn", "longrope")  # by the ratio of two lengths if there is no factor
_NEEDED = dict(
    llama3=("factor", "low_freq_factor", "high_freq_factor"), linear=("factor",), dynamic=("factor",)
)


def read_rope(
    hf: Mapping, rope_types: tuple[str, ...] = ROPE_TYPES, partial: bool = False, interleaved: bool = False
) -> RopeConfig:
    """Returns the rotary embedding from `rope_scaling` and `rope_theta`, or from `rope_parameters`. It has
    one of these types. partial: True: it may rotate a part of each head. interleaved: the field of the
    result. Raises InputError.
    """
    scaling = flat_rope_settings(hf)
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in rope_types:
        raise InputError(
            f"rope type {format_value(rope_type)} is not supported: use one of {', '.join(rope_types)}"
        )
    theta = 10000.0 if hf.get("rope_theta") is None else hf["rope_theta"]
    is_none = lambda name, x: x is None or name in _NONE_IF_0 and type(x) in (int, float) and x == 0  # noqa: E731
    given = {"rope_theta": theta} | {name: x for name, x in scaling.items() if not is_none(name, x)}
    if hf.get("partial_rotary_factor") is not None:
        given.setdefault("partial_rotary_factor", hf["partial_rotary_factor"])
    if given.setdefault("partial_rotary_factor", 1.0) != 1.0 and not partial:
        raise InputError("partial_rotary_factor other than 1 is not supported")
    if rope_type in ("llama3", "yarn", "longrope"):
        given.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
        if hf.get("original_max_position_embeddings") is not None:
            given["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    if rope_type in _STRETCHED and "factor" not in given:
        original = get_integer(given, "original_max_position_embeddings")
        given["factor"] = hf["max_position_embeddings"] / original
    rope = _rope(rope_type, {"truncate": True, **given})
    return dataclasses.replace(rope, interleaved=interleaved)


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """Returns `rope_parameters`: the inverse of `read_rope`, for which an absent factor is not 1."""
    needed = {"rope_type", "rope_theta"} | ({"factor"} if rope.rope_type in _STRETCHED else set())
    needed |= {*_NEEDED.get(rope.rope_type, ())}
    fields = {field.name: field.default for field in dataclasses.fields(rope) if field.name not in _OF_FAMILY}
    values = {name: getattr(rope, name) for name in fields}
    written = {name: x for name, x in values.items() if name in needed or x != fields[name]}
    return {name: list(x) if isinstance(x, tuple) else x for name, x in written.items()}


def flat_rope_settings(hf: Mapping) -> Mapping:
    """Returns `rope_scaling` or `rope_parameters`: one flat object."""
    scaling = get_object(hf, "rope_scaling") or get_object(hf, "rope_parameters")
    if any(isinstance(v, Mapping) for v in scaling.values()):
        raise InputError(
            f"rope parameters must be one flat object (none per layer type), got {format_value(scaling)}"
        )
    return scaling


def _rope(rope_type: str, given: Mapping) -> RopeConfig:
    for name in _NEEDED.get(rope_type, ()):
        if name not in given:
            raise InputError(f"rope type {rope_type!r} needs {name!r}, which config.json does not give")
    lists = ("short_factor", "long_factor")
    names = {f.name for f in dataclasses.fields(RopeConfig)} - {"rope_type", "truncate", *_OF_FAMILY, *lists}
    values: dict[str, Any] = {
        name: (get_integer if name == "original_max_position_embeddings" else get_number)(given, name)
        for name in sorted(names & given.keys())
    }
    if rope_type == "longrope":
        values |= {name: get_numbers(given, name) for name in lists}
    rope = RopeConfig(rope_type=rope_type, truncate=get_boolean(given, "truncate"), **values)
    if rope_type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise InputError(
            f"config.json: low_freq_factor {rope.low_freq_factor} must be less than high_freq_factor"
            f" {rope.high_freq_factor}"
        )
    return rope


def write_partial_rope(rope: RopeConfig) -> dict[str, Any]:
    """Returns `rope_parameters` of a RoPE that may rotate a part of each head."""
    return write_rope(rope) | dict(partial_rotary_factor=rope.partial_rotary_factor)


def read_rope_per_layer_type(hf: Mapping, sliding_theta: float) -> tuple[RopeConfig, RopeConfig | None]:
    """Returns the embeddings of full and of sliding layers if they may differ, or None if they are equal.

    Older files have `rope_scaling` for the full layers. Newer files have `rope_parameters` per layer type.
    sliding_theta: the rope_theta of the sliding layers if `rope_parameters` has none.
    """

    def layer_type_rope(parameters: Mapping, theta: float) -> RopeConfig:
        own = dict(rope_parameters=parameters, rope_theta=theta)
        unused = dict(rope_scaling=None, original_max_position_embeddings=None)
        return read_rope({**hf, **own, **unused}, tuple(t for t in ROPE_TYPES if t != "dynamic"))

    given = rope_per_layer_type(hf)
    rope = layer_type_rope({**given[FULL], **get_object(hf, "rope_scaling")}, hf["rope_theta"])
    sliding_rope = layer_type_rope(given[SLIDING], sliding_theta)
    return rope, None if rope == sliding_rope else sliding_rope


def write_rope_per_layer_type(config: ModelConfig) -> dict[str, Any]:
    """Returns the inverse of `read_rope_per_layer_type`."""
    sliding = next((config.layer_rope(i) for i, window in enumerate(config.layer_windows) if window), None)
    ropes = {FULL: config.rope, SLIDING: sliding or config.rope}
    return dict(rope_parameters={kind: write_rope(rope) for kind, rope in ropes.items()})


def rope_per_layer_type(hf: Mapping) -> dict[str, Mapping]:
    """Returns `rope_parameters` of full and of sliding layers. They are empty if there are none."""
    given = get_object(hf, "rope_parameters")
    kinds = (FULL, SLIDING)
    if not all(k in kinds and isinstance(v, Mapping | None) for k, v in given.items()):
        raise InputError(
            f"rope_parameters of model_type {hf['model_type']!r} must name {' and '.join(kinds)}, got"
            f" {format_value(given)}"
        )
    return {kind: given.get(kind) or {} for kind in kinds}
