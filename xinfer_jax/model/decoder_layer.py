"""One decoder layer for all families: attention with its cache, and feed-forward, driven by the config."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .. import plugin
from ..cache.contiguous import Contiguous, uncached_kv
from ..cache.layer_cache import LayerCache
from ..cache.stored_kv import is_quantized_kv
from ..config.layer_spec import AttentionSpec, LayerSpec
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..errors import InputError
from ..feed_forward.experts import choose_experts, mixture_of_experts
from ..mixers.attention import attention
from ..mixers.rope_append import HeadNorms, rotate, rotate_and_append
from ..ops.operation import run
from ..weights.layers import (
    Angles,
    Norm,
    activation,
    apply_rope,
    gated_mlp,
    joint_norms,
    linear,
    norm,
    norm_before,
    products,
    rms_norm,
)
from ..weights.params import Params


@functools.lru_cache(maxsize=64)
def layer_kinds(config: ModelConfig) -> tuple[int, ...]:
    """The kind of each layer: the first one with its spec. Layers of one kind share a trace, or a program."""
    return tuple(map(config.layers.index, config.layers))


class Positions(NamedTuple):
    """The positions of the tokens of a call, the same for every layer; and what layers get of the tokens."""

    angles: Angles
    start_B: jax.Array | None  # int32: position of each row's first token; None: there is no cache
    num_tokens_B: jax.Array  # int32: real tokens of each row
    position_BT: jax.Array  # int32: of each token
    layer_inputs: tuple[jax.Array, ...] = ()  # of each layer [B, T, P]; (): the model has none
    first_BT: jax.Array | None = None  # int32: where each token's segment begins; None: a row is one segment
    routes: tuple[jax.Array | None, ...] = ()  # experts that each layer uses, int32 [B, T, U], -1: its choice

    def of_layers(self, layers: slice) -> "Positions":
        """Of these layers only."""
        return self._replace(layer_inputs=self.layer_inputs[layers], routes=self.routes[layers])


def run_layer(  # noqa: PLR0913
    layer: Params,
    config: ModelConfig,
    kind: int,
    x_BTD: Any,
    positions: Positions,
    kv: Any,
    run_config: RunConfig,
    half: str | None = None,
) -> tuple[jax.Array, LayerCache | None, jax.Array | None]:
    """The output of one layer, [B, T, D]; its cache with the new tokens (without a cache: None, or the
    layer's keys and values in a model in which other layers use them); and the experts of each token, int32
    [B·T, U], where positions have routes. half: "attention" or "mlp": x after it, with the residual added.
    """
    plain = functools.partial(_run_layer, config=config, kind=kind, run_config=run_config, half=half)
    operands = dict(layer=layer, x_BTD=x_BTD, positions=positions, kv=kv)
    return run("decoder_layer", plain, run_config, static=dict(config=config), **operands)


def _run_layer(layer, x_BTD, positions, kv, config, kind, run_config, half):
    spec = config.layers[kind]
    is_added_here = spec.post_norm or config.residual_multiplier != 1
    if half != "mlp":
        args = x_BTD, positions, kv, run_config
        before = norm_before(layer, "attn_norm", config) if spec.pre_norm else None
        around: dict[str, Any] = dict(before=before, residual=None if is_added_here else x_BTD)
        if config.is_linear(kind):
            attended_BTD, kv = plugin("layer", "linear")(layer, config, *args, **around)
        else:
            attended_BTD, kv = self_attention(layer, config, kind, *args, **around)
        attended_BTD = checkpoint_name(attended_BTD, "attention_out")
        x_BTD = _add_output(x_BTD, attended_BTD, layer, "attn_post_norm", config, spec)
    if half == "attention":
        return x_BTD, kv, None
    route_BTU = positions.routes[0] if positions.routes else None
    residual = None if is_added_here else x_BTD
    fed_BTD, expert_MU = _feed_forward(x_BTD, residual, layer, config, spec, run_config, route_BTU)
    fed_BTD = checkpoint_name(fed_BTD, "mlp_out")
    x_BTD = _add_output(x_BTD, fed_BTD, layer, "mlp_post_norm", config, spec)
    if positions.layer_inputs:
        x_BTD = x_BTD + _of_layer_input(x_BTD, positions.layer_inputs[0], layer, config, run_config)
    x_BTD = x_BTD * layer["layer_scalar"] if spec.scalar else x_BTD
    return x_BTD, kv, None if route_BTU is None else expert_MU


def _add_output(x_BTD, out_BTD, layer: Params, name: str, config: ModelConfig, spec: LayerSpec) -> jax.Array:  # noqa: PLR0913
    """x and the output of attention or MLP, after its norm and factor; with neither that is the sum."""
    factor = config.residual_multiplier
    if spec.post_norm:
        out_BTD = norm(out_BTD, layer, name, config)
    elif factor == 1:
        return out_BTD
    return x_BTD + (out_BTD if factor == 1 else (factor * out_BTD.astype(jnp.float32)).astype(out_BTD.dtype))


def _of_layer_input(x_BTD, input_BTP, layer: Params, config: ModelConfig, run_config: RunConfig) -> jax.Array:
    """What the layer's own input adds to the hidden states, gated by them."""
    gate_BTP = activation(config)(linear(x_BTD, layer["input_gate"], run_config=run_config))
    return norm(
        linear(gate_BTP * input_BTP, layer["input_proj"], run_config=run_config), layer, "input_norm", config
    )


# Jitted within a trace too: layers then share a trace, and lowering 24 of them takes a tenth of the time.
_JITTED_LAYER = jax.jit(run_layer, static_argnames=("config", "kind", "run_config", "half"))


def layer_runner(run_config: RunConfig) -> Callable:
    """`run_layer`, of which the backward pass stores what `RunConfig.remat` says."""
    remat = run_config.remat
    if remat is None:
        return _JITTED_LAYER
    if remat != "layer" and not callable(remat):
        raise InputError(f'remat must be None, "layer" or a policy of jax.checkpoint_policies, got {remat!r}')
    policy = remat if callable(remat) else None
    return jax.checkpoint(_JITTED_LAYER, policy=policy, static_argnums=(1, 2, 6, 7))


def run_layers(  # noqa: PLR0913
    layers, config: ModelConfig, kinds, caches, x_BTD, positions: Positions, kv, run_config, half=None
) -> tuple[Any, tuple, list]:
    """`run_layer` for several layers in order; layers, kinds and caches have one entry for each, and so have
    the caches and experts that are returned.

    kv: layer caches, or None for each. caches: the index in kv of the cache that the layer uses.
    """
    kv = list(kv)
    experts = []
    run_one = layer_runner(run_config)
    for i, (layer, kind, cache) in enumerate(zip(layers, kinds, caches, strict=True)):
        of_layer = positions.of_layers(slice(i, i + 1))
        vectors = layer.get("vectors")  # of an engine, [N, D], and the factors of rows [B, N]
        layer = {name: layer[name] for name in layer if name != "vectors"}  # noqa: PLW2901
        x_BTD, kv[cache], expert_MU = run_one(
            layer, config, kind, x_BTD, of_layer, kv[cache], run_config, half
        )
        if vectors is not None:
            added_BD = jnp.sum(vectors[0] * vectors[1][..., None], 1)
            x_BTD = x_BTD + added_BD[:, None].astype(x_BTD.dtype)
        experts.append(expert_MU)
    return x_BTD, tuple(kv), experts


def self_attention(  # noqa: PLR0913
    layer: Params,
    config: ModelConfig,
    kind: int,
    x_BTD: Any,
    positions: Positions,
    kv: Any,
    run_config: RunConfig,
    *,
    before: Norm | None = None,
    residual: jax.Array | None = None,
) -> tuple[jax.Array, Contiguous | None]:
    """The output of attention, [B, T, D], for x after the norm `before` it, with the residual added if there
    is one; and the layer's cache with the new tokens.
    """
    (B, T, _) = x_BTD.shape
    num_tokens_B = positions.num_tokens_B
    start_B: Any = positions.start_B  # not None if there is a cache
    spec: Any = config.attention(kind)
    of_layer = config.layer_rope(kind)
    rope = None if of_layer is None else config.ropes.index(of_layer)
    key_bias_fn = None
    if kv is not None and is_quantized_kv(kv.k):
        from ..mixers.key_bias import split_key_bias  # optional: quantized caches

        layer, key_bias_fn = split_key_bias(layer, config, spec, rope, kv.capacity)
    angles = None if rope is None else positions.angles[rope]
    gate_BTI = None
    if spec.shares_kv:
        q_BTNH = _only_queries(layer, config, kind, x_BTD, angles, before, run_config)
        visible = kv
    else:
        qkv, gate_BTI = project_qkv(layer, config, kind, x_BTD, before, run_config)
        qkv = checkpoint_name(qkv, "qkv")
        norms = head_norms(layer, config, spec)
        if start_B is None:
            q_BTNH, k_BTKH, v_BTKH = rotate(qkv, norms, angles)
            visible = uncached_kv(jnp.swapaxes(k_BTKH, 1, 2), jnp.swapaxes(v_BTKH, 1, 2))
            kv = visible if config.shares_kv else None
        else:
            q_BTNH, kv = rotate_and_append(qkv, norms, angles, kv, start_B, num_tokens_B, run_config)
            visible = kv
    if spec.query_scaling:
        q_BTNH = scale_by_position(q_BTNH, positions.position_BT, *spec.query_scaling)
    length_B = num_tokens_B
    if start_B is not None:
        length_B = jnp.where(num_tokens_B > 0, start_B + num_tokens_B, 0)  # without queries no key is read
    # The model's window: a cache that stores every token may have been made without one.
    windowed = dataclasses.replace(visible, window=spec.window, key_bias_fn=key_bias_fn)
    scoring = dict(start_B=start_B, first_BT=positions.first_BT, **attention_scoring(layer, config, kind))
    out_BTNH = attention(q_BTNH, windowed, length_B=length_B, **scoring, run_config=run_config)
    out_BTI = out_BTNH.reshape(B, T, -1)
    if spec.o_norm:
        (out_BTI,) = joint_norms([out_BTI], layer, ["o_norm"], config, run_config)
    if gate_BTI is not None:
        out_BTI = out_BTI * jax.nn.sigmoid(gate_BTI)
    return linear(out_BTI, layer["o"], over=run_config.over, residual=residual, run_config=run_config), kv


def attention_scoring(layer: Params, config: ModelConfig, kind: int) -> dict[str, Any]:
    """What `attention` takes of a layer beside queries and keys."""
    spec: Any = config.attention(kind)
    scale = spec.attention_multiplier or (spec.query_pre_attn_scalar or config.head_width(kind)) ** -0.5
    sink_N = layer["sinks"] if spec.sinks else None
    return dict(scale=scale, soft_cap=spec.logit_softcapping, sink_N=sink_N, ahead=spec.ahead)


def _only_queries(layer, config, kind: int, x_BTD, angles, before, run_config) -> jax.Array:  # noqa: PLR0913
    """Queries by head, [B, T, N, H], of a layer without keys of its own, after their norm and RoPE."""
    (q_BTI,) = products(x_BTD, [layer["q"]], before=before, run_config=run_config)
    q_BTNH = q_BTI.reshape(*q_BTI.shape[:2], -1, config.head_width(kind))
    if config.layers[kind].mixer.qk_norm:
        q_BTNH = norm(q_BTNH, layer, "q_norm", config)
    return q_BTNH if angles is None else apply_rope(q_BTNH, *angles)


def scale_by_position(q_BTNH: jax.Array, position_BT: jax.Array, beta: float, length: int) -> jax.Array:
    """Queries with `AttentionSpec.query_scaling`."""
    scale_BT = 1 + beta * jnp.log(1 + (position_BT // length).astype(jnp.float32))
    return q_BTNH * scale_BT[..., None, None].astype(q_BTNH.dtype)


def project_qkv(  # noqa: PLR0913
    layer: Params,
    config: ModelConfig,
    kind: int,
    x_BTD: jax.Array,
    before: Norm | None,
    run_config: RunConfig,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array | None]:
    """Queries, keys and values by head, [B, T, N or K, H], after norms of all heads together; and the gate
    of attention's output, [B, T, N H], if the layer has one.
    """
    spec: Any = config.attention(kind)
    wanted = dict(q=True, k=True, v=not spec.values_are_keys, attn_gate=spec.output_gate)
    names = [name for name in wanted if wanted[name]]
    ys = products(x_BTD, [layer[name] for name in names], before=before, run_config=run_config)
    if spec.qk_norm == "joint":
        ys[:2] = joint_norms(ys[:2], layer, ["q_norm", "k_norm"], config, run_config)
    if spec.values_are_keys:
        ys.insert(2, ys[1])
    q_BTNH, k_BTKH, v_BTKH = (y.reshape(*y.shape[:2], -1, config.head_width(kind)) for y in ys[:3])
    if spec.v_norm:
        ones_H = jnp.ones(config.head_width(kind), v_BTKH.dtype)
        v_BTKH = rms_norm(v_BTKH, ones_H, config.rms_norm_eps)
    return (q_BTNH, k_BTKH, v_BTKH), ys[3] if spec.output_gate else None


def head_norms(layer: Params, config: ModelConfig, spec: AttentionSpec) -> HeadNorms | None:
    """The layer's norms of each head of queries and keys; None: it has none."""
    if spec.qk_norm != "head":
        return None
    return (layer["q_norm"], layer["k_norm"]), (config.rms_norm_eps, config.norm_offset)


def _feed_forward(x_BTD, residual, layer: Params, config, spec: LayerSpec, run_config, route_BTU):  # noqa: PLR0913
    """The MLP, experts or both for x after its norm, with the residual added if there is one; and the experts
    of each token, [M, U], if there are any.
    """
    around: dict[str, Any] = dict(run_config=run_config)
    if spec.mlp:
        before = norm_before(layer, "mlp_norm", config) if spec.pre_norm else None
        around |= dict(down_norm=spec.mlp.down_norm, before=before)
    if not spec.experts:
        return gated_mlp(x_BTD, layer, config, **around, residual=residual), None
    names = ("router", "shared_gate") if spec.mlp else ("router", "shared_gate", "mlp_norm")
    leaves = {name: layer[name] for name in names if name in layer}
    operands = dict(x_BTD=x_BTD, layer=leaves, given_BTU=route_BTU)
    plain = functools.partial(_route, config=config)
    x_BTD, gate_BTD, *chosen = run(
        "route", plain, run_config, derivative=plain, static=dict(config=config), **operands
    )
    routed_BTD = norm(x_BTD, layer, "experts_norm", config) if spec.mlp else x_BTD
    out_BTD = mixture_of_experts(routed_BTD, layer, config, run_config, chosen=chosen)
    if spec.mlp:
        fed_BTD = gated_mlp(x_BTD, layer, config, **around)
        mixed_BTD = norm(out_BTD, layer, "experts_out_norm", config)
        out_BTD = norm(fed_BTD, layer, "mlp_out_norm", config) + mixed_BTD
    elif spec.experts.shared_intermediate_size:  # an expert that all tokens use
        shared_BTD = gated_mlp(x_BTD, layer["shared"], config, **around)
        out_BTD = out_BTD + gate_BTD * shared_BTD
    return out_BTD if residual is None else residual + out_BTD, chosen[1]


def _route(x_BTD, layer: Params, given_BTU, config: ModelConfig) -> tuple:
    """x after its norm, the factor of the shared expert for each feature, and the choice of experts."""
    x_BTD = norm(x_BTD, layer, "mlp_norm", config) if "mlp_norm" in layer else x_BTD
    gate = layer.get("shared_gate")
    gate_BTD = gate and jnp.broadcast_to(jax.nn.sigmoid(linear(x_BTD, gate)), x_BTD.shape)
    return x_BTD, gate_BTD, *choose_experts(x_BTD, layer["router"], config, given_BTU)
