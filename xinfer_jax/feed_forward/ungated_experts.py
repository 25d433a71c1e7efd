"""`UngatedMixture`: a mixture of experts without gates, which may work on narrower vectors than the hidden
states (latent experts), as in Nemotron-H.
"""

import dataclasses
from typing import Any

import jax

from ..config.layer_spec import ExpertsSpec, MlpSpec
from ..weights.layers import linear
from ..weights.param_specs import dense
from ..weights.params import Params
from .experts import mixture_of_experts
from .mixture import Mixture
from .mlp import Mlp, gated_mlp


@dataclasses.dataclass(frozen=True)
class UngatedExpertsSpec(ExpertsSpec):
    """A mixture of experts, each an MLP without a gate: down(activation(up)). The expert that all tokens use
    has no gate either.
    """

    kind = "ungated_experts"

    shared_gated: bool = False
    shared_bias: bool = False  # the expert that all tokens use, and the latent matrices, have biases
    # Experts read and write vectors of this width. A matrix before and one after them change the width. The
    # router reads the hidden states. 0: there are no such matrices.
    latent_size: int = 0


class UngatedMixture(Mixture):
    """A mixture of experts, whose spec is an `UngatedExpertsSpec`."""

    def param_specs(self) -> Params:
        spec: Any = self.spec
        d = (self.config.hidden_size, "embed")
        f = (spec.intermediate_size, None)
        latent = (spec.latent_size, None)
        width = latent if spec.latent_size else d
        tree = super().param_specs()
        tree["experts"] = {"up": self._stack(f, width), "down": self._stack(width, f)}
        if spec.latent_size:
            tree["latent_in"] = dense(latent, d, spec.shared_bias)
            tree["latent_out"] = dense(d, latent, spec.shared_bias)
        if spec.shared_intermediate_size:
            shared = MlpSpec(spec.shared_intermediate_size, bias=spec.shared_bias, gated=False)
            tree["shared"] = Mlp(self.config, shared).param_specs()
        return tree

    def forward(
        self, params, x_BTD, before, residual, run_config, given_BTU=None
    ) -> tuple[jax.Array, jax.Array]:
        x_BTD, _, *chosen = self.route(params, x_BTD, before, run_config, given_BTU)
        latent = "latent_in" in params
        inner = linear(x_BTD, params["latent_in"], run_config=run_config) if latent else x_BTD
        out_BTD = mixture_of_experts(inner, params, self.config, run_config, chosen=chosen)
        out_BTD = linear(out_BTD, params["latent_out"], run_config=run_config) if latent else out_BTD
        if "shared" in params:
            out_BTD = out_BTD + gated_mlp(x_BTD, params["shared"], self.config, run_config)
        return out_BTD if residual is None else residual + out_BTD, chosen[1]
