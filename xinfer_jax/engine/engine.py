"""`Engine`: a scheduler and device programs that answer its requests; or several engines with roles, which it
gives them to.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from ..cache.paged import PAGE_SIZE
from ..checkpoint.loading import Model
from ..checks import check_integer
from ..errors import InputError, format_value
from ..ops.operation import without_mesh_context
from ..sampling.caller_processors import Processor
from ..sharding import on_auto_mesh
from ..weights.params import Params
from .answers import Answer
from .async_sampling import SampleOutput
from .controller import Follower, Leader, control_channel_for
from .core import EngineCore
from .dispatcher import Dispatcher
from .endpoint import DecodeCore, EngineEndpoint, PrefillCore
from .engine_loop import EngineLoop
from .held_adapters import AdapterFiles, adapter_sizes
from .held_processors import HeldProcessors
from .held_vectors import HeldVectors
from .host_tier import HostTier
from .page_files import PageFiles
from .pages import PagePool
from .replay import AdapterVersions, replay_answer
from .requests import Request
from .routing import Devices, close_engines, create_role_engines
from .scheduler import Scheduler
from .shape import (
    EngineSettings,
    EngineShape,
    check_host_pages,
    check_time_slice,
    checked_memory_plan,
    engine_shape,
    page_settings,
)
from .warm_up import create_device
from .weight_updates import own_array, own_params


class Engine(EngineLoop):
    """Answers requests as they come, several at a time (continuous batching, Yu et al. 2022), with a paged KV
    cache (PagedAttention, Kwon et al. 2023). Each request gets, bit for bit, the tokens and log-probabilities
    that it gets alone in an engine of the same shape.

    Attributes:
        model: with the weights of the last `update`.
        rows, capacity, pages, host_pages, chunk, impl: as given, or their defaults.
        num_draft_tokens: draft tokens of a pass; 0 without a draft.
        about: one line about its size, and the seconds until it was ready.
        role, routes: as given.
        memory: the bytes that it takes.
    """

    follower: Any = None  # `Follower`, in processes beside process 0
    _roles: Sequence["Engine"] = ()  # with prefill_devices and decode_devices: the engines of both

    @without_mesh_context
    def __init__(  # noqa: PLR0913
        self,
        model: Model,
        *,
        rows: int = 8,
        capacity: int | None = None,
        pages: int | None = None,
        chunk: int = 256,
        prefix_cache: bool = True,
        time_slice: float = 0.5,
        draft: str | None = None,
        draft_tokens: int = 3,
        cache_dtype: Any = None,
        impl: str | None = None,
        warm_up: bool = False,
        host_pages: int = 0,
        page_directory: str | Path | None = None,
        page_directory_bytes: int = 2**34,
        prefill_devices: Devices | None = None,
        decode_devices: Devices | None = None,
        role: str | None = None,
        adapters: AdapterFiles | None = None,
        max_adapters: int | None = None,
        max_rank: int | None = None,
        routes: bool = False,
        processors: Mapping[str, tuple[Processor, Any]] | None = None,
        taps: Mapping[str, Mapping[int, Any]] | None = None,
    ):
        """Compiles the programs that a short greedy request needs. The others are compiled in the background,
        and a request that needs one of them waits for it.

        Args:
            model: from `load_model`.
            rows: slots: answers that are decoded together (vLLM: max_num_seqs).
            capacity: tokens of a prompt and its answer together, at most; None: 4096, or the model's context
                length if that is less.
            pages: of 64 tokens each, for all rows and the prefix cache; None: half of the memory beside the
                weights (on a CPU: this engine's devices' part of it), at most twice what all rows can fill.
            chunk: tokens of a prompt that are prefilled between decode steps; a multiple of 64.
            prefix_cache: the common beginning of prompts is computed once.
            time_slice: seconds. While a client without a slot waits, the row that has had its slot for the
                longest time, and for so long at least, is preempted. It continues with the same bits when a
                slot is free, or in place of a row that has had its slot for `rows` time slices. A smaller
                value swaps more pages out and in. 0: no row is preempted for this.
            draft: "lookup": speculative decoding with draft tokens found earlier in the text.
            draft_tokens: of each pass.
            cache_dtype: of keys and values, as in `GenerateOptions`; "gear" is for whole rows only.
            impl: as in `GenerateOptions`.
            warm_up: compile all programs before returning, for measurements and long runs.
            host_pages: pages in host memory, beside `pages`: what the prefix cache evicts from the device is
                saved there, and is copied back for a prompt that begins with it.
            page_directory: such pages are also written to files, which later engines of this model find. A
                directory of the user's own, with mode 0700.
            page_directory_bytes: of all files in it; the least recently used are deleted.
            prefill_devices, decode_devices: prompts are prefilled on the first and decoded on the second
                (`Dispatcher`): numbers of local devices, or devices; a list in place of a device: the model
                is divided over these. Each device, or list, has an engine of this shape. With equal meshes on
                both sides a request has the bits of one such engine. The prefix cache is with the engines
                that prefill; pages that decoding wrote go back there for requests with `share_answers`.
            role: "prefill" or "decode": what this engine does for a `Dispatcher`.
            adapters: LoRA adapters that it holds from the start, by name, as `add_adapter` takes them.
            max_adapters: how many it has place for; None: for these.
            max_rank: of each; None: the largest of these, or 16. All take the place of one of this rank on
                every matrix of the layers.
            routes: pages also record which experts of a mixture their tokens use, for `return_routes` of
                `submit`.
            processors: logits processors of yours by name, each with the arguments of a request that gives
                none, without rows. `GenerateOptions(processors={name: arguments})` of a request names them;
                they are applied in this order. Other requests keep their bits.
            taps: vectors by name, float [D] by layer, that `GenerateOptions(taps={name: factor})` of a
                request adds to the hidden states after these layers (steering). Pages of such a request are
                never shared.

        Raises:
            InputError: a value that no engine can have, before anything is compiled.
        """
        if not isinstance(model, Model):
            raise InputError(f"model must be what load_model gives, got {format_value(model)}")
        super().__init__()
        adapters, max_adapters, max_rank = adapter_sizes(model, adapters, max_adapters, max_rank)
        self.processors = HeldProcessors({} if processors is None else processors)
        settings = EngineSettings(
            rows=rows, capacity=capacity, pages=pages, chunk=chunk, draft=draft, draft_tokens=draft_tokens,
            cache_dtype=cache_dtype, impl=impl, role=role, routes=routes, max_adapters=max_adapters,
            max_rank=max_rank,
        )  # fmt: skip
        if prefill_devices is not None or decode_devices is not None:
            create = partial(
                Engine,
                **vars(settings),
                prefix_cache=prefix_cache,
                time_slice=time_slice,
                warm_up=warm_up,
                host_pages=host_pages,
                page_directory=page_directory,
                page_directory_bytes=page_directory_bytes,
                processors=processors,
                taps=taps,
            )
            self._dispatch(create_role_engines(create, model, prefill_devices, decode_devices), prefix_cache)
            self.add_adapters(adapters)
            return
        self.model = dataclasses.replace(model, params=jax.tree.map(own_array, on_auto_mesh(model.params)))
        shape = engine_shape(self.model, settings)
        host_pages = check_host_pages(shape, host_pages, prefix_cache, page_directory)
        time_slice = check_time_slice(time_slice)
        if role == "decode":  # a prefix is found where prompts are prefilled
            prefix_cache = False
            host_pages = 0
            page_directory = None
        snapshots = shape.snapshots if prefix_cache else 0
        self.taps = HeldVectors({} if taps is None else taps, self.model.params, self.model.config)
        shape = dataclasses.replace(
            shape, host_pages=host_pages, snapshots=snapshots,
            processors=self.processors if processors else None, vectors=self.taps if taps else None,
        )  # fmt: skip
        self._channel = control_channel_for(self.model.params)
        if self._channel:  # hosts may have different amounts of memory
            shape = dataclasses.replace(shape, pages=self._channel.broadcast(shape.pages))
        self.shape = shape
        self.role = shape.role
        self.rows = shape.rows
        self.capacity = shape.capacity
        self.pages = shape.pages
        self.host_pages = shape.host_pages
        self.chunk = shape.chunk
        self.num_draft_tokens = shape.num_draft_tokens
        self.impl = shape.impl
        self.routes = shape.num_routes > 0
        self.memory = checked_memory_plan(shape, self.model)
        parts = self.memory.parts
        self.weight_bytes = parts["weights"] + parts["adapters"]
        self.cache_bytes = parts["pages"] + parts["states"]
        page_directory_bytes = check_integer("page_directory_bytes", page_directory_bytes, 1)
        if page_directory is not None and self._channel:
            raise InputError(
                "page_directory does not go with a model over several processes: leave it out, host_pages do"
            )
        self._files = None if page_directory is None else PageFiles(page_directory, page_directory_bytes)
        self._core = self._create_core(shape, prefix_cache, time_slice, warm_up)
        if self.error is None:  # else process 0 adds them, and this one repeats its calls
            self.add_adapters(adapters)

    def _dispatch(self, engines: Sequence["Engine"], prefix_cache: bool) -> None:
        """Gives requests to engines with roles."""
        dispatcher = Dispatcher(self._notify, self._wait_for_work, prefix_cache)

        def emit(name: str, *args: Any) -> None:
            self.call_soon(partial(getattr(dispatcher, name), *args))

        self._roles = engines
        self._core = dispatcher
        self._channel = None
        self.role = None
        for name in (
            "model", "capacity", "pages", "host_pages", "chunk", "num_draft_tokens", "impl", "routes", "taps",
            "about", "weight_bytes", "cache_bytes", "memory",
        ):  # fmt: skip
            setattr(self, name, getattr(engines[0], name))
        dispatcher.endpoints += [engine.endpoint(emit) for engine in engines]
        self.rows = sum(engine.rows for engine in engines if engine.role == "decode")

    def endpoint(self, emit: Callable[..., None]) -> EngineEndpoint:
        """This engine, which has a role, for a `Dispatcher`. emit: takes its events."""
        return EngineEndpoint(self, self._core, emit)

    @property
    def engines(self) -> Sequence["Engine"]:
        """The engines that answer: this one; with roles, those that prefill and then those that decode."""
        return self._roles or (self,)

    def _create_core(
        self, shape: EngineShape, prefix_cache: bool, time_slice: float, warm_up: bool
    ) -> EngineCore:
        """Compiles programs. Over several processes only process 0 takes requests."""
        config = self.model.config
        began = time.perf_counter()
        unfinished = self._unfinished
        is_busy = lambda: bool(unfinished)  # noqa: E731  (it must not keep the engine alive)
        device, self._warm_up = create_device(self.model.params, config, shape, warm_up, is_busy)
        rest = "" if self._warm_up.complete else "; further programs compile in the background"
        beyond = f" + {shape.host_pages} host pages" if shape.host_pages else ""
        self.about = (
            f"{self.rows} rows of {self.capacity} tokens, {self.pages} pages of {PAGE_SIZE}{beyond}:"
            f" {self.memory}, ready in {time.perf_counter() - began:.1f} s{rest}"
        )
        # In one write, as other engines may start at the same time.
        print(f"{self.about}\n", end="", file=sys.stderr)
        own: Any = device
        if self._channel and jax.process_index() == 0:
            own = Leader(device, self._channel)
        elif self._channel:
            self.follower = Follower(device, self._channel)
            self.error = InputError("process 0 answers for all: submit there, and call follow() here")
        files = self._files
        tier = HostTier(shape.host_pages, files) if shape.host_pages else None
        snapshots = PagePool(1 + shape.snapshots) if shape.state_bytes else None
        sizes = shape.rows, shape.pages, shape.capacity, shape.chunk
        scheduler = Scheduler(*sizes, prefix_cache, tier, snapshots, time_slice)
        core_class = {None: EngineCore, "prefill": PrefillCore, "decode": DecodeCore}[shape.role]
        ready = self._warm_up.is_ready
        paths = device.adapters.paths if device.adapters else ()
        core = core_class(own, scheduler, shape, self.counters, self._notify, ready, files, paths)
        if files:
            core.tiers.identify(page_settings(self.model.params, config, shape))
        return core

    def replay(
        self,
        answer: Answer | Request | SampleOutput,
        params: Mapping[int, Params],
        adapters: AdapterVersions | None = None,
    ) -> list[float]:
        """Computes an answer again, with its own tokens, by the engine's programs. The result is `==`
        `answer.logprobs` if the weights are those of its versions. Other requests wait meanwhile.

        Args:
            answer: that has ended, of an engine of this shape; or a request with one, or what `sample` gave.
            params: of each version in `answer.switches`, as `update` takes them.
            adapters: of each adapter_version there, as `add_adapter` takes them, for an answer with one.

        Raises:
            InputError: a version is missing; the answer may have pages of other answers (`share_answers`);
                prompts and answers are on meshes of other sizes, or in several processes.
        """
        if self._channel:
            raise InputError("replay needs an engine of one process: make one of this shape")
        if len({len(engine.model.params["final_norm"].devices()) for engine in self.engines}) > 1:
            raise InputError("replay needs equal meshes for prompts and answers: make such an engine")
        engine = self.engines[-1]  # of several one that decodes
        return replay_answer(engine, engine.core, answer, params, adapters or {})

    def own_params(self, params: Params, cast: bool = True, copy: bool = False) -> Params:
        """Parameters in the form and place of the engine's, as `update` takes them."""
        if not self._channel:
            return own_params(params, self.model, cast, copy)
        with self.without_steps():
            if not self.follower:
                self._core.device.ask_for_params()
            return own_params(params, self.model, cast, copy, self._channel.agree)

    def prepare_params(self, params: Params, cast: bool, copy: bool) -> None:
        """`update` in a process that follows: process 0 decides when the weights are replaced."""
        if not self.follower.wants_params:
            raise InputError("process 0 calls update first: do so here once follow() has returned True")
        self.follower.wants_params = False
        self._core.device.next_params = self.own_params(params, cast, copy)

    def switch_params(self, params: Params, version: int, recomputes: bool) -> None:
        """Replaces the weights. The caller holds `without_steps`."""
        self.core.switch(params, version, recomputes)
        self.model = dataclasses.replace(self.model, params=params)
        if self._files:
            self.core.tiers.identify(page_settings(params, self.model.config, self.shape))

    def forget_prompts(self) -> None:
        """After new weights: no engine has pages of earlier prompts."""
        if self._roles:
            self.model = self._roles[0].model
            self.core.forget_prompts()

    @property
    def version(self) -> int:
        """Of the weights: that of the last `update`."""
        return self._roles[0].version if self._roles else self.core.version

    def counts(self) -> dict[str, int]:
        """The fields of `EngineStats` but for the times."""
        counts = self._core.scheduler.counts() | self.counters.sums
        warm_up = self._warm_up
        return counts | dict(
            waiting=counts["waiting"] + len(self._submitted) + self._core.num_held,
            programs=warm_up.compiler.num_compiled,
            warming_up=int(not warm_up.complete),
            waiting_for_programs=self._core.num_held,
        )

    @property
    def last_step_time(self) -> float:
        """When its last step ended, by time.monotonic(): now, while a step waits for a program that is being
        compiled. Its thread takes a step a second at least.
        """
        if self._roles:
            return min(engine.last_step_time for engine in self._roles)
        return time.monotonic() if self._warm_up.is_waiting else self._last_step_time

    @property
    def usable_capacity(self) -> int:
        """Tokens of a prompt and its answer together that it can hold."""
        return self._roles[0].usable_capacity if self._roles else self._core.scheduler.usable_capacity

    def close(self) -> None:
        if self._roles:
            super().close()
            close_engines(self._roles, Engine.close)
            return
        self._warm_up.stop()
        super().close()
        if isinstance(self._core.device, Leader):
            self._core.device.close()

    @without_mesh_context
    def follow(self) -> bool:
        """If the model lies on devices of several processes, all but process 0 call this: it repeats the
        device calls of process 0's engine. It returns False once that is closed, and True where process 0
        calls `update`: call `update` here too, with this process's part of the weights, then this again.
        """
        if not self.follower:
            raise InputError("there is nobody to follow: only processes beside process 0 follow it")
        updates = self.follower.run()
        self.model = dataclasses.replace(self.model, params=self._core.device.params)
        return updates
