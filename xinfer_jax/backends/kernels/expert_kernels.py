"""A mixture of experts by a kernel, and the operations before it by another kernel."""

from functools import partial
from typing import Any

import jax

from ... import kernels_pallas
from ...config.model_config import ModelConfig
from ...feed_forward.experts import swish
from ...kernels_pallas.reference_products import Matrix
from ...ops.forms import Kernel, named
from ...ops.operation import Call
from ...weights.fp8_weight import Fp8Weight
from ...weights.grouped_weight import GroupedWeight
from ...weights.int8_weight import Int8Weight
from ...weights.layers import activation
from ...weights.mxfp4 import Mxfp4Weight
from ...weights.padded_weight import stored_weight
from ...weights.params import AnyArray, Params
from ...weights.quantized_weight import is_quantized
from .product_kernels import Operands, select_product

_MOST_NUMBERS = 2**22  # of a router
_GROUPED_FIELDS = (  # of `GroupedTopkSpec`, which the kernel takes
    "scoring_func", "n_group", "topk_group", "group_score", "masked_score", "norm_topk_prob", "norm_epsilon",
    "norm_minimum", "routed_scaling_factor",
)  # fmt: skip


def select_experts(impl: str | None, x_MD: Any, experts: Params) -> kernels_pallas.Selection:
    """Returns the implementation for these tokens and experts. Raises as `named` does."""
    weights = [leaf["weight"] for leaf in experts.values()]
    obstacle = next(filter(None, map(_obstacle, weights)), None)
    if "gate" not in experts and "bias" in experts["up"]:
        obstacle = "experts with biases and without a gate"
    if len(set(map(_layout, weights))) > 1:
        obstacle = obstacle or "experts whose matrices have different formats"
    args = () if obstacle else _arrays({"gate": experts["up"]} | experts)
    return named("gated_experts", impl, x_MD, *args, obstacle=obstacle)


def _obstacle(weight: Any) -> str | None:
    """Returns the reason why no kernel reads these matrices, or None."""
    weight = stored_weight(weight)
    if not is_quantized(weight) or isinstance(weight, Mxfp4Weight | Fp8Weight):
        return None
    if not isinstance(weight, Int8Weight | GroupedWeight):
        return f"experts of the kind {type(weight).__name__}"
    if weight.int8_activations or weight.input_block:
        return "experts with int8 activations"
    if isinstance(weight, GroupedWeight) and (weight.offset is not None or weight.order is not None):
        return "experts with offsets of groups, or inputs in another order"
    return "experts in groups with padding" if weight.groups_with_padding else None


def _layout(weight: Any) -> tuple[Any, ...]:
    weight = stored_weight(weight)
    fields = [getattr(weight, name, None) for name in ("values", "zero")]
    return type(weight), getattr(weight, "group", None), *(getattr(x, "dtype", None) for x in fields)


def _arrays(experts: Params) -> list[Any]:
    """Returns the matrices of gate, up and down as kernels take them, then their biases if there are any.
    There may be no gate.
    """
    leaves = [experts[name] for name in ("gate", "up", "down") if name in experts]
    arrays = [leaf[kind] for kind in ("weight", "bias") for leaf in leaves if kind in leaf]
    return list(map(_operand, arrays))


def _operand(x: Any) -> Any:
    """Returns matrices of experts, or biases, as kernels take them."""
    x = stored_weight(x)
    if isinstance(x, Mxfp4Weight):
        return kernels_pallas.Mxfp4(x.values, x.scale)
    return Matrix(x.values, x.scale, getattr(x, "zero", None)) if is_quantized(x) else x


def _select(call: Call) -> kernels_pallas.Selection:
    return select_experts(call.run_config.impl, call.operands["x_MD"], call.operands["experts"])


