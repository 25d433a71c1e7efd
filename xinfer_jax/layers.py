"""The parts of a decoder layer: RMS norm, rotary embedding, linear, gated MLP. Norms and angles are computed in float32."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .config import ModelConfig, RopeConfig
from .params import Params
from .products import product
from .quantization import is_quantized, quantized_product, rows_of


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis (Zhang & Sennrich 2019). x: [..., D], weight: [D]."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + eps)
    return (weight * x32.astype(x.dtype)).astype(x.dtype)


def linear(x: jax.Array, leaf: Params, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x @ weight.T + bias. x: [..., in], leaf: {"weight": [out, in] or quantized, "bias": [out] or absent}. Returns [..., out]."""
    weight = leaf["weight"]
    if is_quantized(weight):
        y = quantized_product(x, weight)
    else:
        y = product(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)
    if "bias" in leaf:
        y = y + leaf["bias"]
    return y.astype(out_dtype or x.dtype)


def embed(token: jax.Array, leaf: Params, dtype: jnp.dtype) -> jax.Array:
    """Rows of the embedding table: token [...] int32, leaf: {"weight": [V, D] or quantized}, returns [..., D]."""
    table = leaf["weight"]
    return (rows_of(table, token) if is_quantized(table) else _embed(token, table)).astype(dtype)


@jax.custom_jvp
def _embed(token: jax.Array, table: jax.Array) -> jax.Array:

    def row_by_row(token: jax.Array, table: jax.Array) -> jax.Array:
        ids = token.reshape(-1)

        def row(i: jax.Array) -> jax.Array:  # tied as in products.tile_by_tile, and to the ids: one token's loop is unrolled
            tied, at = lax.optimization_barrier((table, ids[i]))
            return lax.dynamic_index_in_dim(tied, at, 0, keepdims=False).astype(jnp.float32)

        return lax.map(row, jnp.arange(ids.size)).reshape(*token.shape, -1).astype(table.dtype)

    if table.dtype == jnp.float32:
        return table[token]
    return lax.platform_dependent(token, table, cpu=row_by_row, default=lambda token, table: table[token])


@_embed.defjvp
def _embed_jvp(primals, tangents):
    token, table = primals
    return _embed(token, table), tangents[1][token]


def gated_mlp(x: jax.Array, layer: Params) -> jax.Array:
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)). x: [..., D]."""
    return linear(jax.nn.silu(linear(x, layer["gate"])) * linear(x, layer["up"]), layer["down"])


def rotary_angles(config: ModelConfig, position_BT: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotary angles (Su et al. 2021), float32.

    Args:
        config: the model; its `rope` says how frequencies are scaled.
        position_BT: absolute positions.
        length_B: each row's length after this call: `dynamic` scales by it.

    Returns:
        cos and sin, each [B, T, H/2].
    """
    rope, width = config.rope, config.head_dim
    inverse, scale = _inverse_frequencies(rope, width)
    if rope.rope_type == "dynamic":  # theta * stretch ** (H / (H - 2)), with the stretch taken out of the power: closer to exact
        stretch_B = rope.factor * jnp.maximum(length_B, config.max_position_embeddings) / config.max_position_embeddings - (rope.factor - 1)
        inverse = (inverse * stretch_B[:, None] ** (-np.arange(0, width, 2, dtype=np.float32) / (width - 2)))[:, None]  # [B, 1, H/2]
    angle = position_BT[..., None].astype(jnp.float32) * inverse
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x_BTNH: jax.Array, cos_BTR: jax.Array, sin_BTR: jax.Array) -> jax.Array:
    """Rotates each pair (i, i + H/2) of every head by its angle, the layout of Hugging Face checkpoints. R = H/2."""
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BTR[:, :, None], sin_BTR[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def _inverse_frequencies(rope: RopeConfig, width: int) -> tuple[np.ndarray, float]:
    """Angle per position of each pair, float32 [H/2], and the factor on cos and sin."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    # Powers in float64, rounded once, are torch's own; numpy's in float32 are off by an ulp, which 500 positions make visible.
    powers = (np.float64(rope.rope_theta) ** exponents.astype(np.float64)).astype(np.float32)
    inverse = np.float32(1.0) / powers
    if rope.rope_type == "linear":
        return inverse / np.float32(rope.factor), 1.0
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, inverse), 1.0
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, inverse), _yarn_scale(rope)
    return inverse, 1.0


def _llama3_frequencies(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    """Llama 3.1: long waves stretched by `factor`, short ones kept, a smooth passage between."""
    turns = rope.original_max_position_embeddings * inverse / np.float32(2 * math.pi)  # full turns within the first context
    smooth = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return ((1 - smooth) * inverse / rope.factor + smooth * inverse).astype(np.float32)


def _yarn_frequencies(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    """YaRN (Peng et al. 2023): a ramp over the pairs between extrapolation and interpolation by `factor`."""
    width = 2 * len(inverse)

    def pair_with(turns: float) -> float:
        return width * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = np.clip((np.arange(len(inverse), dtype=np.float32) - low) / ((high - low) or 0.001), 0, 1)
    return (inverse / rope.factor * ramp + inverse * (1 - ramp)).astype(np.float32)


def _yarn_scale(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
