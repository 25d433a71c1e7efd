"""The parts of a decoder layer: RMS norm, rotary position embedding (RoPE), linear, gated MLP."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .. import plugin
from ..config.model_config import ModelConfig, RopeConfig
from ..ops.operation import run
from ..ops.product import float_product
from ..weights.params import AnyArray, Params

Angles = tuple[tuple[jax.Array, jax.Array], ...]  # (cos, sin) for each of `ModelConfig.ropes`

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class Norm(NamedTuple):
    """An RMS norm of the input of products."""

    weight: Any  # [I]
    eps: float
    offset: float | None  # as in `rms_norm`; kernels always multiply in float32


def activation(config: ModelConfig) -> Callable[[jax.Array], jax.Array]:
    """The elementwise function of the model's gated MLPs."""
    return _ACTIVATIONS[config.hidden_act]


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, offset: float | None = None, mean: jax.Array | None = None
) -> jax.Array:
    """Root-mean-square norm (Zhang & Sennrich 2019) of x [..., D], times offset + weight [D] in float32. No
    offset: it is rounded to the dtype of x, and then multiplied by the weight. mean: the mean of squares,
    [..., 1], where x has only a part of the features.
    """
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(x32), -1, keepdims=True) if mean is None else mean
    x32 = x32 * lax.rsqrt(mean + eps)
    if offset is not None:
        return (x32 * (offset + weight.astype(jnp.float32))).astype(x.dtype)
    return (weight * x32.astype(x.dtype)).astype(x.dtype)


def norm(x: jax.Array, tree: Params, name: str, config: ModelConfig, mean: Any = None) -> jax.Array:
    """x after the RMS norm of that name. mean: as in `rms_norm`."""
    return rms_norm(x, tree[name], config.rms_norm_eps, config.norm_offset, mean)


def joint_norms(
    xs: list[jax.Array], tree: Params, names: list[str], config: ModelConfig, over: str | None
) -> list[jax.Array]:
    """`norm` of several vectors, whose features may be sharded along the mesh axis `over`."""
    means: Any = [None] * len(xs) if over is None else plugin("mesh", "means of squares")(xs, over)
    return [norm(x, tree, name, config, mean) for x, name, mean in zip(xs, names, means, strict=True)]


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap); None: x."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def norm_before(tree: Params, name: str, config: ModelConfig) -> Norm:
    """The RMS norm of that name, for `products` of its result."""
    return Norm(tree[name], config.rms_norm_eps, config.norm_offset)


def linear(  # noqa: PLR0913
    x: jax.Array,
    leaf: Params,
    out_dtype: jnp.dtype | None = None,
    over: str | None = None,
    *,
    residual: jax.Array | None = None,
    impl: str | None = "xla",
) -> jax.Array:
    """x @ weight.T + bias: [..., I] -> [..., O]. leaf: "weight" [O, I] or quantized, "bias" [O] or absent.
    over: a mesh axis along which I is sharded; the devices' products are summed. residual: None, or what is
    added to the result. impl: as in `products`.
    """
    dtype = out_dtype or x.dtype
    if over is not None:
        return plugin("mesh", "linear")(x, leaf, over, dtype, residual, impl)
    return products(x, [leaf], residual=residual, dtype=dtype, impl=impl)[0]


def products(  # noqa: PLR0913
    x: jax.Array,
    leaves: list[Params],
    *,
    before: Norm | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
    impl: str | None = "xla",
) -> list[jax.Array]:
    """x @ weight.T + bias for each leaf: [..., I] -> [..., O]. One kernel where there is one for all.

    Args:
        x: activations.
        leaves: as in `linear`.
        before: None, or a norm of x.
        activation: None; or of two leaves the result is activation(first) * second.
        residual: None, or what is added to the only result.
        dtype: of the results; None: that of x.
        impl: None (the best for the device), or one of `kernels_pallas.IMPLS`.

    Returns:
        A result for each leaf; one with an activation.
    """
    dtype = dtype or x.dtype
    static: dict[str, Any] = dict(norm=before and before[1:], activation=activation, dtype=dtype)
    operands = x, leaves, before and before.weight, residual
    return run("products", partial(plain_products, **static), *operands, impl=impl, **static)


def plain_products(  # noqa: PLR0913
    x: jax.Array,
    leaves: list[Params],
    norm_weight: Any,
    residual: Any,
    norm: Any,
    activation: Any,
    dtype: Any,
) -> list[jax.Array]:
    """`products` by one product for each leaf. The operation "apart" keeps XLA from fusing what is before and
    after it, where a form wants that (on TPUs). norm: eps and offset of `Norm`; None: there is none."""
    x = x if norm is None else run("apart", _identity, rms_norm(x, norm_weight, *norm))
    return finish_products([_product(x, leaf, dtype) for leaf in leaves], residual, activation)


def finish_products(
    ys: list[jax.Array], residual: jax.Array | None, activation: str | None
) -> list[jax.Array]:
    """The results of products with the activation and the residual of `products`."""
    if activation is not None:
        ys = checkpoint_name(ys, "gate_up")
        ys = [run("apart", _identity, _ACTIVATIONS[activation](ys[0]) * ys[1])]
    return ys if residual is None else [residual + ys[0]]


