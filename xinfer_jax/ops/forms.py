"""`choose`: the one rule by which an operation gets its form."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jax import lax

import kernels_pallas
from kernels_pallas import Selection

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

    In this order: a form for any platform; one by kernels; the kernel that `impl` names, in programs
    for all devices; in programs for each platform its kernel, or the platform's own form, or `plain`.
    """
    has_kernels = impl != "xla" and (impl or kernels_pallas.dispatch.device_impl().impl) != "xla"
    for kind in ("any", "kernels") if has_kernels else ("any",):
        make = load(name, kind)
        if make is not None and (form := make(plain, impl, operands, static)) is not None:
            return form
    forms: dict[str, Callable] = {}
    for platform in kernels_pallas.platforms():
        make = load(name, platform)
        if make is not None and (form := make(plain, impl, operands, static)) is not None:
            forms[platform] = form
    selection = why_not(name, impl, operands, static)
    if selection.impl != "xla":
        kernel = partial(load(name, "kernel").run, selection.impl, **static)
        kernel_platform = kernels_pallas.platform_of(selection.impl, impl)
        if kernel_platform is None:
            return kernel
        forms[kernel_platform] = kernel
    if not forms:
        return None
    return lambda *operands: lax.platform_dependent(*operands, **forms, default=plain)


def why_not(
    name: str, impl: str | None, operands: tuple[Any, ...], static: dict[str, Any] | None = None
) -> Selection:
    """The kernel that serves an operation, or "xla" and the reason why none does. Arrays may be shapes.

    Raises:
        InputError: the named kernel does not support these operands.
    """
    if impl == "xla":
        return Selection("xla", "requested by name")
    here = kernels_pallas.dispatch.device_impl()
    if impl is None and here.impl == "xla":
        return here
    kernel = load(name, "kernel")
    if kernel is None:
        return Selection("xla", f"there is no kernel for {name}")
    return _without_value_error(kernel.select, impl, operands, static or {})


def named(kernel: str, impl: str | None, *args: Any, obstacle: str | None = None) -> Selection:
    """`kernels_pallas.select`, which raises InputError."""
    return _without_value_error(kernels_pallas.select, kernel, impl, *args, obstacle=obstacle)


def _without_value_error(select: Callable, *args: Any, **options: Any) -> Selection:
    try:
        return select(*args, **options)
    except ValueError as error:
        raise InputError(str(error)) from error


def check_available(impl: str | None) -> None:
    """Raises InputError where this process cannot run kernels of that name."""
    if reason := kernels_pallas.unavailable_reason(impl):
        raise InputError(reason)
