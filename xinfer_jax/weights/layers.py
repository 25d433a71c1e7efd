"""The parts of a decoder layer: RMS norm, rotary position embedding (RoPE), linear, gated MLP."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..config.model_config import ModelConfig, RopeConfig
from ..config.run_config import PLAIN, RunConfig
from ..ops.operation import Call, chosen_form, run
from ..ops.product import float_product
from ..registry import plugin
from .params import AnyArray, Params

Angles = tuple[tuple[jax.Array, jax.Array], ...]  # (cos, sin) for each of `ModelConfig.ropes`

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["eps", "offset", "centered"])
@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm of the input of products."""

    weight: Any  # [I]
    eps: float
    offset: float | None  # as in `rms_norm`; kernels always multiply in float32
    centered: bool = False  # as in `rms_norm`

    def __call__(self, x: jax.Array, mean: Any = None) -> jax.Array:
        """Returns x after the norm. mean: as in `rms_norm`."""
        return rms_norm(x, self.weight, self.eps, self.offset, mean, self.centered)


def activation(config: ModelConfig) -> Callable[[jax.Array], jax.Array]:
    """Returns the elementwise function of the model's gated MLPs."""
    return _ACTIVATIONS[config.hidden_act]


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, offset: float | None = None, mean: Any = None, centered=False
) -> jax.Array:
    """Returns the root-mean-square norm (Zhang & Sennrich 2019) of x [..., D], times offset + weight [D] in
    float32. Without an offset it is rounded to the dtype of x, and then multiplied by the weight. mean: the
    mean of squares, [..., 1], if x has only a part of the features. centered: True subtracts the mean of x
    first, as LayerNorm does (Ba et al. 2016).
    """
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, -1, keepdims=True) if centered else x32
    mean = jnp.mean(jnp.square(x32), -1, keepdims=True) if mean is None else mean
    x32 = x32 * lax.rsqrt(mean + eps)
    if offset is not None:
        return (x32 * (offset + weight.astype(jnp.float32))).astype(x.dtype)
    return (weight * x32.astype(x.dtype)).astype(x.dtype)


def norm(x: jax.Array, tree: Params, name: str, config: ModelConfig, mean: Any = None) -> jax.Array:
    """Returns x after the norm of that name. mean: see `rms_norm`."""
    return norm_before(tree, name, config)(x, mean)


