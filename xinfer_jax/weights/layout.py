"""The division of parameters over a mesh, by the logical axes of their specs."""

import dataclasses
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..config.model_config import ModelConfig
from ..errors import InputError
from ..sharding import MODEL, RULES, check_divisible, check_mesh, partition_spec
from .params import Params, ParamSpec, check_params, param_specs
from .stacking import stack_layers, unstack_layers
from .weight_leaf import WeightLeaf


def shardings(
    config: ModelConfig,
    mesh: Mesh,
    *,
    rules: Mapping[str, str | None] | None = None,
    fsdp: str | None = None,
    like: Params | None = None,
) -> Params:
    """Returns a tree of `NamedSharding` for the parameters, for `jax.device_put` and `jax.jit`.

    The mesh's axis "model" divides matrices by their outputs if their input is a hidden state, and by their
    inputs if their output is a hidden state (tensor parallelism).

    A vocabulary whose size the devices do not divide is replicated. `load_model(path, mesh=mesh)` divides it
    too: it pads its matrices with rows of zeros to the next multiple of the number of devices.
    `like=model.params` returns the shardings of such a tree. Ids and logits have the unpadded vocabulary in
    both cases.

    Args:
        config: the config of the model.
        mesh: a mesh. It needs an axis "model", unless you pass `rules` or `fsdp`. Its axes become Auto axes,
            except under `jax.set_mesh` of a mesh with Explicit axes.
        rules: a dict from logical axes to mesh axes, for a mesh whose axes have other names. The logical axes
            are "vocab", "heads", "kv_heads", "linear_heads", "mlp", "experts" and "embed" (hidden_size).
            Missing axes are not divided. None divides all except "embed" along "model". With other rules,
            jax's compiler divides the computation, because implementations for meshes work with "model"
            alone.
        fsdp: an axis of the mesh that divides hidden_size too (FSDP): each device stores less, and parts are
            gathered at their use. A mesh without "model" is divided along this axis alone. None does not
            divide hidden_size.
        like: parameters or their shapes. You need it if matrices are quantized, the vocabulary is padded, or
            layers are stacked. None: a float tree as `init_params` returns it.

    Raises:
        InputError: the mesh has no such axis, or its devices do not divide a size other than the vocabulary.
    """
    if rules is not None and (unknown := rules.keys() - RULES.keys()):
        raise InputError(f"rules have unknown axes {sorted(unknown)}: use some of {', '.join(RULES)}")
    mesh = check_mesh(mesh, None if rules is not None or fsdp is not None else MODEL)
    if fsdp is not None and fsdp not in mesh.shape:
        raise InputError(f"fsdp={fsdp!r} is no axis of the mesh, which has {list(mesh.axis_names)}")
    specs = param_specs(config)
    if rules is not None or MODEL not in mesh.shape:
        rules = dict.fromkeys(RULES) | dict(rules or {})
    rules = {**(RULES if rules is None else rules), **({} if fsdp is None else dict(embed=fsdp))}
    _check_heads(config, mesh, rules)
    if like is not None:
        check_params(like, config, stacked=True)
    is_stacked = like is not None and isinstance(like["layers"], dict)
    like = jax.eval_shape(unstack_layers, like) if is_stacked else like
    tree = partition_specs(specs, specs if like is None else like, mesh, rules)
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    tree = jax.tree.map(partial(NamedSharding, mesh), tree, is_leaf=is_spec)
    return stack_layers(tree, config) if is_stacked else tree


def _check_heads(config: ModelConfig, mesh: Any, rules: Mapping[str, str | None] = RULES) -> None:
    """Raises InputError if devices do not divide the heads."""

    def devices(axis: str) -> int:
        return mesh.shape.get(rules[axis], 1)  # partition_spec raises where the mesh has no such axis

    remedy = (
        "choose a number that does, or load the checkpoint by load_model(path, mesh=mesh), which repeats key"
        " heads for a multiple of them"
    )
    mixers = (mixer for layer in range(config.num_hidden_layers) for mixer in config.mixers(layer))
    divided = dict.fromkeys(divided for mixer in mixers for divided in mixer.divided)
    order = [*RULES]
    for axis, name, size in sorted(divided, key=lambda of: order.index(of.axis)):
        others = dict(remedy=remedy) if axis == "kv_heads" else {}
        check_divisible(name, size, devices(axis), **others)


@lru_cache(maxsize=64)
def is_divisible(config: ModelConfig, devices: int) -> bool:
    """Returns True if the number of devices divides every size along axis "model" except the vocabulary."""
    mesh = AbstractMesh((devices,), (MODEL,))
    specs = param_specs(config)
    try:
        _check_heads(config, mesh)
        partition_specs(specs, specs, mesh, RULES)
    except InputError:
        return False
    return True


def layer_partition_specs(
    layer: Params, config: ModelConfig, mesh: Any, rules: Mapping[str, str | None] = RULES
) -> Any:
    """Returns `partition_specs` of a layer's parameters."""
    if rules["heads"]:
        _check_heads(config, mesh)
    return partition_specs(_layer_specs(config, frozenset(layer)), layer, mesh, rules)


def partition_specs(specs: Any, tree: Any, mesh: Any, rules: Mapping[str, str | None]) -> Any:
    """Returns the `PartitionSpec`s of parameters or of their specs. A quantized matrix is one leaf."""
    leaf_specs = partial(_leaf_specs, mesh=mesh, rules=rules)
    return jax.tree.map(leaf_specs, specs, tree, is_leaf=lambda x: isinstance(x, ParamSpec))


@lru_cache(maxsize=64)
def _layer_specs(config: ModelConfig, names: frozenset[str]) -> Params:
    return next(layer for layer in param_specs(config)["layers"] if layer.keys() == names)


def _leaf_specs(param_spec: ParamSpec, leaf: Any, mesh: Any, rules: Mapping[str, str | None]) -> Any:
    def spec_of(part: Any, *axes: str | None) -> Any:
        if part is None:
            return None
        if isinstance(part, WeightLeaf):
            return _leaf_specs(param_spec, part, mesh, rules)
        if mesh and "vocab" in axes and part.shape[axes.index("vocab")] % mesh.shape.get(rules["vocab"], 1):
            axes = tuple(None if axis == "vocab" else axis for axis in axes)
        return partition_spec(axes, part.shape, mesh, rules)

    if not isinstance(leaf, WeightLeaf):
        return spec_of(leaf, *param_spec.axes)
    inputs = param_spec.axes[-1]
    if mesh and rules[inputs or "embed"] and (group := leaf.groups_with_padding):
        raise InputError(f"{param_spec.name}: groups of {group} do not divide its {leaf.shape[-1]} inputs")
    for axis, size, block in zip(param_spec.axes[-2:], leaf.shape[-2:], leaf.block, strict=True):
        devices = mesh.shape.get(rules[axis or "embed"], 1) if mesh else 1
        if devices > 1 and block > 1 and size % (block * devices):
            raise InputError(f"{param_spec.name}: devices cut its blocks of {block}: choose fewer")
    matrix: Any = leaf  # a kind is a dataclass
    fields = leaf.field_axes(*param_spec.axes).items()
    return dataclasses.replace(matrix, **{name: spec_of(getattr(leaf, name), *axes) for name, axes in fields})
