"""`XieluMlp`: an MLP without a gate, whose activation has parameters (xIELU, Huang & Schlag 2024)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ..config.layer_spec import MlpSpec
from ..weights.layers import linear, products
from ..weights.param_specs import ParamSpec, tensor
from ..weights.params import Params
from .mlp import Mlp

_CONSTANTS = dict(beta=0.5, eps=-1e-6)  # numbers of every published model, which files have too


@dataclasses.dataclass(frozen=True)
class XieluMlpSpec(MlpSpec):
    """An MLP with the activation xIELU: down(xielu(up(x)))."""

    kind = "xielu_mlp"

    gated: bool = False


class XieluMlp(Mlp):
    """An MLP whose spec is a `XieluMlpSpec`."""

    names = Mlp.names | {
        f"xielu.{leaf}": f"mlp.act_fn.{leaf}" for leaf in ("alpha_p", "alpha_n", *_CONSTANTS)
    }

    def param_specs(self) -> Params:
        alphas = dict.fromkeys(("alpha_p", "alpha_n"), tensor((1, None), init="small"))
        constants = {name: ParamSpec((1,), (None,), init=value) for name, value in _CONSTANTS.items()}
        return super().param_specs() | {"xielu": alphas | constants}

    def forward(self, params, x_BTD, before, residual, run_config, given_BTU=None) -> tuple[jax.Array, None]:
        (inner_BTF,) = products(x_BTD, [params["up"]], before=before, run_config=run_config)
        inner_BTF = xielu(inner_BTF, params["xielu"])
        options = dict(over=run_config.over, residual=residual, run_config=run_config)
        return linear(inner_BTF, params["down"], **options), None


def xielu(x: jax.Array, params: Params) -> jax.Array:
    """Returns alpha_p x² + beta x where x is positive, and alpha_n (exp(x) - 1 - x) + beta x elsewhere, in
    the dtype of x. Both alphas are positive functions of the parameters of these names. Constants have no
    gradient.
    """
    numbers = {name: leaf.astype(jnp.float32) for name, leaf in params.items()}
    beta, eps = (lax.stop_gradient(numbers[name]) for name in _CONSTANTS)
    alpha_p = jax.nn.softplus(numbers["alpha_p"])
    alpha_n = beta + jax.nn.softplus(numbers["alpha_n"])
    x32 = x.astype(jnp.float32)
    negative = (jnp.expm1(jnp.minimum(x32, eps)) - x32) * alpha_n
    return (jnp.where(x32 > 0, alpha_p * x32 * x32, negative) + beta * x32).astype(x.dtype)
