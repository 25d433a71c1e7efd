"""`ScaledAttention`: softmax attention with factors of its input, keys and output (Falcon-H1)."""

import dataclasses
from typing import Any

import jax

from ..config.layer_spec import AttentionSpec
from ..config.run_config import RunConfig
from ..weights.layers import Norm, normalized, scaled
from ..weights.params import Params
from .softmax_attention import SoftmaxAttention


@dataclasses.dataclass(frozen=True)
class ScaledAttentionSpec(AttentionSpec):
    """Softmax attention with three factors."""

    kind = "scaled_attention"

    in_multiplier: float = 1.0  # of hidden states
    key_multiplier: float = 1.0  # of keys
    out_multiplier: float = 1.0  # of the output


class ScaledAttention(SoftmaxAttention):
    """The mixer whose spec is a `ScaledAttentionSpec`. The cache has keys without their factor, which scores
    get instead.
    """

    def forward(
        self, params, x_BTD, positions, cache, run_config, before=None, residual=None
    ) -> tuple[jax.Array, Any]:
        out_BTD, cache = super().forward(params, x_BTD, positions, cache, run_config, before)
        out_BTD = scaled(out_BTD, self.spec.out_multiplier)
        return out_BTD if residual is None else residual + out_BTD, cache

    def project(
        self, params: Params, x_BTD: jax.Array, before: Norm | None, run_config: RunConfig
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array | None]:
        factor = self.spec.in_multiplier
        if factor != 1:
            x_BTD = scaled(x_BTD if before is None else normalized(x_BTD, before), factor)
            before = None
        return super().project(params, x_BTD, before, run_config)

    def scoring(self, params: Params) -> dict[str, Any]:
        own = super().scoring(params)
        scale = own["scoring"].scale * self.spec.key_multiplier
        return own | dict(scoring=own["scoring"]._replace(scale=scale))

    @property
    def unsupported(self) -> dict[str, str]:
        return super().unsupported | {"scales": "attention with factors"}
