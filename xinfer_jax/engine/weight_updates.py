"""`Engine.update`: new parameters are checked and converted for every engine, and then all engines switch to
them between the same steps.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import jax
import numpy as np

from ..checkpoint.loading import Model
from ..checks import check_integer
from ..errors import InputError, format_message, format_value
from ..ops.operation import without_mesh_context
from ..sharding import on_auto_mesh
from ..weights.params import Params
from ..weights.params_like import params_like
from .pausing import RUNNING
from .row import HeldAdapter

MODES = ("continue", "wait", "abort", "recompute")


@without_mesh_context
def update_engines(owner: Any, params: Any, version: int | None, mode: str, cast: bool, copy: bool) -> None:
    """`Engine.update` of an engine, or of all that one stands for. owner: `Engine` or `Engines`."""
    check_mode(owner, mode)
    engines = owner.engines
    if engines[0].follower:
        engines[0].prepare_params(params, cast, copy)
        return
    with owner.updating:
        version = owner.version + 1 if version is None else check_integer("version", version, 0)
        owner.check_open()
        trees = [engine.own_params(params, cast, copy) for engine in engines]
        with switching(owner, mode):
            for engine, tree in zip(engines, trees, strict=True):
                engine.switch_params(tree, version, mode == "recompute")
            owner.forget_prompts()


def check_mode(owner: Any, mode: str) -> None:
    """Raises InputError for a mode that is none, or that the engines do not have."""
    if mode not in MODES:
        raise InputError(f"mode must be one of {', '.join(MODES)}, got {format_value(mode)}")
    engines = owner.engines
    if not engines or not hasattr(engines[0], "core"):
        raise InputError("engines in other processes keep their weights: start them with others")


@contextmanager
def switching(owner: Any, mode: str, adapter: HeldAdapter | None = None) -> Iterator[None]:
    """Within the `with` block none of the engines takes a step; before it, "wait" lets answers end, and
    "abort" ends them. adapter: "abort" is for answers with it.
    """
    with _drained(owner) if mode == "wait" else nullcontext(), _without_steps(owner):
        owner.check_open()
        if mode == "abort":
            for loop in [owner] if owner.engines[0].role is not None else owner.engines:
                loop.abort_unfinished("aborted", adapter)
        yield


@contextmanager
def _drained(owner: Any) -> Iterator[None]:
    """Ends all answers that have begun, and starts no others within the `with` block."""
    cores = [engine.core for engine in owner.engines]
    try:
        with _without_steps(owner):
            for core in cores:
                core.hold(True)
        while not all(core.is_drained for core in cores):  # first where prompts are prefilled
            owner.check_open()
            if owner.phase != RUNNING:
                remedy = "call resume() first, or take another mode"
                raise InputError(f"mode='wait' is for an engine that runs: {remedy}")
            owner.step()
        yield
    finally:
        for core in cores:
            core.hold(False)


def own_params(
    params: Any, model: Model, cast: bool, copy: bool, agree: Callable[[str], str] | None = None
) -> Params:
    """Parameters in the form and place of a model's own. copy: in arrays of their own; agree: over several
    processes, what is wrong in any of them: an error of one is raised in all. Raises InputError.
    """

    def fit(tree: Any) -> Params:
        return params_like(on_auto_mesh(tree), model.config, model.params, cast)

    def own_arrays(tree: Params) -> Params:
        return jax.tree.map(lambda x, old: own_array(x, old, copy), tree, model.params)

    if agree is None:
        return own_arrays(fit(params))
    for convert in (fit, own_arrays):
        problem = ""
        try:
            params = convert(params)
        except Exception as error:
            problem = f"process {jax.process_index()}: {format_message(error) or type(error).__name__}"
        if problem := agree(problem):
            raise InputError(problem)
    return params


def own_array(new: Any, old: Any = None, copy: bool = False) -> jax.Array:
    """An array that the caller cannot change, placed like the old one: committed where that is, or not."""
    if isinstance(new, jax.Array) and copy:
        if new.is_fully_addressable and all(device.platform == "cpu" for device in new.devices()):
            new = np.asarray(new)  # nothing to compile
        else:
            new = jax.device_put(new, new.sharding, may_alias=False)
    is_committed = old is not None and old.committed
    if is_committed and not old.is_fully_addressable and not isinstance(new, jax.Array):
        return jax.make_array_from_callback(new.shape, old.sharding, lambda index: np.array(new[index]))
    if not isinstance(new, jax.Array):
        return jax.device_put(np.array(new), old.sharding if is_committed else None)
    if old is None or not (new.committed or is_committed):
        return new
    return jax.device_put(new, old.sharding) if is_committed else jax.device_put(np.asarray(new))


@contextmanager
def _without_steps(owner: Any) -> Iterator[None]:
    """Within the `with` block none of the engines takes a step, nor does who gives them requests."""
    with ExitStack() as stack:
        for loop in dict.fromkeys((owner, *owner.engines)):
            if hasattr(loop, "without_steps"):
                stack.enter_context(loop.without_steps())
        yield
