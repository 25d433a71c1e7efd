"""One decoder layer for all families: attention with its cache, and feed-forward, driven by the config."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import HeadNorms

from ..cache.layer_caches import Contiguous, uncached_kv
from ..cache.quantized_kv import cache_specs
from ..cache.recurrent import Recurrent
from ..cache.stored_kv import is_quantized_kv
from ..config.model_config import ModelConfig
from ..sharding import MODEL, REPLICATED, abstract_mesh_of, shard_map_model
from ..weights.layout import is_divisible, layer_partition_specs
from ..weights.params import Params
from .attention import attention
from .experts import mixture_of_experts
from .kernel_products import Norm
from .layers import (
    Angles,
    gated_mlp,
    joint_norms,
    linear,
    norm,
    norm_before,
    products,
    rope_bias_fn,
    rope_is_fixed,
)
from .linear_attention import linear_attention
from .rope_append import rotate, rotate_and_append


class LayerKind(NamedTuple):
    """How layers differ beyond their parameters. Layers of one kind share a trace, or a compiled program."""

    window: int | None
    rope: int | None  # index in `ModelConfig.ropes`; None: no RoPE
    linear: bool = False  # linear attention


@functools.lru_cache(maxsize=64)
def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """The kind of each layer."""
    ropes = map(config.layer_rope_config, range(config.num_hidden_layers))
    numbers = (None if rope is None else config.ropes.index(rope) for rope in ropes)
    linear = map(config.is_linear, range(config.num_hidden_layers))
    return tuple(map(LayerKind, config.layer_windows, numbers, linear))


class Positions(NamedTuple):
    """The positions of the tokens of a call; the same for every layer."""

    angles: Angles
    start_B: jax.Array | None  # int32: position of each row's first token; None: there is no cache
    num_tokens_B: jax.Array  # int32: real tokens of each row


def run_layer(  # noqa: PLR0913
    layer: Params,
    config: ModelConfig,
    kind: LayerKind,
    x_BTD: Any,
    positions: Positions,
    kv: Any,
    impl: str | None,
) -> tuple[jax.Array, Contiguous | Recurrent | None]:
    """The output of one layer, [B, T, D], and its cache with the new tokens (None without a cache)."""
    if (mesh := model_mesh(layer, config)) is None:
        return _run_layer(layer, x_BTD, positions, kv, config, kind, impl)
    kv_specs = cache_specs(kv, mesh)
    run = functools.partial(_run_layer, config=config, kind=kind, impl=impl, over=MODEL)
    specs = (layer_partition_specs(layer, config, mesh), REPLICATED, REPLICATED, kv_specs)
    return shard_map_model(run, mesh, specs, (REPLICATED, kv_specs))(layer, x_BTD, positions, kv)


def model_mesh(tree: Any, config: ModelConfig) -> Any:
    """The mesh over which the model is sharded. None: there is none, or its devices do not divide the sizes:
    then the caller has sharded the arrays in another way, and XLA propagates that sharding.
    """
    mesh = abstract_mesh_of(tree)
    return mesh if mesh is not None and is_divisible(config, mesh.shape[MODEL]) else None


def _run_layer(layer, x_BTD, positions, kv, config, kind, impl, over=None):  # noqa: PLR0913
    """over: a mesh axis along which heads, experts, the MLP's features and the cache are sharded."""
    post_norm = "attn_post_norm" in layer
    args = x_BTD, positions, kv, impl, over
    around = dict(before=norm_before(layer, "attn_norm", config), residual=None if post_norm else x_BTD)
    if kind.linear:
        attended_BTD, kv = linear_attention(layer, config, *args, **around)
    else:
        attended_BTD, kv = self_attention(layer, config, kind, *args, **around)
    x_BTD = x_BTD + norm(attended_BTD, layer, "attn_post_norm", config) if post_norm else attended_BTD
    if "mlp_post_norm" not in layer:
        return _feed_forward(x_BTD, x_BTD, layer, config, over, impl), kv
    fed_BTD = _feed_forward(x_BTD, None, layer, config, over, impl)
    return x_BTD + norm(fed_BTD, layer, "mlp_post_norm", config), kv


# Jitted within a trace too: layers then share a trace, and lowering 24 of them takes a tenth of the time.
_JITTED_LAYER = jax.jit(run_layer, static_argnames=("config", "kind", "impl"))


def run_layers(
    layers, config: ModelConfig, kinds, x_BTD, positions: Positions, kv, impl
) -> tuple[Any, tuple]:
    """`run_layer` for several layers in order; layers, kinds and kv (layer caches or None) have one entry
    for each.
    """
    new_kv = []
    for layer, kind, layer_kv in zip(layers, kinds, kv, strict=True):
        x_BTD, layer_kv = _JITTED_LAYER(layer, config, kind, x_BTD, positions, layer_kv, impl)
        new_kv.append(layer_kv)
    return x_BTD, tuple(new_kv)


