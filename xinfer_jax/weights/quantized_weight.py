"""The common part of quantized leaves: their product, its derivative, and rows of the matrix."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from ..modes import in_default_modes
from ..ops.operation import run
from ..ops.product import dot
from .weight_leaf import WeightLeaf

_MIN_ROW_MAX = 1e-5  # avoids a division by 0 in rows of zeros


class QuantizedWeight(WeightLeaf):
    """A matrix as `values`, multiplied by `scale`."""

    operation: ClassVar[str]  # the name of its product: platforms have other forms of some kinds
    values: Any
    scale: Any

    def dequantize(self) -> jax.Array:
        """Returns the matrix, float32 [O, I]."""
        raise NotImplementedError

    def product(self, x: jax.Array) -> jax.Array:
        return quantized_product(x, self)

    def product_of_rows(self, x_MI: jax.Array) -> jax.Array:
        """Returns x @ matrix.T, float32 [M, O], by the form for the platform."""
        return run(self.operation, lambda x, matrix: matrix.plain_product(x), x=x_MI, matrix=self)

    def plain_product(self, x_MI: jax.Array) -> jax.Array:
        """Returns `product_of_rows` in plain jnp: the matrix is converted to the dtype of x."""
        # The barrier makes weights depend on x, or XLA would dequantize all layers before the loop.
        x_MI, weight = lax.optimization_barrier((x_MI, self))
        return dot(x_MI, weight.dequantize().astype(x_MI.dtype))

    def rows(self, index: jax.Array) -> jax.Array:
        parts = {name: getattr(self, name, None) for name in ("values", "scale", "zero", "offset", "step")}
        rows = {name: x[..., index.reshape(-1)] for name, x in parts.items() if x is not None}
        leaf: Any = self  # a kind is a dataclass
        return dataclasses.replace(leaf, **rows).dequantize().reshape(*index.shape, -1)


@jax.custom_jvp
def quantized_product(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Returns x @ dequantize(weight).T in float32, [..., I] -> [..., O].

    Gradients are the gradients of this product, also if x is quantized first.
    """
    return weight.product_of_rows(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


@quantized_product.defjvp
@in_default_modes
def _quantized_product_jvp(primals, tangents):
    (x, weight) = primals
    (x_dot, weight_dot) = tangents

    names = [name for name in ("scale", "offset", "step") if is_float_array(getattr(weight, name, None))]

    def plain(x: jax.Array, *floats: jax.Array) -> jax.Array:
        changed = dataclasses.replace(weight, **dict(zip(names, floats, strict=True)))
        return x.astype(jnp.float32) @ changed.dequantize().T

    primals, tangents = ((x, *(getattr(w, name) for name in names)) for x, w in (primals, tangents))
    return quantized_product(x, weight), jax.jvp(plain, primals, tangents)[1]


def quantize_activations(x_MI: jax.Array, axis_name: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns rows as int8 and the factors that they were multiplied by, float32 [M, 1], as transformers does
    for BitNet. axis_name: an axis of a mesh along which I is divided. None: it is not.
    """
    x_MI = x_MI.astype(jnp.float32)
    max_M1 = jnp.abs(x_MI).max(1, keepdims=True)
    max_M1 = max_M1 if axis_name is None else lax.pmax(max_M1, axis_name)
    factor_M1 = 127 / jnp.maximum(max_M1, _MIN_ROW_MAX)
    return jnp.round(x_MI * factor_M1).astype(jnp.int8), factor_M1


def is_float_array(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", object), jnp.floating)


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, WeightLeaf)
