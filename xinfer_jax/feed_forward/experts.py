"""Mixture of experts: a router chooses a few of X MLPs for each token, and weights their outputs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config.model_config import ModelConfig
from ..config.run_config import DEFAULT, RunConfig
from ..ops.operation import match_varying_axes, run
from ..registry import plugin
from ..weights.layers import activation, linear, products
from ..weights.params import Params
from .mlp import gated_mlp
from .routers import router_of


def mixture_of_experts(
    x_BTD: jax.Array,
    layer: Params,
    config: ModelConfig,
    run_config: RunConfig = DEFAULT,
    *,
    chosen: Sequence[jax.Array] | None = None,
) -> jax.Array:
    """Runs a sparse feed-forward (Shazeer et al. 2017).

    Args:
        x_BTD: hidden states after the norm.
        layer: "router", as `Router.choose` takes it, and "experts", the tree of an MLP with a first axis X.
            Its matrices may be quantized. Both may have biases.
        config: the config of the model, for its `experts` and the activation.
        run_config: its `over` divides the experts: the devices' outputs are summed. The derivative of a
            kernel is the derivative of the plain form.
        chosen: weights and experts of each token. None: the router chooses them for x.

    Returns:
        [B, T, D] in the dtype of x.

    Raises:
        InputError: the named impl does not support these arguments.
    """
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    experts: Any = config.experts
    weight_MU, expert_MU = chosen or router_of(config, experts).choose(layer["router"], x_BTD)
    plain = partial(plain_experts, config=config)

    def mix(expert_MU: jax.Array) -> jax.Array:  # [B, T, D]
        operands = dict(x_MD=x_MD, weight_MU=weight_MU, expert_MU=expert_MU, experts=layer["experts"])
        call = partial(run, "experts", plain, run_config, static=dict(config=config))
        tiled = plugin("experts", "gradient")
        out_MD = tiled and tiled(call, operands, config)
        out_MD = call(**operands, derivative=plain) if out_MD is None else out_MD
        return out_MD.astype(x_BTD.dtype).reshape(x_BTD.shape)

    if run_config.over is None:
        return mix(expert_MU)
    from ..backends.mesh import mesh_experts  # optional: meshes

    return mesh_experts(mix, expert_MU, layer, run_config.over)


def expert_output(x_MD: jax.Array, tree: Params, config: ModelConfig) -> jax.Array:
    """Returns one expert's MLP for all tokens, float32 [M, D]."""
    if config.experts is None or config.experts.swiglu is None:
        return gated_mlp(x_MD, tree, config).astype(jnp.float32)
    gate_MF, up_MF = products(x_MD, [tree["gate"], tree["up"]])
    return linear(inner_activation(config)(gate_MF, up_MF), tree["down"], jnp.float32)


def inner_activation(config: ModelConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the function of an expert's gate and up, [M, F] each: its output is the input of down."""
    swiglu = config.experts.swiglu if config.experts else None
    if swiglu is None:
        return lambda gate, up: activation(config)(gate) * up
    alpha = swiglu.alpha
    limit = swiglu.limit
    return lambda gate, up: swish(alpha, jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1)


def swish(alpha: float, x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(alpha * x)


def expert_at(expert: jax.Array, experts: Params) -> Params:
    """Returns the leaves of one expert."""
    return run("expert_at", _expert_at, expert=expert, experts=experts)


def _expert_at(expert: jax.Array, experts: Params) -> Params:
    return jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, expert, 0, keepdims=False), experts)


def num_local_experts(experts: Params) -> int:
    """Returns experts of this device."""
    return len(jax.tree.leaves(experts)[0])


def plain_experts(x_MD, weight_MU, expert_MU, experts: Params, config: ModelConfig) -> jax.Array:
    """Returns [M, D], float32: the experts' outputs with their weights, in plain jnp."""
    size = expert_MU.size  # it may be symbolic
    mix = _chosen_experts if isinstance(size, int) and size < config.num_experts else _all_experts
    return mix(x_MD, weight_MU, expert_MU, experts, config)


def _chosen_experts(x_MD, weight_MU, expert_MU, experts: Params, config: ModelConfig) -> jax.Array:
    """Returns [M, D]. It computes one chosen expert after the other, and reads no other expert. It is for few
    tokens.
    """

    def one(x_D, expert):  # float32 [D]
        tree = expert_at(expert, experts)
        return expert_output(x_D[None], tree, config)[0]

    def one_if_local(choice):  # zeros where the expert is on another device
        x_D, expert = choice
        none_D = match_varying_axes(jnp.zeros(x_D.shape, jnp.float32), x_D, experts)
        return lax.cond((expert >= 0) & (expert < num_local), one, lambda *_: none_D, x_D, expert)

    num_local = num_local_experts(experts)
    compute = one_if_local if num_local < config.num_experts else lambda choice: one(*choice)
    outs = lax.map(compute, (jnp.repeat(x_MD, expert_MU.shape[1], 0), expert_MU.reshape(-1)))
    return (outs.reshape(*expert_MU.shape, -1) * weight_MU[..., None]).sum(1)


def _all_experts(x_MD, weight_MU, expert_MU, experts: Params, config: ModelConfig) -> jax.Array:
    """Returns [M, D]. It computes every expert for all tokens, and uses the outputs at the tokens that chose
    it. It reads each expert once.
    """
    used_MUX = expert_MU[..., None] == jnp.arange(num_local_experts(experts))
    weight_MX = (weight_MU[..., None] * used_MUX).sum(1)

    def add(sum_MD, part):
        tree, weight_M = part
        out_MD = expert_output(x_MD, tree, config)
        # 0 * inf would be NaN.
        return sum_MD + jnp.where(weight_M[:, None] != 0, weight_M[:, None] * out_MD, 0), None

    start_MD = match_varying_axes(jnp.zeros(x_MD.shape, jnp.float32), x_MD, experts)
    return lax.scan(add, start_MD, (experts, weight_MX.T))[0]
