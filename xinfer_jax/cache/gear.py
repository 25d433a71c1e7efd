"""GEAR (Kang et al. 2024): keys and values in 4 bits. Outliers are stored separately, which narrows the range
that is quantized. A low-rank approximation of the quantization error is added.

Tokens arrive one by one, so here the first tokens of a row choose the directions (the basis), and each token
stores its coordinates along them. Z is the number of directions.
"""

import dataclasses
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax

from ..errors import InputError
from ..kernels_pallas.key_layouts import from_levels, to_levels
from ..ops.operation import match_varying_axes
from .stored_kv import CacheDtype, StoredKV

_BITS = 4
_RANK = 4  # directions of the low-rank part
_OUTLIERS = 2  # per vector: its smallest and its largest number
_MAX_WIDTH = 256  # of a vector: the index of an outlier has a byte
# The first tokens of a row, which choose its directions. A prefill chunk has as many, or the whole prompt, so
# that the directions depend neither on the chunks nor on other rows.
_FIRST_TOKENS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class GearKV(StoredKV):
    """K or V of one layer, [B, K, S, H]: low + step * level, with the low-rank part and outliers."""

    name = "gear"
    values: jax.Array  # uint8 [B, K, S, H/2 + 2]: levels as `QuantizedKV.values`, indices of the outliers
    scale: jax.Array  # float16 [B, K, S, 4 + Z]: step, low, the outliers and Z coordinates
    basis: jax.Array  # float32 [B, K, Z, H], orthonormal or zeros

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], self.basis.shape[-1])

    def of_rows(self, cut: Callable) -> Self:
        return dataclasses.replace(self, basis=cut(self.basis))

    def encode(self, *x_BKTH: jax.Array, first_B: jax.Array | None = None) -> Self:
        """Quantizes to nearest between the smallest and the largest number of each head and position,
        outliers excluded. The first `_FIRST_TOKENS` of a row choose a new basis.
        """
        (x,) = (x.astype(jnp.float32) for x in x_BKTH)
        smallest = jnp.argmin(x, -1, keepdims=True)
        largest = jnp.argmax(x, -1, keepdims=True)
        is_outlier = _is_at(smallest, x) | _is_at(largest, x)
        low = jnp.min(x, -1, keepdims=True, where=~is_outlier, initial=jnp.inf)
        high = jnp.max(x, -1, keepdims=True, where=~is_outlier, initial=-jnp.inf)
        level, scale = to_levels(jnp.clip(x, low, high), low, high, _BITS)
        error = jnp.where(is_outlier, 0, x - from_levels(level, scale, _BITS))
        basis = match_varying_axes(self.basis, error, first_B)
        if first_B is not None and x.shape[2] > 1:  # a single token has no directions
            first = error[:, :, :_FIRST_TOKENS]
            basis = lax.cond(jnp.any(first_B > 0), lambda: _directions(first, basis, first_B), lambda: basis)
        coordinates = jnp.einsum("bkth,bkjh->bktj", error, basis, precision=lax.Precision.HIGHEST)
        outliers = (jnp.take_along_axis(x, at, -1) for at in (smallest, largest))
        values = jnp.concatenate([level, smallest.astype(jnp.uint8), largest.astype(jnp.uint8)], -1)
        parts = (part.astype(jnp.float16) for part in (*outliers, coordinates))
        scale = jnp.concatenate([scale, *parts], -1)
        return dataclasses.replace(self, values=values, scale=scale, basis=basis)

    def decode(self) -> jax.Array:
        end = self.values.shape[-1]
        level, smallest, largest = jnp.split(self.values, (end - 2, end - 1), -1)
        scale, low, high, coordinates = jnp.split(self.scale.astype(jnp.float32), (2, 3, 4), -1)
        error = jnp.einsum("bksj,bkjh->bksh", coordinates, self.basis, precision=lax.Precision.HIGHEST)
        y = from_levels(level, scale, _BITS) + error
        return jnp.where(_is_at(smallest, y), low, jnp.where(_is_at(largest, y), high, y))


def _empty(shape: tuple[int, ...]) -> GearKV:
    (B, K, S, H) = shape
    _check_width(H)
    rank = min(_RANK, H)
    values = jnp.zeros((B, K, S, H * _BITS // 8 + _OUTLIERS), jnp.uint8)
    scale = jnp.zeros((B, K, S, 2 + _OUTLIERS + rank), jnp.float16)
    return GearKV(values, scale, jnp.zeros((B, K, rank, H), jnp.float32))


def _check_width(width: int) -> None:
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


def _vector_bytes(width: int) -> int:
    return width * _BITS // 8 + _OUTLIERS + 2 * (2 + _OUTLIERS + min(_RANK, width))


GEAR = CacheDtype(
    "gear",
    _empty,
    _vector_bytes,
    _check_width,
    chunk=_FIRST_TOKENS,
    page_obstacle="has low-rank directions for a whole row, which pages cannot hold: use 'int8' or 'int4'",
    kernel_obstacle="keys in GEAR's format",
)


def _is_at(at, x):
    return jnp.arange(x.shape[-1]) == at


def _directions(error_BKTH, basis_BKZH, first_B):
    """Returns the Z directions of the largest quantization error of the first first_B[b] tokens, or the old
    ones if first_B[b] is 0.

    If there are fewer than Z tokens, they span fewer directions. The other directions are zeros: otherwise
    rounding noise would choose them, differently in each batch.
    """
    counts_BT = jnp.arange(error_BKTH.shape[2]) < first_B[:, None]
    counted = jnp.where(counts_BT[:, None, :, None], error_BKTH, 0)
    moments_BKHH = jnp.einsum("bkth,bktg->bkhg", counted, counted, precision=lax.Precision.HIGHEST)
    values_BKH, vectors_BKHH = jnp.linalg.eigh(moments_BKHH)
    known_BKH = values_BKH > 1e-5 * values_BKH[..., -1:]  # eigenvalues ascend
    directions_BKHH = jnp.where(known_BKH[..., None], jnp.swapaxes(vectors_BKHH, 2, 3), 0)
    found = directions_BKHH[:, :, -basis_BKZH.shape[2] :]
    return jnp.where((first_B > 0)[:, None, None, None], found, basis_BKZH)
