"""What quantized leaves have in common: their product, its derivative, and rows of the matrix."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..modes import in_default_modes
from ..ops.product import dot
from ..ops.tpu.tpu_products import tpu_forms
from .weight_leaf import WeightLeaf


class QuantizedWeight(WeightLeaf):
    """A matrix as `values`, multiplied by `scale`."""

    values: Any
    scale: Any

    def dequantize(self) -> jax.Array:
        """Returns the matrix, float32 [O, I]."""
        raise NotImplementedError

    def product(self, x: jax.Array) -> jax.Array:
        return quantized_product(x, self)

    def forms_product(self, x_MI: jax.Array) -> jax.Array:
        """Returns x @ matrix.T, float32 [M, O], in the form of each platform."""
        return lax.platform_dependent(
            x_MI,
            self,
            cpu=lambda x, weight: weight.cpu_product(x),
            default=lambda x, weight: weight.plain_product(x),
            **tpu_forms(lambda x, weight: weight.tpu_product(x), x_MI),
        )

    def cpu_product(self, x_MI: jax.Array) -> jax.Array:
        """The form for CPUs."""
        raise NotImplementedError

    def tpu_product(self, x_MI: jax.Array) -> jax.Array:
        """The form for TPUs."""
        return self.plain_product(x_MI)

    def plain_product(self, x_MI: jax.Array) -> jax.Array:
        """On GPU and TPU: the matrix in the type of x."""
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

    Gradients are those of this product, also where x is quantized first.
    """
    return weight.forms_product(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


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


def is_float_array(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", object), jnp.floating)


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, WeightLeaf)
