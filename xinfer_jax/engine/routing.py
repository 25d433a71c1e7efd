"""Functions for several engines: they create the engines, each with a copy of the parameters, and know which
engine has the beginning of a prompt.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from ..checkpoint.loading import Model
from ..checks import is_sequence
from ..errors import InputError, format_value
from ..memory_plan import MemoryPlan
from ..sharding import MODEL, concrete_mesh_of
from ..weights.layout import shardings
from ..weights.params import Params, tree_bytes
from .engine_options import EngineOptions
from .pages import PAGE_SIZE, hash_pages
from .row import Row


class PromptRouter:
    """Chooses which of several engines gets a prompt. prefix_cache: False: no engine keeps any page."""

    def __init__(self, prefix_cache: bool = True):
        self._prefix_cache = prefix_cache
        # Hashes of the pages of the prompts that each engine was given, the least recent first; as many as it
        # has pages, as its prefix cache cannot have more.
        self.given: dict[Any, OrderedDict[bytes, None]] = {}
        self._last_routed: dict[Any, int] = {}  # of each engine, the number of its last request

    def route(self, row: Row, order: Callable[[Any, int], Any], engines: Iterable[Any]) -> Any:
        """Returns the engine for a row: the engine with the lowest `order` of itself and the pages of the
        prompt that it was given before. Between equal engines it is the one that got no request for the
        longest time.
        """
        full_pages = len(row.ids) // PAGE_SIZE  # their hashes are of any program
        hashes = hash_pages(row.page_salt, row.ids, [0] * full_pages) if self._prefix_cache else []

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
        """Removes an engine that is gone."""
        self.given.pop(engine, None)
        self._last_routed.pop(engine, None)


def create_engines(
    create: Callable[..., Any],
    model: Model,
    groups: Sequence[list[jax.Device]],
    each: Sequence[EngineOptions],
    remedy: str,
) -> list[Any]:
    """Creates engines in parallel, each with a copy of the parameters on a group of devices. If one fails,
    the others are closed.

    Args:
        create: makes an engine of a model and one of the options in `each`.
        remedy: the end of the error that is raised if the memory of a CPU is too small.
    """
    if groups[0][0].platform == "cpu":  # all engines share one memory
        weights = len(groups) * tree_bytes(model.params)
        MemoryPlan({f"weights of {len(groups)} engines": weights}).check(remedy)

    def create_on(group: list[jax.Device], options: EngineOptions) -> Any:
        return create(dataclasses.replace(model, params=_place_params(model, group)), options)

    with ThreadPoolExecutor(len(groups)) as pool:
        creating = [pool.submit(create_on, *arguments) for arguments in zip(groups, each, strict=True)]
    if any(future.exception() for future in creating):  # the others do not go on compiling
        for future in creating:
            if not future.exception():
                future.result().close()
    return [future.result() for future in creating]


def create_role_engines(create: Callable[..., Any], model: Model, options: EngineOptions) -> list[Any]:
    """Creates engines that prefill, then engines that decode. If the model lies on a mesh of k devices, a
    list of devices is taken in groups of k.
    """
    names = ("prefill_devices", "decode_devices")
    sides = {name: _device_groups(name, getattr(options, name), model) for name in names}
    roles: list[Any] = [name.partition("_")[0] for name, groups in sides.items() for _ in groups]
    groups = [group for side in sides.values() for group in side]
    own = dataclasses.replace(options, prefill_devices=None, decode_devices=None, adapters=None)
    each = [dataclasses.replace(own, role=role) for role in roles]
    engines = create_engines(create, model, groups, each, "give fewer devices")
    for engine, role, group in zip(engines, roles, groups, strict=True):
        engine.name = f"the {role} engine on {', '.join(map(str, group))}"
    return engines


def close_engines(engines: Sequence[Any], close: Callable[[Any], None]) -> None:
    """Closes engines in parallel: each ends its step first."""
    with ThreadPoolExecutor(len(engines)) as pool:
        list(pool.map(close, engines))


def _place_params(model: Model, devices: list[jax.Device]) -> Params:
    """Returns a copy of the parameters on these devices: sharded as the original is over as many, or divided
    over them.
    """
    mesh = concrete_mesh_of(model.params)
    if len(devices) != (mesh.size if mesh else 1):
        mesh = jax.make_mesh((len(devices),), (MODEL,), devices=devices)
        return jax.device_put(model.params, shardings(model.config, mesh, like=model.params))

    def sharding_of(x: Any) -> Any:
        old = getattr(x, "sharding", None)
        if not isinstance(old, NamedSharding):
            return SingleDeviceSharding(devices[0])
        axes = old.mesh.axis_names, old.mesh.axis_types
        mesh = Mesh(np.reshape(devices, old.mesh.devices.shape), axes[0], axis_types=axes[1])
        return NamedSharding(mesh, old.spec)

    return jax.device_put(model.params, jax.tree.map(sharding_of, model.params))


def _device_groups(name: str, devices: Any, model: Model) -> list[list[jax.Device]]:
    """Returns the devices of each engine of a side. name: the name of the argument."""
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
