"""`ScaledMlp`: an MLP with factors of its gate and output (Falcon-H1)."""

import dataclasses

import jax

from ..config.layer_spec import MlpSpec
from ..weights.layers import activation, linear, products, scaled
from .mlp import Mlp


@dataclasses.dataclass(frozen=True)
class ScaledMlpSpec(MlpSpec):
    """An MLP with two factors: down_multiplier * down(activation(gate_multiplier * gate) * up)."""

    kind = "scaled_mlp"

    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0


class ScaledMlp(Mlp):
    """The feed-forward whose spec is a `ScaledMlpSpec`."""

    def forward(self, params, x_BTD, before, residual, run_config, given_BTU=None) -> tuple[jax.Array, None]:
        leaves = [params["gate"], params["up"]]
        gate_BTF, up_BTF = products(x_BTD, leaves, before=before, run_config=run_config)
        inner_BTF = activation(self.config)(scaled(gate_BTF, self.spec.gate_multiplier)) * up_BTF
        out_BTD = linear(inner_BTF, params["down"], over=run_config.over, run_config=run_config)
        out_BTD = scaled(out_BTD, self.spec.down_multiplier)
        return out_BTD if residual is None else residual + out_BTD, None

    @property
    def unsupported(self) -> dict[str, str]:
        return super().unsupported | {"scales": "an MLP with factors"}
