"""The decoder as a pure function of (params, tokens, cache): embed, layers, logits. One for all families, driven by the config."""

import jax
import jax.numpy as jnp

from .attention import attention, check_impl
from .cache import KVCache, advance, append, read
from .config import ModelConfig
from .errors import InputError
from .layers import embed, gated_mlp, linear, rms_norm, rotary_angles, rotate
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
    """Logits of every token. Not jitted: the caller jits it. Without a cache it has reverse-mode gradients in every leaf.

    Args:
        params: the parameter tree.
        config: static.
        tokens_BT: int32 token ids.
        cache: None, or the cache that already holds what precedes these tokens; they are appended at its `length_B`.
        num_tokens_B: how many of the T tokens of each row are real (the rest is padding on the right); None: all.
        impl: of attention: None (what suits the device), "mosaic", "triton" or "xla".

    Returns:
        float32 logits [B, T, V] (undefined at padding) and the cache with the tokens appended.

    Raises:
        InputError: more tokens than the cache's capacity; an impl that this machine lacks, or that cannot serve the call.
    """
    check_impl(impl)
    hidden_BTD, cache = hidden_states(params, config, tokens_BT, cache, num_tokens_B, impl=impl)
    return unembed(params, hidden_BTD), cache


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
    B, T = tokens_BT.shape
    num_tokens_B = jnp.full(B, T, jnp.int32) if num_tokens_B is None else num_tokens_B
    start_B = jnp.zeros(B, jnp.int32) if cache is None else cache.length_B
    angles = rotary_angles(config, start_B[:, None] + jnp.arange(T), start_B + num_tokens_B)
    x_BTD = embed_tokens(params, tokens_BT) if inputs_BTD is None else inputs_BTD.astype(activation_dtype(params))
    for index, layer in enumerate(params["layers"]):
        attended, cache = _attend(
            layer, config, index, rms_norm(x_BTD, layer["attn_norm"], config.rms_norm_eps), angles, cache, num_tokens_B, impl
        )
        x_BTD = x_BTD + attended
        x_BTD = x_BTD + gated_mlp(rms_norm(x_BTD, layer["mlp_norm"], config.rms_norm_eps), layer)
    cache = None if cache is None else advance(cache, num_tokens_B)
    return rms_norm(x_BTD, params["final_norm"], config.rms_norm_eps), cache


def embed_tokens(params: Params, tokens: jax.Array) -> jax.Array:
    """What the first layer gets of tokens: int32 [...] -> [..., D] in the type of the activations."""
    return embed(jnp.asarray(tokens), params["embed"], activation_dtype(params))


def unembed(params: Params, hidden: jax.Array) -> jax.Array:
    """float32 logits [..., V] of hidden states [..., D]."""
    return linear(hidden, head(params), jnp.float32)


def head(params: Params) -> Params:
    """The vocabulary matrix; a tied model reuses the embedding matrix."""
    return params["lm_head"] if "lm_head" in params else params["embed"]


def _attend(layer: Params, config: ModelConfig, index: int, x_BTD, angles, cache: KVCache | None, num_tokens_B, impl):
    B, T, _ = x_BTD.shape
    q_BTNH, k_BTKH, v_BTKH = (linear(x_BTD, layer[name]).reshape(B, T, -1, config.head_dim) for name in "qkv")
    if config.qk_norm:
        q_BTNH = rms_norm(q_BTNH, layer["q_norm"], config.rms_norm_eps)
        k_BTKH = rms_norm(k_BTKH, layer["k_norm"], config.rms_norm_eps)
    if config.layer_rope[index]:
        q_BTNH, k_BTKH = rotate(q_BTNH, *angles), rotate(k_BTKH, *angles)
    if cache is None:
        k_BKSH, v_BKSH = jnp.swapaxes(k_BTKH, 1, 2), jnp.swapaxes(v_BTKH, 1, 2)
        start_B, length_B = None, num_tokens_B
    else:
        start_B, length_B = cache.length_B, cache.length_B + num_tokens_B
        cache = append(cache, index, k_BTKH, v_BTKH, num_tokens_B)
        k_BKSH, v_BKSH = read(cache, index)
    scale, window = config.head_dim**-0.5, config.layer_windows[index]
    out_BTNH = attention(q_BTNH, k_BKSH, v_BKSH, length_B=length_B, start_B=start_B, scale=scale, window=window, impl=impl)
    return linear(out_BTNH.reshape(B, T, -1), layer["o"]), cache
