"""The common part of int8 and int4: inputs rotated in blocks, for int8 activations."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from .hadamard import hadamard_rotate, hadamard_unrotate
from .quantized_weight import QuantizedWeight


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class RotatedWeight(QuantizedWeight):
    """A matrix whose inputs may be rotated against outliers of activations (`hadamard`)."""

    # The width of the blocks in which `values` have their inputs rotated and products rotate x; 0: no blocks.
    input_block: int = dataclasses.field(default=0, repr=False, metadata=dict(static=True))
    # A mesh axis along which I is divided (`local_shard`): a token's scale is computed over all inputs.
    axis_name: str | None = dataclasses.field(default=None, repr=False, metadata=dict(static=True))

    @property
    def block(self) -> tuple[int, int]:
        return 1, self.input_block or 1

    def local_shard(self, x: jax.Array, axis_name: str) -> tuple[jax.Array, Self]:
        return x, dataclasses.replace(self, axis_name=axis_name)

    def plain_product(self, x_MI: jax.Array) -> jax.Array:
        x_MI = self.rotated_inputs(x_MI).astype(x_MI.dtype)
        return super(RotatedWeight, dataclasses.replace(self, input_block=0)).plain_product(x_MI)

    def unrotated(self, rows: jax.Array) -> jax.Array:
        """Returns rows of `values` [..., I], dequantized, as rows of the matrix."""
        return hadamard_unrotate(rows, self.input_block) if self.input_block else rows

    def rotated_inputs(self, x: jax.Array) -> jax.Array:
        """Returns x [..., I] as `values` take it. It is float32 if it is rotated."""
        return hadamard_rotate(x.astype(jnp.float32), self.input_block) if self.input_block else x
