"""Parameters in the form of other parameters of the model: containers, dtypes, quantized leaves, repeated key
heads, a padded vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config.model_config import ModelConfig
from ..errors import InputError, format_names
from .grouped_weight import GroupedWeight
from .int8_weight import Int8Weight
from .param_specs import leaf_name
from .params import Params, ParamSpec, param_specs
from .quantization import device_form, quantized_leaf, quantized_stack
from .quantized_weight import is_quantized


def params_like(params: Any, config: ModelConfig, like: Params, cast: bool = True) -> Params:
    """Returns parameters as `like` has them. Leaves are found by their paths, so containers may be others, as
    the lists of a restored checkpoint.

    Where `like` has an int8 or int4 leaf, a float matrix is quantized as `load_model(quantize=)` does it, on
    the host. Leaves that fit stay the same arrays. On CPUs nothing is compiled.

    Args:
        params: float arrays, or quantized leaves whose arrays are those of `like` in number and shape.
        config: of `like`.
        cast: floats become those of `like`. False: another dtype is an error.

    Raises:
        InputError: leaves that are missing, unknown, misshapen or deleted; the first one of another dtype
            without `cast`; a float matrix where `like` has a format that only its checkpoint has.
    """
    given = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    pairs: list[tuple[ParamSpec, Any]] = []
    jax.tree.map(lambda spec, old: pairs.append((spec, old)), param_specs(config), like)
    wanted = [_parts(spec, old, given) for spec, old in pairs]
    _check_names(given, {name for names in wanted for name in names})
    if config.rotated and any(is_quantized(old) and spec.name in given for spec, old in pairs):
        raise InputError("the quantized matrices are rotated: give parameters that load_model quantized so")
    misshapen = []
    for (spec, old), names in zip(pairs, wanted, strict=True):
        for name, part in names.items():
            x = given[name]
            if np.shape(x) != part.shape and not (part is old and _fits(np.shape(x), spec, old)):
                misshapen.append(f"{name} is {list(np.shape(x))}, not {list(part.shape)}")
            elif getattr(x, "is_deleted", bool)():
                raise InputError(f"{name} was donated or deleted: give arrays that nobody else donates")
            elif not cast or x.dtype != getattr(part, "dtype", None):
                _check_dtype(name, x.dtype, part, cast)
    if misshapen:
        raise InputError(f"the new parameters have other shapes: {format_names(misshapen)}")
    parts = iter([[given[name] for name in names] for names in wanted])
    return jax.tree.map(lambda spec, old: _converted(spec, old, next(parts)), param_specs(config), like)


def is_deleted(tree: Any) -> bool:
    """Whether any array of a tree was donated or deleted."""
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))


def _name(path: Any) -> str:
    return leaf_name(path).replace("..", ".")  # a field of a leaf has its own dot


def _parts(spec: ParamSpec, old: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The names of the given arrays that make a leaf, and what each of them has to look like."""
    if not is_quantized(old) or spec.name in given:
        return {spec.name: old}
    fields = jax.tree_util.tree_leaves_with_path(old)
    return {_name((jax.tree_util.DictKey(spec.name), *path)): x for path, x in fields}


def _check_names(given: Mapping[str, Any], wanted: set[str]) -> None:
    missing = sorted(wanted - given.keys())
    unknown = sorted(given.keys() - wanted)
    for what, names in (("lack", missing), ("have unknown leaves:", unknown)):
        if names:
            raise InputError(f"the new parameters {what} {format_names(names)}: give those of this model")


def _check_dtype(name: str, dtype: Any, old: Any, cast: bool) -> None:
    own = getattr(old, "dtype", None)  # None: a quantized leaf, to be made of floats
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if is_float and cast and (own is None or jnp.issubdtype(own, jnp.floating)):
        return
    if dtype != own:
        form = own or f"a {type(old).__name__}"
        remedy = ": leave out cast=False" if is_float and not cast else ""
        raise InputError(f"the new parameters have other types: {name} is {dtype}, not {form}{remedy}")


def _fits(shape: tuple[int, ...], spec: ParamSpec, old: Any) -> bool:
    """Whether a leaf of this shape becomes one like `old`, with its key heads repeated or rows of zeros."""
    if shape[1:] != old.shape[1:] or not shape[0]:
        return False
    repeated = spec.kv_heads and old.shape[0] % shape[0] == 0 and spec.kv_heads * shape[0] % old.shape[0] == 0
    return bool(repeated or shape == spec.shape)


def _converted(spec: ParamSpec, old: Any, parts: list[Any]) -> Any:
    if len(parts) > 1:
        leaves = [_cast(x, of_old) for x, of_old in zip(parts, jax.tree.leaves(old), strict=True)]
        return jax.tree.unflatten(jax.tree.structure(old), leaves)
    (x,) = parts
    if not is_quantized(old) and x.shape == old.shape:
        return _cast(x, old)
    x = np.asarray(x)
    rows = old.shape[0]
    if spec.kv_heads and len(x) < rows:
        x_KX = x.reshape(spec.kv_heads * len(x) // rows, -1)
        x = np.repeat(x_KX, rows // len(x), 0).reshape(old.shape)
    x = np.pad(x, [(0, rows - len(x)), *[(0, 0)] * (x.ndim - 1)])
    return _quantized(x, spec.name, old) if is_quantized(old) else x.astype(old.dtype)


def _cast(x: Any, old: Any) -> Any:
    if x.dtype == old.dtype:
        return x
    on_host = not isinstance(x, jax.Array) or next(iter(x.devices())).platform == "cpu"
    return np.asarray(x).astype(old.dtype) if on_host else x.astype(old.dtype)


def _quantized(matrix: np.ndarray, name: str, old: Any) -> Any:
    """The matrix, quantized as `old` is."""
    new: Any = None
    if isinstance(old, Int8Weight | GroupedWeight):
        method = "int4" if old.values.dtype == np.uint8 else "int8"
        group = old.group if isinstance(old, GroupedWeight) else matrix.shape[-1]
        quantize: Any = quantized_leaf if matrix.ndim == 2 else quantized_stack
        new = device_form(quantize(matrix, name, method, group))
    if isinstance(old, Int8Weight):
        new = dataclasses.replace(new, int8_activations=old.int8_activations)
    forms = [jax.tree.map(lambda x: (x.shape, x.dtype), leaf) for leaf in (new, old)]
    if forms[0] != forms[1]:
        raise InputError(f"{name} has a format of its checkpoint, {old}: give it in that, not as floats")
    return new
