"""The bias of keys in a quantized cache, added when keys are read: so a large bias costs no precision."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..config.layer_spec import AttentionSpec
from ..config.model_config import ModelConfig
from ..kernels_pallas import BIAS_STRIDE
from ..weights.layers import apply_rope, rotary_angles
from ..weights.params import Params
from .rope_orders import halves_first


def split_key_bias(
    layer: Params, config: ModelConfig, spec: AttentionSpec, rope: int | None, capacity: int
) -> tuple[Params, Any]:
    """Returns the layer without k's bias, and a function that adds the RoPE-rotated bias when keys are read.
    If that is not possible, it returns the layer unchanged, and None.

    RoPE angles of cached keys must depend on their positions only. The angles of `dynamic` RoPE change beyond
    its original maximum, which no cache exceeds.
    """
    is_split = spec.qkv_bias and not spec.qk_norm and not spec.shares_kv
    if rope is None or not is_split or config.ropes[rope].switches_at is not None:
        return layer, None
    leaf = layer["k"]
    bias_KH = leaf["bias"].reshape(-1, spec.head_dim or config.head_dim)
    if config.ropes[rope].interleaved:
        bias_KH = halves_first(bias_KH, config.ropes[rope])
    return layer | {"k": {"weight": leaf["weight"]}}, rope_bias_fn(config, rope, bias_KH, capacity)


class RotatedBias(NamedTuple):
    """The RoPE-rotated bias of keys, as a function of positions, int32 [B, S] -> float32 [B, K, S, H]. It
    adds the angles of a multiple of `BIAS_STRIDE` and of the remainder, so its tables are small.
    """

    near_KTH: jax.Array  # at the positions below `BIAS_STRIDE`
    across_KTH: jax.Array  # rotated by 90 degrees more
    cos_TH: jax.Array  # of multiples of `BIAS_STRIDE`
    sin_TH: jax.Array
    cos_RP: jax.Array  # the same for each rotated pair, as kernels read them
    sin_RP: jax.Array

    def __call__(self, position_BS: jax.Array) -> jax.Array:
        def one(position_S: jax.Array) -> jax.Array:
            far_S = position_S // BIAS_STRIDE
            near_S = position_S % BIAS_STRIDE
            across_KSH = self.across_KTH[:, near_S] * self.sin_TH[far_S]
            return self.near_KTH[:, near_S] * self.cos_TH[far_S] + across_KSH

        return jax.vmap(one)(position_BS)


def rope_bias_fn(config: ModelConfig, rope: int, bias_KH: jax.Array, capacity: int) -> RotatedBias:
    """Returns the RoPE-rotated bias of keys at positions below the capacity."""

    def angles(position_T: jax.Array) -> Any:  # each [1, T, P]
        return rotary_angles(config, position_T[None], jnp.zeros(1, jnp.int32))[rope]

    bias_1TKH = jnp.broadcast_to(bias_KH.astype(jnp.float32), (1, BIAS_STRIDE, *bias_KH.shape))
    near_1TKH = apply_rope(bias_1TKH, *angles(jnp.arange(BIAS_STRIDE)))
    cos, sin = angles(BIAS_STRIDE * jnp.arange(capacity // BIAS_STRIDE + 1))
    # Rotated by 90 degrees more: near * cos + across * sin is near rotated by an angle.
    across_1TKH = apply_rope(near_1TKH, *(jnp.full((1, BIAS_STRIDE, cos.shape[-1]), x) for x in (0.0, 1.0)))
    scale = cos[0, 0, 0]
    padding = ((0, 0), (0, bias_KH.shape[-1] - 2 * cos.shape[-1]))  # cos 0 is 1
    cos_TH, sin_TH = (
        jnp.pad(jnp.tile(x[0] / scale, 2), padding, constant_values=rest) for x, rest in ((cos, 1), (sin, 0))
    )
    near_KTH, across_KTH = (jnp.swapaxes(x[0], 0, 1) for x in (near_1TKH, across_1TKH))
    return RotatedBias(near_KTH, across_KTH, cos_TH, sin_TH, cos[0] / scale, sin[0] / scale)
