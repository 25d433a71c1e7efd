"""`HostPages`: the contents of pages in host memory, or of snapshots of recurrent states. If a model is over
several processes, each process has its parts.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


class HostPages:
    """Pages in one block of host memory, which the system provides once they are written. Their numbers are 1
    to `pages`.

    A page is a row of the block: its keys and values of all layers, one array after another, each as the
    device has it in `pools`. Over several processes each has the parts of its devices. A snapshot of
    recurrent states is a page too: then `pools` are the device's snapshots.
    """

    def __init__(self, pages: int, pools: Any):
        parts = [(shape[1:], x.dtype) for x in jax.tree.leaves(pools) for shape in _local_shapes(x)]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in parts]
        self._block_PY = np.empty((pages + 1, sum(sizes)), np.uint8)  # Y: bytes
        self._arrays = []
        end = 0
        for (shape, dtype), size in zip(parts, sizes, strict=True):
            flat = self._block_PY[:, end : end + size].view(dtype)
            self._arrays.append(flat.reshape(pages + 1, *shape))  # a view
            end += size
        self._saved: tuple[np.ndarray, Any] | None = None  # pages whose copies the device still makes

    def bytes_of(self, page: int) -> np.ndarray:
        """Returns the bytes of a page, uint8, in place. `finish` comes first."""
        return self._block_PY[page]

    def save(self, pages: np.ndarray, contents: Any) -> None:
        """Copies contents of pages from the device, which makes them meanwhile: until the next call."""
        self.finish()
        for x in jax.tree.leaves(contents):
            if x.is_fully_addressable:
                x.copy_to_host_async()
        self._saved = pages, contents

    def finish(self) -> None:
        """Waits for the copies of `save`."""
        if self._saved is None:
            return
        pages, contents = self._saved
        parts = (part for x in jax.tree.leaves(contents) for part in _local_parts(x))
        for array, part in zip(self._arrays, parts, strict=True):
            array[pages] = part
        self._saved = None

    def load(self, pages: np.ndarray, pools: Any) -> Any:
        """Returns contents of these pages, for the device's `pools`."""
        self.finish()
        arrays = iter(self._arrays)

        def contents(pool: Any) -> Any:
            if pool.is_fully_addressable:
                return next(arrays)[pages]
            devices = [shard.device for shard in pool.addressable_shards]
            parts = [jax.device_put(next(arrays)[pages], device) for device in devices]
            shape = (len(pages), *pool.shape[1:])
            return jax.make_array_from_single_device_arrays(shape, pool.sharding, parts)

        return jax.tree.map(contents, pools)


def _local_shapes(x: Any) -> list[tuple[int, ...]]:
    return [x.shape] if x.is_fully_addressable else [shard.data.shape for shard in x.addressable_shards]


def _local_parts(x: Any) -> Iterator[np.ndarray]:
    """Yields the whole array, or this process's shards of it."""
    if x.is_fully_addressable:
        yield np.asarray(x)
    else:
        yield from (np.asarray(shard.data) for shard in x.addressable_shards)
