"""`WeightUpdates`: new parameters are checked and converted for every engine, and then all engines switch to
them between the same steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import numpy as np

from ..checks import check_integer
from ..errors import InputError, format_message, format_value
from ..ops.operation import without_mesh_context
from ..sharding import on_auto_mesh
from ..weights.params import Params
from ..weights.params_like import params_like
from .pausing import RUNNING, without_steps
from .row import HeldAdapter

MODES = ("continue", "wait", "abort", "recompute")


class WeightUpdates:
    """Replaces the weights of an engine, or of all that one stands for."""

    def __init__(self, owner: Any):
        """owner: `Engine` or `Engines`."""
        self._owner = owner

    @property
    def version(self) -> int:
        """Of the weights: that of the last `update`."""
        version: int = self._owner.engines[0].core.weights.version
        return version

    @without_mesh_context
    def update(
        self,
        params: Params,
        *,
        version: int | None = None,
        mode: str = "continue",
        cast: bool = True,
        copy: bool = False,
    ) -> None:
        """Replaces the weights between two steps, without compiling. Pages of earlier weights are not shared
        any more. Several engines switch between the same steps, and several processes: process 0 calls it,
        and each other one where its `follow` returns True, with the same arguments (version and mode are
        those of process 0); what is wrong in one of them is raised in all, and nothing changes. An engine
        whose weights were donated to another program answers again.

        Args:
            params: leaves with the paths and shapes of `model.params`, in any containers, on any devices. An
                engine with int8 or int4 matrices takes floats too, and quantizes them where they lie; key
                heads that it repeats and rows that pad its vocabulary may be missing.
            version: of these weights, for `token_versions`; None: the last one + 1. Engines start with 0.
            mode: what becomes of unfinished answers. "continue": they go on with their keys. "wait": no
                answer starts until those that have are finished, then the weights are replaced. "abort": they
                end with the finish_reason "abort". "recompute": their keys are computed anew, and they go
                on; where other devices prefill prompts, those that decode compile programs for that.
            cast: floats of another type are cast. False: they are an error.
            copy: the engine has arrays of its own. False: it uses the given ones where they fit, so do not
                donate them to a training step.

        Raises:
            InputError: leaves that are missing, unknown or misshapen, before anything changes; "wait" for
                answers of a paused engine; other norms under int8 activations, while adapters are held; the
                engine is closed.
        """
        owner = self._owner
        owner.check_local("weights")
        check_mode(mode)
        engines = owner.engines
        first = engines[0]
        if follower := first.follower:
            if not follower.wants_params:
                raise InputError("process 0 calls update first: do so here once follow() has returned True")
            follower.wants_params = False
            first.core.device.next_params = first.weights.fit(params, cast, copy)
            return
        with owner.updating:
            version = self.version + 1 if version is None else check_integer("version", version, 0)
            owner.check_open()
            trees = [engine.weights.fit(params, cast, copy) for engine in engines]
            with switching(owner, mode):
                for engine, tree in zip(engines, trees, strict=True):
                    engine.switch_params(tree, version, mode == "recompute")
                owner.forget_prompts()

    def fit(self, params: Params, cast: bool = True, copy: bool = False) -> Params:
        """Returns parameters in the form and place of an engine's, as `update` takes them. What is wrong in
        one of several processes is raised in all.
        """
        owner = self._owner
        model = owner.model
        converters = (
            lambda tree: params_like(on_auto_mesh(tree), model.config, model.params, cast),
            lambda tree: jax.tree.map(lambda x, old: own_array(x, old, copy), tree, model.params),
        )
        with owner.without_steps() if owner.channel else nullcontext():
            if owner.channel and not owner.follower:
                owner.core.device.ask_for_params()
            for convert in converters:
                problem = ""
                try:
                    params = convert(params)
                except Exception as error:
                    if not owner.channel:
                        raise
                    problem = (
                        f"process {jax.process_index()}: {format_message(error) or type(error).__name__}"
                    )
                if owner.channel and (problem := owner.channel.agree(problem)):
                    raise InputError(problem)
        return params


def check_mode(mode: str) -> None:
    """Raises InputError for a mode that is none."""
    if mode not in MODES:
        raise InputError(f"mode must be one of {', '.join(MODES)}, got {format_value(mode)}")


@contextmanager
def switching(owner: Any, mode: str, adapter: HeldAdapter | None = None) -> Iterator[None]:
    """Within the `with` block none of the engines takes a step; before it, "wait" lets answers end, and
    "abort" ends them. adapter: "abort" is for answers with it.
    """
    with _drained(owner) if mode == "wait" else nullcontext(), without_steps(owner):
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
        with without_steps(owner):
            for core in cores:
                core.hold(True)
        while not all(core.is_drained for core in cores):  # first where prompts are prefilled
            owner.check_open()
            if owner.pausing.phase != RUNNING:
                remedy = "call resume() first, or take another mode"
                raise InputError(f"mode='wait' is for an engine that runs: {remedy}")
            owner.step()
        yield
    finally:
        for core in cores:
            core.hold(False)


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
