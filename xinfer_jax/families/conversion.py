"""Parameters as the tensors of a Hugging Face checkpoint, and back: pure functions of arrays by name."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..annotations import Dtype
from ..config.model_config import ModelConfig, check_config
from ..errors import InputError, format_names, format_value
from ..modes import in_default_modes
from ..sharding import RULES
from ..weights.adapted_weight import AdaptedWeight, UntiedWeight
from ..weights.layout import partition_specs, shardings
from ..weights.param_specs import leaf_name
from ..weights.params import Params, ParamSpec, check_params, param_specs, resolve_dtype
from ..weights.quantized_weight import is_quantized
from .naming import TIED, FileSpec, file_specs, published_name
from .skipped_tensors import text_name, unused_names

Shape = tuple[int, ...]
_SHOWN = 8  # names in an error


class ParamName(NamedTuple):
    """A parameter, and its place in published files.

    Attributes:
        path: the path in the tree, for example "layers.0.q.weight".
        name: the name of the tensor in published files. The tensor may contain other parameters too. If the
            name has "{}", there is one tensor for each expert.
        shape: the shape of the parameter.
        axes: the logical axes of the parameter. `shardings` divides the parameter by them.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def param_names(config: ModelConfig) -> list[ParamName]:
    """Returns every parameter of a model with its Hugging Face name, shape and logical axes.

    The list has the order of the parameter tree.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> first = xj.params.param_names(model.config)[0]
        >>> first.path, first.name
        ('embed.weight', 'model.embed_tokens.weight')

    Args:
        config: the config of the model.
    """
    specs = jax.tree.leaves(file_specs(config))
    return [
        ParamName(spec.name, published_name(config, spec.published_name), spec.shape, spec.axes)
        for spec in specs
    ]


@in_default_modes
def params_to_tensors(params: Params, config: ModelConfig) -> dict[str, Any]:
    """Returns the parameters of a model as named tensors, as the published files of its family have them.

    For example, a family may join some matrices, store its experts together or one by one, and store a tied
    matrix once. It is a pure function, so it also works under `jit`.

    Args:
        params: the parameter tree of float arrays, which may be sharded. Rows that pad its vocabulary are
            left out.
        config: the config of the model.

    Returns:
        A dict from names to arrays.

    Raises:
        InputError: leaves are missing, unknown, misshapen or quantized.
    """
    specs, leaves = specs_and_leaves(params, config)
    if quantized := [spec.name for spec, leaf in zip(specs, leaves, strict=True) if is_quantized(leaf)]:
        raise InputError(f"only float parameters have tensors; quantized: {format_names(quantized, _SHOWN)}")
    tensors = plan_tensors(specs, leaves)
    return {published_name(config, name): tensor.make(lambda leaf: leaf) for name, tensor in tensors.items()}


class TensorOfLeaves(NamedTuple):
    """A tensor of a checkpoint that is made of leaves.

    Attributes:
        shape: the shape of the tensor.
        dtype: the dtype of the leaves.
        make: returns it, its leaves converted by a given function.
    """

    shape: tuple[int, ...]
    dtype: Any
    make: Callable[[Callable[[Any], Any]], Any]


def specs_and_leaves(params: Params, config: ModelConfig) -> tuple[list[FileSpec], list[Any]]:
    """Returns a model's specs and leaves, without rows that pad the vocabulary.

    Raises:
        InputError: leaves that are missing, unknown or misshapen, all in one error.
    """
    leaves = check_leaves(params, config)
    if any(isinstance(leaf, AdaptedWeight) for leaf in leaves.values()):
        raise InputError(
            "the parameters have an adapter: merge it, or save it apart, by split_adapter and save_adapter"
        )
    if isinstance(leaves["embed.weight"], UntiedWeight):
        raise InputError(
            "an adapter made the head another matrix than the embedding: save params with"
            " embed.weight.embedding as embed, .head as lm_head, and the config without tie_word_embeddings"
        )
    specs = jax.tree.leaves(file_specs(config))
    return specs, [_without_padding(spec, leaves[spec.name]) for spec in specs]


def check_leaves(params: Params, config: ModelConfig) -> dict[str, Any]:
    """Returns the leaves by their paths. They may be shapes. It raises the errors of `specs_and_leaves`."""
    check_params(params, config)
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    leaves = {leaf_name(keys): leaf for keys, leaf in found}
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    specs = jax.tree.leaves(param_specs(config))
    padded = {spec.name: spec.shape for spec in specs if _is_padded(spec, shapes.get(spec.name, ()))}
    check_shapes("params", {spec.name: spec.shape for spec in specs}, shapes | padded)
    _check_floats({name: leaf for name, leaf in leaves.items() if not is_quantized(leaf)})
    return leaves


def _is_joined(spec: FileSpec, like: Mapping[str, Any] | None) -> bool:
    """Returns True if a tensor to write joins this leaf and other leaves. like: as in `plan_tensors`, but a
    draft head that it lacks is written as in published files.
    """
    is_new = spec.name.startswith("draft_head.") and not any(
        name in (like or ()) for name in (spec.fused_name, spec.hf_name, spec.hf_name.format(0))
    )
    if like is None or is_new:
        return spec.is_published
    return bool(spec.interleaved) or spec.fused_name in like