def joint_norms(
    xs: list[jax.Array], tree: Params, names: list[str], config: ModelConfig, run_config: RunConfig
) -> list[jax.Array]:
    """Runs `norm` of several vectors, whose features `RunConfig.over` may divide."""
    means: Any = [None] * len(xs)
    if run_config.over is not None:
        from ..backends.mesh import means_of_squares  # optional: meshes

        means = means_of_squares(xs, run_config.over)
    return [norm(x, tree, name, config, mean) for x, name, mean in zip(xs, names, means, strict=True)]


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Returns x times a factor. It multiplies in float32, and rounds once to the dtype of x."""
    return x if factor == 1 else (factor * x.astype(jnp.float32)).astype(x.dtype)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Returns cap * tanh(x / cap). None: x."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def norm_before(tree: Params, name: str, config: ModelConfig) -> Norm:
    """Returns the norm of that name, for `products` of its result."""
    return Norm(tree[name], config.rms_norm_eps, config.norm_offset, config.layers[0].centered_norms)


def linear(
    x: jax.Array,
    leaf: Params,
    out_dtype: jnp.dtype | None = None,
    over: str | None = None,
    *,
    residual: jax.Array | None = None,
    run_config: RunConfig = PLAIN,
) -> jax.Array:
    """Returns x @ weight.T + bias, [..., I] -> [..., O].

    Args:
        leaf: "weight", [O, I] or quantized, and "bias", [O] or absent.
        over: a mesh axis along which I is sharded. The devices' products are summed.
        residual: None, or an array that is added to the result.
        run_config: see `products`.
    """
    dtype = out_dtype or x.dtype
    if over is not None:
        from ..backends.mesh import summed_linear  # optional: meshes

        return summed_linear(x, leaf, over, dtype, residual, run_config)
    return products(x, [leaf], residual=residual, dtype=dtype, run_config=run_config)[0]


def products(
    x: jax.Array,
    leaves: list[Params],
    *,
    before: Norm | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
    run_config: RunConfig = PLAIN,
) -> list[jax.Array]:
    """Returns x @ weight.T + bias for each leaf: [..., I] -> [..., O]. They are one kernel if there is one
    for all. The operation "apart" keeps XLA from fusing the operations before and after the products, if a
    form wants that (on TPUs).

    Args:
        x: activations.
        leaves: see `linear`.
        before: None, or a norm of x.
        activation: None, or an activation. With it, two leaves give the result activation(first) * second.
        residual: None, or an array that is added to the only result.
        dtype: the dtype of the results. None: the dtype of x.
        run_config: its `impl` names a kernel.

    Returns:
        A result for each leaf, or one result with an activation.
    """
    static: dict[str, Any] = dict(activation=activation, dtype=dtype or x.dtype)
    operands: dict[str, Any] = dict(x=x, leaves=leaves, before=before, residual=residual)
    by_kernels = chosen_form("products", Call(partial(products, **static), operands, static, run_config))
    if by_kernels is not None:
        return by_kernels(**operands)
    x = x if before is None else normalized(x, before)
    ys = []
    for leaf in leaves:
        weight = leaf["weight"]
        y = float_product(x, jnp.asarray(weight)) if isinstance(weight, AnyArray) else weight.product(x)
        y = y + leaf["bias"] if "bias" in leaf else y
        ys.append(y.astype(static["dtype"]))
    return finish_products(ys, residual, activation)


def normalized(x: jax.Array, before: Norm) -> jax.Array:
    """Returns x after the norm before products."""
    return run("apart", _identity, x=before(x))


def finish_products(
    ys: list[jax.Array], residual: jax.Array | None, activation: str | None
) -> list[jax.Array]:
    """Returns the results of products with the activation and the residual of `products`."""
    if activation is not None:
        ys = checkpoint_name(ys, "gate_up")
        ys = [run("apart", _identity, x=_ACTIVATIONS[activation](ys[0]) * ys[1])]
    return ys if residual is None else [residual + ys[0]]


def _identity(x: jax.Array) -> jax.Array:
    return x


def embed(token: jax.Array, leaf: Params, dtype: jnp.dtype, scale: float = 1.0) -> jax.Array:
    """Returns rows of the embedding table {"weight": [V, D] or quantized}, times scale: int32 [...] -> [...,
    D].
    """
    table = leaf["weight"]
    is_float = isinstance(table, AnyArray)
    rows = _embed(token, jnp.asarray(table)) if is_float else table.rows(token)
    x = rows.astype(dtype)
    return x if scale == 1 else x * jnp.asarray(scale, dtype)


def _embed(token: jax.Array, table: jax.Array) -> jax.Array:
    plain = lambda token, table: table[token]  # noqa: E731
    return run("embedding", plain, derivative=plain, token=token, table=table)


def rotary_angles(config: ModelConfig, position_BT: jax.Array, length_B: jax.Array) -> Angles:
    """Returns cosine and sine of the rotary angles (Su et al. 2021), float32.

    Args:
        config: the model. Its RoPE configs say how frequencies are scaled.
        position_BT: absolute positions.
        length_B: the length by which `dynamic` and `longrope` choose frequencies. Without a cache it is the
            number of the row's tokens. With a cache it is the longest that the row may become, or 0 if that
            is not known.

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
    """Returns float32 [P]: the positions in which each pair of the first `width` numbers rotates by 1."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    # Computed in float64 and rounded once, they equal torch's. In float32 they differ by an ulp, which is
    # visible after 500 positions.
    return (np.float64(rope.rope_theta) ** exponents.astype(np.float64)).astype(np.float32)


def apply_rope(x_BTNH: jax.Array, cos_BTP: jax.Array, sin_BTP: jax.Array) -> jax.Array:
    """Applies RoPE: rotates each pair (i, i + P) of every head, in the order of transformers, by its angle.
    The rest of a head stays.
    """
    cos = cos_BTP[:, :, None]
    sin = sin_BTP[:, :, None]
    pairs = cos.shape[-1]
    a, b, rest = jnp.split(x_BTNH.astype(jnp.float32), (pairs, 2 * pairs), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x_BTNH.dtype)
