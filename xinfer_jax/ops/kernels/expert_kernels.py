"""A mixture of experts by a kernel."""

from functools import partial
from typing import Any

import jax

import kernels_pallas

from ...config.model_config import ModelConfig
from ...model.experts import swish
from ...model.layers import activation
from ...weights.mxfp4 import Mxfp4Weight
from ...weights.params import Params
from ...weights.quantized_weight import is_quantized
from ..forms import Kernel, named


def select_experts(impl: str | None, x_MD: Any, experts: Params) -> kernels_pallas.Selection:
    """The implementation for these tokens and experts; raises as `named`."""
    weights = [experts[name]["weight"] for name in ("gate", "up", "down")]
    is_mxfp4 = all(isinstance(weight, Mxfp4Weight) for weight in weights)
    obstacle = "quantized experts" if any(map(is_quantized, weights)) and not is_mxfp4 else None
    args = () if obstacle else _arrays(experts)
    return named("gated_experts", impl, x_MD, *args, obstacle=obstacle)


def _arrays(experts: Params) -> list[Any]:
    """The matrices of gate, up and down as kernels take them, then their biases if there are any."""
    leaves = [experts[name] for name in ("gate", "up", "down")]
    arrays = [leaf[kind] for kind in ("weight", "bias") for leaf in leaves if kind in leaf]
    return [kernels_pallas.Mxfp4(x.values, x.scale) if isinstance(x, Mxfp4Weight) else x for x in arrays]


def _select(impl: str | None, operands: Any, static: Any) -> kernels_pallas.Selection:
    return select_experts(impl, operands[0], operands[3])


def _run(impl: str, x_MD, weight_MU, expert_MU, experts: Params, config: ModelConfig) -> jax.Array:
    args = (x_MD, weight_MU, expert_MU, *_arrays(experts))
    of_model: dict[str, Any] = dict(activation=activation(config), num_experts=config.num_experts)
    if config.experts and (swiglu := config.experts.swiglu):
        of_model |= dict(activation=partial(swish, swiglu.alpha), limit=swiglu.limit)
    return kernels_pallas.run_kernel(impl, "gated_experts", *args, **of_model)


EXPERTS = Kernel(_select, _run)