def plan_tensors(
    specs: Iterable[FileSpec], leaves: Iterable[Any], like: Mapping[str, Any] | None = None
) -> dict[str, TensorOfLeaves]:
    """Returns the tensors that hold these leaves, by name. like: tensors of a checkpoint. Leaves are joined,
    or not, as they are there. None: as in published files.
    """
    tensors: dict[str, TensorOfLeaves] = {}
    joined: dict[str, list[tuple[FileSpec, Any]]] = {}
    for spec, leaf in zip(specs, leaves, strict=True):
        if spec.fused_name and _is_joined(spec, like):
            joined.setdefault(spec.fused_name, []).append((spec, leaf))
        elif "{}" in spec.hf_name:
            for expert in range(len(leaf)):
                at = partial(of_expert, leaf, expert)
                tensors[spec.hf_name.format(expert)] = TensorOfLeaves(leaf.shape[1:], leaf.dtype, at)
        else:
            tensors[spec.hf_name] = TensorOfLeaves(leaf.shape, leaf.dtype, partial(itself, leaf))
    for name, parts in joined.items():
        parts.sort(key=lambda part: part[0].first_row)
        spec = parts[0][0]
        shape = spec.tensor_shapes({name} if like is None or name not in like else like)[name]
        leaves = [leaf for _, leaf in parts]
        inputs_first = spec.has_inputs_first(like)
        make = partial(_join, spec, shape, leaves, inputs_first)
        tensors[name] = TensorOfLeaves(shape, leaves[0].dtype, make)
    return tensors


@in_default_modes
def params_from_tensors(
    config: ModelConfig, tensors: Mapping[str, Any], *, dtype: Dtype | None = None, mesh: Mesh | None = None
) -> Params:
    """Returns the parameter tree from the named tensors of a Hugging Face checkpoint.

    It is the inverse of `params_to_tensors`, and a pure function, so it also works under `jit`.

    Args:
        config: the config of the model, for example from `ModelConfig.from_hf`.
        tensors: a mapping from names to float arrays, which may be sharded. For a model with images you can
            use the names of its text model, and its other tensors are left out.
        dtype: float32, bfloat16 or float16. None keeps the dtype of each tensor.
        mesh: a mesh. The parameters are sharded over its axis "model" (see `shardings`). None leaves the
            arrays on their devices.

    Raises:
        InputError: tensors are missing, unknown or misshapen. One error lists all of them.
    """
    _check_arrays(config, tensors)
    has_draft_head = config.draft_head is not None
    named = {own: tensor for name, tensor in tensors.items() if (own := text_name(name, has_draft_head))}
    (embed, head) = TIED
    if config.tie_word_embeddings and embed not in named and head in named:
        named[embed] = named.pop(head)
    specs, tree = jax.tree.flatten(file_specs(config))
    expected: dict[str, tuple[int, ...]] = {}
    for spec in specs:
        expected |= spec.tensor_shapes(named)
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    check_shapes("tensors", expected, shapes, unused_names(config, named))
    _check_floats({name: named[name] for name in expected})
    leaves = [leaf_of_tensors(spec, named) for spec in specs]
    if dtype is not None:
        pairs = zip(specs, leaves, strict=True)
        leaves = [leaf.astype(spec.dtype or resolve_dtype(dtype)) for spec, leaf in pairs]
    params = jax.tree.unflatten(tree, leaves)
    return params if mesh is None else jax.device_put(params, shardings(config, mesh))


def _check_arrays(config: Any, tensors: Any) -> None:
    check_config(config)
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise InputError(f"tensors must be arrays by name, got {format_value(tensors)}")
    for name, tensor in tensors.items():
        _check_array(name, tensor)


def check_tensor(name: str, tensor: Any) -> None:
    """Raises InputError unless a tensor is an array of floats, of NumPy or jax."""
    _check_array(name, tensor)
    _check_floats({name: tensor})


def _check_array(name: str, tensor: Any) -> None:
    if not isinstance(tensor, np.ndarray | jax.Array):
        raise InputError(
            f"{name} must be an array of NumPy or jax, as np.asarray makes it, got"
            f" {type(tensor).__module__}.{type(tensor).__name__}"
        )


def _check_floats(arrays: Mapping[str, Any]) -> None:
    others = [
        f"{name} of {x.dtype}" for name, x in arrays.items() if not jnp.issubdtype(x.dtype, jnp.floating)
    ]
    if others:
        raise InputError(f"parameters are floats, or quantized leaves, got {format_names(others, _SHOWN)}")


