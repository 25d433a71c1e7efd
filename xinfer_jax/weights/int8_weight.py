"""Matrices in int8 with a scale per output."""

import dataclasses

import jax
import jax.numpy as jnp

from ..ops.operation import run
from ..ops.product import dot
from .rotated_weight import RotatedWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Int8Weight(RotatedWeight):
    """A matrix [O, I] as `values * scale` with a scale per output."""

    operation = "int8_product"
    values: jax.Array  # int8 [O, I]
    scale: jax.Array  # float32 [O]
    # Activations are quantized to one int8 number: on CPU not split into two, in GPU kernels not floats.
    int8_activations: bool = dataclasses.field(default=False, repr=False, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def field_axes(self, *axes: str | None) -> dict[str, tuple[str | None, ...]]:
        return {"values": axes, "scale": axes[:-1]}

    def dequantize(self) -> jax.Array:
        return self.unrotated(self.values.astype(jnp.float32) * self.scale.astype(jnp.float32)[:, None])

    def rows(self, index: jax.Array) -> jax.Array:
        values = run("embedding", lambda token, table: table[token], token=index, table=self.values)
        return self.unrotated(values.astype(jnp.float32) * self.scale[index][..., None])

    def plain_product(self, x_MI: jax.Array) -> jax.Array:
        """Returns the product. The scale is applied to the result."""
        x_MI = self.rotated_inputs(x_MI).astype(x_MI.dtype)
        return dot(x_MI, self.values.astype(x_MI.dtype)) * self.scale