def _run(kernel: str, x_MD, weight_MU, expert_MU, experts: Params, config: ModelConfig) -> jax.Array:
    gate = [] if "gate" in experts else [None]
    args = (x_MD, weight_MU, expert_MU, *gate, *_arrays(experts))
    of_model: dict[str, Any] = dict(activation=activation(config), num_experts=config.num_experts)
    if config.experts and (swiglu := config.experts.swiglu):
        of_model |= dict(activation=partial(swish, swiglu.alpha), limit=swiglu.limit)
    return kernels_pallas.run_kernel(kernel, "gated_experts", *args, **of_model)


EXPERTS = Kernel(_select, _run)


def _select_route(call: Call) -> kernels_pallas.Selection:
    """Returns the implementation of the operations before experts, in one launch. It is "xla" if there is no
    kernel for it, under every name.
    """
    leaves = call.operands["leaves"]
    impl = call.run_config.impl
    if (impl or kernels_pallas.dispatch.device_impl().impl) not in ("tpu", "interpret_tpu"):
        return kernels_pallas.Selection("xla", "a kernel for TPUs")
    router: Any = call.static["config"].experts.router
    if reason := _route_obstacle(call) or _router_obstacle(router, leaves["router"]):
        return kernels_pallas.Selection("xla", reason)
    x_BTD = call.operands["x_BTD"]
    if router.kind == "grouped_topk":  # it multiplies in the dtype of the router
        x_BTD = jax.ShapeDtypeStruct(x_BTD.shape, leaves["router"]["weight"].dtype)
    return select_product(impl, Operands(x_BTD, _route_leaves(leaves), leaves.get("mlp_norm")), None)


def _route_obstacle(call: Call) -> str | None:
    """Returns the reason why no kernel takes the operations before experts, whatever the router."""
    leaves = call.operands["leaves"]
    if "mlp_norm" in leaves and call.static["config"].layers[0].centered_norms:
        return "a norm that subtracts the mean"
    if call.operands["given_BTU"] is not None:
        return "experts that are given"
    if not all(isinstance(leaf["weight"], AnyArray) for leaf in _route_leaves(leaves)):
        return "a router that is no array"
    if "bias" in leaves.get("shared_gate", {}):
        return "a gate with a bias"
    return None


def _router_obstacle(router: Any, leaf: Params) -> str | None:
    """Returns the reason why no kernel has such a router, or None."""
    if leaf["weight"].size > _MOST_NUMBERS:
        return "a router too large for on-chip memory"
    if router.kind == "grouped_topk":
        return "a router with a bias of its logits" if "bias" in leaf else None
    if router.kind != "softmax":
        return f"a router of the kind {router.kind!r}"
    if router.input_scale or router.per_expert_scale:
        return "a router with a norm or scales of its own"
    return None if router.norm_topk_prob else "weights that do not sum to 1"


def _route_leaves(layer: Params) -> list[Params]:
    return [layer[name] for name in ("router", "shared_gate") if name in layer]


def _run_route(kernel: str, x_BTD, leaves: Params, given_BTU, config: ModelConfig) -> tuple:
    matrices = [Matrix(leaf["weight"], bias=leaf.get("bias")) for leaf in _route_leaves(leaves)]
    assert config.experts
    router: Any = config.experts.router
    grouped = None
    if router.kind == "grouped_topk":
        grouped = {name: getattr(router, name) for name in _GROUPED_FIELDS}
        matrices[0] = matrices[0]._replace(bias=leaves["router"].get("correction_bias"))
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    of_norm = dict(eps=config.rms_norm_eps, offset=config.norm_offset or 0.0)
    args = x_MD, matrices, leaves.get("mlp_norm")
    x_MD, weight_MU, expert_MU, *gates = kernels_pallas.run_kernel(
        kernel, "route", *args, count=config.num_experts_per_tok, grouped=grouped, **of_norm
    )
    x_BTD, *gates = (y_MD.reshape(x_BTD.shape) for y_MD in (x_MD, *gates))
    return x_BTD, gates[0] if gates else None, weight_MU, expert_MU


ROUTE = Kernel(_select_route, _run_route)
