"""Keys and values in 8 or 4 bits a number, with a step and an offset per head and position; GEAR on 4 bits.

GEAR (Kang et al. 2024) keeps the outliers apart, which narrows the range that is divided into steps, and adds
a low-rank part of what rounding loses. Here tokens come one by one, so the directions of that part are those
of the tokens that begin the row, and a token adds its coordinates along them. Z: how many directions.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas import varying_as

from ..brief import Brief
from ..errors import InputError
from ..sharding import SAME, spec

KV_BITS = {"int8": 8, "int4": 4, "gear": 4}
_RANK = 4  # directions of the low-rank part
_OUTLIERS = 2  # the least and the largest number of a vector
_WIDEST = 256  # of a vector whose outliers' places fit a byte
# Tokens that begin a row and choose its directions; a prefill chunk has as many, or the whole prompt, so that
# the directions depend neither on the chunk nor on the other rows.
GEAR_TOKENS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class QuantizedKV(Brief):
    """K or V of one layer, [B, K, S, H]: low + step * level, and with a basis what GEAR adds."""

    # uint8 [B, K, S, H]; with 4 bits [B, K, S, H/2], dimension h in the low half of a byte and h + H/2 in the
    # high one; with a basis followed by the places of the two outliers
    values: jax.Array
    # Float16 [B, K, S, 2]: step and low; with a basis followed by the two outliers and Z coordinates.
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


def by_slot(function: Callable, x: jax.Array | QuantizedKV, *others: Any) -> Any:
    """The function on each array of x, and of others like it, that has slots on axis 2. The basis is x's."""
    if not isinstance(x, QuantizedKV):
        return function(x, *others)
    parts = {name: function(*(getattr(y, name) for y in (x, *others))) for name in ("values", "scale")}
    return dataclasses.replace(x, **parts)


