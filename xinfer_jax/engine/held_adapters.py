"""`AdapterCalls`: an engine holds LoRA adapters by name, and a request may name one. They come and go between
two steps, on all engines that one stands for, and nothing is compiled.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

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
from .row import HeldAdapter
from .shape import EngineShape
from .weight_updates import check_mode, switching

_MAX_NAME = 256  # characters
_RANK = 16


AdapterFiles: TypeAlias = Mapping[str, Adapter | str | Path]


def adapter_sizes(
    model: Any, adapters: AdapterFiles | None, most: int | None, rank: int | None
) -> tuple[dict[str, Adapter], int, int]:
    """`Engine`'s adapters, loaded, with its max_adapters and max_rank. Raises InputError."""
    if not isinstance(adapters or {}, Mapping):
        raise InputError(f"adapters must be a dict of names, got {format_value(adapters)}")
    rank = None if rank is None else check_integer("max_rank", rank, 1)
    loaded = {name: _loaded(model, adapter, rank) for name, adapter in (adapters or {}).items()}
    for adapter in loaded.values():
        check_adapter(model.params, adapter)
    ranks = [len(a) for adapter in loaded.values() for a, _ in adapter.matrices.values()]
    return (
        loaded, len(loaded) if most is None else most, max(ranks, default=_RANK) if rank is None else rank
    )  # fmt: skip


def _loaded(model: Model, adapter: Adapter | str | Path, max_rank: int | None) -> Adapter:
    """What is not the path or hub name of an adapter stays as it is."""
    if isinstance(adapter, str | Path):
        return load_adapter(model.config, adapter, base=model.name, max_rank=max_rank)
    return adapter


def own_adapter(model: Model, shape: EngineShape, adapter: Adapter | str | Path) -> Adapter:
    """An adapter as the parameters of an engine of this shape take it. Raises InputError where it is not one
    that a row may have there.
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
    """a, b and the scale of each matrix, on the host."""
    scale_of = adapter.scale_of()
    return {path: (np.asarray(a), np.asarray(b), scale_of[path]) for path, (a, b) in adapter.matrices.items()}


class AdapterCalls:
    """The methods of every engine that take adapters."""

    engines: Any
    updating: Any
    check_open: Any
    close: Any
    model: Any
    _adapters: Mapping[str, HeldAdapter] = {}

    @property
    def adapters(self) -> Mapping[str, HeldAdapter]:
        """The adapters that requests may name."""
        return self._adapters

    @property
    def adapters_with_places(self) -> set[HeldAdapter]:
        """These, and those of requests that run."""
        loops = dict.fromkeys((self, *self.engines))
        running = (held for loop in loops for held in getattr(loop, "adapters_in_use", ()))
        return {*self._adapters.values(), *running}

    def add_adapters(self, adapters: AdapterFiles) -> None:
        """`add_adapter` of each; where one fails, the engine is closed."""
        try:
            for name, adapter in adapters.items():
                self.add_adapter(name, adapter)
        except BaseException:
            self.close()
            raise

    @without_mesh_context
    def add_adapter(self, name: str, adapter: Adapter | str | Path) -> None:
        """Lets requests name a LoRA adapter from now on. Answers that run go on; nothing is compiled.

        Args:
            name: that no other adapter has.
            adapter: from `load_adapter`, or what that takes; its arrays become those of the model's dtype.

        Raises:
            InputError: it does not fit the model or the engine's `max_rank`, or has matrices that are only
                for all rows together; the name is taken; there are `max_adapters`.
        """
        with self._prepared(name, adapter) as (matrices, digest):
            if name in self._adapters:
                raise InputError(f"the adapter {format_value(name)} is there: call update_adapter")
            held = HeldAdapter(name, self._free_index(), digest)
            with switching(self, "continue"):
                for engine in self.engines:
                    engine.core.set_adapter(held.index, matrices)
            self._adapters = {**self._adapters, name: held}

    @without_mesh_context
    def update_adapter(
        self,
        name: str,
        adapter: Adapter | str | Path,
        *,
        version: int | None = None,
        mode: str = "continue",
    ) -> None:
        """Replaces an adapter, as `update` replaces the weights. Pages of other adapters, and of requests
        without one, are found as before.

        Args:
            name, adapter: as of `add_adapter`.
            version: of these contents, for `adapter_versions`; None: the last one + 1. `add_adapter` gives 0.
            mode: as of `update`, of unfinished answers with this adapter; "wait" waits for all answers.

        Raises:
            InputError: as `add_adapter` and `update`; no adapter has the name.
        """
        check_mode(self, mode)
        with self._prepared(name, adapter) as (matrices, digest):
            held = self.held_adapter(name)
            version = held.version + 1 if version is None else check_integer("version", version, 0)
            with switching(self, mode, held):
                for engine in self.engines:
                    engine.core.switch_adapter(held, matrices, version, mode == "recompute")
                held.version = version
                held.digest = digest

    def remove_adapter(self, name: str) -> None:
        """Lets no further request name an adapter. Requests that have named it go on; its place is free when
        they have ended. Raises InputError where no adapter has the name.
        """
        self._shape()
        with self.updating:
            self.held_adapter(name).removed = True
            self._adapters = {other: held for other, held in self._adapters.items() if other != name}

    def held_adapter(self, name: Any) -> HeldAdapter:
        """The adapter of this name. Raises InputError where there is none."""
        adapters = self._adapters
        if not isinstance(name, str) or name not in adapters:
            known = f"has {format_names(sorted(adapters), 8)}" if adapters else "has none"
            raise InputError(f"no adapter is called {format_value(name)}: the engine {known}")
        return adapters[name]

    @contextmanager
    def _prepared(self, name: Any, adapter: Any) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Within the `with` block no other update runs. Gives (a, b, scale) of each matrix, and their digest,
        before anything changes.
        """
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > _MAX_NAME:
            raise InputError(f"an adapter's name must be a short text, got {format_value(name)}")
        adapter = own_adapter(self.model, self._shape(), adapter)
        with self.updating:
            self.check_open()
            yield row_values(adapter), adapter_digest(adapter)

    def _shape(self) -> EngineShape:
        engines = self.engines
        if not engines or not hasattr(engines[0], "core"):
            raise InputError("engines in other processes keep their adapters: start them with others")
        shape: EngineShape = engines[0].shape
        return shape

    def _free_index(self) -> int:
        """A place that no adapter has, nor a request that runs."""
        number = self._shape().max_adapters
        if free := {*range(number)} - {held.index for held in self.adapters_with_places}:
            return min(free)
        removed = sorted(held.name for held in self.adapters_with_places if held.removed)
        rest = f"; requests of removed ones still run: {format_names(removed)}" if removed else ""
        raise InputError(f"the engine holds {number} adapters (max_adapters): remove one first{rest}")
