"""`AttentionAndMlp`: attention and an MLP side by side, which have the same input (a parallel block)."""

import dataclasses
from typing import Any

import jax

from ..config.layer_spec import AttentionSpec, MlpSpec
from ..mixers.softmax_attention import SoftmaxAttention
from ..weights.params import Params
from .mlp import Mlp


@dataclasses.dataclass(frozen=True)
class AttentionAndMlpSpec(AttentionSpec):
    """Softmax attention and an MLP of the same hidden states, whose outputs are added."""

    kind = "attention_and_mlp"

    mlp: MlpSpec = MlpSpec()


class AttentionAndMlp(SoftmaxAttention):
    """The mixer whose spec is an `AttentionAndMlpSpec`, as layers of Cohere's models have it. A layer with it
    has no feed-forward.
    """

    names = SoftmaxAttention.names | Mlp.names

    @property
    def mlp(self) -> Mlp:
        """The MLP."""
        return Mlp(self.config, self.spec.mlp)

    def param_specs(self) -> Params:
        return super().param_specs() | self.mlp.param_specs()

    def forward(
        self, params, x_BTD, positions, cache, run_config, before=None, residual=None
    ) -> tuple[jax.Array, Any]:
        sum_BTD, _ = self.mlp.forward(params, x_BTD, before, residual, run_config)
        return super().forward(params, x_BTD, positions, cache, run_config, before, sum_BTD)

    @property
    def unsupported(self) -> dict[str, str]:
        parts = super().unsupported | self.mlp.unsupported
        return parts | {"scales": "attention and an MLP side by side"}
