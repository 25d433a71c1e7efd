"""The engines of `Engine(model, prefill_devices=…, decode_devices=…)`, each with a copy of the parameters."""

import dataclasses
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
from .routing import check_copies, copy_params, create_in_parallel

Devices = Sequence[int | jax.Device | Sequence[int | jax.Device]]


def create_role_engines(
    create: Callable[..., Any], model: Model, prefill_devices: Devices | None, decode_devices: Devices | None
) -> list[Any]:
    """Creates engines that prefill, then those that decode, in parallel.

    Args:
        create: makes an engine of a model, with `role`.
        model: from `load_model`. If it lies on a mesh of k devices, a list of devices is taken in groups of
            k.
        prefill_devices, decode_devices: as in `Engine`.

    Raises:
        InputError: as `Engine`; a device that does not exist.
    """
    given = dict(prefill_devices=prefill_devices, decode_devices=decode_devices)
    groups = [
        (name.partition("_")[0], group)
        for name, devices in given.items()
        for group in _device_groups(name, devices, model)
    ]
    check_copies(model, groups[0][1], len(groups), "give fewer devices")

    def create_on(role: str, group: list[jax.Device]) -> Any:
        return create(dataclasses.replace(model, params=_place_params(model, group)), role=role)

    engines = create_in_parallel([partial(create_on, *at) for at in groups])
    for engine, (role, group) in zip(engines, groups, strict=True):
        engine.name = f"the {role} engine on {', '.join(map(str, group))}"
    return engines


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
