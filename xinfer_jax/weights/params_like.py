"""Parameters in the form of other parameters of the model: containers, dtypes, quantized leaves, repeated key
heads, a padded vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config.model_config import ModelConfig
from ..errors import InputError, format_names, format_value
from .adapted_weight import AdaptedWeight
from .device_quantization import quantized_on_device
from .grouped_weight import GroupedWeight
from .hadamard import hadamard_rotate, rotate_on_host
from .int8_weight import Int8Weight
from .padded_weight import stored_weight
from .param_specs import leaf_name
from .params import AnyArray, Params, ParamSpec, param_specs
from .quantization import device_form, quantized_leaf, with_int8_activations
from .quantized_weight import is_quantized
from .resharding import grow_rows


def params_like(params: Any, config: ModelConfig, like: Params, cast: bool = True) -> Params:
    """Returns parameters in the form of `like`. Leaves are found by their paths, so containers may be others,
    such as the lists of a restored checkpoint.

    If `like` has an int8 or int4 leaf, a float matrix is quantized as `load_model(quantize=)` does it, on its
    device. On an accelerator this is one program for each shape. Leaves that fit stay the same arrays. On
    CPUs nothing is compiled.

    Args:
        params: float arrays, or the arrays of leaves that are quantized as in `like`.
        config: the config of `like`.
        cast: True: floats become the floats of `like`. False: another dtype is an error.

    Raises:
        InputError: leaves are missing, unknown, misshapen, deleted or of another type. Or there is a float
            matrix for a format that only its checkpoint has, or an adapter with another scale.
    """
    given = {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    scales = _adapter_scales(params)
    new = jax.tree.map(
        lambda spec, old: _converted(given, scales, spec, old, cast), param_specs(config), like
    )
    if given:
        raise InputError(f"the new parameters have unknown leaves: {format_names(given)}: leave them out")
    return new


def leaf_like(leaf: Any, spec: ParamSpec, old: Any, cast: bool = True) -> Any:
    """Returns one leaf in the form of `old`, as `params_like` returns it in its tree.

    Args:
        leaf: a float array, or a leaf that is quantized as `old` is.
        spec: the spec of the leaf.
        old: the leaf whose form it gets.
        cast: see `params_like`.

    Raises:
        InputError: see `params_like`, or the leaf is quantized in another form.
    """
    forms: Any = [jax.tree.structure(leaf), jax.tree.structure(old)]
    if is_quantized(leaf) and forms[0] != forms[1]:
        raise InputError(
            f"{spec.name} is quantized in the new weights, and has another form in the engine: give floats,"
            " which the engine quantizes itself"
        )
    found = jax.tree_util.tree_leaves_with_path(leaf)
    given = {_name((spec.name, *path)): x for path, x in found}
    return _converted(given, _adapter_scales(leaf, spec.name), spec, old, cast)


def _converted(given: dict[str, Any], scales: dict[str, float], spec: ParamSpec, old: Any, cast: bool) -> Any:
    """Takes the arrays of a leaf out of the given ones, and returns the leaf in the form of `old`."""
    if not is_quantized(old) or spec.name in given:
        return _fitted(given, spec, old, cast)
    for name, old_scale in _adapter_scales(old, spec.name).items():
        if (scale := scales.get(name, old_scale)) != old_scale:
            raise InputError(
                f"{name} has an adapter of the scale {scale}, and programs one of {old_scale}: give it"
                f" that alpha / rank, and lora_b times {scale} / {old_scale}"
            )
    fields, form = jax.tree_util.tree_flatten_with_path(old)
    names = [_name((spec.name, *path)) for path, _ in fields]
    specs = [dataclasses.replace(spec, name=name, kv_heads=0) for name in names]
    arrays = [_fitted(given, own, x, cast) for own, x in zip(specs, jax.tree.leaves(old), strict=True)]
    return jax.tree.unflatten(form, arrays)


def _adapter_scales(tree: Any, *prefix: str) -> dict[str, float]:
    """Returns the static scales of adapted matrices, by their paths."""
    is_adapted = lambda leaf: isinstance(leaf, AdaptedWeight)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_adapted)
    return {_name((*prefix, *path)): leaf.scale for path, leaf in leaves if is_adapted(leaf)}


def is_deleted(tree: Any) -> bool:
    """Returns True if any array of a tree was donated or deleted."""
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))


def _name(path: Any) -> str:
    return leaf_name(path).replace("..", ".")  # a field of a leaf has its own dot


def _fitted(given: dict[str, Any], spec: ParamSpec, old: Any, cast: bool) -> Any:
    """Takes an array out of the given ones, and gives it the form of `old`."""
    if spec.name not in given:
        raise InputError(f"the new parameters lack {spec.name}: give all of the model's, unstacked")
    x = given.pop(spec.name)
    if not isinstance(x, AnyArray):
        raise InputError(f"{spec.name} must be an array, got {format_value(x)}")
    if is_deleted(x):
        raise InputError(f"{spec.name} was donated or deleted: give arrays that nobody else donates")
    dtype = getattr(old, "dtype", jnp.float32)  # a quantized leaf is made of floats
    are_floats = all(jnp.issubdtype(each, jnp.floating) for each in (x.dtype, dtype))
    if x.dtype != dtype and not (cast and are_floats):
        raise InputError(f"{spec.name} is {x.dtype}, not {dtype}" + ": leave out cast=False" * are_floats)
    rows = old.shape[0]
    repeats = bool(spec.kv_heads and len(x) and rows % len(x) == 0 == spec.kv_heads * len(x) % rows)
    if x.shape[1:] != old.shape[1:] or not (len(x) == rows or repeats or x.shape == spec.shape):
        raise InputError(f"{spec.name} has the shape {list(x.shape)}, not {list(old.shape)}")
    if is_on_host(x):
        x = np.asarray(x) if x.dtype != dtype or is_quantized(old) or len(x) < rows else x
    if len(x) < rows:
        x = grow_rows(x, rows, spec.kv_heads * len(x) // rows if repeats else 0)
    if is_quantized(old):
        return _quantized(x, spec.name, old)
    return x if x.dtype == dtype else x.astype(dtype)


def is_on_host(x: Any) -> bool:
    """Returns True if NumPy converts an array without a copy from a device, and nothing is compiled for
    it.
    """
    return not isinstance(x, jax.Array) or (
        x.is_fully_addressable and all(device.platform == "cpu" for device in x.devices())
    )


def _quantized(matrix: Any, name: str, old: Any) -> Any:
    """Returns the matrix, quantized as `old` is, on the matrix's device."""
    new: Any = None
    stored = stored_weight(old)
    if isinstance(stored, Int8Weight | GroupedWeight):
        method = "int4" if stored.values.dtype == np.uint8 else "int8"
        group = stored.group if isinstance(stored, GroupedWeight) else matrix.shape[-1]
        if block := stored.input_block:
            rotate: Any = rotate_on_host if is_on_host(matrix) else hadamard_rotate
            matrix = rotate(matrix.astype(np.float32), block)
        quantize: Any = quantized_leaf if is_on_host(matrix) else quantized_on_device
        new = quantize(matrix, name, method, group)
        if stored.int8_activations:
            new = with_int8_activations(new)
        new = device_form(new)
    forms = [jax.tree.map(lambda x: (x.shape, x.dtype), leaf) for leaf in (new, old)]
    if forms[0] != forms[1]:
        raise InputError(f"{name} has a format of its checkpoint, {old}: give it in that, not as floats")
    return new
