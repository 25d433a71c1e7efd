"""`run`: an operation by its plain form, or by the form that is plugged in for this process."""

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from ..config.run_config import PLAIN, RunConfig
from ..errors import InputError
from ..modes import default_modes, in_default_modes
from ..registry import plugin

F = TypeVar("F", bound=Callable)


class Call(NamedTuple):
    """A call of an operation, for which a form is chosen. A form takes the operands by name."""

    plain: Callable  # the operation in jnp, of the operands by name
    operands: dict[str, Any]  # pytrees of arrays
    static: Mapping[str, Any]  # what forms need to know next to the operands
    run_config: RunConfig  # its `impl` names a kernel


def run(
    name: str,
    plain: Callable,
    run_config: RunConfig = PLAIN,
    /,
    *,
    derivative: Callable | None = None,
    static: Mapping[str, Any] | None = None,
    **operands: Any,
) -> Any:
    """Returns plain(**operands), by the form that `plugins.TABLE` has for this operation, if it serves the
    operands.

    Args:
        name: the name of the operation.
        plain, operands, static, run_config: see `Call`.
        derivative: the function that is differentiated in place of a form and of plain. None: these are.

    Raises:
        InputError: the named kernel does not support these operands. An operation may run plainly instead.
    """
    form = chosen_form(name, Call(plain, operands, static or {}, run_config))
    if derivative is None or form is None and derivative is plain:
        return (form or plain)(**operands)
    return with_derivative(form or plain, derivative, operands)


def chosen_form(name: str, call: Call) -> Callable | None:
    """Returns the form of the operation of that name for a call. None: its plain form serves."""
    choose = plugin("operation", "choose")
    return choose and choose(name, call)


def with_derivative(form: Callable, derivative: Callable, operands: dict[str, Any]) -> Any:
    """Returns form(**operands), with the derivative of another function of the same operands."""

    @jax.custom_jvp
    def call(*values: Any) -> Any:
        return form(**dict(zip(operands, values, strict=True)))

    @call.defjvp
    @in_default_modes
    def _jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        return call(*primals), jax.jvp(by_position(derivative, operands), primals, tangents)[1]

    return call(*operands.values())


def by_position(function: Callable, names: Iterable[str]) -> Callable:
    """Returns the function, which takes arguments by these names, as one that takes them by position."""
    names = tuple(names)
    return lambda *values: function(**dict(zip(names, values, strict=True)))


def without_gradient(tree: Any, what: str, remedy: str) -> Any:
    """Returns the tree of arrays that `what` has made. For it reverse mode raises InputError, and forward
    mode passes.
    """

    def mark(x: Any) -> Any:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return _FORWARD_ONLY.bind(x, what=what, remedy=remedy) if is_float else x

    return jax.tree.map(mark, tree)


def _no_gradient(cotangent: Any, x: Any, *, what: str, remedy: str) -> Any:
    raise InputError(f"{what} has no reverse-mode gradient: {remedy}")


_FORWARD_ONLY = Primitive("forward_only")  # the identity
_FORWARD_ONLY.def_impl(lambda x, **_: x)
_FORWARD_ONLY.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_FORWARD_ONLY, _no_gradient)
batching.defvectorized(_FORWARD_ONLY)
mlir.register_lowering(_FORWARD_ONLY, lambda _, x, **__: [x])


def check_impl(impl: str | None) -> None:
    """Raises InputError if this process cannot run kernels of that name."""
    check = plugin("operation", "check")
    if check is not None:
        check(impl)


def over_any_mesh(function: F) -> F:
    """Returns the function of parameters, config, an array with rows in front, and others, which also takes
    arrays over a mesh with Explicit axes. It runs in jax's default modes.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        on_auto_axes = plugin("mesh", "explicit axes")
        with default_modes():
            return on_auto_axes(function, args, kwargs) if on_auto_axes else function(*args, **kwargs)

    return cast(F, call)


def without_mesh_context(function: F) -> F:
    """Returns the function of the host, whose programs run outside `jax.set_mesh` of a mesh with Explicit
    axes, and in jax's default modes.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
        with default_modes(), jax.set_mesh(None) if is_explicit else nullcontext():
            return function(*args, **kwargs)

    return cast(F, call)


def match_varying_axes(tree: Any, *inputs: Any) -> Any:
    """Returns the tree, its arrays marked as varying over each axis of a `jax.shard_map` over which an input
    varies. Constants are not marked by themselves.
    """
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(inputs)))

    def vary(x: jax.Array) -> jax.Array:
        more = axes - jax.typeof(x).manual_axis_type.varying
        return lax.pcast(x, tuple(more), to="varying") if more else x

    return jax.tree.map(vary, tree) if axes else tree
