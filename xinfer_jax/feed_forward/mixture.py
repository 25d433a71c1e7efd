"""`Mixture`: a mixture of experts as the feed-forward of a layer, alone or next to an MLP."""

from .. import plugin
from ..config.layer_spec import MlpSpec
from ..weights.param_specs import Axis, dense, norm_spec, tensor
from ..weights.params import Params
from .feed_forward import FeedForward
from .mlp import Mlp
from .routers import Router

_FEATURES = ("rotations", "scales", "leaf formats")


class Mixture(FeedForward):
    """A mixture of experts, whose spec is an `ExpertsSpec`."""

    @property
    def router(self) -> Router:
        """What chooses the experts."""
        return plugin("router", self.spec.router.kind)(self.config, self.spec)

    def param_specs(self) -> Params:
        spec = self.spec
        d = (self.config.hidden_size, "embed")
        f = (spec.intermediate_size, None)
        tree: Params = {
            "router": self.router.param_specs(),
            "experts": {"gate": self._stack(f, d), "up": self._stack(f, d), "down": self._stack(d, f)},
        }
        if width := spec.shared_intermediate_size:
            tree["shared"] = Mlp(self.config, MlpSpec(width)).param_specs()
            if spec.shared_gated:
                tree["shared_gate"] = dense((1, None), d, stays_float=True)
        return tree

    def _stack(self, outputs: Axis, inputs: Axis) -> Params:
        """The specs of a matrix of all experts, and of their biases."""
        experts = (self.spec.num_experts, "experts")
        bias = {"bias": tensor(experts, outputs, init="small", stays_float=True)} if self.spec.bias else {}
        return {"weight": tensor(experts, outputs, inputs)} | bias

    @property
    def unsupported(self) -> dict[str, str]:
        return dict.fromkeys(_FEATURES, "a mixture of experts")


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

    @property
    def unsupported(self) -> dict[str, str]:
        mlp, mixture = self.parts
        return mlp.unsupported | mixture.unsupported
