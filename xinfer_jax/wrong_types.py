"""The errors of an object of another type in place of a config, options or settings, such as the objects of
transformers. A check imports this module once it fails.
"""

from collections.abc import Iterable

from .errors import InputError, format_value

_TO_SETTINGS = "SamplingConfig.from_hf(config.to_dict())"


def is_of_transformers(value: object) -> bool:
    """Returns True if a value is a config of transformers, whose `to_dict` returns its fields."""
    bases = type(value).__mro__
    return hasattr(value, "to_dict") and any(base.__module__.startswith("transformers.") for base in bases)


def not_a_config(value: object) -> InputError:
    """Returns the error of a value in place of a `ModelConfig`."""
    remedy = "ModelConfig.from_hf(config.to_dict())" if is_of_transformers(value) else "model.config"
    got = type(value).__name__
    return InputError(f"config must be a ModelConfig, as model.config is, got {got}: give {remedy}")


def not_a_config_file(value: object) -> InputError:
    """Returns the error of a value in place of the object of a config.json."""
    remedy = (
        "ModelConfig.from_hf(config.to_dict())"
        if is_of_transformers(value)
        else "the dict that json.load returns"
    )
    return InputError(f"ModelConfig.from_hf takes config.json's object, got {_shown(value)}: give {remedy}")


def not_a_generation_config(value: object) -> InputError:
    """Returns the error of a value in place of the object of a generation_config.json."""
    remedy = _TO_SETTINGS if is_of_transformers(value) else "the dict that json.load returns"
    what = "SamplingConfig.from_hf takes generation_config.json's object"
    return InputError(f"{what}, got {_shown(value)}: give {remedy}")


def not_options(value: object) -> InputError:
    """Returns the error of a value in place of `GenerateOptions`."""
    given = "max_tokens=128"
    if is_of_transformers(value):
        given = f"sampling={_TO_SETTINGS}"
    elif type(value).__name__ == "SamplingConfig":
        given = "sampling=settings"
    return InputError(f"options must be GenerateOptions, got {_shown(value)}: give GenerateOptions({given})")


def not_sampling(value: object) -> InputError:
    """Returns the error of a value in place of a `SamplingConfig` or a list of them."""
    each = value if isinstance(value, Iterable) else [value]
    remedy = _TO_SETTINGS if any(map(is_of_transformers, each)) else "SamplingConfig()"
    what = "sampling must be a SamplingConfig, or a list of them"
    return InputError(f"{what}, got {_shown(value)}: give {remedy}")


def _shown(value: object) -> str:
    return type(value).__name__ if is_of_transformers(value) else format_value(value)
