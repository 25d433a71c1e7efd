"""Large arrays on the host: aligned memory, and work on all cores."""

import functools
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

_BLOCK = 1 << 20  # bytes that fit into a core's cache
_MAX_THREADS = 16  # enough for the memory's bandwidth; each has a few blocks


def aligned_empty(struct: Any) -> np.ndarray:
    """Returns an uninitialised array, aligned to 64 bytes so that `jax.device_put` on CPU does not copy it.

    struct: its shape and type, a `jax.ShapeDtypeStruct`.
    """
    raw = np.empty(math.prod(struct.shape) * struct.dtype.itemsize + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + raw.size - 64].view(struct.dtype).reshape(struct.shape)


def run_in_blocks(work: Callable[[slice], object], rows: int, width: int, block: int = _BLOCK) -> None:
    """Calls `work` with slices of rows, on all cores: NumPy and file reads release the interpreter's lock. Of
    several errors that of the first slice is raised. width, block: bytes of a row, and of a slice.
    """
    size = max(64, block // width // 64 * 64)  # full cache lines where rows become columns
    slices = [slice(first, min(first + size, rows)) for first in range(0, rows, size)]
    results = map(work, slices) if len(slices) < 2 else _pool().map(work, slices)
    for _ in results:
        pass  # at an error and at Ctrl-C, slices that have not begun are dropped


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Returns the threads; they are kept, since starting them takes as long as reading a small matrix."""
    return ThreadPoolExecutor(min(_MAX_THREADS, cpu_count()))


def cpu_count() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has no threads of its parent
