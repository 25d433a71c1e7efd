"""`Router`: what chooses the experts of each token; and the softmax router."""

import dataclasses
from typing import Any

from ..config.layer_spec import ExpertsSpec
from ..config.model_config import ModelConfig
from ..weights.param_specs import dense, tensor
from ..weights.params import Params


@dataclasses.dataclass(frozen=True)
class Router:
    """The router of a mixture. A kind is a subclass with a line in `plugins.TABLE`."""

    config: ModelConfig
    spec: ExpertsSpec  # of the mixture: its `router` is of the router's kind

    def param_specs(self) -> Params:
        """The specs of the tree "router" of a layer: of the matrix of scores, and of its bias if experts have
        biases.
        """
        d = (self.config.hidden_size, "embed")
        return dense((self.spec.num_experts, None), d, self.spec.bias, stays_float=True)


class SoftmaxRouter(Router):
    """The router whose spec is a `SoftmaxRouterSpec`."""

    def param_specs(self) -> Params:
        spec: Any = self.spec.router
        tree = super().param_specs()
        if spec.input_scale:
            tree["scale"] = tensor((self.config.hidden_size, "embed"), init="ones")
        if spec.per_expert_scale:
            tree["per_expert_scale"] = tensor((self.spec.num_experts, None), init="ones")
        return tree
