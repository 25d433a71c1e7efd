"""Trees whose layers are stacked, as programs that scan over layers take them."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..modes import in_default_modes
from .params import AnyArray, Params, check_params


@in_default_modes
def stack_layers(params: Params, config: ModelConfig) -> Params:
    """Returns the parameter tree with equal layers stacked, for programs that scan over layers.

    A program then compiles each kind of layer only once. It is a pure function of any tree with the structure
    of the parameters, for example gradients, optimizer states, shapes, shardings, masks and labels.

    Args:
        params: the tree. Its `layers` is a tuple of layers. A sharding gets a new first axis that is not
            divided. Leaves that are not arrays, for example True in a mask or a label, do not change.
        config: the config of the model. Its layers repeat a pattern of P kinds R times, and may end within
            the pattern.

    Returns:
        The tree. Its `layers` has "blocks", P trees whose arrays begin with an axis of R, and "rest", a tuple
        of the layers after the last whole pattern. If i is below P·R, layer i is at index i // P of block i %
        P.

    Raises:
        InputError: layers of one kind have different leaves, for example because only some of them have an
            adapter, or they differ in the value of a leaf that is not an array.
    """
    check_params(params, config)
    layers = params["layers"]
    period = _period(config)
    repeats = len(layers) // period
    whole = period * repeats

    for kind in range(period):
        if len({jax.tree.structure(layer) for layer in layers[kind:whole:period]}) > 1:
            raise InputError(
                "layers of one kind must have equal leaves to be stacked, and adapters of one scale in each"
                " matrix or in none"
            )
    blocks = tuple(jax.tree.map(_stacked, *layers[kind:whole:period]) for kind in range(period))
    return {**params, "layers": dict(blocks=blocks, rest=tuple(layers[whole:]))}


@in_default_modes
def unstack_layers(params: Params) -> Params:
    """Returns the tree with a tuple of layers. It is the inverse of `stack_layers`.

    Args:
        params: a tree from `stack_layers`.
    """
    if not isinstance(params["layers"], dict) or params["layers"].keys() != {"blocks", "rest"}:
        raise InputError("the layers are not stacked: unstack_layers takes what stack_layers returns")
    blocks = params["layers"]["blocks"]
    first = jax.tree.leaves(blocks[0])[0]
    if not isinstance(first, AnyArray):
        raise InputError(
            f"unstack_layers takes arrays, got {format_value(first)}: of shapes take"
            " jax.eval_shape(unstack_layers, shapes)"
        )
    repeats = len(first)
    layers = [jax.tree.map(lambda x, i=i: x[i], block) for i in range(repeats) for block in blocks]
    return {**params, "layers": (*layers, *params["layers"]["rest"])}


def _stacked(*leaves: Any) -> Any:
    """Returns one leaf of a block: a leaf of several layers."""
    first: Any = leaves[0]
    if isinstance(first, AnyArray):
        return first.__array_namespace__().stack(leaves)
    if others := [leaf for leaf in leaves if leaf != first]:
        raise InputError(
            f"layers of one kind must have equal masks, labels, shapes and shardings to be stacked, got"
            f" {format_value(first)} and {format_value(others[0])}"
        )
    if isinstance(first, PartitionSpec):
        return PartitionSpec(None, *first)
    if isinstance(first, NamedSharding):
        return first.update(spec=_stacked(first.spec))
    if isinstance(first, jax.ShapeDtypeStruct):
        sharding = first.sharding and _stacked(first.sharding)
        return first.update(shape=(len(leaves), *first.shape), sharding=sharding)
    return first


def _period(config: ModelConfig) -> int:
    """Returns the length of the shortest pattern that the layers repeat."""
    specs = config.layers
    return next(n for n in range(1, len(specs) + 1) if specs[n:] == specs[: len(specs) - n])
