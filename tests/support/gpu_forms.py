"""Runs on this device the forms that `lax.platform_dependent` selects on NVIDIA GPUs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

from xinfer_jax import kernels_pallas


@contextlib.contextmanager
def selected() -> Iterator[None]:
    """Inside the block, traced functions contain what a GPU would run. Jitted functions keep their traces:
    jit them inside.
    """

    def on_gpu(*args: Any, default: Callable, **of_platforms: Callable) -> Any:
        return of_platforms.get("cuda", default)(*args)

    with (
        mock.patch.object(jax.lax, "platform_dependent", on_gpu),
        mock.patch.object(kernels_pallas, "platforms", lambda: ("cpu", "cuda")),
    ):
        yield
