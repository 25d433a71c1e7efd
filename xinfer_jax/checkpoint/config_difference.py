"""The differences between the config of a checkpoint and the config of a model."""

import dataclasses
from contextlib import suppress
from typing import Any, NamedTuple

from ..config.model_config import ModelConfig
from ..errors import InputError
from ..weights.resharding import with_repeated_kv_heads


class ConfigDifference(NamedTuple):
    """A field in which two configs differ, such as layers.0.mixers.0.window, and its two values."""

    name: str
    of_model: Any
    of_checkpoint: Any


def find_config_difference(config: ModelConfig, other: ModelConfig) -> ConfigDifference | None:
    """Returns the first field in which a checkpoint's config differs from a model's, or None if the
    checkpoint fits. The model may have key heads that a mesh repeated.

    Args:
        config: the config of the model.
        other: the config of the checkpoint.
    """
    heads = {getattr(mixer, "num_kv_heads", 1) for mixer in config.cached_mixers}
    for devices in {config.num_key_value_heads, *heads}:
        with suppress(InputError):  # these numbers of heads do not divide each other
            if config == with_repeated_kv_heads(other, devices):
                return None
    return None if config == other else _first_difference("", config, other)


def _first_difference(name: str, a: Any, b: Any) -> ConfigDifference:
    """Returns the first difference of two unequal values. name: the field that has the values."""
    pairs = []
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        names = [field.name for field in dataclasses.fields(a) if field.compare]
        pairs = [(part, getattr(a, part), getattr(b, part)) for part in names]
    elif isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        pairs = [(str(i), *pair) for i, pair in enumerate(zip(a, b, strict=True))]
    for part, x, y in pairs:
        if x != y:
            return _first_difference(f"{name}.{part}".removeprefix("."), x, y)
    return ConfigDifference(name, a, b)
