"""The numbers of MXFP4 in 16 bits, for Triton's kernels of experts.

They are exact: two tables of eight bytes have the high and low bytes of each magnitude, and a byte
permutation takes the bytes of four numbers at a time (13 instructions for four numbers, their signs
included).
"""

import jax
import jax.numpy as jnp

from ..mxfp4 import number
from .parts import convert_halves

# Of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6: their high bytes and their low ones, four in a number.
_TABLES = {
    "bfloat16": ("0x3f3f3f00", "0x40404040", "0xc0800000", "0xc0804000"),
    "float16": ("0x3e3c3800", "0x46444240", "0", "0"),
}


def mxfp4_numbers(values_YO: jax.Array, dtype, interpret: bool) -> list[jax.Array]:
    """Returns the numbers of `dtype` in each half of the bytes."""
    if interpret:
        return [number(values_YO, shift).astype(dtype) for shift in (0, 4)]
    (high_0, high_1, low_0, low_1) = _TABLES[jnp.dtype(dtype).name]
    asm = f"""{{{{
        .reg .b32 bits, place, high, low, first, last;
        shr.b32 bits, $2, {{shift}};
        and.b32 bits, bits, 0x0f0f0f0f;
        shr.b32 place, bits, 4;
        or.b32 place, place, bits;
        prmt.b32 place, place, 0, 0x4420;
        and.b32 place, place, 0x7777;
        mov.b32 first, {high_0};
        mov.b32 last, {high_1};
        prmt.b32 high, first, last, place;
        mov.b32 first, {low_0};
        mov.b32 last, {low_1};
        prmt.b32 low, first, last, place;
        and.b32 bits, bits, 0x08080808;
        shl.b32 bits, bits, 4;
        or.b32 high, high, bits;
        prmt.b32 $0, low, high, 0x5140;
        prmt.b32 $1, low, high, 0x7362;
    }}}}"""
    return convert_halves(asm, values_YO, dtype)
