"""Measures limits of this machine: the speed at which it reads memory and multiplies matrices. Also measures
the peak memory of this process.
"""

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

_COLUMNS = 2048
_SPLITS = 64  # rows of a sum: many enough for all threads
_MATMULS = {"cpu": ((512, 2048, 2048), (512, 896, 4864), (1024, 2048, 4096))}  # tokens, in, out
# Ways to read all of an array [out, in]. The fastest one depends on the machine and on XLA.
_READS = [
    jax.jit(lambda w, x: lax.dot_general(w, x, (((1,), (0,)), ((), ())))),
    jax.jit(lambda w, x: w.reshape(_SPLITS, -1).sum(1)),
    jax.jit(lambda w, x: w.reshape(_SPLITS, -1).sum()),
    jax.jit(lambda w, x: w.reshape(_SPLITS, -1).max(1)),
]


@jax.jit
def _multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    axes = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, w, axes, precision=precision, preferred_element_type=jnp.float32)


def probe_machine(mib: int) -> dict[str, float]:
    """Returns the read bandwidth in bytes/s, and the matmul rates in FLOP/s by dtype. It takes about half a
    second. The arrays are freed before anything else is measured. mib: MiB that are read.
    """
    array = jnp.ones((mib * 2**20 // 4 // _COLUMNS, _COLUMNS), jnp.float32)
    vector = jnp.ones(_COLUMNS, jnp.float32)
    rates = {"read": max(array.nbytes / _best_seconds(read, array, vector) for read in _READS)}
    shapes = _MATMULS.get(jax.default_backend(), ((8192, 8192, 8192),))
    for dtype in ("float32", "bfloat16"):
        rates[dtype] = max(
            2 * T * D * F / _best_seconds(_multiply, jnp.ones((T, D), dtype), jnp.ones((F, D), dtype))
            for T, D, F in shapes
        )
    return rates


def _best_seconds(function: Callable, *args: jax.Array) -> float:
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def reset_peak_memory() -> None:
    """Begins a new peak for `peak_memory`, on Linux."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Returns the peak bytes of this process since `reset_peak_memory`, or 0 if it is not reported."""
    with contextlib.suppress(OSError):
        if found := re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()):
            return int(found[1]) * 1024
    return 0
