"""`ParallelEngine`: several engines behind one queue, each on devices of its own (data parallelism).

submit ─► route: the engine with most of the prompt in its prefix cache, unless it is much busier ─► its queue
"""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, Self, Unpack

from ..checkpoint.loading import Model
from ..errors import InputError
from ..sharding import concrete_mesh_of, device_groups
from .engine import LocalEngine, given_options
from .engine_options import EngineOptions, EngineSettings
from .requests import Request
from .routing import PromptRouter, close_engines, create_engines
from .submission import Engine as Engine

_WAIT_SECONDS = 0.1  # that `step` waits for new tokens


class ParallelEngine(Engine):
    """Several engines of one shape, each with a thread.

    Attributes:
        engines: each has its devices.
        rows: the number of rows of all engines together.
    """

    engines: Sequence[LocalEngine] = ()  # type: ignore[assignment]  # a property of `Engine`

    def __init__(
        self, model: Model, options: EngineOptions | None = None, **settings: Unpack[EngineSettings]
    ):
        """Creates the engines in parallel."""
        self.create_parts()
        options = given_options(model, options, settings)
        if options.prefill_devices or options.decode_devices:
            raise InputError(
                f"data_parallel={options.data_parallel} does not go with prefill_devices and decode_devices,"
                " which list the engines: leave one of them out"
            )
        sharding = getattr(model.params["final_norm"], "sharding", None)
        mesh = concrete_mesh_of(model.params)
        own: Any = mesh.devices.flat if mesh else sharding and sharding.device_set
        groups = device_groups(options.data_parallel, own and list(own))
        each = [dataclasses.replace(options, data_parallel=1, adapters=None)] * len(groups)
        self.engines = create_engines(LocalEngine, model, groups, each, "ask for fewer engines")
        for i, (engine, group) in enumerate(zip(self.engines, groups, strict=True)):
            engine.name = f"engine {i + 1} of {len(groups)} ({', '.join(map(str, group))})"
        self.shape = engine.shape
        self.processors = engine.processors
        self.taps = engine.taps
        self.rows = len(groups) * engine.rows
        self._router = PromptRouter(options.prefix_cache)
        self._lock = threading.Lock()
        self._updated = threading.Event()  # a request has new tokens, or has ended
        self.adapters.add_all(options.adapters)

    @property
    def model(self) -> Model:  # type: ignore[override]
        """The model, with the first engine's copy of the parameters."""
        return self.engines[0].model

    def forget_prompts(self) -> None:
        self._router.given.clear()

    def _start_all(self) -> None:
        self.__enter__()

    def __enter__(self) -> Self:
        with self._lock:
            for engine in self.engines:
                if not engine.started:
                    engine.__enter__()
        return self

    def close(self) -> None:
        close_engines(self.engines, LocalEngine.close)

    def step(self) -> bool:
        """Waits a moment for new tokens of any request. Returns True if any request is unfinished. Raises the
        error of an engine that failed.
        """
        self.__enter__()
        for engine in self.engines:
            if engine.error is not None:
                raise engine.error
        if busy := any(engine.load for engine in self.engines):
            self._updated.wait(_WAIT_SECONDS)
            self._updated.clear()
        return busy

    def enqueue(self, requests: list[Request]) -> None:
        with self._lock:
            self.check_open()
            routed: dict[LocalEngine, list[Request]] = {engine: [] for engine in self.engines}
            loads = {engine: engine.load for engine in self.engines}
            for request in requests:
                # Of the engines that are not clearly busier than another, the one that was given most of the
                # prompt's pages before; then the one with the least load.
                max_load = min(loads.values()) + self.engines[0].rows // 2
                candidates = [engine for engine, load in loads.items() if load <= max_load]
                order = lambda engine, hits: (-hits, loads[engine])  # noqa: E731
                engine = self._router.route(request.answers[0].row, order, candidates)
                loads[engine] += len(request.answers)
                routed[engine].append(request)
                request.move_to(engine)
                request.listeners.append(self._updated.set)
            for engine, own in routed.items():
                engine.enqueue(own)


Engine._several = ParallelEngine
