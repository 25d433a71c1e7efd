"""`FeedForward`: the part of a layer that works on one token at a time, with its parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..weights.layers import Norm
from ..weights.params import Params


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """A feed-forward of a model. A kind is a subclass with a line in `plugins.TABLE`."""

    config: ModelConfig
    spec: Any  # the `FeedForwardSpec`, of its kind

    # The names of leaves in a Hugging Face checkpoint, within a layer, of families that have no others.
    names: ClassVar[Mapping[str, str]] = {}

    def param_specs(self) -> Params:
        """Returns the specs of its parameters by name, without the norms around it."""
        raise NotImplementedError

    def forward(
        self,
        params: Params,
        x_BTD: jax.Array,
        before: Norm | None,
        residual: jax.Array | None,
        run_config: RunConfig,
        given_BTU: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the output, [B, T, D], and the experts of each token, int32 [M, U], if it has some.

        Args:
            params: the parameters of the layer.
            x_BTD: hidden states.
            before: a norm of the hidden states, which comes first. None: there is none.
            residual: an array that is added to the output, [B, T, D]. None: nothing is.
            run_config: the settings of the program.
            given_BTU: experts in place of the router's choice. A token with -1 has the router's choice.
        """
        raise NotImplementedError

    @property
    def unsupported(self) -> dict[str, str]:
        """Features that it does not support, of `config.unsupported`, with the part that is the reason."""
        return {}
