"""`Router`, which chooses the experts of each token, and the softmax router."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config.layer_spec import ExpertsSpec
from ..config.model_config import ModelConfig
from ..registry import plugin
from ..weights.layers import linear, rms_norm
from ..weights.param_specs import dense, tensor
from ..weights.params import Params


@dataclasses.dataclass(frozen=True)
class Router:
    """The router of a mixture. A kind is a subclass with a line in `plugins.TABLE`."""

    config: ModelConfig
    spec: ExpertsSpec  # of the mixture: its `router` is of the router's kind

    def param_specs(self) -> Params:
        """Returns the specs of the tree "router" of a layer: of the matrix of scores, and of its bias if
        experts have biases.
        """
        d = (self.config.hidden_size, "embed")
        return dense((self.spec.num_experts, None), d, self.spec.bias, stays_float=True)

    def choose(
        self, params: Params, x_BTD: jax.Array, given_BTU: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the weights of each token's experts, float32 [M, U], and the experts, int32 [M, U].

        Args:
            params: the tree "router" of the layer.
            x_BTD: its input.
            given_BTU: experts in place of the experts with the best scores. A token with -1 has the best.
        """
        raise NotImplementedError

    @staticmethod
    def given_or(expert_MU: jax.Array, given_BTU: jax.Array) -> jax.Array:
        """Returns the given experts. A token with -1 has the experts that the router chose."""
        given_MU = given_BTU.reshape(expert_MU.shape)
        return jnp.where((given_MU < 0).any(-1, keepdims=True), expert_MU, given_MU)


class SoftmaxRouter(Router):
    """The router whose spec is a `SoftmaxRouterSpec`.

    Softmax comes before top-k, as in Qwen's models. Softmax of the chosen scores alone, as in gpt-oss, is the
    same with normalized weights.
    """

    def param_specs(self) -> Params:
        spec: Any = self.spec.router
        tree = super().param_specs()
        if spec.input_scale:
            tree["scale"] = tensor((self.config.hidden_size, "embed"), init="ones")
        if spec.per_expert_scale:
            tree["per_expert_scale"] = tensor((self.spec.num_experts, None), init="ones")
        return tree

    def choose(
        self, params: Params, x_BTD: jax.Array, given_BTU: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        spec: Any = self.spec.router
        x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
        if spec.input_scale:
            x_MD = rms_norm(x_MD, params["scale"], self.config.rms_norm_eps) * x_MD.shape[1] ** -0.5
        score_MX = linear(x_MD, params, jnp.float32)
        score_MX = score_MX if spec.norm_topk_prob else jax.nn.softmax(score_MX, -1)
        weight_MU, expert_MU = lax.top_k(score_MX, self.spec.num_experts_per_tok)
        if given_BTU is not None:
            expert_MU = self.given_or(expert_MU, given_BTU)
            weight_MU = jnp.take_along_axis(score_MX, expert_MU, -1)
        weight_MU = jax.nn.softmax(weight_MU, -1) if spec.norm_topk_prob else weight_MU
        if spec.per_expert_scale:
            weight_MU = weight_MU * params["per_expert_scale"][expert_MU]
        return weight_MU, expert_MU


def router_of(config: ModelConfig, spec: ExpertsSpec) -> Router:
    """Returns the router of a mixture, by the kind of its spec."""
    return plugin("router", spec.router.kind)(config, spec)
