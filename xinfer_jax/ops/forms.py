"""`choose`: the one rule by which an operation gets its form."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from .. import kernels_pallas
from ..checks import array_module
from ..errors import InputError
from ..kernels_pallas import Selection
from ..plugins import load
from .operation import Call, by_position, with_derivative


class Kernel(NamedTuple):
    """A form by a kernel of `kernels_pallas`."""

    select: Callable[[Call], Selection]
    run: Callable  # takes the selected `impl`; operands and static by name


def always(form: Callable) -> Callable:
    """Returns an entry of `plugins.TABLE` that gives this form for every call."""
    return lambda call: form


def choose(name: str, call: Call) -> Callable | None:
    """Returns the form of an operation for a call. None: `plain` serves.

    Operands with symbolic dimensions, as in `jax.export`, have no form. For other operands the first of these
    is taken:

    1. a form for any platform,
    2. a form by kernels,
    3. the kernel that `impl` names, in programs for all devices,
    4. in programs for each platform, its kernel, or the platform's own form, or `plain`.
    """
    if any(array_module(*np.shape(x)) is not np for x in jax.tree.leaves(call.operands)):
        return None
    impl = call.run_config.impl
    has_kernels = impl != "xla" and (impl or kernels_pallas.dispatch.device_impl().impl) != "xla"
    for kind in ("any", "kernels") if has_kernels else ("any",):
        make = load(name, kind)
        if make is not None and (form := make(call)) is not None:
            return form
    forms: dict[str, Callable] = {}
    kernel = load(name, "kernel") if has_kernels else None
    if kernel is not None and (chosen := kernel.select(call).impl) != "xla":
        by_kernel = partial(kernel.run, chosen, **call.static)
        kernel_platform = kernels_pallas.platform_of(chosen, impl)
        if kernel_platform is None:
            return by_kernel
        forms[kernel_platform] = by_kernel
    for platform in kernels_pallas.platforms():
        make = load(name, platform) if platform not in forms else None
        if make is not None and (form := make(call)) is not None:
            forms[platform] = form
    return on_platforms(forms, call.plain) if forms else None


def on_platforms(forms: Mapping[str, Callable], plain: Callable) -> Callable:
    """Returns the function of operands by name that is each form in programs of its platform, and `plain` in
    others.
    """

    def form(**operands: Any) -> Any:
        branches = {platform: by_position(form, operands) for platform, form in forms.items()}
        return lax.platform_dependent(*operands.values(), **branches, default=by_position(plain, operands))

    return form


def by_name(function: Callable, names: Iterable[str]) -> Callable:
    """Returns the function, which takes arguments by position, as one that takes them by these names."""
    names = tuple(names)
    return lambda **operands: function(*(operands[name] for name in names))


def with_plain_derivative(call: Call, chosen: str, kernel: Callable) -> Callable:
    """Returns the form by a kernel, with the derivative of `plain`. chosen: the `impl` of the kernel. In
    programs for other platforms `plain` runs, unless the kernel was requested by name.
    """
    platform = kernels_pallas.platform_of(chosen, call.run_config.impl)
    form = kernel if platform is None else on_platforms({platform: kernel}, call.plain)
    return lambda **operands: with_derivative(form, call.plain, operands)


def named(kernel: str, impl: str | None, *args: Any, obstacle: str | None = None) -> Selection:
    """Runs `kernels_pallas.select`, which raises InputError."""
    try:
        return kernels_pallas.select(kernel, impl, *args, obstacle=obstacle)
    except ValueError as error:
        raise InputError(str(error)) from error


def check_available(impl: str | None) -> None:
    """Raises InputError if this process cannot run kernels of that name."""
    if reason := kernels_pallas.unavailable_reason(impl):
        raise InputError(reason)