def _identity(x: jax.Array) -> jax.Array:
    return x


def _product(x: jax.Array, leaf: Params, dtype: jnp.dtype) -> jax.Array:
    """x @ weight.T + bias in plain jnp."""
    weight = leaf["weight"]
    if isinstance(weight, AnyArray):
        y = float_product(x, jnp.asarray(weight))
    else:
        y = weight.product(x)
    if "bias" in leaf:
        y = y + leaf["bias"]
    return y.astype(dtype)


def embed(token: jax.Array, leaf: Params, dtype: jnp.dtype, scale: float = 1.0) -> jax.Array:
    """Rows of the embedding table {"weight": [V, D] or quantized}, times scale: int32 [...] -> [..., D]."""
    table = leaf["weight"]
    is_float = isinstance(table, AnyArray)
    rows = _embed(token, jnp.asarray(table)) if is_float else table.rows(token)
    x = rows.astype(dtype)
    return x if scale == 1 else x * jnp.asarray(scale, dtype)


def _embed(token: jax.Array, table: jax.Array) -> jax.Array:
    plain = lambda token, table: table[token]  # noqa: E731
    return run("embedding", plain, token, table, derivative=plain)


def mlp_intermediate(  # noqa: PLR0913
    x: jax.Array,
    layer: Params,
    config: ModelConfig,
    over: str | None = None,
    *,
    down_norm: bool = False,
    before: Norm | None = None,
    impl: str | None = "xla",
) -> jax.Array:
    """The input of an MLP's last matrix, [..., D] -> [..., F]: activation(gate(x)) * up(x), or without a gate
    activation(up(x)), after the norm of that name with down_norm. over: as in `joint_norms`; before and impl:
    as in `products`.
    """
    if "gate" not in layer:
        return activation(config)(products(x, [layer["up"]], before=before, impl=impl)[0])
    leaves = [layer["gate"], layer["up"]]
    (inner,) = products(x, leaves, before=before, activation=config.hidden_act, impl=impl)
    return joint_norms([inner], layer, ["down_norm"], config, over)[0] if down_norm else inner


def gated_mlp(  # noqa: PLR0913
    x: jax.Array,
    layer: Params,
    config: ModelConfig,
    over: str | None = None,
    *,
    down_norm: bool = False,
    before: Norm | None = None,
    residual: jax.Array | None = None,
    impl: str | None = "xla",
) -> jax.Array:
    """SwiGLU, GeGLU (Shazeer 2020): down(activation(gate(x)) * up(x)). x: [..., D]; over: as in `linear`;
    before, residual and impl: as in `products`; down_norm: as in `mlp_intermediate`.
    """
    inner = mlp_intermediate(x, layer, config, over, down_norm=down_norm, before=before, impl=impl)
    return linear(inner, layer["down"], over=over, residual=residual, impl=impl)


def rotary_angles(config: ModelConfig, position_BT: jax.Array, length_B: jax.Array) -> Angles:
    """Cosine and sine of the rotary angles (Su et al. 2021), float32.

    Args:
        config: the model; its RoPE configs say how frequencies are scaled.
        position_BT: absolute positions.
        length_B: the length by which `dynamic` and `longrope` choose frequencies: without a cache the row's
            tokens; with one the longest that the row may become, 0 where that is not said.

    Returns:
        For each of `ModelConfig.ropes` cos and sin, [B, T, P], of the P pairs of a head that it rotates.
    """
    return tuple(_angles(rope, config, position_BT, length_B) for rope in config.ropes)


def _angles(
    rope: RopeConfig, config: ModelConfig, position_BT: jax.Array, length_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    width = rope.rotated_width(config.head_dim)
    inverse: Any = np.float32(1.0) / rope_powers(rope, width)  # the angle per position of each pair
    scale = 1.0
    if rope.rope_type != "default":
        original = config.max_position_embeddings
        inverse, scale = plugin("rope", rope.rope_type)(rope, inverse, original, length_B)
    angle_BTP = position_BT[..., None].astype(jnp.float32) * inverse
    return jnp.cos(angle_BTP) * scale, jnp.sin(angle_BTP) * scale


def rope_powers(rope: RopeConfig, width: int) -> np.ndarray:
    """float32 [P]: the positions in which each pair of the first `width` numbers rotates by 1."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    # Computed in float64 and rounded once, they equal torch's. In float32 they differ by an ulp, which is
    # visible after 500 positions.
    return (np.float64(rope.rope_theta) ** exponents.astype(np.float64)).astype(np.float32)


def apply_rope(x_BTNH: jax.Array, cos_BTP: jax.Array, sin_BTP: jax.Array) -> jax.Array:
    """RoPE: rotates each pair (i, i + P) of every head, in the order of transformers, by its angle; the rest
    of a head stays.
    """
    cos = cos_BTP[:, :, None]
    sin = sin_BTP[:, :, None]
    pairs = cos.shape[-1]
    a, b, rest = jnp.split(x_BTNH.astype(jnp.float32), (pairs, 2 * pairs), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x_BTNH.dtype)
