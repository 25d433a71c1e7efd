"""What several engines need: a copy of the parameters for each, creation in parallel, threads, and which of
them knows the beginning of a prompt.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from ..checkpoint.loading import Model
from ..generation.options import GenerateOutput
from ..memory import check_memory
from ..weights.params import Params, tree_bytes
from .pages import PAGE_SIZE, hash_pages
from .row import Row
from .submission import EngineBase


class GivenPages:
    """The pages of the prompts that an engine was given, as hashes, the least recent first.

    Args:
        most: hashes that are kept: pages of the engine, as its prefix cache cannot have more.
    """

    def __init__(self, most: int):
        self._most = most
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def hits(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's first pages were given before."""
        return sum(1 for _ in takewhile(self._hashes.__contains__, hashes))

    def add(self, hashes: Sequence[bytes]) -> None:
        """The engine is given a prompt of these pages."""
        for page_hash in reversed(hashes):  # a page is of no use without those before it, so they stay longer
            self._hashes[page_hash] = None
            self._hashes.move_to_end(page_hash)
        while len(self._hashes) > self._most:
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        """Forgets all prompts."""
        self._hashes.clear()


def prompt_hashes(row: Row) -> list[bytes]:
    """The hashes of a prompt's full pages, whatever program computes them."""
    return hash_pages(row.salt, row.ids, [0] * (len(row.ids) // PAGE_SIZE))


class PromptRouter:
    """Which of several engines gets a prompt.

    Attributes:
        given: the pages of the prompts that each engine was given.

    Args:
        engines: number of engines.
        pages: of an engine.
        prefix_cache: False: no engine keeps any page.
    """

    def __init__(self, engines: int, pages: int, prefix_cache: bool = True):
        self._prefix_cache = prefix_cache
        self.given = [GivenPages(pages) for _ in range(engines)]
        self._last_routed = [0] * engines  # of each engine, the number of its last request

    def route(self, row: Row, order: Callable[[int, int], Any], candidates: Iterable[int]) -> int:
        """The engine for a row; of several that the order does not distinguish, the one that got no request
        for the longest time.

        Args:
            order: of an engine, from its index and the pages of the prompt that it was given before; the
                lowest is taken.
            candidates: the engines to choose from.
        """
        hashes = prompt_hashes(row) if self._prefix_cache else []
        hits = [given.hits(hashes) for given in self.given]
        i = min(candidates, key=lambda i: (order(i, hits[i]), self._last_routed[i]))
        self._last_routed[i] = max(self._last_routed) + 1
        self.given[i].add(hashes)
        return i


class EngineGroup(EngineBase):
    """Several engines in one process, each with a copy of the parameters and a thread.

    Attributes:
        engines: all of them.
    """

    engines: Sequence[Any] = ()
    _lock: Any  # of the group; a `with` statement takes it

    @property
    def model(self) -> Model:
        """The model, with the first engine's copy of the parameters."""
        return self.engines[0].model

    def generate(self, *args: Any, **kwargs: Any) -> list[GenerateOutput]:
        """`Engine.generate`, by all engines."""
        self.__enter__()
        return super().generate(*args, **kwargs)

    def __enter__(self) -> Self:
        with self._lock:
            for engine in self.engines:
                if not engine.started:
                    engine.__enter__()
        return self

    def close(self) -> None:
        """Ends the threads; unfinished requests get an error."""
        with ThreadPoolExecutor(len(self.engines)) as pool:  # each ends its step first
            list(pool.map(lambda engine: engine.close(), self.engines))

    def step(self) -> bool:
        """Waits a moment for new tokens of any request. Returns whether any request is unfinished; raises the
        error of an engine that failed.
        """
        self.__enter__()
        for engine in self.engines:
            if engine.error is not None:
                raise engine.error
        return self._wait_for_tokens()

    def _wait_for_tokens(self) -> bool:
        """`step` without its checks."""
        raise NotImplementedError


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
