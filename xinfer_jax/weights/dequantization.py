"""Float arrays in place of quantized leaves."""

import dataclasses
from typing import Any

import jax

from ..annotations import Dtype
from ..modes import in_default_modes
from .adapted_weight import AdaptedWeight, UntiedWeight
from .params import Params, activation_dtype, resolve_dtype
from .quantized_weight import is_quantized


@in_default_modes
def dequantize(params: Params, dtype: Dtype | None = None) -> Params:
    """Returns the parameters with float arrays in place of quantized matrices.

    The float arrays have the values by which the quantized matrices multiply. It is a pure function, and
    takes stacked layers too. Adapters stay in the tree, and the config does not change.

    Args:
        params: the parameter tree. Leaves that are not quantized do not change.
        dtype: the dtype of the new arrays: "float32", "bfloat16" or "float16". None takes the dtype of the
            norms.

    Raises:
        InputError: the dtype is another one.
    """
    to = activation_dtype(params) if dtype is None else resolve_dtype(dtype)
    return jax.tree.map(lambda leaf: _float_leaf(leaf, to), params, is_leaf=is_quantized)


def _float_leaf(leaf: Any, dtype: Any) -> Any:
    if not is_quantized(leaf):
        return leaf
    if isinstance(leaf, AdaptedWeight):
        return dataclasses.replace(leaf, base=_float_leaf(leaf.base, dtype))
    if isinstance(leaf, UntiedWeight):
        return UntiedWeight(_float_leaf(leaf.embedding, dtype), _float_leaf(leaf.head, dtype))
    matrix = lambda leaf: leaf.dequantize()  # noqa: E731
    for _ in leaf.shape[:-2]:  # stacked layers, and experts
        matrix = jax.vmap(matrix)
    return matrix(leaf).astype(dtype)
