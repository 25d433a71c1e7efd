"""The decoder as a pure function of (params, tokens, cache): embed, layers, logits. One for all families,
driven by the config.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from .attention import attention, check_impl
from .cache import KVCache, advance, append, held, read
from .config import ModelConfig
from .errors import InputError
from .experts import mixture_of_experts
from .layers import embed, gated_mlp, linear, norm, rotary_angles, rotate, soft_cap
from .params import Params, activation_dtype


def forward(
    params: Params,
    config: ModelConfig,
    tokens_BT: jax.Array,
    cache: KVCache | None = None,
    num_tokens_B: jax.Array | None = None,
    *,
    impl: str | None = None,
) -> tuple[jax.Array, KVCache | None]:
    """Logits of every token. Not jitted: the caller jits it. Without a cache it has reverse-mode gradients in
    every leaf.

    Args:
        params: the parameter tree.
        config: static.
        tokens_BT: int32 token ids.
        cache: None, or the cache that already holds what precedes these tokens; they are appended at its
            `length_B`.
        num_tokens_B: how many of the T tokens of each row are real (the rest is padding on the right); None:
            all.
        impl: of attention: None (what suits the device), "mosaic", "triton" or "xla".

    Returns:
        float32 logits [B, T, V] (undefined at padding) and the cache with the tokens appended.

    Raises:
        InputError: more tokens than the cache's capacity; an impl that this machine lacks, or that cannot
            serve the call.
    """
    check_impl(impl)
    hidden_BTD, cache = hidden_states(params, config, tokens_BT, cache, num_tokens_B, impl=impl)
    return unembed(params, config, hidden_BTD), cache


def hidden_states(
    params: Params,
    config: ModelConfig,
    tokens_BT: jax.Array,
    cache: KVCache | None = None,
    num_tokens_B: jax.Array | None = None,
    *,
    inputs_BTD: jax.Array | None = None,
    impl: str | None = None,
) -> tuple[jax.Array, KVCache | None]:
    """`forward` without its last step: the normed hidden state of every token, [B, T, D].

    inputs_BTD, where given, enters the first layer in place of the tokens' embeddings.
    """
    if tokens_BT.ndim != 2:
        raise InputError(f"tokens must have the shape [rows, tokens], got {tokens_BT.shape}")
    _check_mesh(params, tokens_BT, cache)
    B, T = tokens_BT.shape
    num_tokens_B = jnp.full(B, T, jnp.int32) if num_tokens_B is None else num_tokens_B
    start_B = jnp.zeros(B, jnp.int32) if cache is None else cache.length_B
    angles = rotary_angles(config, start_B[:, None] + jnp.arange(T), start_B + num_tokens_B)
    x_BTD = (
        embed_tokens(params, config, tokens_BT)
        if inputs_BTD is None
        else inputs_BTD.astype(activation_dtype(params))
    )
    for index, layer in enumerate(params["layers"]):
        attended_BTD, cache = _attend(
            layer, config, index, norm(x_BTD, layer, "attn_norm", config), angles, cache, num_tokens_B, impl
        )
        x_BTD = x_BTD + norm(attended_BTD, layer, "attn_post_norm", config)
        fed_BTD = _feed_forward(norm(x_BTD, layer, "mlp_norm", config), layer, config)
        x_BTD = x_BTD + norm(fed_BTD, layer, "mlp_post_norm", config)
    cache = None if cache is None else advance(cache, num_tokens_B)
    return norm(x_BTD, params, "final_norm", config), cache


def _check_mesh(*trees: Any) -> None:
    """Raises InputError where an array is divided along an Explicit axis: jax then wants the layout of every
    product said, which is left to its compiler here.
    """
    for leaf in jax.tree.leaves(trees):
        spec, mesh = jax.typeof(leaf).sharding.spec, jax.typeof(leaf).sharding.mesh
        if any(axis is not None for axis in spec) and AxisType.Explicit in mesh.axis_types:
            raise InputError(
                f"an array is divided as {spec} over a mesh with Explicit axes: make the mesh with"
                f" axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_types)}, or use jax.shard_map"
            )


def embed_tokens(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """What the first layer gets of tokens: int32 [...] -> [..., D] in the type of the activations."""
    return embed(jnp.asarray(tokens), params["embed"], activation_dtype(params), config.embed_scale)


def unembed(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """float32 logits [..., V] of hidden states [..., D]."""
    return soft_cap(linear(hidden, head(params), jnp.float32), config.final_logit_softcapping)


def head(params: Params) -> Params:
    """The vocabulary matrix; a tied model reuses the embedding matrix."""
    return params["lm_head"] if "lm_head" in params else params["embed"]


def _attend(
    layer: Params, config: ModelConfig, index: int, x_BTD, angles, cache: KVCache | None, num_tokens_B, impl
):
    B, T, _ = x_BTD.shape
    q_BTNH, k_BTKH, v_BTKH = (_heads(layer, config, name, x_BTD) for name in "qkv")
    if angles[index] is not None:
        q_BTNH, k_BTKH = rotate(q_BTNH, *angles[index]), rotate(k_BTKH, *angles[index])
    if cache is None:
        k_BKSH, v_BKSH = jnp.swapaxes(k_BTKH, 1, 2), jnp.swapaxes(v_BTKH, 1, 2)
        start_B, length_B = None, num_tokens_B
    else:
        start_B, length_B = cache.length_B, held(cache, index, num_tokens_B)
        cache = append(cache, index, k_BTKH, v_BTKH, num_tokens_B)
        k_BKSH, v_BKSH = read(cache, index)
    scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5
    settings = dict(
        scale=scale, window=config.layer_windows[index], soft_cap=config.attn_logit_softcapping, impl=impl
    )
    ring = cache is not None and cache.is_ring(index)
    out_BTNH = attention(q_BTNH, k_BKSH, v_BKSH, length_B=length_B, start_B=start_B, ring=ring, **settings)
    return linear(out_BTNH.reshape(B, T, -1), layer["o"]), cache


def _heads(layer: Params, config: ModelConfig, name: str, x_BTD: jax.Array) -> jax.Array:
    """Queries, keys or values by head, [B, T, N or K, H]; normed where the layer has a norm for them."""
    y = linear(x_BTD, layer[name])
    y = norm(y, layer, f"{name}_norm", config) if config.qk_norm_joint else y
    y = y.reshape(*y.shape[:2], -1, config.head_dim)
    return y if config.qk_norm_joint else norm(y, layer, f"{name}_norm", config)


def _feed_forward(x_BTD: jax.Array, layer: Params, config: ModelConfig) -> jax.Array:
    if "experts" in layer:
        return mixture_of_experts(x_BTD, layer, config)
    return gated_mlp(x_BTD, layer, config.hidden_act)
