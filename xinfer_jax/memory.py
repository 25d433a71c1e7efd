"""How much memory there is: what does not fit is rejected before it is allocated."""

import functools
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from .errors import InputError

# cgroups 2 and 1: by controller, the folder and the file.
_GROUPS = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}


def check_memory(need: int, what: str, remedy: str, have: int | None = None) -> None:
    """Raises InputError where `what` needs more bytes than there are; remedy: the end of the error; have:
    bytes, None: those of a device.
    """
    if need > (have := memory_bytes() if have is None else have):
        raise InputError(f"{what} need {need:,} bytes of memory, and there are {have:,}: {remedy}")


@functools.cache
def memory_bytes() -> int:
    """Returns the bytes of a device; on CPU those of the machine, or the limit of the process."""
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.local_devices()]
    return min(limits) if all(limits) else host_memory_bytes()


def peak_memory_bytes() -> int:
    """Returns peak memory so far: of the device, or of the process where the device has no counter (CPU)."""
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
