"""The recurrent states of an engine's rows, on its device, and snapshots of them for the prefix cache."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ..cache.recurrent import Recurrent
from ..config.model_config import ModelConfig
from ..generation.executor import Run
from .device_programs import GET_ROW, SET_ROW
from .shape import EngineShape


class States:
    """One state for each slot and linear-attention layer; none for other models.

    Attributes:
        layers: of all slots, the cache of each such layer.
    """

    def __init__(
        self, config: ModelConfig, shape: EngineShape, run: Run, create: Callable, mesh: Mesh | None
    ):
        self._run = run
        drafts = shape.num_draft_tokens and 1 + shape.num_draft_tokens

        def empty(rows: int) -> tuple[Recurrent, ...]:
            lengths_B: Any = np.zeros(rows, np.int32)
            count = config.num_linear_layers
            layers = (Recurrent.empty(config, rows, shape.capacity, mesh) for _ in range(count))
            return tuple(layer.with_draft_slots(drafts, lengths_B) for layer in layers)

        self.layers = create(lambda: empty(shape.rows))
        self._snapshots = create(lambda: empty(shape.snapshots)) if shape.snapshots else ()

    def get(self, slot: int) -> tuple[Recurrent, ...]:
        """The states of one slot, as caches of one row."""
        return self._run(GET_ROW, self.layers, np.int32(slot)) if self.layers else ()

    def set(self, slot: int, states: tuple[Recurrent, ...]) -> None:
        """Puts states of one row into a slot."""
        if self.layers:
            self.layers = self._run(SET_ROW, self.layers, np.int32(slot), states)

    def save(self, slot: int, snapshot: int) -> None:
        """Copies the states of a slot into a snapshot."""
        self._snapshots = self._run(SET_ROW, self._snapshots, np.int32(snapshot), self.get(slot))

    def load(self, slot: int, snapshot: int) -> None:
        """Copies a snapshot into a slot."""
        self.set(slot, self._run(GET_ROW, self._snapshots, np.int32(snapshot)))

    def run_all(self) -> None:
        """Runs every program once, for dry runs."""
        self.set(0, self.get(0))
        if self._snapshots:
            self.save(0, 0)
            self.load(0, 0)
