"""`Engines`: several engines behind one queue, each on devices of its own.

submit ─► who knows how the prompt begins, and is not much busier than others? ─► its queue ─► answers
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from ..checkpoint.loading import Model
from ..errors import InputError, shown
from ..generation.options import GenerateOutput
from ..memory import check_memory
from ..sharding import device_groups, lies_over
from ..weights.params import Params, tree_bytes
from .engine import Engine
from .requests import Request
from .scheduler import PAGE, Row, chain
from .submission import Entrance

_LOOK_SECONDS = 0.1  # that `step` waits for news


class Engines(Entrance):
    """So many engines of one shape, each with a copy of the parameters on devices of its own and a thread:
    data parallelism. A request has the bits that it has in any of them alone. It goes to the engine that has
    the fewest, or to one that knows how its prompt begins, unless that has many more.

    Attributes:
        engines: which they are.
        rows: of all together.
    """

    engines: Sequence[Engine] = ()

    def __init__(self, model: Model, data_parallel: int, **shape: Any):
        """Makes them side by side.

        Args:
            model: from `load_model`. Where it lies on several devices, each engine gets as many.
            data_parallel: how many engines.
            shape: arguments of `Engine`, for each.

        Raises:
            InputError: as `Engine`; there are fewer devices, or too little memory for all.
        """
        if not isinstance(model, Model):
            raise InputError(f"model must be what load_model gives, got {shown(model)}")
        place = getattr(model.params["final_norm"], "sharding", None)
        mesh = lies_over(model.params)
        own: Any = mesh.devices.flat if mesh else place and place.device_set
        groups = device_groups(data_parallel, own and list(own))
        if groups[0][0].platform == "cpu":  # where all have one memory
            need = len(groups) * tree_bytes(model.params)
            check_memory(need, f"the weights, {len(groups)} times,", "ask for fewer engines")

        def make(group: list[jax.Device]) -> Engine:
            return Engine(dataclasses.replace(model, params=_copied(model.params, group)), **shape)

        with ThreadPoolExecutor(len(groups)) as pool:
            self.engines = list(pool.map(make, groups))
        for i, (engine, group) in enumerate(zip(self.engines, groups, strict=True)):
            engine.name = f"engine {i + 1} of {len(groups)} ({', '.join(map(str, group))})"
        self.room = engine.room
        self.impl = engine.impl
        self.switches_at = engine.switches_at
        self.rows = len(groups) * engine.rows
        # Digests of how prompts begin that each engine was given, the least recent first; and when.
        self._known = [OrderedDict[bytes, None]() for _ in groups]
        self._last = [0] * len(groups)
        self._shares = shape.get("prefix_cache", True)
        self._lock = threading.Lock()
        self._news = threading.Event()

    @property
    def model(self) -> Model:
        """With the first engine's copy of the parameters."""
        return self.engines[0].model

    def generate(self, *args: Any, **kwargs: Any) -> list[GenerateOutput]:
        """As `Engine.generate`, by all side by side."""
        self.__enter__()
        return super().generate(*args, **kwargs)

    def update(self, params: Params) -> None:
        """As `Engine.update`, in one engine after another."""
        for engine, known in zip(self.engines, self._known, strict=True):
            engine.update(params)
            with self._lock:
                known.clear()

    def step(self) -> bool:
        """Waits a moment for news of any request, while all engines take turns; whether any is under way.
        What broke an engine down is raised.
        """
        self.__enter__()
        for engine in self.engines:
            if engine.error is not None:
                raise engine.error
        if busy := any(engine.load for engine in self.engines):
            self._news.wait(_LOOK_SECONDS)
            self._news.clear()
        return busy

    def __enter__(self) -> Self:
        with self._lock:
            for engine in self.engines:
                if not engine.started:
                    engine.__enter__()
        return self

    def close(self) -> None:
        """Ends the threads; requests that have not ended get an error."""
        with ThreadPoolExecutor(len(self.engines)) as pool:  # each ends a window of decoding first
            list(pool.map(Engine.close, self.engines))

    def _queue(self, requests: list[Request]) -> None:
        with self._lock:
            self._check_open()
            dealt: list[list[Request]] = [[] for _ in self.engines]
            loads = [engine.load for engine in self.engines]
            for request in requests:
                i = self._choose(request.answers[0].row, loads)
                loads[i] += len(request.answers)
                dealt[i].append(request)
                request.engine = self.engines[i]
                request.wakers.append(self._news.set)
            for engine, own in zip(self.engines, dealt, strict=True):
                engine._queue(own)

    def _choose(self, row: Row, loads: list[int]) -> int:
        """The engine that knows most of how the prompt begins, of those that are not clearly busier than
        another; of equals the one with the fewest answers under way, of these the one not given any the
        longest.
        """
        engine = self.engines[0]
        full = len(row.ids) // PAGE if self._shares else 0
        digests = chain(row.salt, row.ids, [0] * full)
        known = [sum(1 for _ in takewhile(known.__contains__, digests)) for known in self._known]
        most = min(loads) + engine.rows // 2
        free = [i for i, load in enumerate(loads) if load <= most]
        i = max(free, key=lambda i: (known[i], -loads[i], -self._last[i]))
        self._last[i] = max(self._last) + 1
        for digest in reversed(digests):  # of no use without those before it, which are given up later
            self._known[i][digest] = None
            self._known[i].move_to_end(digest)
        while len(self._known[i]) > engine.pages:  # more than it can hold
            self._known[i].popitem(last=False)
        return i


AnyEngine = Engine | Engines


def engine_of(model: Model, data_parallel: int = 1, **shape: Any) -> AnyEngine:
    """One engine, or several."""
    return Engine(model, **shape) if data_parallel == 1 else Engines(model, data_parallel, **shape)


def _copied(params: Params, devices: list[jax.Device]) -> Params:
    """A copy on these devices, which lies there as the one given does on its own."""

    def place(x: Any) -> Any:
        if not isinstance(old := getattr(x, "sharding", None), NamedSharding):
            return SingleDeviceSharding(devices[0])
        axes = old.mesh.axis_names, old.mesh.axis_types
        mesh = Mesh(np.reshape(devices, old.mesh.devices.shape), axes[0], axis_types=axes[1])
        return NamedSharding(mesh, old.spec)

    return jax.device_put(params, jax.tree.map(place, params))
