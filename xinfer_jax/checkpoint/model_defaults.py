"""Fills in the values that a caller of a function of a `Model` does not give: sampling settings, and the
random key.

`generation/README.md` has the rule. Functions of parameters and a config do not use this module.
"""

import dataclasses
from typing import Any

import jax

from ..errors import InputError, format_value
from ..generation.options import GenerateOptions, options_or_default
from ..modes import default_modes
from ..sampling.random_keys import key_from_seed
from .loading import Model


def options_of_model(model: Model, options: Any) -> GenerateOptions:
    """Returns the options, with the sampling settings of the model's generation_config.json if the options
    have none. options: None: `GenerateOptions()`.

    Raises:
        InputError: the options are no `GenerateOptions`, or a setting of generation_config.json is not
            supported.
    """
    if not isinstance(model, Model):
        raise InputError(f"model must be what load_model gives, got {format_value(model)}")
    options = options_or_default(options)
    if options.sampling is not None:
        return options
    return dataclasses.replace(options, sampling=model.sampling_config())


def key_or_default(key: jax.Array | None) -> jax.Array:
    """Returns the key. For None it returns `jax.random.key(0)`, which commands use without --seed."""
    if key is not None:
        return key
    with default_modes():
        return key_from_seed(0)


def end_ids(model: Model, options: GenerateOptions) -> tuple[int, ...]:
    """Returns the EOS ids of a call, which are the model's own if none are given, and then its stop ids."""
    eos = model.config.eos_token_ids if options.eos_token_ids is None else options.eos_token_ids
    return (*eos, *options.stop_token_ids)
