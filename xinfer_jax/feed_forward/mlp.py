"""`Mlp`: an MLP as the feed-forward of a layer, and the functions that experts share with it."""

import jax

from ..config.model_config import ModelConfig
from ..config.run_config import PLAIN, RunConfig
from ..weights.layers import Norm, activation, joint_norms, linear, products
from ..weights.param_specs import dense, norm_spec
from ..weights.params import Params
from .feed_forward import FeedForward


class Mlp(FeedForward):
    """An MLP, whose spec is an `MlpSpec`."""

    names = {leaf: f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")}

    def param_specs(self) -> Params:
        spec = self.spec
        d = (self.config.hidden_size, "embed")
        f = (spec.intermediate_size or self.config.intermediate_size, "mlp")
        up = dense(f, d, spec.bias)
        tree: Params = {**({"gate": up} if spec.gated else {}), "up": up, "down": dense(d, f, spec.bias)}
        return tree | ({"down_norm": norm_spec(f)} if spec.down_norm else {})

    def forward(self, params, x_BTD, before, residual, run_config, given_BTU=None) -> tuple[jax.Array, None]:
        around = dict(before=before, down_norm=self.spec.down_norm, run_config=run_config)
        inner_BTF = mlp_intermediate(x_BTD, params, self.config, **around)
        options = dict(over=run_config.over, residual=residual, run_config=run_config)
        return linear(inner_BTF, params["down"], **options), None

    @property
    def unsupported(self) -> dict[str, str]:
        if self.spec.down_norm:
            return {"scales": "norms of another kind or in other places"}
        return {} if self.spec.gated else {"scales": "an MLP without a gate"}


def mlp_intermediate(
    x: jax.Array,
    layer: Params,
    config: ModelConfig,
    *,
    down_norm: bool = False,
    before: Norm | None = None,
    run_config: RunConfig = PLAIN,
) -> jax.Array:
    """Returns the input of an MLP's last matrix, [..., D] -> [..., F]: activation(gate(x)) * up(x), or
    without a gate activation(up(x)). With down_norm it is after the norm of that name. before and run_config:
    see `products`.
    """
    if "gate" not in layer:
        return activation(config)(products(x, [layer["up"]], before=before, run_config=run_config)[0])
    leaves = [layer["gate"], layer["up"]]
    (inner,) = products(x, leaves, before=before, activation=config.hidden_act, run_config=run_config)
    return joint_norms([inner], layer, ["down_norm"], config, run_config)[0] if down_norm else inner


def gated_mlp(x: jax.Array, layer: Params, config: ModelConfig, run_config: RunConfig = PLAIN) -> jax.Array:
    """Computes SwiGLU, GeGLU (Shazeer 2020): down(activation(gate(x)) * up(x)), [..., D] -> [..., D]."""
    inner = mlp_intermediate(x, layer, config, run_config=run_config)
    return linear(inner, layer["down"], over=run_config.over, run_config=run_config)
