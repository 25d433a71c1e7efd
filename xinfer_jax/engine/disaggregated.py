"""`DisaggregatedEngine`: prompts are prefilled on some devices, and answers are decoded on others (DistServe,
Zhong et al., OSDI 2024; vLLM: disaggregated prefilling).

submit ─► the engine that has a prompt prefilled first ─ first token ─► the decoding engine with most free
pages ─ gives the row a slot, and pulls its pages ─► the prefilling engine frees them

A prompt's pages are not moved while its later chunks are computed: on the decoding side they would hold pages
that no row uses yet, and the copy is short beside the prefill. Calls from one engine to another run on the
other's thread between two of its steps, so only one thread calls a device. Each of several answers moves its
own copy of the pages.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from ..checkpoint.loading import Model
from ..checks import is_sequence
from ..errors import InputError, format_value
from ..sharding import MODEL, concrete_mesh_of
from ..weights.layout import shardings
from ..weights.params import Params
from .pages import PAGE_SIZE
from .prefilled_row import PrefilledRow
from .requests import Answer, Request
from .routing import EngineGroup, PromptRouter, check_copies, copy_params, create_in_parallel
from .row import Row
from .submission import WaitsOnCondition

_WAIT_SECONDS = 0.1  # that `step` waits for new tokens
Devices = Sequence[int | jax.Device | Sequence[int | jax.Device]]


class DisaggregatedEngine(WaitsOnCondition, EngineGroup):
    """Engines that prefill prompts, and engines that decode their answers: a prompt never delays the tokens
    of others. With equal meshes on both sides a request has the bits that it has in an `Engine` of the same
    shape. `Engine(model, prefill_devices=…, decode_devices=…)` returns one.

    The prefix cache is with the engines that prefill. Pages that decoding wrote go back there for requests
    with `share_answers`. An answer that ends with its first token is never moved.

    Attributes:
        prefill_engines, decode_engines: those of each side.
        rows: of all decoding engines together.
    """

    def __init__(
        self,
        engine_class: Any,
        model: Model,
        prefill_devices: Devices | None,
        decode_devices: Devices | None,
        **shape: Any,
    ):
        """Creates the engines in parallel.

        Args:
            engine_class: `Engine`.
            model: from `load_model`. If it lies on a mesh of k devices, a list of devices is taken in groups
                of k.
            prefill_devices, decode_devices: as in `Engine`.
            shape: further arguments of `Engine`, for each.

        Raises:
            InputError: as `Engine`; a device that does not exist.
        """
        if not isinstance(model, Model):
            raise InputError(f"model must be what load_model gives, got {format_value(model)}")
        given = dict(prefill_devices=prefill_devices, decode_devices=decode_devices)
        groups = {name: _device_groups(name, devices, model) for name, devices in given.items()}
        creators = [
            partial(_create, engine_class, model, group, role=name.partition("_")[0], **shape)
            for name, of_side in groups.items()
            for group in of_side
        ]
        check_copies(model, groups["prefill_devices"][0], len(creators), "give fewer devices")
        self.engines = create_in_parallel(creators)
        number = len(groups["prefill_devices"])
        self.prefill_engines = self.engines[:number]
        self.decode_engines = self.engines[number:]
        self._condition = self._lock = (
            threading.Condition()
        )  # of all engines: requests move between them under it
        for engine, group in zip(self.engines, itertools.chain(*groups.values()), strict=True):
            engine.name = f"the {engine.role} engine on {', '.join(map(str, group))}"
            engine.share_condition(self._condition)
            engine.on_failure = partial(self._cancel_failed, engine)
        for engine in self.prefill_engines:
            engine._core.on_prefilled = partial(self._move, engine)
        self.usable_capacity = engine.usable_capacity
        self.impl = engine.impl
        self.num_draft_tokens = engine.num_draft_tokens
        self.rows = sum(engine.rows for engine in self.decode_engines)
        self.weight_bytes = engine.weight_bytes
        self.cache_bytes = engine.cache_bytes
        self._router = PromptRouter(number, engine.pages, shape.get("prefix_cache", True))

    @property
    def started(self) -> bool:
        """Whether all engines have their threads."""
        return all(engine.started for engine in self.engines)

    def update(self, params: Params) -> None:
        """`Engine.update`, in one engine after another: first where answers are decoded, so that pages of
        answers to new prompts are of the new weights alone.
        """
        for engine in (*self.decode_engines, *self.prefill_engines):
            engine.update(params)
        with self._condition:
            for given in self._router.given:
                given.clear()

    def wait(self, until: Callable[[], bool], timeout: float | None = None) -> None:
        """Starts the engines, and waits."""
        self.__enter__()
        super().wait(until, timeout)

    def _wait_for_tokens(self) -> bool:
        with self._condition:
            if busy := any(engine.load for engine in self.engines):
                self._condition.wait(_WAIT_SECONDS)
        return busy

    def cancel(self, request: Request) -> None:
        """Ends a request at the next step."""
        for engine in self.engines:
            engine.cancel(request)

    def _enqueue(self, requests: list[Request]) -> None:
        with self._condition:
            self._check_open()
            queued = [engine.queued_tokens for engine in self.prefill_engines]
            for request in requests:
                row = request.answers[0].row

                def tokens_until_prefilled(i: int, hits: int, row: Row = row) -> int:
                    return queued[i] + len(row.ids) - hits * PAGE_SIZE

                i = self._router.route(row, tokens_until_prefilled, range(len(queued)))
                queued[i] += len(row.ids) * len(request.answers)
                request.engine = self
                self.prefill_engines[i]._enqueue([request])

    def _move(self, source: Any, answer: Answer, row: Row) -> None:
        """An engine has prefilled a row: it is decoded by the engine with the most free pages. Called by the
        thread of the engine that prefilled it.
        """
        request = answer.request
        with self._condition:
            targets = [engine for engine in self.decode_engines if engine.error is None]
            if not targets and not request.ended:
                request.end(self.decode_engines[0].error)
                source.counters.add(request)
                self.cancel(request)  # its other answers
            if request.ended:  # maybe with the error of another engine
                source._core.release(row)
            else:
                target = max(targets, key=lambda engine: engine.free_pages)
                answer.swapped_pages = PrefilledRow(source, target, row)
                target._queue_answers([answer])
                if request.cancelled:
                    target.cancel(request)
        source._notify([request])  # it has no more of this request, if this was its last answer

    def _cancel_failed(self, engine: Any, requests: Sequence[Request]) -> None:
        """Requests have failed: all engines end their answers, and free their pages. If this engine itself
        has failed, requests whose pages are there get the error too.
        """
        for request in requests:
            for answer in request.answers:
                if isinstance(source := answer.swapped_pages, PrefilledRow):
                    source.release()
            self.cancel(request)
        if engine.error is not None:
            for other in self.decode_engines:
                other.call_soon(other._core.fail_lost_rows)


def _create(engine_class: Any, model: Model, devices: list[jax.Device], role: str, **shape: Any) -> Any:
    params = _place_params(model, devices)
    return engine_class(dataclasses.replace(model, params=params), role=role, **shape)


def _place_params(model: Model, devices: list[jax.Device]) -> Params:
    """A copy of the parameters on these devices, divided over them."""
    mesh = concrete_mesh_of(model.params)
    if len(devices) == (mesh.size if mesh else 1):
        return copy_params(model.params, devices)
    mesh = jax.make_mesh((len(devices),), (MODEL,), devices=devices)
    return jax.device_put(model.params, shardings(model.config, mesh, like=model.params))


def _device_groups(name: str, devices: Any, model: Model) -> list[list[jax.Device]]:
    """The devices of each engine of a side. name: of the argument."""
    if not is_sequence(devices) or not len(devices):
        raise InputError(
            f"{name} must be a list of devices, and so for the other side, got {format_value(devices)}"
        )
    own = model.params["final_norm"]
    platform = next(iter(own.devices())).platform if isinstance(own, jax.Array) else None
    local = jax.local_devices(backend=platform)

    def find(device: Any) -> jax.Device:
        if isinstance(device, jax.Device):
            return device
        if not isinstance(device, int) or isinstance(device, bool) or not 0 <= device < len(local):
            virtual = f"XLA_FLAGS=--xla_force_host_platform_device_count={len(local) + 1} makes more of a CPU"
            raise InputError(
                f"{name}: device {format_value(device)} is not here, there are 0 to {len(local) - 1}: give"
                f" one of them; {virtual}"
            )
        return local[device]

    mesh = concrete_mesh_of(model.params)
    size = mesh.size if mesh else 1
    single = [find(device) for device in devices if not is_sequence(device)]
    if len(single) % size:
        raise InputError(f"{name}: {len(single)} devices cannot be divided into meshes of {size}: give more")
    groups = [single[at : at + size] for at in range(0, len(single), size)]
    return groups + [[find(device) for device in of_mesh] for of_mesh in devices if is_sequence(of_mesh)]
