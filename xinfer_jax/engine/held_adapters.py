"""`HeldAdapters`: the LoRA adapters that an engine holds by name. They come and go between two steps, on all
engines that one stands for, and nothing is compiled.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np

from ..adapters.adapter import Adapter, adapter_digest, for_all_rows_only
from ..adapters.fitted_adapter import check_adapter
from ..adapters.peft_files import load_adapter
from ..checkpoint.loading import Model
from ..checks import check_integer
from ..errors import InputError, format_names, format_value
from ..ops.operation import without_mesh_context
from ..weights.params import activation_dtype
from ..weights.params_like import is_deleted
from .engine_options import EngineOptions
from .held_table import HeldTable
from .row import HeldAdapter
from .shape import EngineShape
from .weight_updates import check_mode, switching

_RANK = 16


def with_adapters_read(model: Model, options: EngineOptions) -> EngineOptions:
    """Returns the options with adapters that are read, and numbers for max_adapters and max_rank. Raises
    InputError.
    """
    given = HeldAdapters.check_given(options.adapters, "what load_adapter takes")
    rank = options.max_rank
    rank = None if rank is None else check_integer("max_rank", rank, 1)
    adapters = {name: _loaded(model, adapter, rank) for name, adapter in given.items()}
    for adapter in adapters.values():
        check_adapter(model.params, adapter)
    if rank is None:
        ranks = [len(a) for adapter in adapters.values() for a, _ in adapter.matrices.values()]
        rank = max(ranks, default=_RANK)
    most = len(adapters) if options.max_adapters is None else options.max_adapters
    return dataclasses.replace(options, adapters=adapters, max_adapters=most, max_rank=rank)


def _loaded(model: Model, adapter: Adapter | str | PathLike[str], max_rank: int | None) -> Adapter:
    """Loads an adapter if it is a path or a name on the hub. Returns an `Adapter` as it is."""
    if isinstance(adapter, str | PathLike):
        return load_adapter(model.config, os.fspath(adapter), base=model.name, max_rank=max_rank)
    return adapter


def own_adapter(model: Model, shape: EngineShape, adapter: Adapter | str | PathLike[str]) -> Adapter:
    """Returns an adapter as the parameters of an engine of this shape take it. Raises InputError if it is not
    one that a row may have there.
    """
    if not shape.max_adapters:
        raise InputError("the engine has no place for adapters: make it with max_adapters")
    loaded = _loaded(model, adapter, shape.max_rank)
    if is_deleted(loaded):
        raise InputError("the adapter's arrays were donated to another program, or deleted: copy them before")
    adapter = check_adapter(model.params, loaded)
    if names := for_all_rows_only(adapter):
        what = "an engine has adapters for rows, and all rows share"
        raise InputError(f"{what} {format_names(names, 4)}: load the model with this adapter (merge_adapter)")
    if (rank := max((len(a) for a, _ in adapter.matrices.values()), default=0)) > shape.max_rank:
        raise InputError(f"the adapter has rank {rank}, and the engine max_rank {shape.max_rank}")
    dtype = activation_dtype(model.params)
    for path, (a, b, scale) in row_values(adapter).items():
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = np.float32(scale) * b.astype(np.float32)
            is_finite = all(np.isfinite(x.astype(dtype)).all() for x in (a, scaled))
        if not is_finite:
            raise InputError(f"the adapter has NaN or inf in {path}, with its scale {scale:g} in {dtype}")
    return adapter


def row_values(adapter: Adapter) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """Returns a, b and the scale of each matrix, on the host."""
    scale_of = adapter.scale_of()
    return {path: (np.asarray(a), np.asarray(b), scale_of[path]) for path, (a, b) in adapter.matrices.items()}


class HeldAdapters(HeldTable[HeldAdapter]):
    """The LoRA adapters that requests may name, in all engines of an owner."""

    noun = "adapter"

    def __init__(self, owner: Any):
        """owner: the engine."""
        super().__init__()
        self._owner = owner

    @property
    def with_places(self) -> set[HeldAdapter]:
        """These, and the removed ones of requests that run."""
        loops = dict.fromkeys((self._owner, *self._owner.engines))
        running = (held for loop in loops for held in getattr(loop, "adapters_in_use", ()))
        return {*self.values(), *running}

    def add_all(self, adapters: "Mapping[str, Adapter | str | PathLike[str]] | None") -> None:
        """`add` of each; where one fails, the engine is closed."""
        try:
            for name, adapter in (adapters or {}).items():
                self.add(name, adapter)
        except BaseException:
            self._owner.close()
            raise

    @without_mesh_context
    def add(self, name: str, adapter: Adapter | str | PathLike[str]) -> None:
        """Adds a LoRA adapter that requests can name from now on.

        Running answers continue, and nothing is compiled.

        Args:
            name: a name that no other adapter has.
            adapter: an `xj.lora.Adapter`, or a directory or hub name, as `xj.lora.load_adapter` takes it. Its
                arrays are cast to the model's dtype.

        Raises:
            InputError: the adapter does not fit the model or the engine's `max_rank`.
            InputError: it has matrices that work only for all rows together.
            InputError: the name is taken, or there are `max_adapters` already.
        """
        with self._prepared(name, adapter) as contents:
            if name in self:
                raise InputError(f"the adapter {format_value(name)} is there: call update_adapter")
            held = HeldAdapter(name, self._free_index(), b"")
            self._switch(held, contents, 0, "continue")
            self.replace_all({**self, name: held})

    @without_mesh_context
    def update(
        self,
        name: str,
        adapter: Adapter | str | PathLike[str],
        *,
        version: int | None = None,
        mode: str = "continue",
    ) -> None:
        """Replaces an adapter, as `update` replaces the weights.

        Requests with other adapters, or without one, still find their pages in the prefix cache.

        Args:
            name: the name of the adapter.
            adapter: the new adapter: an `xj.lora.Adapter`, or a directory or hub name, as
                `xj.lora.load_adapter` takes it.
            version: the version of the new adapter, for `adapter_versions`. None takes the last version plus
                1. `add_adapter` sets 0.
            mode: the fate of unfinished answers with this adapter: "continue", "wait", "abort" or "recompute"
                (see `Engine.update`). "wait" waits for all answers.

        Raises:
            InputError: `add_adapter` or `Engine.update` would raise it, or no adapter has the name.
        """
        check_mode(mode)
        with self._prepared(name, adapter) as contents:
            held = self.find(name)
            version = held.version + 1 if version is None else check_integer("version", version, 0)
            self._switch(held, contents, version, mode)

    def remove(self, name: str) -> None:
        """Removes an adapter, so that no further request can name it.

        Requests that already named it continue. Its memory is free for another adapter when they have ended.

        Args:
            name: the name of the adapter.

        Raises:
            InputError: no adapter has the name.
        """
        self._owner.check_local("adapters")
        with self._owner.updating:
            self.find(name).removed = True
            self.replace_all({other: held for other, held in self.items() if other != name})

    @contextmanager
    def _prepared(self, name: Any, adapter: Any) -> Iterator[Adapter]:
        """Within the `with` block no other update runs. Gives the adapter as the engines take it."""
        self.check_name(name)
        owner = self._owner
        owner.check_local("adapters")
        adapter = own_adapter(owner.model, owner.shape, adapter)
        with owner.updating:
            owner.check_open()
            yield adapter

    def _switch(self, held: HeldAdapter, contents: Adapter, version: int, mode: str) -> None:
        """Gives all engines the contents of an adapter, between two steps."""
        matrices = row_values(contents)
        digest = adapter_digest(contents)
        with switching(self._owner, mode, held):
            for engine in self._owner.engines:
                engine.core.weights.switch(matrices, version, mode == "recompute", held)
            held.version = version
            held.digest = digest

    def _free_index(self) -> int:
        """Returns a place that no adapter has, nor a request that runs."""
        number = self._owner.shape.max_adapters
        if free := {*range(number)} - {held.index for held in self.with_places}:
            return min(free)
        removed = sorted(held.name for held in self.with_places if held.removed)
        rest = f"; requests of removed ones still run: {format_names(removed)}" if removed else ""
        raise InputError(f"the engine holds {number} adapters (max_adapters): remove one first{rest}")
