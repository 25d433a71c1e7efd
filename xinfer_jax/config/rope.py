"""`RopeConfig`: which rotary embedding a layer has, and how config.json says so."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import InputError, shown
from .values import boolean, integer, number, numbers, objects

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, with the field names of Hugging Face's `rope_parameters`."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # llama3, yarn, longrope: the context first trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, longrope: scale of cos and sin; None: from factor
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    partial_rotary_factor: float = 1.0  # the leading part of each head that is rotated
    short_factor: tuple[float, ...] = ()  # longrope: divides each pair's frequency up to that context
    long_factor: tuple[float, ...] = ()  # longrope: the same for longer sequences

    @property
    def switches_at(self) -> int | None:
        """The length beyond which all positions of a sequence rotate by other angles; None: there is none."""
        return None if self.short_factor == self.long_factor else self.original_max_position_embeddings


def read_rope(hf: Mapping, rope_types: tuple[str, ...] = ROPE_TYPES, partial: bool = False) -> RopeConfig:
    """From `rope_scaling` and `rope_theta` of config.json, or from `rope_parameters`.

    Args:
        rope_types: those that the family has.
        partial: whether the family may rotate a part of each head.

    Raises:
        InputError: a type, a part or a value that is not supported.
    """
    scaling = rope_settings(hf)
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in rope_types:
        raise InputError(f"rope type {shown(rope_type)} is not supported: use one of {', '.join(rope_types)}")
    theta = 10000.0 if hf.get("rope_theta") is None else hf["rope_theta"]
    given = {"rope_theta": theta, **{k: v for k, v in scaling.items() if v is not None}}
    if hf.get("partial_rotary_factor") is not None:
        given.setdefault("partial_rotary_factor", hf["partial_rotary_factor"])
    if given.setdefault("partial_rotary_factor", 1.0) != 1.0 and not partial:
        raise InputError("partial_rotary_factor other than 1 is not supported")
    if rope_type in ("llama3", "yarn", "longrope"):
        given.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
        if hf.get("original_max_position_embeddings") is not None:
            given["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    if rope_type in ("yarn", "longrope") and "factor" not in given:
        given["factor"] = hf["max_position_embeddings"] / integer(given, "original_max_position_embeddings")
    return _rope(rope_type, {"truncate": True, **given})


def rope_settings(hf: Mapping) -> Mapping:
    """`rope_scaling`, or `rope_parameters`: one flat object."""
    scaling = objects(hf, "rope_scaling") or objects(hf, "rope_parameters")
    if any(isinstance(v, Mapping) for v in scaling.values()):
        raise InputError(
            f"rope parameters must be one flat object (none per layer type), got {shown(scaling)}"
        )
    return scaling


def _rope(rope_type: str, given: Mapping) -> RopeConfig:
    scaled = ("factor",)
    needed = dict(llama3=(*scaled, "low_freq_factor", "high_freq_factor"), linear=scaled, dynamic=scaled)
    for name in needed.get(rope_type, ()):
        if name not in given:
            raise InputError(f"rope type {rope_type!r} needs {name!r}, which config.json does not give")
    lists = ("short_factor", "long_factor")
    names = {f.name for f in dataclasses.fields(RopeConfig)} - {"rope_type", "truncate", *lists}
    values: dict[str, Any] = {
        name: (integer if name == "original_max_position_embeddings" else number)(given, name)
        for name in sorted(names & given.keys())
    }
    if rope_type == "longrope":
        values |= {name: numbers(given, name) for name in lists}
    rope = RopeConfig(rope_type=rope_type, truncate=boolean(given, "truncate"), **values)
    if rope_type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise InputError(
            f"config.json: low_freq_factor {rope.low_freq_factor} must be less than high_freq_factor"
            f" {rope.high_freq_factor}"
        )
    return rope


def read_ropes(hf: Mapping, sliding_theta: float) -> dict[str, RopeConfig | None]:
    """`rope` and `sliding_rope` of families whose full and sliding layers rotate differently.

    Older files scale the full layers by `rope_scaling`; newer ones give `rope_parameters` per layer type.
    sliding_theta: of the sliding layers, where these do not say.
    """
    given = objects(hf, "rope_parameters")
    kinds = ("full_attention", "sliding_attention")
    if not all(k in kinds and isinstance(v, Mapping | None) for k, v in given.items()):
        raise InputError(
            f"rope_parameters of model_type {hf['model_type']!r} must name {' and '.join(kinds)}, got"
            f" {shown(given)}"
        )

    def one(parameters: Mapping, theta: float) -> RopeConfig:
        alone = dict(rope_parameters=parameters, rope_theta=theta)
        gone = dict(rope_scaling=None, original_max_position_embeddings=None)
        return read_rope({**hf, **alone, **gone}, tuple(t for t in ROPE_TYPES if t != "dynamic"))

    full, sliding = (dict(given.get(kind) or {}) for kind in kinds)
    ropes = one({**full, **objects(hf, "rope_scaling")}, hf["rope_theta"]), one(sliding, sliding_theta)
    return dict(rope=ropes[0], sliding_rope=None if ropes[0] == ropes[1] else ropes[1])