def part(x: jax.Array | QuantizedKV, at: Any, width: int, row: Any) -> Any:
    """`width` slots from one on, of one row or, where that is None, of all."""
    first, rows = (0, x.shape[0]) if row is None else (row, 1)

    def cut(y: jax.Array, at: Any, width: int) -> jax.Array:
        return lax.dynamic_slice(y, (first, 0, at, 0), (rows, y.shape[1], width, y.shape[3]))

    y = by_slot(partial(cut, at=at, width=width), x)
    if isinstance(y, QuantizedKV) and y.basis is not None:
        y = dataclasses.replace(y, basis=cut(y.basis, 0, y.basis.shape[2]))
    return y


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros of a format in `KV_BITS` or of a float type: shape [B, K, S, H]."""
    if dtype not in KV_BITS:
        return jnp.zeros(shape, dtype)
    (B, K, S, H) = shape
    bits = KV_BITS[dtype]
    check_width(H, dtype)
    rank, apart = (min(_RANK, H), _OUTLIERS) if dtype == "gear" else (0, 0)
    values = jnp.zeros((B, K, S, H * bits // 8 + apart), jnp.uint8)
    scale = jnp.zeros((B, K, S, 2 + apart + rank), jnp.float16)
    return QuantizedKV(values, scale, jnp.zeros((B, K, rank, H)) if rank else None, bits)


def check_width(width: int, dtype: Any) -> None:
    """Raises InputError where a format cannot hold vectors of that width (head_dim)."""
    if dtype != "gear":
        return
    if width <= _OUTLIERS:
        raise InputError(
            f"'gear' keeps {_OUTLIERS} numbers of a vector apart, and head_dim {width} leaves none: use"
            " 'int8'"
        )
    if width > _WIDEST:
        raise InputError(
            f"'gear' keeps the places of outliers in a byte each, so head_dim {width} exceeds its {_WIDEST}:"
            " use 'int8' or 'int4'"
        )


def cache_specs(tree: Any, mesh: Any) -> Any:
    """How a cache, or parts of it, lie over a mesh: keys and values by heads, on axis 1."""

    def of(x: Any) -> PartitionSpec:
        return spec(("rows", "kv_heads", None, None), x.shape, mesh) if x.ndim == 4 else SAME

    return jax.tree.map(of, tree)


def over_heads(tree: Any, mesh: Mesh | None) -> Any:
    """Keys and values laid out by `cache_specs`, in a traced function."""
    if mesh is None:
        return tree
    places = jax.tree.map(partial(NamedSharding, mesh), cache_specs(tree, mesh))
    return lax.with_sharding_constraint(tree, places)


def vector_bytes(width: int, dtype: Any) -> int:
    """Bytes of one key or value: a format in `KV_BITS`, or a float type."""
    if dtype not in KV_BITS:
        return width * jnp.dtype(dtype).itemsize
    apart = _OUTLIERS + 2 * (_OUTLIERS + min(_RANK, width)) if dtype == "gear" else 0
    return width * KV_BITS[dtype] // 8 + 2 * 2 + apart


def quantize(x_BKTH: jax.Array, like: QuantizedKV, first_B: jax.Array | None = None) -> QuantizedKV:
    """Rounds to nearest between each head and position's least and largest number; GEAR's outliers are apart.

    Args:
        x_BKTH: new keys or values.
        like: what they will be written to: the format, and the basis.
        first_B: int32, how many of the T tokens begin a row: the first `GEAR_TOKENS` of them choose its basis
            anew; None: none.
    """
    x = x_BKTH.astype(jnp.float32)
    bits = like.bits
    if like.basis is None:
        level, scale = _rounded(x, jnp.min(x, -1, keepdims=True), jnp.max(x, -1, keepdims=True), bits)
        return QuantizedKV(level, scale, None, bits)
    least = jnp.argmin(x, -1, keepdims=True)
    largest = jnp.argmax(x, -1, keepdims=True)
    apart = _is_at(least, x) | _is_at(largest, x)
    low = jnp.min(x, -1, keepdims=True, where=~apart, initial=jnp.inf)
    high = jnp.max(x, -1, keepdims=True, where=~apart, initial=-jnp.inf)
    level, scale = _rounded(jnp.clip(x, low, high), low, high, bits)
    lost = jnp.where(apart, 0, x - _levels(level, scale, bits))
    basis = varying_as(like.basis, lost, first_B)
    if first_B is not None and x.shape[2] > 1:  # a single token has no directions
        begun = lost[:, :, :GEAR_TOKENS]
        basis = lax.cond(jnp.any(first_B > 0), lambda: _directions(begun, basis, first_B), lambda: basis)
    along = jnp.einsum("bkth,bkjh->bktj", lost, basis, precision=lax.Precision.HIGHEST)
    outliers = (jnp.take_along_axis(x, at, -1) for at in (least, largest))
    values = jnp.concatenate([level, least.astype(jnp.uint8), largest.astype(jnp.uint8)], -1)
    scale = jnp.concatenate([scale, *(part.astype(jnp.float16) for part in (*outliers, along))], -1)
    return QuantizedKV(values, scale, basis, bits)


def widen(x: jax.Array | QuantizedKV) -> jax.Array:
    """The numbers, float32 where they were rounded; an array as it is."""
    if not isinstance(x, QuantizedKV):
        return x
    if x.basis is None:
        return _levels(x.values, x.scale, x.bits)
    level, least, largest = jnp.split(x.values, (x.values.shape[-1] - 2, x.values.shape[-1] - 1), -1)
    scale, low, high, along = jnp.split(x.scale.astype(jnp.float32), (2, 3, 4), -1)
    lost = jnp.einsum("bksj,bkjh->bksh", along, x.basis, precision=lax.Precision.HIGHEST)
    y = _levels(level, scale, x.bits) + lost
    return jnp.where(_is_at(least, y), low, jnp.where(_is_at(largest, y), high, y))


def _rounded(x, low, high, bits):
    """Levels, packed two to a byte where they have 4 bits, and step and low."""
    most = 2**bits - 1
    step = jnp.maximum((high - low) / most, jnp.finfo(jnp.float16).smallest_normal)
    scale = jnp.concatenate([step, low], -1).astype(jnp.float16)
    # As they are stored: levels make up for their rounding.
    step, low = jnp.split(scale.astype(jnp.float32), 2, -1)
    level = jnp.clip(jnp.round((x - low) / step), 0, most).astype(jnp.uint8)
    if bits == 4:
        first, second = jnp.split(level, 2, -1)
        level = first | (second << 4)
    return level, scale


def _levels(level, scale, bits):
    """What levels stand for."""
    level = level if bits == 8 else jnp.concatenate([level & 15, level >> 4], -1)
    step, low = jnp.split(scale.astype(jnp.float32), 2, -1)
    return low + step * level.astype(jnp.float32)


def _is_at(at, x):
    return jnp.arange(x.shape[-1]) == at


def _directions(lost_BKTH, basis_BKZH, first_B):
    """The Z directions in which the first first_B[b] tokens lost most; the old ones where there are none.

    Fewer tokens than Z lose in fewer: the rest are zeros, or rounding would choose them, batch by batch.
    """
    counts_BT = jnp.arange(lost_BKTH.shape[2]) < first_B[:, None]
    kept = jnp.where(counts_BT[:, None, :, None], lost_BKTH, 0)
    moments_BKHH = jnp.einsum("bkth,bktg->bkhg", kept, kept, precision=lax.Precision.HIGHEST)
    values_BKH, vectors_BKHH = jnp.linalg.eigh(moments_BKHH)
    known_BKH = values_BKH > 1e-5 * values_BKH[..., -1:]  # eigenvalues ascend
    directions_BKHH = jnp.where(known_BKH[..., None], jnp.swapaxes(vectors_BKHH, 2, 3), 0)
    found = directions_BKHH[:, :, -basis_BKZH.shape[2] :]
    return jnp.where((first_B > 0)[:, None, None, None], found, basis_BKZH)
