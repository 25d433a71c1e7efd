"""`Engines`: several engines behind one queue, each on devices of its own (data parallelism).

submit ─► route: the engine with most of the prompt in its prefix cache, unless it is much busier ─► its queue
"""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, Self, TypeAlias, Unpack

import jax

from ..checkpoint.loading import Model
from ..errors import InputError
from ..generation.options import GenerateOptions, GenerateOutput
from ..sharding import concrete_mesh_of, device_groups
from ..text import Prompt
from .engine import Engine, given_options
from .engine_options import EngineOptions, EngineSettings
from .request_options import ManyRequestFields, RequestOptions
from .requests import Request
from .routing import PromptRouter, close_engines, create_engines
from .submission import EngineBase

_WAIT_SECONDS = 0.1  # that `step` waits for new tokens


class Engines(EngineBase):
    """Several engines of one shape, each with a copy of the parameters on devices of its own, and a thread
    (data parallelism). A request has the same bits in each of them. It goes to the engine with the fewest
    requests, or to one whose prefix cache has the beginning of its prompt, unless that is much busier.

    Attributes:
        rows: of all together.
    """

    engines: Sequence[Engine] = ()  # type: ignore[assignment]  # a property of `EngineBase`

    def __init__(
        self,
        model: Model,
        data_parallel: int,
        options: EngineOptions | None = None,
        **settings: Unpack[EngineSettings],
    ):
        """Creates the engines in parallel.

        Args:
            model: from `load_model`. If it lies on several devices, each engine gets as many.
            data_parallel: number of engines.
            options, settings: as of `Engine`, for each.

        Raises:
            InputError: as `Engine`; there are fewer devices, or too little memory for all.
        """
        super().__init__()
        options = given_options(model, options, settings)
        sharding = getattr(model.params["final_norm"], "sharding", None)
        mesh = concrete_mesh_of(model.params)
        own: Any = mesh.devices.flat if mesh else sharding and sharding.device_set
        groups = device_groups(data_parallel, own and list(own))
        each = [dataclasses.replace(options, adapters=None)] * len(groups)
        self.engines = create_engines(Engine, model, groups, each, "ask for fewer engines")
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

    def generate(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        options: GenerateOptions | Sequence[GenerateOptions] | None = None,
        request_options: RequestOptions | None = None,
        *,
        key: jax.Array | None = None,
        **fields: Unpack[ManyRequestFields],
    ) -> list[GenerateOutput]:
        """`Engine.generate`, by all engines."""
        self.__enter__()
        return super().generate(prompts, options, request_options, key=key, **fields)

    def __enter__(self) -> Self:
        with self._lock:
            for engine in self.engines:
                if not engine.started:
                    engine.__enter__()
        return self

    def close(self) -> None:
        close_engines(self.engines, Engine.close)

    def step(self) -> bool:
        """Waits a moment for new tokens of any request. Returns whether any request is unfinished; raises the
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
            routed: dict[Engine, list[Request]] = {engine: [] for engine in self.engines}
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


AnyEngine: TypeAlias = Engine | Engines


def make_engine(model: Model, options: EngineOptions, data_parallel: int = 1) -> AnyEngine:
    """An `Engine`, or `Engines` if `data_parallel` is more than 1."""
    if data_parallel != 1 and (options.prefill_devices or options.decode_devices):
        raise InputError(
            f"data_parallel={data_parallel} does not go with prefill_devices and decode_devices, which list"
            " the engines: leave one of them out"
        )
    return Engine(model, options) if data_parallel == 1 else Engines(model, data_parallel, options)
