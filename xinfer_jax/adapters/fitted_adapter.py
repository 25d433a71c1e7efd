"""An adapter in the form that a model's parameters need, which may be rotated or have more rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import is_traced
from ..errors import InputError, format_names
from ..sharding import MODEL, abstract_mesh_of
from ..weights.adapted_weight import AdaptedWeight, UntiedWeight
from ..weights.hadamard import hadamard_rotate, rotate_on_host
from ..weights.param_specs import leaf_name
from ..weights.params import Params
from ..weights.quantized_weight import is_float_array, is_quantized
from ..weights.resharding import grow_rows
from .adapter import Adapter, LowRank, is_norm, make_adapter

_NOT_ROTATED = (0, 0)  # `RotatedWeight.rotated`
_FOLDED = ("attn_norm", "mlp_norm")  # norms whose gains are in the matrices of a rotated model


def check_adapter(params: Params, adapter: Adapter) -> Adapter:
    """Returns the adapter as these parameters take it: rotated as their matrices are; with the key heads that
    a mesh repeats, and the rows that pad its vocabulary.

    Raises:
        InputError: it has what they do not take, all in one error.
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
    rotated = any(map(is_rotated, weights.values()))
    faults += _norm_faults(params, adapter, rotated)
    if faults:
        raise InputError(f"the adapter does not fit the parameters: {format_names(faults, 8)}")
    if rotated:
        matrices = {path: _rotated(path, pair, weights[path]) for path, pair in matrices.items()}
    return make_adapter(matrices, adapter.scale_of(), adapter.norms)


def _norm_faults(params: Params, adapter: Adapter, rotated: bool) -> list[str]:
    norms = {leaf_name(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(params)}
    faults = []
    for path, norm in adapter.norms.items():
        if not is_float_array(norm):
            faults.append(f"{path} has no float array")
        elif not is_norm(path) or path not in norms or norms[path].shape != norm.shape:
            faults.append(f"{path} {list(norm.shape)} is no norm of the model")
        elif rotated and path.endswith(_FOLDED):
            faults.append(f"{path} is in the matrices of a model that int8 activations rotate")
    return faults


def weights_by_path(params: Params) -> dict[str, Any]:
    """Returns every weight by the path of its matrix; a tied one by both of its paths."""
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
    """The pair with the rows of a matrix over a mesh, where each device has one of the repeated key heads."""
    rows = weight.shape[-2]
    mesh = abstract_mesh_of(weight)
    if pair.b.ndim != 2 or len(pair.b) >= rows or mesh is None:
        return pair
    if path in ("embed", "lm_head"):
        return pair._replace(b=grow_rows(pair.b, rows))
    (heads, rest) = divmod(len(pair.b), rows // mesh.shape[MODEL])
    is_repeated = path.endswith((".k", ".v")) and heads and not rest and not mesh.shape[MODEL] % heads
    return pair._replace(b=grow_rows(pair.b, rows, heads)) if is_repeated else pair


def is_rotated(weight: Any) -> bool:
    """Whether a matrix is one of a model that `hadamard` rotated."""
    return getattr(weight, "rotated", _NOT_ROTATED) != _NOT_ROTATED


def _rotated(path: str, pair: LowRank, weight: Any) -> LowRank:
    (outputs, inputs) = getattr(weight, "rotated", None) or _NOT_ROTATED
    if not inputs:
        raise InputError(
            f"{path} is rotated for int8 activations, and its file does not say how: load the checkpoint that"
            " it was made from with activations, or merge the adapter before"
        )
    (a, b) = pair
    gain = weight.gain
    if isinstance(gain, jax.ShapeDtypeStruct):  # for compilation
        gain = np.ones(gain.shape, gain.dtype)
    a = _rotate(a if gain is None else a * gain, inputs)
    return LowRank(a, _rotate(b.T, outputs).T if outputs else b)


def _rotate(x: Any, width: int) -> Any:
    """`hadamard_rotate`; outside a trace on the host, where nothing is compiled."""
    if is_traced(x):
        return hadamard_rotate(x, width)
    return jnp.asarray(rotate_on_host(np.asarray(x, np.float32), width), x.dtype)
