"""What the processor multiplies fast, which decides how products on a CPU are done."""

import functools
import os
import platform
import re
from pathlib import Path
from typing import Any

import jax

from ..errors import InputError, shown

VARIABLE = "XINFER_JAX_CPU"  # of the environment: overrules what is read, for products
_VECTORS = re.compile("avx|amx|fma|f16c|sse4|asimd|sve|sme|i8mm|bf16|fp16|fphp")
_INFO = Path("/proc/cpuinfo")
# Its flags, on x86 and on Arm, that say it of int8, of bfloat16, and of both by matrix units.
_FLAGS = {
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "i8mm", "asimddp"},
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "amx": {"amx_int8"},
}


@functools.cache
def multiplies() -> frozenset[str]:
    """Some of int8, bfloat16 and amx. What says nothing (no Linux) counts as int8 and bfloat16 on Arm and as
    nothing elsewhere.

    Raises:
        InputError: the environment's variable names something else.
    """
    if (given := os.environ.get(VARIABLE)) is not None:
        names = frozenset(name.strip() for name in given.split(",")) - {"none", ""}
        if not names <= set(_FLAGS):
            raise InputError(f"{VARIABLE}={shown(given)}: give some of {','.join(_FLAGS)}, or none")
        return names
    if (has := _flags()) is None:
        return frozenset({"int8", "bfloat16"} if platform.machine() == "arm64" else ())
    return frozenset(name for name, flags in _FLAGS.items() if has & flags)


@functools.cache
def _flags() -> frozenset[str] | None:
    try:
        lines = _INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    lines = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return frozenset(flag for line in lines for flag in line.split())


def features() -> list[str]:
    """What the last bits of a program on this CPU depend on: its vector and matrix instructions, and how
    products are done.
    """
    known = {flag for flag in _flags() or () if _VECTORS.match(flag)}
    return sorted(known | {f"multiplies_{name}" for name in multiplies()})


def compiler_options() -> dict[str, Any] | None:
    """Of our own programs. XLA keeps to vectors of 256 bits if nobody asks; with 512 int4 decodes
    1.07 times as fast at one row, 1.15 at eight, int8 1.01 and 1.03; floats and prompts stay as they are.
    """
    return {"xla_cpu_prefer_vector_width": 512} if "avx512f" in (_flags() or ()) else None


def multiplies_int8_fast() -> bool:
    """Whether many rows are faster in int8 than in float32: XLA before 0.12 uses matrix units only."""
    return "amx" in multiplies() or ("int8" in multiplies() and jax.__version_info__ >= (0, 12))


def about() -> str:
    """For people."""
    has = [name for name in _FLAGS if name in multiplies()]
    wide = "" if multiplies_int8_fast() else "; prompts in int8 are widened to float32"
    return f"processor: multiplies {', '.join(has) or 'float32 only'}{wide} ({VARIABLE} overrules)"
