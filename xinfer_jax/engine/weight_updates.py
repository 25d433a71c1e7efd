"""`WeightUpdates`: new parameters are checked and converted for every engine, and then all engines switch to
them between the same steps.
"""

import os
from collections.abc import ItemsView, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from ..checkpoint.new_leaves import new_leaves
from ..checks import check_integer
from ..errors import InputError, format_message, format_value
from ..ops.operation import without_mesh_context
from ..sharding import on_auto_mesh
from ..weights.params import Params, param_specs
from ..weights.params_like import leaf_like, params_like
from .pausing import abort_unfinished, drained, without_steps
from .row import HeldAdapter

MODES = ("continue", "wait", "abort", "recompute")
NamedTensors: TypeAlias = Iterator[tuple[str, Any]] | ItemsView[str, Any] | list[tuple[str, Any]]
WeightSource: TypeAlias = Params | str | os.PathLike[str] | NamedTensors


class WeightUpdates:
    """Replaces the weights of an engine, or of all engines behind a queue."""

    def __init__(self, owner: Any):
        """owner: the engine."""
        self._owner = owner

    @property
    def version(self) -> int:
        """The version of the weights, which the last `update` set."""
        version: int = self._owner.engines[0].core.weights.version
        return version

    @without_mesh_context
    def update(
        self,
        params: WeightSource,
        *,
        version: int | None = None,
        mode: str = "continue",
        cast: bool = True,
        copy: bool = False,
    ) -> None:
        """Replaces the weights between two steps, without compiling.

        After it, pages of earlier weights are not shared any more. Several engines switch between the same
        steps. If the weights of an engine were donated to another program, the engine can answer again after
        an update.

        The weights come from one of three sources. A directory and a stream are read leaf by leaf: each leaf
        is converted and put on the devices before the next one is read. If a source ends early or is wrong,
        the engine keeps its weights.

        - A tree has leaves with the paths and shapes of `model.params`, in any containers, on any devices.
        - A directory (a text or a `Path`) is a checkpoint that `save_model` wrote, or a Hugging Face
          checkpoint. Its config must be equal to the config of `model`.
        - A stream (an iterator, `dict.items()`, or a list) has pairs of a name and an array, by the published
          names of `xj.params.params_to_tensors`, in any order.

        An engine with int8 or int4 matrices also takes floats, and quantizes them on its devices. Key heads
        that the engine repeats, and rows that pad its vocabulary, may be missing. If a family stores queries,
        keys and values as one tensor, a stream must have the repeated key heads.

        If the engine is over several processes, process 0 calls `update`, and each other process calls it
        when its `follow` returns True, with the same arguments. `version` and `mode` are taken from process
        0. An error in one process is raised in all, and nothing changes. For a directory only process 0 calls
        `update`, and each process reads its own directory of this path.

        Args:
            params: the tree, the directory or the stream.
            version: the version of these weights, for `token_versions`. None takes the last version plus 1.
                Engines start with 0.
            mode: the fate of unfinished answers:

                - "continue": they continue with their keys.
                - "wait": no answer starts until the answers that have begun are finished. Then the weights
                  are replaced.
                - "abort": they end with the finish_reason "abort".
                - "recompute": their keys are computed again with the new weights, and they continue. If other
                  devices prefill prompts, the devices that decode then compile programs for it.
            cast: True casts floats of another type. False raises `InputError` for them. Floats of a directory
                are always cast.
            copy: True copies the arrays. False uses your arrays if they fit, so do not donate them to a
                training step.

        Raises:
            InputError: leaves or tensors are missing, unknown or misshapen.
            InputError: a directory cannot be read, or has another config.
            InputError: the mode is "wait", and the engine is paused with unfinished answers.
            InputError: norms differ under int8 activations, while the engine has adapters.
            InputError: the engine is closed.
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
            trees = self._fit_each(engines, params, cast, copy)
            with switching(owner, mode):
                for engine, tree in zip(engines, trees, strict=True):
                    engine.switch_params(tree, version, mode == "recompute")
                owner.forget_prompts()

    def _fit_each(self, engines: Sequence[Any], params: WeightSource, cast: bool, copy: bool) -> list[Params]:
        """Returns the parameters in the form and place of each engine's parameters. A stream is read once for
        all.
        """
        model = engines[0].model
        leaves = new_leaves(params, model.params, model.config) if len(engines) > 1 else None
        if leaves is not None:
            return fit_leaves(engines, leaves, cast, copy)
        return [engine.weights.fit(params, cast, copy) for engine in engines]

    def fit(self, params: WeightSource, cast: bool = True, copy: bool = False) -> Params:
        """Returns parameters in the form and place of the engine's parameters, as `update` takes them.

        If an argument is wrong in one of several processes, the error is raised in all.
        """
        owner = self._owner
        model = owner.model
        leaves = new_leaves(params, model.params, model.config)
        directory = str(Path(params).absolute()) if isinstance(params, str | os.PathLike) else None
        converters: Any = (
            lambda tree: params_like(on_auto_mesh(tree), model.config, model.params, cast),
            lambda tree: jax.tree.map(lambda x, old: own_array(x, old, copy), tree, model.params),
        )
        if leaves is not None:
            converters = (lambda _: fit_leaves([owner], leaves, cast, copy)[0],)
        found: Any = params
        with owner.without_steps() if owner.channel else nullcontext():
            if owner.channel and not owner.follower:
                owner.core.device.ask_for_params(directory)
            for convert in converters:
                problem = ""
                try:
                    found = convert(found)
                except Exception as error:
                    if not owner.channel:
                        raise
                    problem = (
                        f"process {jax.process_index()}: {format_message(error) or type(error).__name__}"
                    )
                if owner.channel and (problem := owner.channel.agree(problem)):
                    raise InputError(problem)
        tree: Params = found
        return tree


def fit_leaves(
    engines: Sequence[Any], leaves: Iterator[tuple[str, Any]], cast: bool, copy: bool
) -> list[Params]:
    """Returns trees in the form and place of each engine's parameters, from leaves that come one by one.

    Args:
        engines: engines of one model.
        leaves: the path and the array of each, in any order.
        cast, copy: see `WeightUpdates.update`.

    Raises:
        InputError: a leaf does not fit, or lies on devices of several processes.
    """
    structure: Any
    specs, structure = jax.tree.flatten(param_specs(engines[0].model.config))
    places = {spec.name: i for i, spec in enumerate(specs)}
    olds = [structure.flatten_up_to(engine.model.params) for engine in engines]
    trees: list[list[Any]] = [[None] * len(specs) for _ in engines]
    for name, leaf in leaves:
        i = places[name]
        if engines[0].channel:
            leaf = jax.tree.map(_host_array, leaf)
        for tree, old in zip(trees, olds, strict=True):
            new = leaf_like(on_auto_mesh(leaf), specs[i], old[i], cast)
            tree[i] = jax.tree.map(lambda x, placed: own_array(x, placed, copy), new, old[i])
    return [jax.tree.unflatten(structure, tree) for tree in trees]


def _host_array(x: Any) -> Any:
    """Returns an array that each of several processes has whole."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise InputError(
            "a stream of weights for several processes has whole arrays in each of them: give a tree for"
            " arrays that are divided over processes"
        )
    return np.asarray(x)


def check_mode(mode: str) -> None:
    """Raises InputError for a mode that is none."""
    if mode not in MODES:
        raise InputError(f"mode must be one of {', '.join(MODES)}, got {format_value(mode)}")


@contextmanager
def switching(owner: Any, mode: str, adapter: HeldAdapter | None = None) -> Iterator[None]:
    """Within the `with` block none of the engines takes a step. Before it, "wait" lets answers end, and
    "abort" ends them. adapter: if it is given, "abort" ends only answers with it.
    """
    with drained(owner) if mode == "wait" else nullcontext(), without_steps(owner):
        owner.check_open()
        if mode == "abort":
            abort_unfinished(owner, adapter)
        yield


def own_array(new: Any, old: Any = None, copy: bool = False) -> jax.Array:
    """Returns an array that the caller cannot change, placed like the old one: committed if the old one
    is.
    """
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
