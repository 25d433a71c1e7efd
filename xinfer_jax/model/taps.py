"""Taps: the residual stream between layers, read, or replaced by a caller's function."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from .. import plugin
from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from .decoder_layer import Positions, run_layers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tap:
    """What is done with the residual stream after a layer; a pytree, whose arrays are traced.

    Attributes:
        args: what `edit` takes beside the hidden states: a pytree of arrays.
        edit: f(hidden_BTD, args) -> hidden_BTD: a pure function, whose result takes their place; None: they
            stay. A jitted call is compiled for each function: a lambda that is made anew compiles anew.
        read: return the hidden states, as they are after `edit`.
    """

    args: Any = None
    edit: Callable[[jax.Array, Any], jax.Array] | None = dataclasses.field(
        default=None, metadata=dict(static=True)
    )
    read: bool = dataclasses.field(default=False, metadata=dict(static=True))


class TappedLayers:
    """`run_layers` with taps. `reads` has the hidden states of the taps that read, by their layers."""

    def __init__(self, taps: Any, config: ModelConfig):
        """Raises InputError where taps are no `Tap`s by layers of the model."""
        L = config.num_hidden_layers
        if not isinstance(taps, Mapping) or not all(isinstance(tap, Tap) for tap in taps.values()):
            raise InputError(
                f"taps must be xj.Tap by layer, as {{3: xj.Tap(read=True)}}, got {format_value(taps)}"
            )
        for layer, tap in taps.items():
            if tap.edit is not None and not callable(tap.edit):
                raise InputError(f"edit of a tap must be a function, got {format_value(tap.edit)}")
            if not isinstance(layer, int | np.integer) or not -1 <= layer < L:
                what = f"-1, the embeddings, or a layer from 0 to {L - 1}"
                raise InputError(f"taps: give {what}, got {format_value(layer)}")
        self.taps = {int(layer): taps[layer] for layer in sorted(taps)}
        self.reads: dict[int, jax.Array] = {}

    def __call__(  # noqa: PLR0913  as `run_layers`
        self, layers, config: ModelConfig, kinds, caches, x_BTD, positions: Positions, kv, impl, remat
    ) -> tuple[Any, tuple, list]:
        if isinstance(layers, dict):
            raise InputError("taps need layers that are not stacked: give unstack_layers' tree")
        experts: list[Any] = []
        for layer in sorted({*self.taps, config.num_hidden_layers - 1}):
            part = slice(len(experts), layer + 1)
            args = config, kinds[part], caches[part], x_BTD, positions.of_layers(part), kv, impl, remat
            x_BTD, kv, experts_of_part = run_layers(layers[part], *args)
            experts += experts_of_part
            if layer in self.taps:
                x_BTD = self._tap(layer, x_BTD, config)
        return x_BTD, kv, experts

    def _tap(self, layer: int, x_BTD: jax.Array, config: ModelConfig) -> jax.Array:
        tap = self.taps[layer]
        D = config.hidden_size
        hidden_BTD = plugin("rotation", "unrotate")(x_BTD, D) if config.rotated else x_BTD
        if tap.edit is not None:
            edited_BTD = tap.edit(hidden_BTD, tap.args)
            got = _describe(edited_BTD)
            if got != (wanted := _describe(hidden_BTD)):
                name = getattr(tap.edit, "__qualname__", repr(tap.edit))
                raise InputError(f"edit {name} after layer {layer} returned {got}, expected {wanted}")
            hidden_BTD = edited_BTD
            x_BTD = plugin("rotation", "rotate")(edited_BTD, D) if config.rotated else edited_BTD
        if tap.read:
            self.reads[layer] = hidden_BTD
        return x_BTD


def check_edits(taps: Any, config: ModelConfig, function: str) -> None:
    """Raises InputError where taps are none, or one reads, for a function that returns no hidden states."""
    if any(tap.read for tap in TappedLayers(taps, config).taps.values()):
        raise InputError(f"{function} returns no hidden states: use hidden_states for a tap that reads")


def _describe(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array) else format_value(x)