def self_attention(  # noqa: PLR0913
    layer: Params,
    config: ModelConfig,
    kind: LayerKind,
    x_BTD: Any,
    positions: Positions,
    kv: Any,
    impl: str | None,
    over: str | None = None,
    *,
    before: Norm | None = None,
    residual: jax.Array | None = None,
) -> tuple[jax.Array, Contiguous | None]:
    """The output of attention, [B, T, D], for x after the norm `before` it, with the residual added if there
    is one; and the layer's cache with the new tokens.
    """
    (B, T, _) = x_BTD.shape
    num_tokens_B = positions.num_tokens_B
    start_B: Any = positions.start_B  # not None if kv is not None
    layer, key_bias_fn = _split_key_bias(layer, config, kind, kv)
    qkv, gate_BTI = _project_qkv(layer, config, x_BTD, over, before, impl)
    norms = _head_norms(layer, config)
    angles = None if kind.rope is None else positions.angles[kind.rope]
    if kv is None:
        q_BTNH, k_BTKH, v_BTKH = rotate(qkv, norms, angles)
        visible = uncached_kv(jnp.swapaxes(k_BTKH, 1, 2), jnp.swapaxes(v_BTKH, 1, 2))
        length_B = num_tokens_B
    else:
        q_BTNH, kv = rotate_and_append(qkv, norms, angles, kv, start_B, num_tokens_B, impl)
        visible = kv
        length_B = jnp.where(num_tokens_B > 0, start_B + num_tokens_B, 0)  # without queries no key is read
    scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
    cap = config.attn_logit_softcapping
    # The model's window: a cache that stores every token may have been made without one.
    windowed = dataclasses.replace(visible, window=kind.window, key_bias_fn=key_bias_fn)
    out_BTNH = attention(
        q_BTNH, windowed, length_B=length_B, start_B=start_B, scale=scale, soft_cap=cap, impl=impl
    )
    (out_BTI,) = joint_norms([out_BTNH.reshape(B, T, -1)], layer, ["o_norm"], config, over)
    if gate_BTI is not None:
        out_BTI = out_BTI * jax.nn.sigmoid(gate_BTI)
    return linear(out_BTI, layer["o"], over=over, residual=residual, impl=impl), kv


def _split_key_bias(layer: Params, config: ModelConfig, kind: LayerKind, kv: Any) -> tuple[Params, Any]:
    """For a quantized cache: the layer without k's bias, and a function that adds the RoPE-rotated bias when
    keys are read, so that a large bias costs no precision. Where that is not possible: the layer as it is,
    and None.
    """
    leaf = layer["k"]
    rope = kind.rope
    if kv is None or rope is None or not is_quantized_kv(kv.k):
        return layer, None
    if "bias" not in leaf or "k_norm" in layer or not rope_is_fixed(config, rope):
        return layer, None
    bias_KH = leaf["bias"].reshape(-1, config.head_dim)
    return layer | {"k": {"weight": leaf["weight"]}}, rope_bias_fn(config, rope, bias_KH, kv.capacity)


def _project_qkv(  # noqa: PLR0913
    layer: Params,
    config: ModelConfig,
    x_BTD: jax.Array,
    over: str | None,
    before: Norm | None,
    impl: str | None,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array | None]:
    """Queries, keys and values by head, [B, T, N or K, H], after norms of all heads together; and the gate
    of attention's output, [B, T, N H], if the layer has one.
    """
    names = ["q", "k", "v", *(["attn_gate"] if config.attn_output_gate else [])]
    ys = products(x_BTD, [layer[name] for name in names], before=before, impl=impl)
    if config.qk_norm_joint:
        ys[:2] = joint_norms(ys[:2], layer, ["q_norm", "k_norm"], config, over)
    q_BTNH, k_BTKH, v_BTKH = (y.reshape(*y.shape[:2], -1, config.head_dim) for y in ys[:3])
    return (q_BTNH, k_BTKH, v_BTKH), ys[3] if config.attn_output_gate else None


def _head_norms(layer: Params, config: ModelConfig) -> HeadNorms | None:
    """The layer's norms of each head of queries and keys; None: it has none."""
    if config.qk_norm_joint or "q_norm" not in layer:
        return None
    return HeadNorms(layer["q_norm"], layer["k_norm"], config.rms_norm_eps, config.norm_offset)


def _feed_forward(  # noqa: PLR0913
    x_BTD: jax.Array,
    residual: jax.Array | None,
    layer: Params,
    config: ModelConfig,
    over: str | None,
    impl: str | None,
) -> jax.Array:
    """The MLP or experts for x after its norm; with the residual added if there is one."""
    if "experts" not in layer:
        before = norm_before(layer, "mlp_norm", config)
        return gated_mlp(x_BTD, layer, config, over, before=before, residual=residual, impl=impl)
    x_BTD = norm(x_BTD, layer, "mlp_norm", config)
    out_BTD = mixture_of_experts(x_BTD, layer, config, over, impl)
    if "shared" in layer:  # an expert that all tokens use
        shared_BTD = gated_mlp(x_BTD, layer["shared"], config, over, impl=impl)
        out_BTD = out_BTD + jax.nn.sigmoid(linear(x_BTD, layer["shared_gate"])) * shared_BTD
    return out_BTD if residual is None else residual + out_BTD
