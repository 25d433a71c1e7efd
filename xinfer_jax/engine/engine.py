"""`LocalEngine`: a scheduler and device programs that answer its requests, or several engines with roles, to
which it gives the requests.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Unpack

import jax

from ..cache.paged import PAGE_SIZE
from ..checkpoint.loading import Model
from ..draft_heads.draft import Draft, place_draft
from ..errors import InputError, format_value
from ..memory_plan import format_mib
from ..ops.operation import without_mesh_context
from ..processes.control_channel import ControlChannel
from ..sharding import on_auto_mesh
from ..weights.params import Params
from .controller import Follower, Leader, control_channel_for
from .core import EngineCore
from .dispatcher import Dispatcher
from .endpoint import DecodeCore, EngineEndpoint, PrefillCore
from .engine_loop import EngineLoop
from .engine_options import EngineOptions, EngineSettings
from .held_adapters import with_adapters_read
from .held_processors import HeldProcessors
from .held_vectors import HeldVectors
from .host_tier import HostTier
from .page_files import PageFiles
from .pages import PagePool
from .routing import close_engines, create_role_engines
from .scheduler import Scheduler
from .shape import EngineShape, check_options, checked_memory_plan, engine_shape, page_settings
from .submission import Engine
from .warm_up import create_device
from .weight_updates import own_array

_LOGGER = logging.getLogger(__name__)


class LocalEngine(EngineLoop):
    """The engine of a model: a scheduler and device programs, or several such engines with roles.

    Attributes:
        about: one line about its size, and the seconds until it was ready.
        role: see `EngineOptions`.
        follower: the follower, in processes other than process 0.
        channel: the channel to other processes. None: there are none.
        memory: the bytes that it takes.
    """

    follower: Follower | None = None
    channel: ControlChannel | None = None
    _roles: Sequence["LocalEngine"] = ()  # with prefill_devices and decode_devices: the engines of both

    @without_mesh_context
    def __init__(
        self, model: Model, options: EngineOptions | None = None, **settings: Unpack[EngineSettings]
    ):
        self.create_parts()
        options = given_options(model, options, settings)
        self.processors = HeldProcessors(options.processors)
        if options.prefill_devices is not None or options.decode_devices is not None:
            self._dispatch(model, options)
        else:
            self._start(model, check_options(model, options))
        if self.error is None:  # else process 0 adds them, and this one repeats its calls
            self.adapters.add_all(options.adapters)

    def _start(self, model: Model, options: EngineOptions) -> None:
        """Allocates pages and compiles programs."""
        self.model = dataclasses.replace(model, params=jax.tree.map(own_array, on_auto_mesh(model.params)))
        self.taps = HeldVectors(options.taps, self.model.params, self.model.config)
        if isinstance(options.draft, Draft):
            draft = jax.tree.map(own_array, place_draft(options.draft, self.model.params))
            options = dataclasses.replace(options, draft=draft)
        # The shape outlives these, of which the engine has copies.
        shape = engine_shape(self.model, dataclasses.replace(options, adapters=None, taps=None))
        self.channel = control_channel_for(self.model.params)
        if self.channel:  # hosts may have different amounts of memory
            shape = dataclasses.replace(shape, pages=self.channel.broadcast(shape.pages))
        self.shape = dataclasses.replace(shape, processors=self.processors or None, vectors=self.taps or None)
        self.role = options.role
        self.memory = checked_memory_plan(self.shape, self.model)
        directory = shape.page_directory
        if directory is not None and self.channel:
            raise InputError(
                "page_directory does not go with a model over several processes: leave it out, host_pages do"
            )
        self._files = None if directory is None else PageFiles(directory, shape.page_directory_bytes)
        self.core = self._create_core(self.shape)

    def _dispatch(self, model: Model, options: EngineOptions) -> None:
        """Creates engines with roles, and gives requests to them."""
        engines = create_role_engines(LocalEngine, model, options)
        dispatcher = Dispatcher(self._notify, self._wait_for_work, options.prefix_cache)

        def emit(name: str, *args: Any) -> None:
            self.call_soon(partial(getattr(dispatcher, name), *args))

        self._roles = engines
        self.core = dispatcher
        self.model = engines[0].model
        self.about = engines[0].about
        self.taps = engines[0].taps
        self.memory = engines[0].memory
        self.shape = dataclasses.replace(
            engines[0].shape,
            rows=sum(engine.rows for engine in engines if engine.role == "decode"),
            role=None,
        )
        dispatcher.endpoints += [engine.endpoint(emit) for engine in engines]

    def endpoint(self, emit: Callable[..., None]) -> EngineEndpoint:
        """Returns this engine, which has a role, for a `Dispatcher`. emit: takes its events."""
        return EngineEndpoint(self, self.core, emit)

    @property
    def engines(self) -> Sequence["LocalEngine"]:
        """The engines that answer: this one or, with roles, the ones that prefill and then the ones that
        decode.
        """
        return self._roles or (self,)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all pages, recurrent states and their snapshots."""
        return sum(engine.shape.cache_bytes for engine in self.engines)

    def _create_core(self, shape: EngineShape) -> EngineCore:
        """Compiles programs. Over several processes only process 0 takes requests."""
        config = self.model.config
        began = time.perf_counter()
        unfinished = self._unfinished
        is_busy = lambda: bool(unfinished)  # noqa: E731  (it must not keep the engine alive)
        device, self._warm_up = create_device(self.model.params, config, shape, shape.warm_up, is_busy)
        rest = "" if self._warm_up.complete else "; further programs compile in the background"
        beyond = f" + {shape.host_pages} host pages" if shape.host_pages else ""
        if shape.host_snapshots:
            size = format_mib(shape.host_snapshots * shape.state_bytes)
            beyond += f" + {shape.host_snapshots} host snapshots ({size})"
        self.about = (
            f"{self.rows} rows of {self.capacity} tokens, {self.pages} pages of {PAGE_SIZE}{beyond}:"
            f" {self.memory}, ready in {time.perf_counter() - began:.1f} s{rest}"
        )
        _LOGGER.info("%s", self.about)
        own: Any = device
        if self.channel and jax.process_index() == 0:
            own = Leader(device, self.channel)
        elif self.channel:
            self.follower = Follower(device, self.channel)
            self.error = InputError("process 0 answers for all: submit there, and call follow() here")
        files = self._files
        tier = HostTier(shape.host_pages, files, shape.host_snapshots) if shape.host_pages else None
        snapshots = PagePool(1 + shape.snapshots) if shape.state_bytes else None
        sizes = shape.rows, shape.pages, shape.capacity, shape.chunk
        scheduler = Scheduler(*sizes, shape.prefix_cache, tier, snapshots, shape.time_slice)
        core_class = {None: EngineCore, "prefill": PrefillCore, "decode": DecodeCore}[shape.role]
        ready = self._warm_up.is_ready
        paths = device.adapters.paths if device.adapters else ()
        core = core_class(own, scheduler, shape, self.counters, self._notify, ready, files, paths)
        if files:
            core.tiers.identify(page_settings(self.model.params, config, shape))
        return core

    def switch_params(self, params: Params, version: int, recomputes: bool) -> None:
        """Replaces the weights. The caller holds `without_steps`."""
        self.core.weights.switch(params, version, recomputes)
        self.model = dataclasses.replace(self.model, params=params)
        if self._files:
            self.core.tiers.identify(page_settings(params, self.model.config, self.shape))

    def forget_prompts(self) -> None:
        if self._roles:
            self.model = self._roles[0].model
            self.core.forget_prompts()

    def counts(self) -> dict[str, int]:
        """Returns the fields of `EngineStats` except the times."""
        counts = self.core.scheduler.counts() | self.counters.sums
        warm_up = self._warm_up
        return counts | dict(
            waiting=counts["waiting"] + len(self._submitted) + self.core.num_held,
            programs=warm_up.compiler.num_compiled,
            warming_up=int(not warm_up.complete),
            waiting_for_programs=self.core.num_held,
        )

    @property
    def last_step_time(self) -> float:
        """The time at which the last step ended, by time.monotonic(). While a step waits for a program that
        is being compiled, it is the current time. The engine's thread takes at least one step per second.
        """
        if self._roles:
            return min(engine.last_step_time for engine in self._roles)
        return time.monotonic() if self._warm_up.is_waiting else self._last_step_time

    def close(self) -> None:
        if self._roles:
            super().close()
            close_engines(self._roles, LocalEngine.close)
            return
        self._warm_up.stop()
        super().close()
        if isinstance(self.core.device, Leader):
            self.core.device.close()

    @without_mesh_context
    def follow(self) -> bool:
        if not self.follower:
            return super().follow()
        while updates := self.follower.run():
            self._take_params()
            if self.follower.directory is None:
                break
            with suppress(InputError):  # process 0 raises it
                self.update(self.follower.directory)
        self._take_params()
        return updates

    def _take_params(self) -> None:
        """The parameters of the last update are the model's in a process that follows."""
        self.model = dataclasses.replace(self.model, params=self.core.device.params)


def given_options(model: Model, options: EngineOptions | None, settings: EngineSettings) -> EngineOptions:
    """Returns the options of an engine, with adapters that are read. settings: values in place of their
    fields. Raises InputError.
    """
    if not isinstance(model, Model):
        raise InputError(f"model must be what load_model gives, got {format_value(model)}")
    if options is not None and not isinstance(options, EngineOptions):
        remedy = f": write data_parallel={options}" if type(options) is int else ""  # as of `Engines` before
        raise InputError(f"options must be EngineOptions, got {format_value(options)}{remedy}")
    return with_adapters_read(model, dataclasses.replace(options or EngineOptions(), **settings))


Engine._one = LocalEngine
