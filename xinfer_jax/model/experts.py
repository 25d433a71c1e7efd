"""Mixture of experts: a router gives each token to a few of X gated MLPs and weighs their outputs."""

import jax
import jax.numpy as jnp
from jax import lax

import kernels_pallas

from ..config.model_config import ModelConfig
from ..weights.params import Params
from .layers import gated_mlp, linear


def mixture_of_experts(
    x_BTD: jax.Array, layer: Params, config: ModelConfig, over: str | None = None
) -> jax.Array:
    """Sparse feed-forward (Shazeer et al. 2017), softmax before the choice as in Qwen's models.

    Args:
        x_BTD: hidden states, normed.
        layer: "router": {"weight": [X, D]}, "experts": a gated MLP's tree with X in front of every shape.
        config: num_experts_per_tok, norm_topk_prob and the activation.
        over: an axis of a mesh along which the experts are divided: devices add up what theirs give.

    Returns:
        [B, T, D] in the dtype of x.
    """
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    probability_MX = jax.nn.softmax(linear(x_MD, layer["router"], jnp.float32), -1)
    weight_MU, expert_MU = lax.top_k(probability_MX, config.num_experts_per_tok)  # U: those it uses
    if config.norm_topk_prob:
        weight_MU = weight_MU / weight_MU.sum(-1, keepdims=True)
    mixed = _by_choice if expert_MU.size < config.num_experts else _by_expert
    experts = layer["experts"]
    if over is not None:  # numbered from a device's first
        expert_MU = expert_MU - lax.axis_index(over) * len(experts["gate"]["weight"])
    out_MD = mixed(x_MD, weight_MU, expert_MU, experts, config)
    out_BTD = out_MD.astype(x_BTD.dtype).reshape(x_BTD.shape)
    return out_BTD if over is None else lax.psum(out_BTD, over)


def _by_choice(x_MD, weight_MU, expert_MU, experts: Params, config: ModelConfig) -> jax.Array:
    """[M, D], one used expert after the other: reads no other. For few tokens."""

    def one(x_D, expert):  # float32 [D]
        tree = jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, expert, 0, keepdims=False), experts)
        return gated_mlp(x_D[None], tree, config)[0].astype(jnp.float32)

    def mine(choice):  # zeros where another device has the expert
        x_D, expert = choice
        none_D = kernels_pallas.varying_as(jnp.zeros(x_D.shape, jnp.float32), x_D, experts)
        return lax.cond((expert >= 0) & (expert < here), one, lambda *_: none_D, x_D, expert)

    here = len(experts["gate"]["weight"])
    some = mine if here < config.num_experts else lambda choice: one(*choice)
    outs = lax.map(some, (jnp.repeat(x_MD, expert_MU.shape[1], 0), expert_MU.reshape(-1)))
    return (outs.reshape(*expert_MU.shape, -1) * weight_MU[..., None]).sum(1)


def _by_expert(x_MD, weight_MU, expert_MU, experts: Params, config: ModelConfig) -> jax.Array:
    """[M, D], every expert for all tokens, kept where it is used: reads each expert once."""
    used_MUX = expert_MU[..., None] == jnp.arange(len(experts["gate"]["weight"]))
    weight_MX = (weight_MU[..., None] * used_MUX).sum(1)

    def add(sum_MD, part):
        tree, weight_M = part
        out_MD = gated_mlp(x_MD, tree, config).astype(jnp.float32)
        # 0 times infinity is no number.
        return sum_MD + jnp.where(weight_M[:, None] > 0, weight_M[:, None] * out_MD, 0), None

    start_MD = kernels_pallas.varying_as(jnp.zeros(x_MD.shape, jnp.float32), x_MD, experts)
    return lax.scan(add, start_MD, (experts, weight_MX.T))[0]
