"""Calls with arrays over a mesh. With Explicit axes, as `jax.make_mesh` makes it, they are traced with Auto
axes, for which the compiler chooses the shardings. Outside a trace a call is one program, compiled once.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, get_abstract_mesh, reshard, use_abstract_mesh

from ..cache.kv_cache import KVCache
from ..checks import check_range, is_traced
from ..config.model_config import is_config
from ..errors import InputError
from ..sharding import REPLICATED, concrete_mesh_of
from ..weights.params import AnyArray


def on_auto_axes(function: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns function(*args, **kwargs). Its arguments are parameters, config, an array with rows in front or
    a tree that begins with one, and others.

    Over Explicit axes the results are sharded in this way:

    - A cache in the result is sharded as the given cache. If the given cache is over no such axes, the
      compiler chooses.
    - Arrays with rows in front are sharded along the rows as the third argument.
    - Other results are replicated.
    """
    mesh = _explicit_mesh((args, kwargs))
    if mesh is None and concrete_mesh_of(args[0]) is None:
        return function(*args, **kwargs)
    bound = inspect.signature(function).bind(*args, **kwargs)
    args = bound.args
    kwargs = bound.kwargs
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_config)
    if not all(is_traced(x) for x in leaves if isinstance(x, jax.Array)):  # it needs a trace, for the context
        _check_values(bound.arguments)
        arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, AnyArray)}
        others = tuple((i, x) for i, x in enumerate(leaves) if i not in arrays)
        return _program(function, tree, others)(arrays)
    if mesh is None:
        return function(*args, **kwargs)
    with use_abstract_mesh(mesh.update_axis_types({axis: AxisType.Auto for axis in mesh.explicit_axes})):
        auto_args, auto_kwargs = jax.tree.map(
            lambda x: reshard(x, REPLICATED) if _is_explicit(x) else x, (args, kwargs)
        )
        out = function(*auto_args, **auto_kwargs)
    given = next((x for x in (*args, *kwargs.values()) if isinstance(x, KVCache)), None)
    rows = jax.typeof(jax.tree.leaves(args[2])[0])

    def like(x: Any, old: Any) -> Any:
        """Returns the part of a cache with the sharding of the old one, which may have Auto axes."""
        sharding = jax.typeof(old).sharding
        return reshard(x, NamedSharding(mesh, sharding.spec)) if sharding.mesh.explicit_axes else x

    def result(x: Any) -> Any:
        if isinstance(x, KVCache):
            return jax.tree.map(like, x, given)
        spec = rows.sharding.spec[:1] if x.shape[:1] == rows.shape[:1] else ()
        return reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(result, out, is_leaf=lambda x: isinstance(x, KVCache))


@functools.lru_cache(maxsize=64)
def _program(function: Callable, tree: Any, others: tuple[tuple[int, Any], ...]) -> Callable:
    """Returns the jitted function of the arrays among the leaves of its arguments, by their numbers."""

    def traced(arrays: dict[int, Any]) -> Any:
        leaves = arrays | dict(others)
        args, kwargs = jax.tree.unflatten(tree, [leaves[i] for i in range(len(leaves))])
        return on_auto_axes(function, args, kwargs)

    return jax.jit(traced, inline=True)


def _check_values(arguments: Mapping[str, Any]) -> None:
    """Raises InputError for values out of range, which a trace cannot see."""
    config = arguments["config"]
    tokens = arguments.get("tokens_BT", arguments.get("tokens"))
    longest = np.shape(tokens)[-1] if np.ndim(tokens) else 0
    for name, values, least, most in (
        ("token id", tokens, 0, config.vocab_size - 1),
        ("num_tokens", arguments.get("num_tokens_B"), 0, longest),
        ("routed_experts: expert", arguments.get("routed_experts"), -1, config.num_experts - 1),
    ):
        if isinstance(values, AnyArray) and jnp.issubdtype(values.dtype, jnp.integer):
            check_range(name, values, least, most)


def _is_explicit(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jax.typeof(leaf).sharding.mesh.explicit_axes)


def _explicit_mesh(tree: Any) -> Any:
    """Returns the abstract mesh with Explicit axes of `jax.set_mesh` or of one of the arrays. None: there is
    none, or the call is in a `jax.shard_map` and nothing is divided along the other axes.
    """
    try:
        leaves = jax.tree.leaves(tree)
    except ValueError as error:
        what = 'keys of a dict must be of one kind: in taps write 3 as (3, "layer") beside (3, "attention")'
        raise InputError(what) from error
    types = (jax.typeof(leaf).sharding for leaf in leaves if isinstance(leaf, jax.Array))
    found = [get_abstract_mesh(), *(x.mesh for x in types if any(x.spec) or not x.mesh.manual_axes)]
    if found[0].manual_axes:
        del found[0]
    return next((mesh for mesh in found if AxisType.Explicit in mesh.axis_types), None)
