"""What several engines need: a copy of the parameters for each, creation in parallel, threads, and which of
them knows the beginning of a prompt.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from ..checkpoint.loading import Model
from ..memory import check_memory
from ..weights.params import Params, tree_bytes
from .pages import PAGE_SIZE, hash_pages
from .row import Row


class PromptRouter:
    """Which of several engines gets a prompt.

    Attributes:
        given: the pages of the prompts that each engine was given, as hashes, the least recent first; as many
            as it has pages, as its prefix cache cannot have more.

    Args:
        prefix_cache: False: no engine keeps any page.
    """

    def __init__(self, prefix_cache: bool = True):
        self._prefix_cache = prefix_cache
        self.given: dict[Any, OrderedDict[bytes, None]] = {}
        self._last_routed: dict[Any, int] = {}  # of each engine, the number of its last request

    def route(self, row: Row, order: Callable[[Any, int], Any], engines: Iterable[Any]) -> Any:
        """The engine for a row; of several that the order does not distinguish, the one that got no request
        for the longest time.

        Args:
            order: of an engine, and the pages of the prompt that it was given before; the lowest is taken.
            engines: to choose from, with `pages`.
        """
        full_pages = len(row.ids) // PAGE_SIZE  # their hashes are of any program
        hashes = hash_pages(row.salt, row.ids, [0] * full_pages) if self._prefix_cache else []

        def rank(engine: Any) -> tuple[Any, int]:
            given = self.given.setdefault(engine, OrderedDict())
            hits = sum(1 for _ in takewhile(given.__contains__, hashes))
            return order(engine, hits), self._last_routed.get(engine, 0)

        engine = min(engines, key=rank)
        self._last_routed[engine] = max(self._last_routed.values(), default=0) + 1
        given = self.given[engine]
        for page_hash in reversed(hashes):  # a page is of no use without those before it, so they stay longer
            given[page_hash] = None
            given.move_to_end(page_hash)
        while len(given) > engine.pages:
            given.popitem(last=False)
        return engine

    def remove(self, engine: Any) -> None:
        """An engine is gone."""
        self.given.pop(engine, None)
        self._last_routed.pop(engine, None)


def check_copies(model: Model, devices: Sequence[jax.Device], copies: int, remedy: str) -> None:
    """Raises InputError where the memory of a CPU is too small for so many copies of the parameters. remedy:
    the end of the error.
    """
    if devices[0].platform == "cpu":  # all engines share one memory
        need = copies * tree_bytes(model.params)
        check_memory(need, f"the weights, {copies} times,", remedy)


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
