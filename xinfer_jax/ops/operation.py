"""`run`: an operation by its plain form, or by the form that is plugged in for this process."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from .. import plugin


def run(
    name: str,
    plain: Callable,
    *operands: Any,
    impl: str | None = "xla",
    derivative: Callable | None = None,
    **static: Any,
) -> Any:
    """plain(*operands), by the form that `plugins.TABLE` has for this operation, if it serves the operands.

    Args:
        name: of the operation.
        plain: in jnp.
        operands: pytrees of arrays.
        impl: a kernel by name; "xla": none, though a form that is no kernel may serve; None: the best for
            this process's device.
        derivative: what is differentiated in place of a form; None: the form.
        static: what forms need to know beside the operands.

    Raises:
        InputError: the named kernel does not support these operands; an operation may run plainly instead.
    """
    choose = plugin("operation", "choose")
    form = choose and choose(name, plain, impl, operands, static)
    if form is None:
        return plain(*operands)
    return form(*operands) if derivative is None else with_derivative(form, derivative, operands)


def with_derivative(form: Callable, derivative: Callable, operands: tuple[Any, ...]) -> Any:
    """form(*operands), with the derivative of another function of the same operands."""

    @jax.custom_jvp
    def call(*operands: Any) -> Any:
        return form(*operands)

    @call.defjvp
    def _jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        return call(*primals), jax.jvp(derivative, primals, tangents)[1]

    return call(*operands)


def check_impl(impl: str | None, *operands: Any) -> None:
    """Raises InputError where this process cannot run kernels of that name, or operations on these arrays."""
    check = plugin("operation", "check")
    if check is not None:
        check(impl, *operands)


def match_varying_axes(tree: Any, *inputs: Any) -> Any:
    """The tree, its arrays marked as varying over each axis of a `jax.shard_map` over which an input varies.
    Constants are not marked by themselves.
    """
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(inputs)))

    def vary(x: jax.Array) -> jax.Array:
        more = axes - jax.typeof(x).manual_axis_type.varying
        return lax.pcast(x, tuple(more), to="varying") if more else x

    return jax.tree.map(vary, tree) if axes else tree
