"""jax's primitives on NumPy values: what scalars, indices and masks of a program need."""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

MOST_ELEMENTS = 2**24  # of a known array


def _div(x, y):
    if not np.issubdtype(np.result_type(x), np.integer):
        return np.divide(x, y)
    y = np.where(y == 0, 1, y)
    quotient = np.abs(x) // np.abs(y)
    return np.asarray(np.sign(x) * np.sign(y) * quotient, np.result_type(x))


def _select(which, *cases):
    which = np.asarray(which)
    if which.dtype == bool:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


_BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _div, "rem": np.fmod, "max": np.maximum,
    "min": np.minimum, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.invert, "neg": np.negative, "sign": np.sign, "abs": np.abs, "select_n": _select,
    "shift_left": np.left_shift, "stop_gradient": lambda x: x, "copy": lambda x: x, "copy_p": lambda x: x,
    "optimization_barrier": lambda x: x, "layout_cast": lambda x: x, "pvary": lambda x: x,
    "square": np.square, "clamp": lambda low, x, high: np.clip(x, low, high), "add_any": operator.add,
}  # fmt: skip


def apply_primitive(name: str, primitive: Any, values: list[Any], params: dict[str, Any]) -> list[Any] | None:
    """The results of a primitive on known values; None: it cannot be computed here."""
    if function := _BINARY.get(name):
        if name == "optimization_barrier":
            return values
        return [function(*values)]
    if name == "convert_element_type":
        return [np.asarray(values[0]).astype(params["new_dtype"])]
    if name == "broadcast_in_dim":
        return [_broadcast(np.asarray(values[0]), params["shape"], params["broadcast_dimensions"])]
    if name == "reshape":
        return [np.reshape(values[0], params["new_sizes"])]
    if name == "squeeze":
        return [np.squeeze(values[0], params["dimensions"])]
    if name == "iota":
        shape = params["shape"]
        dimension = params["dimension"]
        index = np.arange(shape[dimension], dtype=params["dtype"])
        return [_broadcast(index, shape, (dimension,))]
    if "jaxpr" in params or "call_jaxpr" in params:
        return None
    try:
        out = primitive.bind(*map(jnp.asarray, values), **params)
    except Exception:  # a primitive of kernels, which runs nowhere else
        return None
    return [np.asarray(x) for x in (out if primitive.multiple_results else [out])]


def short_circuit(name: str, values: list[Any]) -> Any:
    """The result of a primitive that some known values decide alone; None: they do not."""
    known = [value for value in values if value is not None]
    if name == "and" and any(np.asarray(value).dtype == bool and not np.any(value) for value in known):
        return next(value for value in known if not np.any(value))
    if name == "or" and any(np.asarray(value).dtype == bool and np.all(value) for value in known):
        return next(value for value in known if np.all(value))
    if name == "select_n" and values[0] is not None:
        which = np.asarray(values[0])
        if which.size and np.all(which == which.flat[0]):
            return values[1 + int(which.flat[0])]
    return None


def _broadcast(x: np.ndarray, shape: tuple[int, ...], dimensions: tuple[int, ...]) -> np.ndarray:
    wide = [1] * len(shape)
    for size, dimension in zip(x.shape, dimensions, strict=True):
        wide[dimension] = size
    return np.broadcast_to(x.reshape(wide), shape)


def is_small(shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape is worth knowing."""
    return math.prod(shape) <= MOST_ELEMENTS
