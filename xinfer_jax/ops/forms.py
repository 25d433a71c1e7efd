"""`choose`: the one rule by which an operation gets its form."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

import kernels_pallas
from kernels_pallas import Selection

from ..checks import array_module
from ..errors import InputError
from ..plugins import load


class Kernel(NamedTuple):
    """A form by a kernel of `kernels_pallas`."""

    select: Callable[[str | None, tuple[Any, ...], dict[str, Any]], Selection]  # impl, operands, static
    run: Callable  # impl, operands, static by name


def choose(
    name: str, plain: Callable, impl: str | None, operands: tuple[Any, ...], static: dict[str, Any]
) -> Callable | None:
    """The form of an operation for these operands; None: `plain` serves. Arguments as in `operation.run`.

    Operands with symbolic dimensions, as of `jax.export`, have none. Others, in this order: a form for any
    platform; one by kernels; the kernel that `impl` names, in programs for all devices; in programs for each
    platform its kernel, or the platform's own form, or `plain`.
    """
    if any(array_module(*np.shape(x)) is not np for x in jax.tree.leaves(operands)):
        return None
    has_kernels = impl != "xla" and (impl or kernels_pallas.dispatch.device_impl().impl) != "xla"
    for kind in ("any", "kernels") if has_kernels else ("any",):
        make = load(name, kind)
        if make is not None and (form := make(plain, impl, operands, static)) is not None:
            return form
    forms: dict[str, Callable] = {}
    kernel = load(name, "kernel") if has_kernels else None
    if kernel is not None and (chosen := kernel.select(impl, operands, static).impl) != "xla":
        by_kernel = partial(kernel.run, chosen, **static)
        kernel_platform = kernels_pallas.platform_of(chosen, impl)
        if kernel_platform is None:
            return by_kernel
        forms[kernel_platform] = by_kernel
    for platform in kernels_pallas.platforms():
        make = load(name, platform) if platform not in forms else None
        if make is not None and (form := make(plain, impl, operands, static)) is not None:
            forms[platform] = form
    if not forms:
        return None
    return lambda *operands: lax.platform_dependent(*operands, **forms, default=plain)


def named(kernel: str, impl: str | None, *args: Any, obstacle: str | None = None) -> Selection:
    """`kernels_pallas.select`, which raises InputError."""
    try:
        return kernels_pallas.select(kernel, impl, *args, obstacle=obstacle)
    except ValueError as error:
        raise InputError(str(error)) from error


def check_available(impl: str | None) -> None:
    """Raises InputError where this process cannot run kernels of that name."""
    if reason := kernels_pallas.unavailable_reason(impl):
        raise InputError(reason)
