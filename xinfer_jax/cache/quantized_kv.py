"""Keys and values in 8 or 4 bits a number, with a step and an offset per head and position; GEAR in 4 bits.

GEAR (Kang et al. 2024) stores outliers separately, which narrows the range that is quantized, and stores a
low-rank approximation of the quantization error. Tokens arrive one by one, so here the first tokens of a row
choose the directions (the basis), and each token stores its coordinates along them. Z: number of directions.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas import match_varying_axes
from kernels_pallas.key_layouts import from_levels, to_levels

from ..errors import InputError
from ..formatting import ShortRepr
from ..sharding import REPLICATED, partition_spec

KV_BITS = {"int8": 8, "int4": 4, "gear": 4}
_RANK = 4  # directions of the low-rank part
_OUTLIERS = 2  # per vector: its smallest and its largest number
_MAX_WIDTH = 256  # of a vector: the index of an outlier has a byte
# The first tokens of a row, which choose its directions. A prefill chunk has as many, or the whole prompt, so
# that the directions depend neither on the chunks nor on other rows.
GEAR_TOKENS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class QuantizedKV(ShortRepr):
    """K or V of one layer, [B, K, S, H]: low + step * level; with a basis GEAR's low-rank part and outliers
    too.
    """

    # Levels, uint8 [B, K, S, H]; in 4 bits [B, K, S, H/2] with dimension h in the low half of a byte and
    # h + H/2 in the high half. With a basis the indices of the two outliers follow.
    values: jax.Array
    # Float16 [B, K, S, 2]: step and low. With a basis the two outliers and Z coordinates follow.
    scale: jax.Array
    basis: jax.Array | None  # float32 [B, K, Z, H], orthonormal or zeros; None: no GEAR
    bits: int = dataclasses.field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        width = self.values.shape[-1] * 8 // self.bits if self.basis is None else self.basis.shape[-1]
        return (*self.values.shape[:-1], width)

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype

    @property
    def name(self) -> str:
        return f"int{self.bits}" if self.basis is None else "gear"


def empty_kv(shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros [B, K, S, H]. dtype: a name in `KV_BITS`, or a float type."""
    if dtype not in KV_BITS:
        return jnp.zeros(shape, dtype)
    (B, K, S, H) = shape
    bits = KV_BITS[dtype]
    check_head_dim(H, dtype)
    rank, outliers = (min(_RANK, H), _OUTLIERS) if dtype == "gear" else (0, 0)
    values = jnp.zeros((B, K, S, H * bits // 8 + outliers), jnp.uint8)
    scale = jnp.zeros((B, K, S, 2 + outliers + rank), jnp.float16)
    return QuantizedKV(values, scale, jnp.zeros((B, K, rank, H)) if rank else None, bits)


def check_head_dim(width: int, dtype: Any) -> None:
    """Raises InputError where a format cannot store vectors of that width (head_dim)."""
    if dtype != "gear":
        return
    if width <= _OUTLIERS:
        raise InputError(
            f"'gear' stores {_OUTLIERS} outliers of a vector separately, which leaves nothing of head_dim"
            f" {width}: use 'int8'"
        )
    if width > _MAX_WIDTH:
        raise InputError(
            f"'gear' stores the index of an outlier in a byte, and head_dim {width} exceeds {_MAX_WIDTH}: use"
            " 'int8' or 'int4'"
        )


def cache_specs(tree: Any, mesh: Any) -> Any:
    """The PartitionSpecs of a cache or of parts of it: keys and values are sharded by heads, on axis 1."""

    def of(x: Any) -> PartitionSpec:
        return partition_spec(("rows", "kv_heads", None, None), x.shape, mesh) if x.ndim == 4 else REPLICATED

    return jax.tree.map(of, tree)


def shard_heads(tree: Any, mesh: Mesh | None) -> Any:
    """Keys and values with the sharding of `cache_specs`, in a traced function."""
    if mesh is None:
        return tree
    shardings = jax.tree.map(partial(NamedSharding, mesh), cache_specs(tree, mesh))
    return lax.with_sharding_constraint(tree, shardings)


def vector_bytes(width: int, dtype: Any) -> int:
    """Bytes of one key or value. dtype: a name in `KV_BITS`, or a float type."""
    if dtype not in KV_BITS:
        return width * jnp.dtype(dtype).itemsize
    gear = _OUTLIERS + 2 * (_OUTLIERS + min(_RANK, width)) if dtype == "gear" else 0
    return width * KV_BITS[dtype] // 8 + 2 * 2 + gear


def quantize_kv(x_BKTH: jax.Array, like: QuantizedKV, first_B: jax.Array | None = None) -> QuantizedKV:
    """Quantizes to nearest, between the smallest and the largest number of each head and position. GEAR
    stores these two separately.

    Args:
        x_BKTH: new keys or values.
        like: the cache that they will be written to: its format and basis.
        first_B: int32, how many of the T tokens are the first of their row: the first `GEAR_TOKENS` of them
            choose a new basis; None: none.
    """
    x = x_BKTH.astype(jnp.float32)
    bits = like.bits
    if like.basis is None:
        level, scale = to_levels(x, jnp.min(x, -1, keepdims=True), jnp.max(x, -1, keepdims=True), bits)
        return QuantizedKV(level, scale, None, bits)
    smallest = jnp.argmin(x, -1, keepdims=True)
    largest = jnp.argmax(x, -1, keepdims=True)
    is_outlier = _is_at(smallest, x) | _is_at(largest, x)
    low = jnp.min(x, -1, keepdims=True, where=~is_outlier, initial=jnp.inf)
    high = jnp.max(x, -1, keepdims=True, where=~is_outlier, initial=-jnp.inf)
    level, scale = to_levels(jnp.clip(x, low, high), low, high, bits)
    error = jnp.where(is_outlier, 0, x - from_levels(level, scale, bits))
    basis = match_varying_axes(like.basis, error, first_B)
    if first_B is not None and x.shape[2] > 1:  # a single token has no directions
        first = error[:, :, :GEAR_TOKENS]
        basis = lax.cond(jnp.any(first_B > 0), lambda: _directions(first, basis, first_B), lambda: basis)
    coordinates = jnp.einsum("bkth,bkjh->bktj", error, basis, precision=lax.Precision.HIGHEST)
    outliers = (jnp.take_along_axis(x, at, -1) for at in (smallest, largest))
    values = jnp.concatenate([level, smallest.astype(jnp.uint8), largest.astype(jnp.uint8)], -1)
    scale = jnp.concatenate([scale, *(part.astype(jnp.float16) for part in (*outliers, coordinates))], -1)
    return QuantizedKV(values, scale, basis, bits)


def dequantize_kv(x: jax.Array | QuantizedKV) -> jax.Array:
    """Float32 keys or values; an array that is not quantized as it is."""
    if not isinstance(x, QuantizedKV):
        return x
    if x.basis is None:
        return from_levels(x.values, x.scale, x.bits)
    level, smallest, largest = jnp.split(x.values, (x.values.shape[-1] - 2, x.values.shape[-1] - 1), -1)
    scale, low, high, coordinates = jnp.split(x.scale.astype(jnp.float32), (2, 3, 4), -1)
    error = jnp.einsum("bksj,bkjh->bksh", coordinates, x.basis, precision=lax.Precision.HIGHEST)
    y = from_levels(level, scale, x.bits) + error
    return jnp.where(_is_at(smallest, y), low, jnp.where(_is_at(largest, y), high, y))


def _is_at(at, x):
    return jnp.arange(x.shape[-1]) == at


def _directions(error_BKTH, basis_BKZH, first_B):
    """The Z directions of the largest quantization error of the first first_B[b] tokens; the old ones where
    first_B[b] is 0.

    Fewer than Z tokens span fewer directions. The others are zeros; else rounding noise would choose them,
    differently in each batch.
    """
    counts_BT = jnp.arange(error_BKTH.shape[2]) < first_B[:, None]
    counted = jnp.where(counts_BT[:, None, :, None], error_BKTH, 0)
    moments_BKHH = jnp.einsum("bkth,bktg->bkhg", counted, counted, precision=lax.Precision.HIGHEST)
    values_BKH, vectors_BKHH = jnp.linalg.eigh(moments_BKHH)
    known_BKH = values_BKH > 1e-5 * values_BKH[..., -1:]  # eigenvalues ascend
    directions_BKHH = jnp.where(known_BKH[..., None], jnp.swapaxes(vectors_BKHH, 2, 3), 0)
    found = directions_BKHH[:, :, -basis_BKZH.shape[2] :]
    return jnp.where((first_B > 0)[:, None, None, None], found, basis_BKZH)
