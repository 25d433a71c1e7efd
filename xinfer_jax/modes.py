"""Modes of jax with which callers look for faults in their own code, and in which this library works too."""

import functools
from collections.abc import Callable
from typing import TypeVar, cast

import jax

F = TypeVar("F", bound=Callable)

# With these values of `jax.config` shapes and dtypes are promoted, and arrays are transferred without a call.
_DEFAULTS = {
    "jax_numpy_rank_promotion": ("allow",),
    "jax_numpy_dtype_promotion": ("standard",),
    "jax_transfer_guard": (None, "allow"),
    "jax_transfer_guard_host_to_device": (None, "allow"),
    "jax_transfer_guard_device_to_device": (None, "allow"),
    "jax_transfer_guard_device_to_host": (None, "allow"),
}


def in_default_modes(function: F) -> F:
    """Returns the function, which may promote and transfer arrays in its thread whatever the caller's modes
    are. Programs are those of a caller without modes.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):  # type: ignore[no-untyped-def]
        if all(getattr(jax.config, name) in values for name, values in _DEFAULTS.items()):
            return function(*args, **kwargs)
        with (
            jax.numpy_rank_promotion("allow"),
            jax.numpy_dtype_promotion("standard"),
            jax.transfer_guard("allow"),
        ):
            return function(*args, **kwargs)

    return cast(F, call)
