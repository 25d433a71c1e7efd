"""Matrices in int8 with a scale per output."""

import dataclasses

import jax
import jax.numpy as jnp

import kernels_pallas

from ..ops.cpu import product_table
from ..ops.cpu.cpu_products import INT8_DOTS, int8_activation_product, upcast_product
from ..ops.operation import run
from ..ops.product import dot
from .rotated_weight import RotatedWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Int8Weight(RotatedWeight):
    """A matrix [O, I] as `values * scale` with a scale per output."""

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
        if index.size == 1 and kernels_pallas.device_impl().impl == "tpu":
            # For a single row XLA would copy the matrix into another layout.
            return self.rows(jnp.repeat(index.reshape(1), 2))[:1].reshape(*index.shape, -1)
        values = run("embedding", lambda index, values: values[index], index, self.values)
        return self.unrotated(values.astype(jnp.float32) * self.scale[index][..., None])

    def plain_product(self, x_MI: jax.Array) -> jax.Array:
        """The scale is applied to the result."""
        x_MI = self.rotated_inputs(x_MI).astype(x_MI.dtype)
        return dot(x_MI, self.values.astype(x_MI.dtype)) * self.scale

    def cpu_product(self, x_MI: jax.Array) -> jax.Array:
        x_MI = self.rotated_inputs(x_MI)
        if self.int8_activations:
            return int8_activation_product(x_MI, self.values, self.axis_name) * self.scale
        form = product_table.fastest_form("int8", len(x_MI), *self.values.shape)
        if form == product_table.TILES:
            return upcast_product(x_MI, self.values) * self.scale
        # Activations as the sum of two int8 numbers.
        x_MI = x_MI.astype(jnp.float32)
        max_M = jnp.abs(x_MI).max(1)
        step_M1 = jnp.where(max_M == 0, 1, max_M)[:, None] / 127
        exact_MI = x_MI / step_M1
        high_MI = jnp.round(exact_MI)
        low_MI = jnp.round((exact_MI - high_MI) * 254)
        split = jnp.concatenate([high_MI, low_MI]).astype(jnp.int8)
        sums_SO = INT8_DOTS[form](split, self.values, dtype=jnp.int32)
        high_MO, low_MO = jnp.split(sums_SO.astype(jnp.float32), 2)
        return (high_MO + low_MO / 254) * step_M1 * self.scale
