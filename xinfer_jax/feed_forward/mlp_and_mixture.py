"""`MlpAndMixture`: an MLP and a mixture of experts side by side, as the feed-forward of a layer."""

import dataclasses

import jax

from ..config.layer_spec import ExpertsSpec, FeedForwardSpec, MlpSpec
from ..weights.layers import norm
from ..weights.param_specs import norm_spec
from ..weights.params import Params
from .experts import mixture_of_experts
from .feed_forward import FeedForward
from .mixture import Mixture
from .mlp import Mlp


@dataclasses.dataclass(frozen=True)
class MlpAndExpertsSpec(FeedForwardSpec):
    """An MLP and a mixture of experts, whose outputs, each after a norm, are added."""

    kind = "mlp_and_experts"

    mlp: MlpSpec
    experts: ExpertsSpec


class MlpAndMixture(FeedForward):
    """An MLP and a mixture of experts, whose outputs, each after a norm, are added (Gemma 4). Its spec is an
    `MlpAndExpertsSpec`.
    """

    names = Mlp.names

    @property
    def parts(self) -> tuple[Mlp, Mixture]:
        """The MLP and the mixture."""
        return Mlp(self.config, self.spec.mlp), Mixture(self.config, self.spec.experts)

    def param_specs(self) -> Params:
        norms = ("mlp_out_norm", "experts_norm", "experts_out_norm")
        tree = {name: norm_spec((self.config.hidden_size, "embed")) for name in norms}
        for part in self.parts:
            tree |= part.param_specs()
        return tree

    def forward(
        self, params, x_BTD, before, residual, run_config, given_BTU=None
    ) -> tuple[jax.Array, jax.Array]:
        mlp, mixture = self.parts
        x_BTD, _, *chosen = mixture.route(params, x_BTD, None, run_config, given_BTU)
        routed_BTD = norm(x_BTD, params, "experts_norm", self.config)
        mixed_BTD = mixture_of_experts(routed_BTD, params, self.config, run_config, chosen=chosen)
        fed_BTD, _ = mlp.forward(params, x_BTD, before, None, run_config)
        mixed_BTD = norm(mixed_BTD, params, "experts_out_norm", self.config)
        out_BTD = norm(fed_BTD, params, "mlp_out_norm", self.config) + mixed_BTD
        return out_BTD if residual is None else residual + out_BTD, chosen[1]

    @property
    def unsupported(self) -> dict[str, str]:
        mlp, mixture = self.parts
        return mlp.unsupported | mixture.unsupported
