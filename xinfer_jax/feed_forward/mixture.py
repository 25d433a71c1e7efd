"""`Mixture`: a mixture of experts as the feed-forward of a layer."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..config.layer_spec import ExpertsSpec, MlpSpec
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..ops.operation import run
from ..weights.layers import Norm, linear, norm
from ..weights.param_specs import Axis, dense, tensor
from ..weights.params import Params
from .experts import mixture_of_experts
from .feed_forward import FeedForward
from .mlp import Mlp, gated_mlp
from .routers import router_of

_FEATURES = ("scales", "leaf formats")


class Mixture(FeedForward):
    """A mixture of experts, whose spec is an `ExpertsSpec`."""

    unsupported = dict.fromkeys(_FEATURES, "a mixture of experts")

    def param_specs(self) -> Params:
        spec = self.spec
        d = (self.config.hidden_size, "embed")
        f = (spec.intermediate_size, None)
        tree: Params = {
            "router": router_of(self.config, self.spec).param_specs(),
            "experts": {"gate": self._stack(f, d), "up": self._stack(f, d), "down": self._stack(d, f)},
        }
        if width := spec.shared_intermediate_size:
            tree["shared"] = Mlp(self.config, MlpSpec(width)).param_specs()
            if spec.shared_gated:
                tree["shared_gate"] = dense((1, None), d, stays_float=True)
        return tree

    def _stack(self, outputs: Axis, inputs: Axis) -> Params:
        """Returns the specs of a matrix of all experts, and of their biases."""
        experts = (self.spec.num_experts, "experts")
        bias = {"bias": tensor(experts, outputs, init="small", stays_float=True)} if self.spec.bias else {}
        return {"weight": tensor(experts, outputs, inputs)} | bias

    def forward(
        self, params, x_BTD, before, residual, run_config, given_BTU=None
    ) -> tuple[jax.Array, jax.Array]:
        x_BTD, gate_BTD, *chosen = self.route(params, x_BTD, before, run_config, given_BTU)
        out_BTD = mixture_of_experts(x_BTD, params, self.config, run_config, chosen=chosen)
        if self.spec.shared_intermediate_size:  # an expert that all tokens use
            shared_BTD = gated_mlp(x_BTD, params["shared"], self.config, run_config)
            out_BTD = out_BTD + (shared_BTD if gate_BTD is None else gate_BTD * shared_BTD)
        return out_BTD if residual is None else residual + out_BTD, chosen[1]

    def route(
        self,
        params: Params,
        x_BTD: jax.Array,
        before: Norm | None,
        run_config: RunConfig,
        given_BTU: jax.Array | None,
    ) -> tuple[jax.Array, ...]:
        """Returns x after its norm, the factor of the shared expert for each feature (None without one), and
        the weights and experts of each token.
        """
        leaves: Params = {name: params[name] for name in ("router", "shared_gate") if name in params}
        if before is not None:
            leaves["mlp_norm"] = before.weight
        plain = partial(route, config=self.config, spec=self.spec)
        static = dict(config=self.config)
        operands: dict[str, Any] = dict(x_BTD=x_BTD, leaves=leaves, given_BTU=given_BTU)
        return run("route", plain, run_config, derivative=plain, static=static, **operands)


def route(x_BTD: jax.Array, leaves: Params, given_BTU: Any, config: ModelConfig, spec: ExpertsSpec) -> tuple:
    """Runs `Mixture.route` in plain jnp. leaves: "router", and "mlp_norm" and "shared_gate" if there are
    any.
    """
    x_BTD = norm(x_BTD, leaves, "mlp_norm", config) if "mlp_norm" in leaves else x_BTD
    gate = leaves.get("shared_gate")
    gate_BTD = gate and jnp.broadcast_to(jax.nn.sigmoid(linear(x_BTD, gate)), x_BTD.shape)
    return x_BTD, gate_BTD, *router_of(config, spec).choose(leaves["router"], x_BTD, given_BTU)
