"""`Executor`: runs jitted functions now, or compiles them ahead of time in a dry run on shapes. Sizes of
arrays are rounded up, so that few programs are compiled.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from .. import plugin

_MIN_BUCKET = 16


class Executor(Protocol):
    """Runs jitted functions, or returns the shapes of what they would return."""

    def __call__(self, program: Any, *args: Any) -> Any:
        """Returns program(*args)."""

    def create(self, function: Callable[[], Any], device: jax.Device | None = None) -> Any:
        """Returns function(). device: the result is committed to it."""

    def is_true(self, x: Any) -> bool:
        """Whether any bool of an array is true; in a dry run always."""


class ImmediateExecutor:
    """Runs jitted functions."""

    def __call__(self, program: Any, *args: Any) -> Any:
        return program(*args)

    def create(self, function: Callable[[], Any], device: jax.Device | None = None) -> Any:
        if device is None:
            return function()
        with jax.default_device(device):  # another one may have too little memory
            return jax.device_put(function(), device)

    def is_true(self, x: Any) -> bool:
        return bool(np.any(x))


IMMEDIATE = ImmediateExecutor()


class NothingAhead:
    """Stands for a `Precompiler` where programs compile when they run."""

    def wait(self, programs: int | None = None) -> None:
        pass


def compile_ahead(params: Any, signature: Any, dry_run: Callable[[Any], int]) -> tuple[Any, int]:
    """Begins to compile what calls of a signature run, in threads, once for each signature.

    Args:
        params: of the model.
        signature: a pytree; calls with equal values and shapes run the same programs.
        dry_run: runs the call with the executor that it gets, on shapes; returns how many programs come
            before the first token.

    Returns:
        A `Precompiler`, whose `wait` waits for the first so many programs; and what `dry_run` returned.
    """
    precompile_once = plugin("compiler", "ahead")
    return (NothingAhead(), 0) if precompile_once is None else precompile_once(params, signature, dry_run)


def decode_compiler_options() -> dict[str, Any] | None:
    """XLA's options for decode programs on this machine; None: its defaults."""
    options = plugin("compiler", "options")
    return None if options is None else options()


def bucket(size: int) -> int:
    """The smallest power of two that is at least `size`, and at least 16: for lengths."""
    return max(_MIN_BUCKET, next_power_of_two(size))


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`: for numbers of rows."""
    return 1 << (size - 1).bit_length()
