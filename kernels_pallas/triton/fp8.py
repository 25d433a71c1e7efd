"""Numbers in FP8 (E4M3) as 16-bit floats, for Triton's kernels of products and of experts.

The bits of a byte are moved to the bits of a 16-bit float. Read as such a float they are the number times a
power of two, also for subnormal numbers. A product with the inverse of this power is exact. This takes ten
instructions for four numbers, and runs on devices without a conversion of FP8 (before compute capability
8.9).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from ..reference_products import FP8_BLOCK
from .parts import convert_bytes

# Where the exponent begins, bits from the left; the inverse of the power of two, twice; and its kind.
_FORMS = {"bfloat16": (4, "0x7b807b80", "bf16x2"), "float16": (1, "0x5c005c00", "f16x2")}


def fp8_numbers(values: jax.Array, dtype: Any, interpret: bool) -> jax.Array:
    """Returns the bytes of E4M3 without NaN, as `dtype`."""
    if interpret:
        return values.astype(dtype)
    (shift, inverse, kind) = _FORMS[jnp.dtype(dtype).name]
    # A product is a fused one with -0, which sm_80 has for both types.
    halves = "".join(
        f"""
        prmt.b32 bits, $2, 0, {place};
        and.b32 sign, bits, 0x80008000;
        and.b32 bits, bits, 0x7f007f00;
        shr.b32 bits, bits, {shift};
        or.b32 bits, bits, sign;
        fma.rn.{kind} {result}, bits, inverse, zero;"""
        for place, result in (("0x1404", "$0"), ("0x3424", "$1"))
    )
    asm = f"""{{
        .reg .b32 bits, sign, inverse, zero;
        mov.b32 inverse, {inverse};
        mov.b32 zero, 0x80008000;{halves}
    }}"""
    return convert_bytes(asm, lax.bitcast_convert_type(values, jnp.uint8), dtype)


def flat_numbers(values: jax.Array, dtype: Any, interpret: bool) -> jax.Array:
    """Returns values of a matrix that is not in groups, as `dtype`."""
    is_fp8 = values.dtype == jnp.float8_e4m3fn
    return fp8_numbers(values, dtype, interpret) if is_fp8 else values.astype(dtype)


def has_blocks(matrix: Any) -> bool:
    """Returns True if a `Matrix` has a scale for each block of outputs and inputs."""
    is_fp8 = matrix.values.dtype == jnp.float8_e4m3fn
    return is_fp8 and matrix.scale.ndim == matrix.values.ndim


def block_scale(matrix: Any, at: tuple, output: Any, column: Any) -> jax.Array:
    """Returns the scale of the block of this output and input. at: the expert, or nothing."""
    return pltriton.load(matrix.scale.at[*at, lax.div(output, FP8_BLOCK), lax.div(column, FP8_BLOCK)])
