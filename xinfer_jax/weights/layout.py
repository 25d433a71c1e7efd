"""How parameters lie over a mesh: by the logical axes of their specs, quantized ones as their matrix."""

import dataclasses
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..config.model_config import ModelConfig
from ..errors import InputError
from ..sharding import MODEL, RULES, on_devices, spec
from .params import Params, ParamSpec, check_params, param_specs
from .quantized import Int8Weight, is_quantized
from .ternary import TernaryWeight


def shardings(
    config: ModelConfig, mesh: Mesh, *, fsdp: str | None = None, like: Params | None = None
) -> Params:
    """The parameter tree's `NamedSharding`s, for `jax.device_put` and `jax.jit`: over the mesh's axis "model"
    matrices are divided by outputs where they take hidden states, by inputs where they give them back.

    A vocabulary that the devices do not divide lies whole on each of them. `load_model(path, mesh=mesh)`
    divides it too: its matrices then have rows of zeros at their end, up to the next multiple of the devices,
    and `like=model.params` gives the shardings of such a tree. Ids and logits are those of the vocabulary
    in both cases.

    Args:
        config, mesh: the model; a mesh with an axis "model". Its axes become Auto ones.
        fsdp: an axis of the mesh along which hidden_size lies too, so that each device holds less, and parts
            are gathered where they are used.
        like: parameters or their shapes, where matrices are quantized or the vocabulary has padding.

    Raises:
        InputError: no such axis, or a size other than the vocabulary that its devices do not divide.
    """
    mesh = checked_mesh(mesh)
    if fsdp is not None and fsdp not in mesh.shape:
        raise InputError(f"fsdp={fsdp!r} is no axis of the mesh, which has {list(mesh.axis_names)}")
    specs = param_specs(config)
    _check_heads(config, mesh)
    if like is not None:
        check_params(like, config)
    tree = specs_of(specs, specs if like is None else like, mesh, {**RULES, "embed": fsdp})
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(partial(NamedSharding, mesh), tree, is_leaf=is_spec)


def checked_mesh(mesh: Any) -> Mesh:
    """The mesh with Auto axes; InputError unless it is one with an axis "model"."""
    if not isinstance(mesh, Mesh) or MODEL not in mesh.shape:
        what = list(mesh.axis_names) if isinstance(mesh, Mesh) else type(mesh).__name__
        raise InputError(
            f"mesh must be a jax.sharding.Mesh with an axis {MODEL!r}, as jax.make_mesh((4,), ({MODEL!r},))"
            f" makes it, got {what}"
        )
    return on_devices(mesh)


def _check_heads(config: ModelConfig, mesh: Any) -> None:
    """Heads are whole on a device, whatever else would divide; and so are rotated models."""
    if config.rotated:
        raise InputError(
            "int8 activations and rotations are not supported over a mesh: leave out one of them"
        )
    spec(("heads",), (config.num_attention_heads,), mesh)
    if config.num_key_value_heads % mesh.shape[MODEL]:
        raise InputError(
            f"kv_heads has {config.num_key_value_heads}, which {mesh.shape[MODEL]} devices along {MODEL!r} do"
            " not divide: choose a number that does, or load the checkpoint by load_model(path, mesh=mesh),"
            " which repeats key heads for a multiple of them"
        )


@lru_cache(maxsize=64)
def divides(config: ModelConfig, devices: int) -> bool:
    """Whether so many devices divide every size that is to lie over them, but for the vocabulary."""
    mesh = AbstractMesh((devices,), (MODEL,))
    specs = param_specs(config)
    try:
        _check_heads(config, mesh)
        specs_of(specs, specs, mesh, RULES)
    except InputError:
        return False
    return True


def layer_specs(layer: Params, config: ModelConfig, mesh: Any) -> Any:
    """`specs_of` a layer's parameters."""
    _check_heads(config, mesh)
    return specs_of(_layer_specs(config, "experts" in layer), layer, mesh, RULES)


def specs_of(specs: Any, tree: Any, mesh: Any, rules: Mapping[str, str | None]) -> Any:
    """`PartitionSpec`s of parameters, or of their specs; of a quantized matrix in its leaf."""
    known = partial(_leaf, mesh=mesh, rules=rules)
    return jax.tree.map(known, specs, tree, is_leaf=lambda x: isinstance(x, ParamSpec))


def without_padding(spec: ParamSpec, leaf: Any) -> Any:
    """A matrix of the vocabulary with the vocabulary's rows alone; another leaf as it is."""
    if spec.axes[0] != "vocab" or leaf.shape == spec.shape:
        return leaf

    def own(x: Any, places: PartitionSpec) -> Any:
        return x[tuple(slice(spec.shape[0] if place else None) for place in places)]

    return jax.tree.map(own, leaf, specs_of(spec, leaf, None, RULES))


@lru_cache(maxsize=64)
def _layer_specs(config: ModelConfig, experts: bool) -> Params:
    return next(layer for layer in param_specs(config)["layers"] if ("experts" in layer) == experts)


def _leaf(known: ParamSpec, leaf: Any, mesh: Any, rules: Mapping[str, str | None]) -> Any:
    def of(part: Any, *axes: str | None) -> Any:
        if part is None:
            return None
        if mesh and "vocab" in axes and part.shape[axes.index("vocab")] % mesh.shape[MODEL]:
            axes = tuple(None if axis == "vocab" else axis for axis in axes)
        return spec(axes, part.shape, mesh, rules)

    if not is_quantized(leaf):
        return of(leaf, *known.axes)
    outputs, inputs = known.axes
    if isinstance(leaf, Int8Weight):
        return dataclasses.replace(
            leaf, values=of(leaf.values, outputs, inputs), scale=of(leaf.scale, outputs)
        )
    if mesh and rules[inputs or "embed"] and len(leaf.values) * leaf.group != leaf.inputs:
        raise InputError(f"{known.hf_name}: groups of {leaf.group} do not divide its {leaf.inputs} inputs")
    if isinstance(leaf, TernaryWeight):
        values = of(leaf.values, inputs, None, outputs)
        scale = of(leaf.scale, outputs)
        return dataclasses.replace(leaf, values=values, scale=scale)
    return dataclasses.replace(
        leaf,
        values=of(leaf.values, inputs, None, outputs),
        scale=of(leaf.scale, inputs, outputs),
        zero=of(leaf.zero, inputs, outputs),
        order=of(leaf.order, inputs),
    )
