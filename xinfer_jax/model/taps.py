"""Taps: the residual stream after layers or their attention, read, or replaced by a caller's function."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..checks import check_integer, number_array
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..errors import InputError, format_value
from .caller_functions import call_function, check_function, check_result
from .decoder_layer import LayerGroup, LayerInputs, LayersOutput, Positions, run_layers
from .extras import Extras


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tap:
    """An edit or a read of the residual stream after a layer or after attention.

    Pass taps to `run_model`, `prefill` or `decode_loop`. A tap is a pytree, and its arrays are traced. For
    example, `{3: xj.Tap(read=True)}` returns the hidden states after layer 3.

    Attributes:
        args: the second argument of `edit`: a pytree of arrays.
        edit: a pure function `(hidden_BTD, args)` that returns the new hidden states. None: they do not
            change. A jitted call is compiled for each function, so a new lambda compiles again. Put arrays
            into `args`.
        read: True returns the hidden states, after `edit`.
    """

    args: Any = None
    edit: Callable[[jax.Array, Any], jax.Array] | None = dataclasses.field(
        default=None, metadata=dict(static=True)
    )
    read: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @classmethod
    def steer(cls, vector: Any, factor: float = 1.0) -> "Tap":
        """Returns a tap that adds `factor * vector` to the hidden states of all tokens (steering).

        `generate` takes it. An engine takes it if it was made with this vector (`EngineOptions.taps`).

        Args:
            vector: a float array [D].
            factor: a number. Another number compiles nothing.

        Raises:
            InputError: the vector is not an array [D] of numbers, or the factor is not a number.
        """
        for name, value, ndim in (("vector", vector, 1), ("factor", factor, 0)):
            array = number_array(value)
            if array is None or array.ndim != ndim:
                what = "an array [D] of numbers" if ndim else "a number"
                raise InputError(f"the {name} of Tap.steer must be {what}, got {format_value(value)}")
        return cls((vector, factor), add_vector)

    def __post_init__(self) -> None:
        check_function("edit of a Tap", self.edit)
        if not isinstance(self.read, bool):
            raise InputError(f"read of a Tap must be True or False, got {format_value(self.read)}")


def add_vector(hidden_BTD: jax.Array, args: Any) -> jax.Array:
    """Returns `Tap.steer`, in the precision in which an engine adds its vectors."""
    vector_D, factor = args
    if (D := hidden_BTD.shape[-1]) != len(vector_D):
        raise InputError(f"the vector of Tap.steer has {len(vector_D)} numbers, and the model's states {D}")
    added_D = jnp.asarray(vector_D, jnp.float32) * jnp.asarray(factor, jnp.float32)
    return hidden_BTD + added_D.astype(hidden_BTD.dtype)


# By layer, or by (layer, "attention") and (layer, "layer"): keys of a pytree are all of one kind.
Taps = Mapping[int, Tap] | Mapping[tuple[int, str], Tap]


class TappedLayers:
    """`run_layers` with taps. `reads` has the hidden states of the taps that read, by their keys."""

    def __init__(self, taps: Any, config: ModelConfig):
        """Raises InputError if taps are no `Tap`s by layers of the model."""
        if not isinstance(taps, Mapping) or not all(isinstance(tap, Tap) for tap in taps.values()):
            what = "taps must be xj.Tap by layer, as {3: xj.Tap(read=True)}"
            raise InputError(f"{what}, got {format_value(taps)}")
        for tap in taps.values():
            if tap.edit is None and tap.args is not None:
                raise InputError(f"a Tap has args without edit, which takes them: {format_value(tap.args)}")
        self._keys = {_place(key, config): key for key in taps}
        self.taps = {place: taps[key] for place, key in self._keys.items()}
        self.reads: dict[Any, jax.Array] = {}

    def __call__(
        self,
        layers: Any,
        group: LayerGroup,
        x_BTD: Any,
        positions: Positions,
        inputs: tuple[LayerInputs, ...],
        extras: Extras,
        caches: tuple[Any, ...],
        run_config: RunConfig,
    ) -> LayersOutput:
        if isinstance(layers, dict):
            raise InputError("taps need layers that are not stacked: give unstack_layers' tree")
        experts: list[Any] = []
        x_BTD = self._tap((-1, "layer"), x_BTD, group.config)
        for layer in range(len(layers)):
            one = slice(layer, layer + 1)
            halves = ("attention", "mlp") if (layer, "attention") in self.taps else (None,)
            for half in halves:
                # A row's vector is added after the whole layer.
                own = extras.of_layers(one)
                own = own._replace(vectors=()) if half == "attention" else own
                args = x_BTD, positions, inputs[one], own, caches
                half_config = dataclasses.replace(run_config, half=half)
                out = run_layers(layers[one], group.part(one), *args, half_config)
                x_BTD, caches, experts_of_layer = out
                after = "attention" if half == "attention" else "layer"
                x_BTD = self._tap((layer, after), x_BTD, group.config)
            experts += experts_of_layer
        return LayersOutput(x_BTD, caches, experts)

    def _tap(self, place: tuple[int, str], x_BTD: jax.Array, config: ModelConfig) -> jax.Array:
        tap = self.taps.get(place)
        if tap is None:
            return x_BTD
        key = self._keys[place]
        if tap.edit is not None:
            edited_BTD = call_function("edit", tap.edit, x_BTD, tap.args)
            check_result("edit", tap.edit, edited_BTD, x_BTD, f" after layer {key}")
            x_BTD = edited_BTD
        if tap.read:
            self.reads[key] = x_BTD
        return x_BTD


def _place(key: Any, config: ModelConfig) -> tuple[int, str]:
    """Returns the layer, and "layer" or "attention", after which a key's tap stands."""
    layer, after = key if isinstance(key, tuple) and len(key) == 2 else (key, "layer")
    least = -1 if after == "layer" else 0
    most = config.num_hidden_layers - 1
    layer = check_integer("taps: layer (-1: the embeddings)", layer, least, most)
    if after not in ("layer", "attention"):
        raise InputError(f'taps: a key is a layer, (layer, "attention") or (layer, "layer"), got {key}')
    return layer, after


def check_none_reads(taps: Any, config: ModelConfig, function: str) -> dict[tuple[int, str], Tap]:
    """Returns the taps by pairs in a dict. Raises InputError if they are no `Tap`s, or one reads: `function`
    does not return the values that it reads.
    """
    checked = TappedLayers(taps, config).taps
    if any(tap.read for tap in checked.values()):
        raise InputError(f"{function} returns no hidden states that taps read: use run_model")
    return checked


def check_edits(taps: Any, config: ModelConfig, function: str) -> dict[tuple[int, str], Tap]:
    """Runs `check_none_reads`, with arrays in place of numbers: programs are not compiled for each."""
    checked = check_none_reads(taps, config, function)
    try:
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), checked)
    except (TypeError, ValueError) as error:
        raise InputError(f"args of a Tap must be a pytree of arrays: {error}") from error
