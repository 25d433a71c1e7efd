"""`Engines`: several engines behind one queue, each on devices of its own (data parallelism).

submit ─► route: the engine with most of the prompt in its prefix cache, unless it is much busier ─► its queue
"""

import dataclasses
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from ..checkpoint.loading import Model
from ..errors import InputError, format_value
from ..sharding import concrete_mesh_of, device_groups
from ..weights.params import Params
from .disaggregated import DisaggregatedEngine
from .engine import Engine
from .requests import Request
from .routing import EngineGroup, PromptRouter, check_copies, copy_params, create_in_parallel
from .row import Row

_WAIT_SECONDS = 0.1  # that `step` waits for new tokens


class Engines(EngineGroup):
    """Several engines of one shape, each with a copy of the parameters on devices of its own, and a thread
    (data parallelism). A request has the same bits in each of them. It goes to the engine with the fewest
    requests, or to one whose prefix cache has the beginning of its prompt, unless that is much busier.

    Attributes:
        rows: of all together.
    """

    engines: Sequence[Engine] = ()

    def __init__(self, model: Model, data_parallel: int, **shape: Any):
        """Creates the engines in parallel.

        Args:
            model: from `load_model`. If it lies on several devices, each engine gets as many.
            data_parallel: number of engines.
            shape: arguments of `Engine`, for each.

        Raises:
            InputError: as `Engine`; there are fewer devices, or too little memory for all.
        """
        if not isinstance(model, Model):
            raise InputError(f"model must be what load_model gives, got {format_value(model)}")
        sharding = getattr(model.params["final_norm"], "sharding", None)
        mesh = concrete_mesh_of(model.params)
        own: Any = mesh.devices.flat if mesh else sharding and sharding.device_set
        groups = device_groups(data_parallel, own and list(own))
        check_copies(model, groups[0], len(groups), "ask for fewer engines")

        def create(group: list[jax.Device]) -> Engine:
            return Engine(dataclasses.replace(model, params=copy_params(model.params, group)), **shape)

        self.engines = create_in_parallel([partial(create, group) for group in groups])
        for i, (engine, group) in enumerate(zip(self.engines, groups, strict=True)):
            engine.name = f"engine {i + 1} of {len(groups)} ({', '.join(map(str, group))})"
        self.usable_capacity = engine.usable_capacity
        self.impl = engine.impl
        self.rows = len(groups) * engine.rows
        self._router = PromptRouter(len(groups), engine.pages, shape.get("prefix_cache", True))
        self._lock = threading.Lock()
        self._updated = threading.Event()  # a request has new tokens, or has ended

    def update(self, params: Params) -> None:
        """`Engine.update`, in one engine after another."""
        for engine, hashes in zip(self.engines, self._router.given, strict=True):
            engine.update(params)
            with self._lock:
                hashes.clear()

    def _wait_for_tokens(self) -> bool:
        if busy := any(engine.load for engine in self.engines):
            self._updated.wait(_WAIT_SECONDS)
            self._updated.clear()
        return busy

    def _enqueue(self, requests: list[Request]) -> None:
        with self._lock:
            self._check_open()
            routed: list[list[Request]] = [[] for _ in self.engines]
            loads = [engine.load for engine in self.engines]
            for request in requests:
                i = self._route(request.answers[0].row, loads)
                loads[i] += len(request.answers)
                routed[i].append(request)
                request.engine = self.engines[i]
                request.listeners.append(self._updated.set)
            for engine, own in zip(self.engines, routed, strict=True):
                engine._enqueue(own)

    def _route(self, row: Row, loads: list[int]) -> int:
        """The index of the engine for a row: of those that are not clearly busier than another, the one that
        was given most of the prompt's pages before; then the one with the least load.
        """
        max_load = min(loads) + self.engines[0].rows // 2
        candidates = (i for i, load in enumerate(loads) if load <= max_load)
        return self._router.route(row, lambda i, hits: (-hits, loads[i]), candidates)


AnyEngine = Engine | Engines | DisaggregatedEngine


def make_engine(model: Model, data_parallel: int = 1, **shape: Any) -> AnyEngine:
    """An `Engine`, or `Engines` if `data_parallel` is more than 1."""
    if data_parallel != 1 and (shape.get("prefill_devices") or shape.get("decode_devices")):
        raise InputError(
            f"data_parallel={data_parallel} does not go with prefill_devices and decode_devices, which list"
            " the engines: leave one of them out"
        )
    return Engine(model, **shape) if data_parallel == 1 else Engines(model, data_parallel, **shape)
