"""Modes of jax with which callers look for faults in their own code, and in which this library works too."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar, cast

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


def default_modes() -> AbstractContextManager[Any]:
    """Returns a context in which arrays may be promoted and transferred in this thread, whatever the caller's
    modes are. Programs are the same as for a caller without modes.
    """
    if all(getattr(jax.config, name) in values for name, values in _DEFAULTS.items()):
        return nullcontext()
    modes = ExitStack()
    modes.enter_context(jax.numpy_rank_promotion("allow"))
    modes.enter_context(jax.numpy_dtype_promotion("standard"))
    modes.enter_context(jax.transfer_guard("allow"))
    return modes


def in_default_modes(function: F) -> F:
    """Returns the function, which runs in `default_modes`."""

    @functools.wraps(function)
    def call(*args, **kwargs):  # type: ignore[no-untyped-def]
        with default_modes():
            return function(*args, **kwargs)

    return cast(F, call)
