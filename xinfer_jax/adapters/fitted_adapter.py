"""An adapter in the form that a model's parameters need, which may have more rows."""

from typing import Any

import jax

from ..errors import InputError, format_names
from ..sharding import MODEL, abstract_mesh_of
from ..weights.adapted_weight import AdaptedWeight, UntiedWeight
from ..weights.param_specs import leaf_name
from ..weights.params import Params
from ..weights.quantized_weight import is_float_array, is_quantized
from ..weights.resharding import grow_rows
from .adapter import Adapter, LowRank, is_norm, make_adapter


def check_adapter(params: Params, adapter: Adapter) -> Adapter:
    """Returns the adapter as these parameters take it: with the key heads that a mesh repeats, and the rows
    that pad its vocabulary.

    Raises:
        InputError: it has matrices that they do not take. One error names all.
    """
    if not isinstance(adapter, Adapter):
        raise InputError(f"an adapter is what load_adapter returns, got {type(adapter).__name__}")
    weights = weights_by_path(params)
    faults = []
    matrices = {}
    for path, pair in adapter.matrices.items():
        weight = weights.get(path)
        if not (isinstance(pair, LowRank) and all(map(is_float_array, pair))):
            faults.append(f"{path} has no LowRank of two float arrays")
        elif weight is None:
            faults.append(f"{path} is no matrix of the model")
        elif isinstance(weight, AdaptedWeight):
            faults.append(f"{path} has an adapter already")
        else:
            matrices[path] = _with_rows(path, pair, weight)
            if not _fits(matrices[path], weight.shape):
                (a, b) = pair
                faults.append(f"{path} {list(weight.shape)} has a {list(a.shape)} and b {list(b.shape)}")
    faults += _norm_faults(params, adapter)
    if faults:
        raise InputError(f"the adapter does not fit the parameters: {format_names(faults, 8)}")
    return make_adapter(matrices, adapter.scale_of(), adapter.norms)


def _norm_faults(params: Params, adapter: Adapter) -> list[str]:
    norms = {leaf_name(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(params)}
    faults = []
    for path, norm in adapter.norms.items():
        if not is_float_array(norm):
            faults.append(f"{path} has no float array")
        elif not is_norm(path) or path not in norms or norms[path].shape != norm.shape:
            faults.append(f"{path} {list(norm.shape)} is no norm of the model")
    return faults


def weights_by_path(params: Params) -> dict[str, Any]:
    """Returns every weight by the path of its matrix. A tied weight has both of its paths."""
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    named = {leaf_name(keys): leaf for keys, leaf in found}
    weights = {name.removesuffix(".weight"): leaf for name, leaf in named.items() if name.endswith(".weight")}
    embed = weights["embed"]
    if isinstance(embed, UntiedWeight):
        return weights | dict(embed=embed.embedding, lm_head=embed.head)
    return {"lm_head": embed} | weights


def _fits(pair: LowRank, shape: tuple[int, ...]) -> bool:
    (*experts, outputs, inputs) = shape
    rank = pair.a.shape[-2:-1]
    return pair.a.shape == (*experts, *rank, inputs) and pair.b.shape == (*experts, outputs, *rank)


def _with_rows(path: str, pair: LowRank, weight: Any) -> LowRank:
    """Returns the pair with the rows of a matrix over a mesh, in which each device has one of the repeated
    key heads.
    """
    rows = weight.shape[-2]
    mesh = abstract_mesh_of(weight)
    if pair.b.ndim != 2 or len(pair.b) >= rows or mesh is None:
        return pair
    if path in ("embed", "lm_head"):
        return pair._replace(b=grow_rows(pair.b, rows))
    (heads, rest) = divmod(len(pair.b), rows // mesh.shape[MODEL])
    is_repeated = path.endswith((".k", ".v")) and heads and not rest and not mesh.shape[MODEL] % heads
    return pair._replace(b=grow_rows(pair.b, rows, heads)) if is_repeated else pair
