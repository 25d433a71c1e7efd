"""Parameters as the tensors of a Hugging Face checkpoint, and back: pure functions of arrays by name."""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax

from ..config.model_config import ModelConfig
from ..errors import InputError, format_names
from ..weights.layout import shardings
from ..weights.params import Params, check_params, resolve_dtype
from ..weights.quantized_weight import is_quantized
from .naming import FileSpec, file_specs
from .unread import text_name, unused_names

_SHOWN = 8  # names in an error


class ParamName(NamedTuple):
    """A parameter, and where published files have it.

    Attributes:
        path: in the tree, as "layers.0.q.weight".
        name: of its tensor, which may hold other parameters too; with "{}": one tensor for each expert.
        shape: of the parameter.
        axes: its logical axes, by which `shardings` divides it.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def param_names(config: ModelConfig) -> list[ParamName]:
    """Returns every parameter of a model, in the order of its tree."""
    specs = jax.tree.leaves(file_specs(config))
    return [ParamName(spec.name, spec.published_name, spec.shape, spec.axes) for spec in specs]


def params_to_tensors(params: Params, config: ModelConfig) -> dict[str, Any]:
    """Returns a model's parameters as its family's published files have them: by name, some of them joined,
    experts apart or together, a tied matrix once. A pure function, also under `jit`.

    Args:
        params: the tree, of float arrays; they may be sharded. Rows that pad its vocabulary are left out.
        config: of the model.

    Raises:
        InputError: leaves that are missing, unknown, misshapen or quantized; the model is rotated.
    """
    check_params(params, config)
    if config.rotated:
        raise InputError(
            "rotated weights have no tensors of Hugging Face: load the model without activations"
        )
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    leaves = {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys): x for keys, x in found
    }
    if quantized := sorted(path for path, leaf in leaves.items() if is_quantized(leaf)):
        raise InputError(f"only float parameters have tensors; quantized: {format_names(quantized, _SHOWN)}")
    specs = jax.tree.leaves(file_specs(config))
    leaves |= {spec.name: _without_padding(spec, leaves[spec.name]) for spec in specs if spec.name in leaves}
    _check_shapes("params", {spec.name: spec.shape for spec in specs}, leaves)
    tensors: dict[str, Any] = {}
    joined: dict[str, list[tuple[FileSpec, Any]]] = {}
    for spec in specs:
        leaf = leaves[spec.name]
        if spec.fused_name == spec.published_name:
            joined.setdefault(spec.fused_name, []).append((spec, leaf))
        elif "{}" in spec.hf_name:
            tensors |= {spec.hf_name.format(expert): leaf[expert] for expert in range(len(leaf))}
        else:
            tensors[spec.hf_name] = leaf
    return tensors | {name: _join(name, parts) for name, parts in joined.items()}


def params_from_tensors(
    config: ModelConfig, tensors: Mapping[str, Any], *, dtype: Any = None, mesh: Any = None
) -> Params:
    """Returns the parameter tree of a Hugging Face checkpoint's tensors: the inverse of `params_to_tensors`.
    A pure function, also under `jit`.

    Args:
        config: of the model, as `from_hf` returns it.
        tensors: float arrays by name; they may be sharded. Those of a model that also sees are taken by the
            names of its text model, and its other tensors are left out.
        dtype: float32, bfloat16 or float16; None: each tensor keeps its own.
        mesh: parameters are divided over its axis "model", as by `shardings`; None: they stay.

    Raises:
        InputError: tensors that are missing, unknown or misshapen, all in one error.
    """
    named = {text_name(name): tensor for name, tensor in tensors.items()}
    named.pop(None, None)
    specs, tree = jax.tree.flatten(file_specs(config))
    expected: dict[str, tuple[int, ...]] = {}
    for spec in specs:
        expected |= spec.tensor_shapes(named)
    _check_shapes("tensors", expected, named, unused_names(config, named))
    leaves = [_split(spec, named) for spec in specs]
    if dtype is not None:
        leaves = [leaf.astype(resolve_dtype(dtype)) for leaf in leaves]
    params = jax.tree.unflatten(tree, leaves)
    return params if mesh is None else jax.device_put(params, shardings(config, mesh))


def _check_shapes(
    what: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Any], unused: Collection[str] = ()
) -> None:
    """Raises one InputError for all names that are missing, unknown or misshapen."""
    faults = [f"missing {name} {list(expected[name])}" for name in expected.keys() - found.keys()]
    faults += [f"unknown {name}" for name in found.keys() - expected.keys() - {*unused}]
    faults += [
        f"{name} has shape {list(found[name].shape)}, the config asks for {list(expected[name])}"
        for name in found.keys() & expected.keys()
        if found[name].shape != expected[name]
    ]
    if faults:
        raise InputError(f"the {what} do not fit the config: {format_names(sorted(faults), _SHOWN)}")


def _without_padding(spec: FileSpec, leaf: Any) -> Any:
    """A matrix of the vocabulary without the rows that pad it over a mesh; others unchanged."""
    return leaf[: spec.shape[0]] if spec.axes[0] == "vocab" and leaf.shape[1:] == spec.shape[1:] else leaf


def _join(name: str, parts: list[tuple[FileSpec, Any]]) -> Any:
    """The tensor that holds these leaves."""
    spec = parts[0][0]
    arrays = [leaf for _, leaf in sorted(parts, key=lambda part: part[0].first_row)]
    xp = arrays[0].__array_namespace__()  # NumPy or jax.numpy
    shape = spec.tensor_shapes({name})[name]
    if spec.interleaved:
        return xp.stack([xp.moveaxis(x, 1, -1) for x in arrays], axis=-1).reshape(shape)
    return xp.concat(
        [x.reshape(_groups(spec), -1, *x.shape[spec.row_axis + 1 :]) for x in arrays], axis=1
    ).reshape(shape)


def _split(spec: FileSpec, tensors: Mapping[str, Any]) -> Any:
    """A leaf from the tensors that hold it."""
    names = [*spec.tensor_shapes(tensors)]
    tensor = tensors[names[0]]
    if names[0] != spec.fused_name:
        return (
            tensor.__array_namespace__().stack([tensors[name] for name in names])
            if "{}" in spec.hf_name
            else tensor
        )
    if spec.interleaved:
        return tensor.__array_namespace__().moveaxis(tensor[..., spec.first_row :: spec.interleaved], -1, 1)
    rows = spec.shape[spec.row_axis] // spec.fused_groups
    groups = tensor.reshape(_groups(spec), spec.fused_rows, *spec.shape[spec.row_axis + 1 :])
    return groups[:, spec.first_row : spec.first_row + rows].reshape(spec.shape)


def _groups(spec: FileSpec) -> int:
    """Groups of rows of the tensor that holds it, of all experts."""
    return spec.fused_groups * math.prod(spec.shape[: spec.row_axis])
