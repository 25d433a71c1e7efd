"""What several engines need: a copy of the parameters for each, creation in parallel, and which of them knows
the beginning of a prompt.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from ..weights.params import Params
from .pages import PAGE_SIZE, hash_pages
from .row import Row


class PromptRouter:
    """The pages of the prompts that each engine was given, as hashes.

    Args:
        engines: number of engines.
        pages: of an engine: it cannot have more in its prefix cache.
        prefix_cache: False: no engine keeps any page.
    """

    def __init__(self, engines: int, pages: int, prefix_cache: bool = True):
        self._pages = pages
        self._prefix_cache = prefix_cache
        # Of each engine, the least recent first.
        self.given = [OrderedDict[bytes, None]() for _ in range(engines)]
        self._last_routed = [0] * engines  # of each engine, the number of its last request

    def route(self, row: Row, order: Callable[[int, int], Any], candidates: Iterable[int]) -> int:
        """The engine for a row; of several that the order does not distinguish, the one that got no request
        for the longest time.

        Args:
            order: of an engine, from its index and the pages of the prompt that it was given before; the
                lowest is taken.
            candidates: the engines to choose from.
        """
        full = len(row.ids) // PAGE_SIZE if self._prefix_cache else 0
        hashes = hash_pages(row.salt, row.ids, [0] * full)
        hits = [sum(1 for _ in takewhile(given.__contains__, hashes)) for given in self.given]
        i = min(candidates, key=lambda i: (order(i, hits[i]), self._last_routed[i]))
        self._last_routed[i] = max(self._last_routed) + 1
        given = self.given[i]
        for page_hash in reversed(hashes):  # a page is of no use without those before it, so they stay longer
            given[page_hash] = None
            given.move_to_end(page_hash)
        while len(given) > self._pages:
            given.popitem(last=False)
        return i


def create_in_parallel(creators: Sequence[Callable[[], Any]]) -> list[Any]:
    """What these functions return, each called in a thread. If one raises, the engines that the others
    created are closed.
    """
    with ThreadPoolExecutor(len(creators)) as pool:
        creating = [pool.submit(create) for create in creators]
    if any(future.exception() for future in creating):  # the others do not go on compiling
        for future in creating:
            if not future.exception():
                future.result().close()
    return [future.result() for future in creating]


def copy_params(params: Params, devices: list[jax.Device]) -> Params:
    """A copy on these devices, sharded over them as the original is over its own."""

    def sharding_of(x: Any) -> Any:
        old = getattr(x, "sharding", None)
        if not isinstance(old, NamedSharding):
            return SingleDeviceSharding(devices[0])
        axes = old.mesh.axis_names, old.mesh.axis_types
        mesh = Mesh(np.reshape(devices, old.mesh.devices.shape), axes[0], axis_types=axes[1])
        return NamedSharding(mesh, old.spec)

    return jax.device_put(params, jax.tree.map(sharding_of, params))
