"""Matrices in FP8 (E4M3), the bytes of a checkpoint, and their products with activations of 16 or 32 bits."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..kernels_pallas.reference_products import FP8_BLOCK as FP8_BLOCK, spread_blocks
from .quantized_weight import QuantizedWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Fp8Weight(QuantizedWeight):
    """A matrix [O, I] as `values * scale`, with a scale per output or for each 128 × 128 numbers."""

    operation = "fp8_product"
    values: jax.Array  # float8_e4m3fn [O, I], without NaN
    scale: jax.Array  # float32 [O], or [⌈O/128⌉, ⌈I/128⌉]
    kept_as: ClassVar = "fp8"  # the value of `quantize` that asks for it
    not_written: ClassVar = (  # the error where files have no place for it
        "is kept in FP8, which is saved only in the files of a checkpoint with quant_method fp8: load the"
        " model without quantize='fp8', and save that"
    )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def has_blocks(self) -> bool:
        """Returns True if each scale belongs to a block, False if it belongs to an output."""
        return self.scale.ndim == self.values.ndim

    @property
    def block(self) -> tuple[int, int]:
        return (FP8_BLOCK, FP8_BLOCK) if self.has_blocks else (1, 1)

    def field_axes(self, *axes: str | None) -> dict[str, tuple[str | None, ...]]:
        return {"values": axes, "scale": axes if self.has_blocks else axes[:-1]}

    def dequantize(self) -> jax.Array:
        scale = spread_blocks(self.scale, *self.shape) if self.has_blocks else self.scale[:, None]
        return self.values.astype(jnp.float32) * scale

    def rows(self, index: jax.Array) -> jax.Array:
        at = index.reshape(-1)
        rows = self.values[at].astype(jnp.float32)
        if self.has_blocks:
            rows *= jnp.repeat(self.scale[at // FP8_BLOCK], FP8_BLOCK, -1)[:, : rows.shape[-1]]
        else:
            rows *= self.scale[at][:, None]
        return rows.reshape(*index.shape, -1)


def fp8_struct(shape: tuple[int, ...], has_blocks: bool) -> Fp8Weight:
    """Returns the leaf of matrices [..., O, I] with `jax.ShapeDtypeStruct` instead of arrays."""
    (*experts, outputs, inputs) = shape
    struct: Any = jax.ShapeDtypeStruct
    blocks = (-(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK)) if has_blocks else (outputs,)
    return Fp8Weight(struct(shape, jnp.float8_e4m3fn), struct((*experts, *blocks), np.float32))