def check_shapes(
    what: str, expected: Mapping[str, Shape], found: Mapping[str, Shape], unused: Collection[str] = ()
) -> None:
    """Raises one InputError for all names that are missing, unknown or misshapen."""
    faults = [f"missing {name} {list(expected[name])}" for name in expected.keys() - found.keys()]
    faults += [f"unknown {name}" for name in found.keys() - expected.keys() - {*unused}]
    faults += [
        f"{name} has shape {list(found[name])}, the config asks for {list(expected[name])}"
        for name in found.keys() & expected.keys()
        if found[name] != expected[name]
    ]
    if faults:
        raise InputError(f"the {what} do not fit the config: {format_names(sorted(faults), _SHOWN)}")


def _is_padded(spec: ParamSpec, shape: Shape) -> bool:
    """Returns True if it is the shape of a matrix of the vocabulary with more rows, which divide it over a
    mesh.
    """
    return spec.axes[0] == "vocab" and shape[1:] == spec.shape[1:] and shape[0] > spec.shape[0]


def _without_padding(spec: FileSpec, leaf: Any) -> Any:
    if not _is_padded(spec, leaf.shape):
        return leaf
    cut = lambda x, places: x[tuple(slice(spec.shape[0] if place else None) for place in places)]  # noqa: E731
    return jax.tree.map(cut, leaf, partition_specs(spec, leaf, None, RULES))


def itself(leaf: Any, convert: Callable[[Any], Any]) -> Any:
    """Makes a tensor that is a leaf."""
    return convert(leaf)


def of_expert(leaf: Any, expert: int, convert: Callable[[Any], Any]) -> Any:
    """Makes the tensor of one expert of a leaf."""
    return convert(leaf[expert])


def _join(
    spec: FileSpec, shape: Shape, leaves: list[Any], inputs_first: bool, convert: Callable[[Any], Any]
) -> Any:
    """Returns the tensor that holds these leaves. spec: the spec of one of them."""
    arrays = [convert(leaf) for leaf in leaves]
    xp = arrays[0].__array_namespace__()  # NumPy or jax.numpy
    if spec.interleaved:
        joined = xp.stack([xp.moveaxis(x, 1, -1) for x in arrays], axis=-1).reshape(shape)
    elif inputs_first:
        joined = xp.concat([xp.moveaxis(x, 1, 2) for x in arrays], axis=2)
    else:
        rest = spec.shape[spec.row_axis + 1 :]
        joined = xp.concat([x.reshape(_groups(spec), -1, *rest) for x in arrays], axis=1).reshape(shape)
    axes = _axes_in_tensor(spec, inputs_first)
    return _divided_like(arrays[0], [axes.index(i) if i in axes else None for i in range(len(shape))], joined)


def leaf_of_tensors(spec: FileSpec, tensors: Mapping[str, Any]) -> Any:
    """Returns a leaf from the tensors that hold it."""
    names = [*spec.tensor_shapes(tensors)]
    tensor = tensors[names[0]]
    xp = tensor.__array_namespace__()
    if names[0] != spec.fused_name:
        return xp.stack([tensors[name] for name in names]) if "{}" in spec.hf_name else tensor
    inputs_first = spec.has_inputs_first(tensors)
    whole = xp.moveaxis(tensor, 1, 2) if inputs_first else tensor
    if spec.interleaved:
        leaf = xp.moveaxis(whole[..., spec.first_row :: spec.interleaved], -1, 1)
    else:
        rows = spec.shape[spec.row_axis] // spec.fused_groups
        groups = whole.reshape(_groups(spec), spec.fused_rows, *spec.shape[spec.row_axis + 1 :])
        leaf = groups[:, spec.first_row : spec.first_row + rows].reshape(spec.shape)
    return _divided_like(tensor, _axes_in_tensor(spec, inputs_first), leaf)


def _axes_in_tensor(spec: FileSpec, inputs_first: bool) -> list[int | None]:
    """Returns, for each axis of a leaf, the axis of the tensor that holds it."""
    if (axes := spec.axes_of_leaves) is not None:
        return [axes.index(axis) if axis in axes else None for axis in range(len(spec.shape))]
    swapped = inputs_first or spec.interleaved and len(spec.shape) > 2
    return [0, 2, 1] if swapped else [*range(len(spec.shape))]


def _divided_like(source: Any, axes: list[int | None], result: Any) -> Any:
    """Returns the result, divided over a mesh as the source is: eager programs may replicate it. axes: for
    each of its axes, the axis of the source. None: the axis is not divided.
    """
    sharding = getattr(source, "sharding", None)
    if isinstance(source, jax.core.Tracer) or not isinstance(sharding, NamedSharding):
        return result
    places = [*sharding.spec, *[None] * source.ndim]
    spec = PartitionSpec(*(None if axis is None else places[axis] for axis in axes))
    wanted = NamedSharding(sharding.mesh, spec)
    try:
        wanted.shard_shape(result.shape)
    except ValueError:  # the devices do not divide it
        return result
    return jax.device_put(result, wanted)


def _groups(spec: FileSpec) -> int:
    """Returns groups of rows of the tensor that holds it, of all experts."""
    return spec.fused_groups * math.prod(spec.shape[: spec.row_axis])
