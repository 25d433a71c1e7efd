"""Checks and byte counts of parameters, and the dtypes of a model."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..annotations import AnyArray as AnyArray, Dtype
from ..config.model_config import check_config
from ..errors import InputError, format_value
from ..memory_plan import MemoryPlan
from ..registry import plugin
from .param_specs import Params as Params, ParamSpec as ParamSpec, param_specs as param_specs

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def check_weights(size: int, fraction: float = 1.0) -> None:
    """Raises InputError if weights need more memory than there is: a fraction of their bytes is in one."""
    plan = MemoryPlan(dict(weights=size), fraction)
    plan.check("use a smaller dtype, quantize them, or use a smaller model")


def check_params(params: Any, config: Any, stacked: bool = False) -> None:
    """Raises InputError unless params are a model's tree and config is its `ModelConfig`. stacked: True:
    layers may be stacked by `stack_layers`.
    """
    check_config(config)
    if not isinstance(params, Mapping) or not {"embed", "layers", "final_norm"} <= params.keys():
        raise InputError(f"params must be a model's tree, as model.params is, got {type(params).__name__}")
    kind = type(params["final_norm"])
    if any(base.__module__.startswith("flax.") for base in kind.__mro__):
        raise InputError(
            f"params must be a tree of arrays, got leaves of flax ({kind.__name__}): give what"
            " nnx.pure(params) returns"
        )
    if isinstance(params["layers"], dict):
        if not stacked:
            raise InputError("the layers are stacked: this function takes what unstack_layers returns")
    elif len(params["layers"]) != config.num_hidden_layers:
        raise InputError(
            f"params have {len(params['layers'])} layers, the config has {config.num_hidden_layers}"
        )


def activation_dtype(params: Params) -> Any:
    """Returns the dtype of hidden states: the dtype of the norms, which are never quantized."""
    return params["final_norm"].dtype


def cache_dtype(params: Params) -> Any:
    """Returns the dtype of keys and values: the dtype of activations, or float32 on CPU, since XLA (jax 0.10)
    would convert all of them in each step.
    """
    return _default_dtype(activation_dtype(params))


def resolve_dtype(dtype: Dtype | None) -> Any:
    """Returns a floating dtype from its name or dtype. None: float32 on CPU, bfloat16 on GPU and TPU. Raises
    InputError if it is none of float32, bfloat16 and float16.
    """
    if dtype is None:
        return _default_dtype(jnp.bfloat16)
    name: Any
    try:
        name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    except TypeError:
        name = dtype
    if name not in tuple(_DTYPES):
        raise InputError(f"dtype {format_value(name)} is not supported: use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _default_dtype(narrow: Any) -> Any:
    """Returns float32 on CPU, elsewhere the narrow type."""
    of_device = plugin("device", "dtype")
    return of_device(narrow) if of_device else jnp.float32


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of a pytree's arrays, or of its shapes and types."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
