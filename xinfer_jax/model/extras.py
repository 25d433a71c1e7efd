"""`Extras`: the arrays that rows bring along in addition to their tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..weights.params import Params


class Extras(NamedTuple):
    """The arrays that rows bring along in addition to their tokens: a pytree, an explicit argument of every
    function that runs a model.

    A part that is absent leaves no trace in the program.
    """

    routed_experts: Any = None  # int32 [B, T, L, U]: experts of tokens, -1: those that the router chooses
    adapters: Params = {}  # in the places of matrices in the parameters: `RowAdapters`
    adapter_B: jax.Array | None = None  # int32: which one each row has; -1: none
    vectors: tuple[jax.Array, ...] = ()  # of each layer [N, D]: added to the hidden states after it, …
    factor_BN: jax.Array | None = None  # … times these factors of the rows
    taps: Any = None  # `taps.Taps`: by layer, what is done with the residual stream after it

    def adapted(self, params: Params) -> Params:
        """Returns the parameters with the rows' adapters. The tree may be a part of the model's, with its
        layers.
        """
        if not self.adapters:
            return params
        from ..weights.adapted_weight import with_row_adapters  # optional: adapters

        return with_row_adapters(params, self.adapters, self.adapter_B)

    def of_layers(self, layers: slice) -> "Extras":
        """Returns the extras of these layers: their adapters and vectors."""
        adapters = {"layers": self.adapters["layers"][layers]} if "layers" in self.adapters else {}
        return self._replace(adapters=adapters, vectors=self.vectors[layers])

    def steered(self, x_BTD: jax.Array, layer: int) -> jax.Array:
        """Returns the hidden states after a layer, with the rows' vectors."""
        if not self.vectors:
            return x_BTD
        factor_BN: Any = self.factor_BN
        added_BD = jnp.sum(self.vectors[layer] * factor_BN[..., None], 1)
        return x_BTD + added_BD[:, None].astype(x_BTD.dtype)


NO_EXTRAS = Extras()
