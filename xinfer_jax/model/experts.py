"""Mixture of experts: a router chooses a few of X gated MLPs for each token, and weights their outputs."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import kernels_pallas
from kernels_pallas.reference import gated

from ..config.layer_spec import ExpertsSpec
from ..config.model_config import ModelConfig
from ..weights.mxfp4 import Mxfp4Weight
from ..weights.params import Params
from ..weights.quantized_weights import is_quantized
from .attention import select_kernel
from .kernel_products import with_plain_derivative
from .layers import activation, gated_mlp, linear, products, rms_norm

_TILE_ROWS = 64  # at most: more rows are no faster


class _Model(NamedTuple):
    """A model, and the experts of a layer."""

    config: ModelConfig
    spec: ExpertsSpec


def mixture_of_experts(
    x_BTD: jax.Array,
    layer: Params,
    config: ModelConfig,
    spec: ExpertsSpec,
    over: str | None = None,
    impl: str | None = None,
    *,
    routed_BTD: jax.Array | None = None,
) -> jax.Array:
    """Sparse feed-forward (Shazeer et al. 2017), with softmax before top-k as in Qwen's models. Softmax of
    the chosen scores alone, as in gpt-oss, is the same with normalized weights.

    Args:
        x_BTD: hidden states after the norm.
        layer: "router": {"weight": [X, D]}, in Gemma 4 also "scale" [D] of its input and "per_expert_scale"
            [X] of the chosen experts' weights; "experts": the tree of a gated MLP with a first axis X; its
            matrices may be quantized. Both may have biases.
        config, spec: the model, and the experts of this layer.
        over: a mesh axis along which the experts are sharded; the devices' outputs are summed.
        impl: None, or one of `kernels_pallas.IMPLS`. The derivative of a kernel is that of "xla".
        routed_BTD: the router's input before a norm with the weight scale, divided by sqrt(D); None: x.

    Returns:
        [B, T, D] in the dtype of x.

    Raises:
        InputError: the named impl does not support these arguments.
    """
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    router = layer["router"]
    routed_MD = x_MD
    if routed_BTD is not None:
        routed_MD = rms_norm(routed_BTD.reshape(x_MD.shape), router["scale"], config.rms_norm_eps)
        routed_MD = routed_MD * x_MD.shape[1] ** -0.5
    score_MX = linear(routed_MD, router, jnp.float32)
    U = spec.num_experts_per_tok
    if spec.norm_topk_prob:  # softmax, divided by the sum of those that are chosen
        score_MU, expert_MU = lax.top_k(score_MX, U)
        weight_MU = jax.nn.softmax(score_MU, -1)
    else:
        weight_MU, expert_MU = lax.top_k(jax.nn.softmax(score_MX, -1), U)
    if "per_expert_scale" in router:
        weight_MU = weight_MU * router["per_expert_scale"][expert_MU]
    experts = layer["experts"]
    if over is not None:  # relative to the device's first expert
        expert_MU = expert_MU - lax.axis_index(over) * _num_local(experts)
    chosen = select_experts(impl, x_MD, experts).impl
    platform = kernels_pallas.platform_of(chosen, impl)
    out_MD = _mix(chosen, platform, _Model(config, spec), x_MD, weight_MU, expert_MU, experts)
    out_BTD = out_MD.astype(x_BTD.dtype).reshape(x_BTD.shape)
    return out_BTD if over is None else lax.psum(out_BTD, over)


def select_experts(impl: str | None, x_MD: Any, experts: Params) -> kernels_pallas.Selection:
    """The implementation for these tokens and experts; raises as `select_kernel`."""
    weight = experts["gate"]["weight"]
    obstacle = "quantized experts" if is_quantized(weight) and not isinstance(weight, Mxfp4Weight) else None
    args = () if obstacle else _arrays(experts)
    return select_kernel("gated_experts", impl, x_MD, *args, obstacle=obstacle)


def _expert(x_MD: jax.Array, tree: Params, model: _Model) -> jax.Array:
    """One expert's MLP for all tokens, float32 [M, D]."""
    swiglu = model.spec.swiglu
    if swiglu is None:
        return gated_mlp(x_MD, tree, model.config).astype(jnp.float32)
    gate_MF, up_MF = products(x_MD, [tree["gate"], tree["up"]])
    inner_MF = gated(gate_MF, up_MF, partial(_swish, swiglu.alpha), swiglu.limit)
    return linear(inner_MF, tree["down"], jnp.float32)


def _swish(alpha: float, x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(alpha * x)


def _expert_at(expert: jax.Array, experts: Params) -> Params:
    """The leaves of one expert. On CPU jax 0.10 would slice 16-bit stacks in float32: without the barrier it
    would convert all experts once, before the loop.
    """
    expert, experts = lax.optimization_barrier((expert, experts))
    return jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, expert, 0, keepdims=False), experts)


def _num_local(experts: Params) -> int:
    """Experts of this device."""
    return len(jax.tree.leaves(experts)[0])


def _arrays(experts: Params) -> list[Any]:
    """The matrices of gate, up and down as kernels take them, then their biases if there are any."""
    leaves = [experts[name] for name in ("gate", "up", "down")]
    arrays = [leaf[kind] for kind in ("weight", "bias") for leaf in leaves if kind in leaf]
    return [kernels_pallas.Mxfp4(x.values, x.scale) if isinstance(x, Mxfp4Weight) else x for x in arrays]


