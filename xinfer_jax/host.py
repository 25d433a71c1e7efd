"""Large arrays on the host: memory that a device array can keep, and work on all cores."""

import functools
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

_BLOCK = 1 << 20  # bytes that stay in a core's cache
_MOST_WORKERS = 16  # they read as fast as memory does, and each holds a few blocks


def aligned(form: Any) -> np.ndarray:
    """Memory for a shape and type (`jax.ShapeDtypeStruct`): aligned to 64 bytes, `jax.device_put` takes it
    over as it is on CPU.
    """
    raw = np.empty(math.prod(form.shape) * form.dtype.itemsize + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + raw.size - 64].view(form.dtype).reshape(form.shape)


def by_blocks(work: Callable[[slice], object], rows: int, width: int, block: int = _BLOCK) -> None:
    """Calls `work` with runs of rows, so many bytes wide, on all cores: NumPy and files let go of the
    interpreter's lock. Of several errors that of the first rows is raised. block: bytes of a run.
    """
    most = max(64, block // width // 64 * 64)  # whole cache lines where rows become columns
    runs = [slice(first, min(first + most, rows)) for first in range(0, rows, most)]
    for _ in map(work, runs) if len(runs) < 2 else _pool().map(work, runs):
        pass  # at an error, and at Ctrl-C, what has not begun is dropped


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Kept: starting threads takes as long as reading a small matrix."""
    return ThreadPoolExecutor(min(_MOST_WORKERS, cores()))


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not come along
