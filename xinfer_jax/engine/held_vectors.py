"""`HeldVectors`: vectors that an engine is made with, which rows may add to hidden states after layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..checks import check_integer, is_traced, number_array
from ..errors import InputError, format_value
from ..model.taps import Tap, add_vector
from ..weights.params import Params, activation_dtype
from .held_table import HeldTable

_MAX_FACTORS = 64  # arrays that are kept


class HeldVectors(HeldTable[Mapping[int, Any]]):
    """N vectors by name, each of one or several layers. A row has a factor for each."""

    noun = "tap"

    def __init__(self, given: Any, params: Params, config: Any):
        """Makes the vectors. given: for each name, float [D] by layer. None: none. Raises InputError."""
        super().__init__()
        given = self.check_given(given, "vectors by layer, as {'calm': {12: vector}}")
        if not given:
            return
        if isinstance(params["layers"], dict):
            raise InputError("taps need layers that are not stacked: give unstack_layers' tree")
        D = config.hidden_size
        dtype = activation_dtype(params)
        self._vector_LND = np.zeros((config.num_hidden_layers, len(given), D), np.float32)
        self._placed: tuple[jax.Array, ...] = ()
        self._factors: dict[bytes, jax.Array] = {}  # of the rows of earlier calls, on the devices
        for n, (name, by_layer) in enumerate(given.items()):
            if not isinstance(by_layer, Mapping):
                raise InputError(f"tap {name!r} must be vectors by layer, got {format_value(by_layer)}")
            for layer, vector in by_layer.items():
                at = check_integer(f"tap {name!r}: layer", layer, 0, config.num_hidden_layers - 1)
                v_D = number_array(vector)
                if (
                    v_D is None
                    or is_traced(v_D)
                    or v_D.shape != (D,)
                    or not np.isfinite(v_D.astype(dtype)).all()
                ):
                    what = f"{D} numbers that are finite in {dtype}"
                    raise InputError(f"tap {name!r}: layer {at} must have {what}, got {format_value(vector)}")
                self._vector_LND[at, n] = np.asarray(v_D, np.float32)
        self.replace_all(given)

    def of_request(self, given: Any) -> tuple[float, ...]:
        """Returns the factors of a row, for `GenerateOptions.taps` of a request: factors by name, or taps by
        layer as `generate` takes them, made by `Tap.steer` of vectors that the engine holds. (): all factors
        are 0. Raises InputError.
        """
        if isinstance(given, Mapping) and any(isinstance(tap, Tap) for tap in given.values()):
            given = self._by_name(given)
        for name, factor in self.check_request(given, "factors").items():
            self._checked_factor(repr(name), factor)
        factors = tuple(float(given.get(name, 0.0)) for name in self)
        return factors if any(factors) else ()

    @staticmethod
    def _checked_factor(name: str, factor: Any) -> float:
        """Returns a factor. Raises InputError for a value that is no number up to 1e6. name: the name of its
        tap.
        """
        number = number_array(factor)
        if number is None or number.ndim or not abs(number) <= 1e6:
            raise InputError(f"tap {name}: the factor must be a number up to 1e6, got {format_value(factor)}")
        return float(number)

    def _by_name(self, taps: Mapping[Any, Any]) -> dict[str, Any]:
        """Returns the factors by name for taps by layer. Raises InputError for taps of other vectors or
        kinds.
        """
        left: dict[Any, tuple[np.ndarray, float]] = {}
        for place, tap in taps.items():
            layer = place[0] if isinstance(place, tuple) and place[1:] == ("layer",) else place
            if not isinstance(tap, Tap) or tap.edit is not add_vector or tap.read:
                raise InputError(
                    f"taps of a request: the tap of layer {place} is not of Tap.steer: a request can only add"
                    " vectors, so use generate or run_model"
                )
            vector, factor = tap.args
            left[layer] = np.asarray(vector, np.float32), self._checked_factor(f"layer {layer}", factor)
        factors: dict[str, Any] = {}
        for name, by_layer in sorted(self.items(), key=lambda item: -len(item[1])):
            if not by_layer.keys() <= left.keys():
                continue
            same = (
                np.array_equal(left[layer][0], np.asarray(x, np.float32)) for layer, x in by_layer.items()
            )
            (factor, *others) = {left[layer][1] for layer in by_layer} or {0.0}
            if all(same) and not others:
                factors[name] = factor
                left = {layer: pair for layer, pair in left.items() if layer not in by_layer}
        if left:
            raise InputError(
                f"taps of a request: the engine {self.in_words}, and none with the vector of layer"
                f" {next(iter(left))}: make it with taps={{name: {{layer: vector}}}}"
            )
        return factors

    def of_rows(self, factors: Sequence[Sequence[float]], place: Any) -> tuple[Any, jax.Array]:
        """Returns `Extras.vectors` and `factor_BN` of rows with these factors. (): none. place: the place of
        arrays on the devices. None: the place where programs run.
        """
        if not self._placed:
            self._placed = tuple(jax.device_put(vector_ND, place) for vector_ND in self._vector_LND)
        none = (0.0,) * len(self)
        factor_BN = np.array([row or none for row in factors], np.float32)
        key = factor_BN.tobytes()
        if key not in self._factors:
            if len(self._factors) >= _MAX_FACTORS:
                self._factors.clear()
            self._factors[key] = jax.device_put(factor_BN, place)  # over processes they all compare it
        return self._placed, self._factors[key]
