"""Parts that the Triton kernels share: sizes of tiles, their loads, and products in full precision."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

LOG2_E = math.log2(math.e)
LOWEST = -1e30  # the maximum before the first number: finite, so that differences are never NaN


def tile_size(size: int) -> int:
    """Returns the size of a tile for `size` rows or columns: a power of two, and at least 16, as Triton's
    products need.
    """
    return max(16, pl.next_power_of_2(size))


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a · b in float32. The highest precision avoids rounding float32 operands to TF32."""
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """Returns 2**x by the GPU's instruction. `jnp.exp2` adds three more for results too small to matter in a
    sum.
    """
    if interpret:
        return jnp.exp2(x)
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    (power,) = pltriton.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[kind]
    )
    return power


def outer(row_R: jax.Array, column_O: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns indices of all these rows and columns, each [R, O]."""
    shape = len(row_R), len(column_O)
    return jnp.broadcast_to(row_R[:, None], shape), jnp.broadcast_to(column_O, shape)


def convert_halves(asm: str, values_YO: jax.Array, dtype: Any) -> list[jax.Array]:
    """Returns the numbers of `dtype` in both halves of bytes. asm: the instructions for the half from bit
    {shift} on, four bytes at a time.
    """
    return [convert_bytes(asm.format(shift=shift), values_YO, dtype) for shift in (0, 4)]


def convert_bytes(asm: str, values: jax.Array, dtype: Any) -> jax.Array:
    """Returns numbers of `dtype`, of 16 bits, one of each byte. asm: the instructions for four bytes at a
    time.
    """
    kind = jax.ShapeDtypeStruct(values.shape, dtype)
    (numbers,) = pltriton.elementwise_inline_asm(
        asm, args=[values], constraints="=r,=r,r", pack=4, result_shape_dtypes=[kind]
    )
    return numbers


class Range(NamedTuple):
    """The indices of a tile along an axis."""

    slice: Any
    inside: Any  # which are; None: all

    @classmethod
    def of(cls, start, size: int, limit: int, end: int | None = None) -> "Range":
        """Returns the range from `start` on. limit: the limit of the axis. end: the end of the tiles, if they
        are no multiples.
        """
        tiled = limit % size == 0 and end in (None, limit)
        return cls(pl.ds(start, size), None if tiled else start + jnp.arange(size) < limit)


def tile_mask(*axes):
    """Returns a mask of the elements of a tile that are inside. None: all are."""
    sides = [axis for axis in axes if isinstance(axis, Range)]
    shape = [x.slice.size for x in sides]
    parts = [lax.broadcast_in_dim(x.inside, shape, (i,)) for i, x in enumerate(sides) if x.inside is not None]
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1]


def load_tile(ref, *axes):
    """Returns a tile, with zeros outside. axes: ranges and numbers."""
    mask = tile_mask(*axes)
    ref = ref.at[tuple(axis.slice if isinstance(axis, Range) else axis for axis in axes)]
    if mask is None:
        return pltriton.load(ref)
    zero: Any = 0
    if ref.dtype == jnp.float8_e4m3fn:  # Triton casts no number to this type
        zero = lax.bitcast_convert_type(jnp.zeros(mask.shape, jnp.uint8), ref.dtype)
    return pltriton.load(ref, mask=mask, other=zero)
