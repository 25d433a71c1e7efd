"""Kind of device, memory, and work on all cores of the host."""

import functools
import math
import os
import resource
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import kernels_pallas
from .errors import InputError

# Tokens of all rows together in a prefill chunk: 512 queries of the 0.5B shape fill 56 of an H200's 132
# multiprocessors. A v6e reads a matrix of 7B in the time in which it multiplies 560 tokens, and holds the
# activations of 1,024.
_CHUNK_OF_ALL_ROWS = {"gpu": 2048, "tpu": 1024}


def default_dtype(narrow: Any) -> Any:
    """Returns float32 on CPU, elsewhere the narrow type."""
    return jnp.float32 if jax.default_backend() == "cpu" else narrow


def chunk_of_all_rows(length_B: Any) -> int:
    """Returns the most tokens of all rows in a prefill chunk, or 0 if there is no such limit. length_B: an
    array of the cache, or its shape.
    """
    platform = kernels_pallas.default_platform()
    if isinstance(length_B, jax.Array):
        platform = next(iter(length_B.devices())).platform
    return _CHUNK_OF_ALL_ROWS.get(platform, 0)


# cgroups 2 and 1: by controller, the folder and the file.
_GROUPS = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}


def check_memory(need: int, what: str, remedy: str, have: int | None = None) -> None:
    """Raises InputError if `what` needs more bytes than there are. remedy: the end of the error. have: the
    bytes that there are. None: the bytes of a device.
    """
    if need > (have := memory_bytes() if have is None else have):
        raise InputError(f"{what} need {need:,} bytes of memory, and there are {have:,}: {remedy}")


@functools.cache
def memory_bytes() -> int:
    """Returns the bytes of a device. On CPU they are the bytes of the machine, or the limit of the
    process.
    """
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.local_devices()]
    return min(limits) if all(limits) else host_memory_bytes()


def peak_memory_bytes() -> int:
    """Returns peak memory so far: of the device, or of the process if the device has no counter (CPU)."""
    device = jax.local_devices()[0].memory_stats() or {}
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return device.get("peak_bytes_in_use", resident)


def host_memory_bytes() -> int:
    """Returns the bytes of the machine, or the limit of the process."""
    return min(_process_limits())


def _process_limits() -> Iterator[int]:
    yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (soft := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        yield soft
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, kind, group = line.split(":", 2)
        if kind in _GROUPS:
            root, file = _GROUPS[kind]
            inner = Path("/sys/fs/cgroup", root, group.lstrip("/"))
            for folder in (inner, *inner.parents):
                if (folder / file).is_file() and (limit := (folder / file).read_text().strip()).isdigit():
                    yield int(limit)


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
    """Calls `work` with slices of rows, on all cores: NumPy and file reads release the interpreter's lock. If
    several slices fail, the error of the first one is raised. width, block: the bytes of a row, and of a
    slice.
    """
    size = max(64, block // width // 64 * 64)  # full cache lines where rows become columns
    slices = [slice(first, min(first + size, rows)) for first in range(0, rows, size)]
    results = map(work, slices) if len(slices) < 2 else _pool().map(work, slices)
    for _ in results:
        pass  # at an error and at Ctrl-C, slices that have not begun are dropped


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Returns the threads. They are kept, since starting them takes as long as reading a small matrix."""
    return ThreadPoolExecutor(min(_MAX_THREADS, cpu_count()))


def cpu_count() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has no threads of its parent