def _mix(impl: str, platform: str | None, model: _Model, *arrays: Any) -> jax.Array:
    """[M, D], float32: by the kernel of `kernels_pallas`, and on CPU by tiles where they are faster.

    Args:
        impl: of the kernel; "xla": none.
        platform: whose programs run the kernel; None: all, or no kernel.
        model: the model and its experts.
        arrays: x_MD, weight_MU, expert_MU and the experts.
    """
    plain = partial(_plain, model=model)
    by_kernel = partial(_by_kernel, impl=impl, model=model)
    if impl != "xla" and platform is None:
        return with_plain_derivative(by_kernel, plain, None, *arrays)
    forms: dict[str, Callable] = {} if platform is None else {platform: by_kernel}
    if _tiles_are_faster(arrays[2].size, model):
        forms["cpu"] = partial(_by_tiles, model=model)
    if not forms:
        return plain(*arrays)

    def fastest(*arrays: Any) -> jax.Array:
        return lax.platform_dependent(*arrays, **forms, default=plain)

    return with_plain_derivative(fastest, plain, None, *arrays)


def _by_kernel(x_MD, weight_MU, expert_MU, experts: Params, impl: str, model: _Model) -> jax.Array:
    args = (x_MD, weight_MU, expert_MU, *_arrays(experts))
    of_model: dict[str, Any] = dict(activation=activation(model.config), num_experts=model.spec.num_experts)
    if swiglu := model.spec.swiglu:
        of_model |= dict(activation=partial(_swish, swiglu.alpha), limit=swiglu.limit)
    return kernels_pallas.run_kernel(impl, "gated_experts", *args, **of_model)


def _tiles_are_faster(choices: int, model: _Model) -> bool:
    """Whether `_by_tiles`, with up to 3 rows per choice, is faster than every expert for all tokens."""
    return choices >= model.spec.num_experts >= 4 * model.spec.num_experts_per_tok


def _by_tiles(x_MD, weight_MU, expert_MU, experts: Params, model: _Model) -> jax.Array:
    """[M, D]: in order of the experts, a tile of choices (C) of one expert at a time; as many steps as there
    are tiles. Its rows past the expert's last choice are overwritten by the next tile. For CPU.
    """
    M, U = expert_MU.shape
    C = M * U
    X = _num_local(experts)
    rows = min(_TILE_ROWS, 1 << (2 * C // model.spec.num_experts - 1).bit_length())
    key_C = lax.sort(expert_MU.reshape(C) * C + jnp.arange(C), is_stable=False)  # no two are equal
    choice_C = key_C % C
    padded_C = jnp.pad(choice_C, (0, rows))
    first_X, stop_X = ((key_C < C * (jnp.arange(X) + i)[:, None]).sum(1) for i in (0, 1))
    tiles_X = -((first_X - stop_X) // rows)
    last_X = jnp.cumsum(tiles_X)

    def step(tile, out_CD):
        expert = (last_X <= tile).sum()
        first = first_X[expert] + (tile - last_X[expert] + tiles_X[expert]) * rows
        token_R = lax.dynamic_slice_in_dim(padded_C, first, rows) // U
        tree = _expert_at(expert, experts)
        out_RD = _expert(x_MD[token_R], tree, model)
        return lax.dynamic_update_slice_in_dim(out_CD, out_RD, first, 0)

    start_CD = jnp.zeros((C + rows, x_MD.shape[1]), jnp.float32)
    start_CD = kernels_pallas.match_varying_axes(start_CD, x_MD, expert_MU, experts)
    out_CD = lax.fori_loop(0, last_X[-1], step, start_CD)
    place_C = jnp.zeros_like(choice_C).at[choice_C].set(jnp.arange(C))
    here_MU = (expert_MU >= 0) & (expert_MU < X)
    out_MUD = out_CD[place_C].reshape(M, U, -1)
    return jnp.where(here_MU[..., None], weight_MU[..., None] * out_MUD, 0).sum(1)


def _plain(x_MD, weight_MU, expert_MU, experts: Params, model: _Model) -> jax.Array:
    """[M, D], float32, in plain jnp."""
    mix = _chosen_experts if expert_MU.size < model.spec.num_experts else _all_experts
    return mix(x_MD, weight_MU, expert_MU, experts, model)


def _chosen_experts(x_MD, weight_MU, expert_MU, experts: Params, model: _Model) -> jax.Array:
    """[M, D]: one chosen expert after the other; reads no other expert. For few tokens."""

    def one(x_D, expert):  # float32 [D]
        tree = _expert_at(expert, experts)
        return _expert(x_D[None], tree, model)[0]

    def one_if_local(choice):  # zeros where the expert is on another device
        x_D, expert = choice
        none_D = kernels_pallas.match_varying_axes(jnp.zeros(x_D.shape, jnp.float32), x_D, experts)
        return lax.cond((expert >= 0) & (expert < num_local), one, lambda *_: none_D, x_D, expert)

    num_local = _num_local(experts)
    compute = one_if_local if num_local < model.spec.num_experts else lambda choice: one(*choice)
    outs = lax.map(compute, (jnp.repeat(x_MD, expert_MU.shape[1], 0), expert_MU.reshape(-1)))
    return (outs.reshape(*expert_MU.shape, -1) * weight_MU[..., None]).sum(1)


def _all_experts(x_MD, weight_MU, expert_MU, experts: Params, model: _Model) -> jax.Array:
    """[M, D]: every expert for all tokens, used where it was chosen; reads each expert once."""
    used_MUX = expert_MU[..., None] == jnp.arange(_num_local(experts))
    weight_MX = (weight_MU[..., None] * used_MUX).sum(1)

    def add(sum_MD, part):
        tree, weight_M = part
        out_MD = _expert(x_MD, tree, model)
        # 0 * inf would be NaN.
        return sum_MD + jnp.where(weight_M[:, None] != 0, weight_M[:, None] * out_MD, 0), None

    start_MD = kernels_pallas.match_varying_axes(jnp.zeros(x_MD.shape, jnp.float32), x_MD, experts)
    return lax.scan(add, start_MD, (experts, weight_MX.T))[0]
