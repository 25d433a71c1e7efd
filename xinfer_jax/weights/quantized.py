"""Weights in fewer bytes: int8 with a scale per output, int8 or int4 in groups along the inputs. Quantize,
multiply, dequantize.

How CPU products read those bytes at memory speed (measured: WORKSPACE.md):
- XLA multiplies int8 by int8 fast, but only from two rows on. An activation is split in two int8 numbers,
  which are two rows: precise to 1/64,500 of the row's largest, and as fast as one.
- A single row times int4 is a sum of elementwise products, unrolled over the inputs of a group: one loop nest
  that reads each byte once. More rows: a tile of outputs is dequantized, multiplied and forgotten at a time.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..brief import Brief
from ..errors import InputError
from .products import dot, in_front, tile_by_tile

METHODS = ("int8", "int4")
GROUP = 64  # inputs that share a scale in int4
# A matrix with a side of 64 at most belongs to a model so small that its likeliest tokens are often near
# ties: there are more scales.
_SMALL, _SMALL_GROUP = 64, {8: 8, 4: 32}
# Of the least step that leaves nothing out: steps that int8 in groups chooses from.
_STRETCHES = np.linspace(1, 1.1, 11)
# Bytes of weights that one sum adds up: 32 take four times as long to compile, and are no faster.
_UNROLLED = 8
_FEW_ROWS, _FEW_OUTPUTS = 4, 8192  # up to here int8 products are faster with the matrix in front


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Int8Weight(Brief):
    """A matrix [N outputs, K inputs] as `values * scale` with a scale per output."""

    values: jax.Array  # int8 [N, K]
    scale: jax.Array  # float32 [N]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class GroupedWeight(Brief):
    """A matrix [N outputs, K inputs] as `(values - zero) * scale`, scale and zero shared by the J inputs of a
    group; K is padded to G * J.

    int4 packs inputs j and j + J/2 of a group in one byte, the first in the low half. Outputs come last:
    neighbours in memory are added elementwise.
    """

    values: jax.Array  # int8 [G, J, N], or uint8 [G, J/2, N] for int4
    scale: jax.Array  # float16 or float32 [G, N]
    zero: jax.Array | None  # uint8 [G, N]; None: 0
    order: jax.Array | None  # int32 [K]: group by group, which inputs belong to it; None: in their own order
    inputs: int = dataclasses.field(metadata=dict(static=True))  # K

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[-1], self.inputs

    @property
    def group(self) -> int:
        """J."""
        return self.values.shape[1] * (2 if self.values.dtype == jnp.uint8 else 1)


QuantizedWeight = Int8Weight | GroupedWeight


def check_method(quantize: str | None) -> None:
    """Raises InputError unless None or one of `METHODS`."""
    if quantize is not None and quantize not in METHODS:
        raise InputError(f"quantize={quantize!r} is not supported: use None or one of {', '.join(METHODS)}")


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, Int8Weight | GroupedWeight)


def quantized_leaf(matrix_NK: np.ndarray, name: str, quantize: str) -> QuantizedWeight:
    """A checkpoint's matrix as `quantize` says. The vocabulary matrix stays int8: it is read for every token,
    and errs in every logit.
    """
    vocabulary = "embed_tokens" in name or name.startswith("lm_head")
    with np.errstate(invalid="ignore", over="ignore"):  # the smallest and largest are NaN where any is
        if not (np.isfinite(matrix_NK.min()) and np.isfinite(matrix_NK.max())):
            raise InputError(
                f"{name} holds NaN or inf, which cannot be quantized: fetch the checkpoint again"
            )
        leaf = quantize_matrix(matrix_NK, 8 if quantize == "int8" or vocabulary else 4)
    if not np.isfinite(leaf.scale).all():
        raise InputError(f"{name} holds numbers too large to be quantized: load it without quantize")
    return jax.device_put(leaf)


def quantize_matrix(matrix_NK: np.ndarray, bits: int = 8, group: int | None = None) -> QuantizedWeight:
    """Round-to-nearest, a block of outputs at a time; on the host, without a float32 copy of the whole
    matrix.

    Args:
        matrix_NK: any float type, [outputs, inputs].
        bits: 8 or 4.
        group: inputs that share a scale; None: as `group_size` chooses.

    Returns:
        NumPy arrays in the leaf. 8 bits are symmetric; 4 bits have a zero point, since 16 levels are too few
        to waste one side.
    """
    N, K = matrix_NK.shape
    J = group or group_size((N, K), bits)
    if bits == 8 and J >= K:
        values, scale = np.empty((N, K), np.int8), np.empty(N, np.float32)
        for at, block in _blocks(matrix_NK):
            most = np.maximum(block.max(1), -block.min(1))
            scale[at] = np.where(most > 0, most, 1) / np.float32(127)
            values[at] = np.rint(np.divide(block, scale[at][:, None], out=block), out=block)
        return Int8Weight(values, scale)
    G = -(-K // J)
    scale = np.empty((G, N), np.float16)
    values = np.empty((G, J if bits == 8 else J // 2, N), np.int8 if bits == 8 else np.uint8)
    zero = None if bits == 8 else np.empty((G, N), np.uint8)
    for at, block in _blocks(matrix_NK):
        block_RGJ = np.pad(block, ((0, 0), (0, G * J - K))).reshape(-1, G, J)
        low, high = np.minimum(block_RGJ.min(-1), 0), np.maximum(block_RGJ.max(-1), 0)
        step_RG = finest_step(block_RGJ) if bits == 8 else float16_step((high - low) / 15)
        scale[:, at] = step_RG.T
        levels = np.rint(block_RGJ / step_RG[..., None])
        if zero is None:
            values[:, :, at] = np.clip(levels, -127, 127).transpose(1, 2, 0)
            continue
        zero_RG = np.clip(np.rint(-low / step_RG), 0, 15)
        zero[:, at] = zero_RG.T
        values[:, :, at] = pack(
            np.clip(levels + zero_RG[..., None], 0, 15).astype(np.uint8).transpose(1, 2, 0)
        )
    return GroupedWeight(values, scale, zero, None, K)


def group_size(shape: tuple[int, int], bits: int) -> int:
    """How many inputs of a matrix [N, K] share a scale where nobody says."""
    if min(shape) <= _SMALL:
        return _SMALL_GROUP[bits]
    return GROUP if bits == 4 else shape[1]


def finest_step(block_RGJ: Any, xp: Any = np) -> Any:
    """The step of int8, [R, G], that errs least in squares: of a few numbers, what falls close to a level is
    luck, so it has several tries.

    xp: numpy or jax.numpy, whatever the block is of.
    """
    most_RG = xp.abs(block_RGJ).max(-1)
    steps = [float16_step(most_RG * np.float32(stretch / 127), xp) for stretch in _STRETCHES]
    errors = [
        xp.square(xp.rint(block_RGJ / step[..., None]) * step[..., None] - block_RGJ).sum(-1)
        for step in steps
    ]
    return xp.take_along_axis(xp.stack(steps), xp.stack(errors).argmin(0)[None], 0)[0]


def float16_step(step: Any, xp: Any = np) -> Any:
    """As it is stored, in float32."""
    return xp.maximum(step.astype(np.float16), np.finfo(np.float16).smallest_normal).astype(np.float32)


def pack(levels_GJN: np.ndarray) -> np.ndarray:
    """Numbers of 4 bits, uint8 [G, J, N], two to a byte: [G, J/2, N]."""
    half = levels_GJN.shape[1] // 2
    return levels_GJN[:, :half] | (levels_GJN[:, half:] << 4)


def _blocks(matrix_NK: np.ndarray, size: int = 1 << 22):
    """Runs of rows as float32, each below 16 MiB."""
    rows = max(1, size // matrix_NK.shape[1])
    for first in range(0, len(matrix_NK), rows):
        yield slice(first, first + rows), matrix_NK[first : first + rows].astype(np.float32)


def dequantize(weight: QuantizedWeight) -> jax.Array:
    """The matrix, float32 [N, K]."""
    if isinstance(weight, Int8Weight):
        return weight.values.astype(jnp.float32) * weight.scale[:, None]
    matrix_KN = _dequantized(weight.values, weight.scale, weight.zero)[: weight.inputs]
    return (
        matrix_KN if weight.order is None else jnp.zeros_like(matrix_KN).at[weight.order].set(matrix_KN)
    ).T


def rows_of(weight: QuantizedWeight, index: jax.Array) -> jax.Array:
    """Rows of the matrix, float32 [..., K], for an embedding; index: int32 [...]."""
    if isinstance(weight, Int8Weight):
        return weight.values[index].astype(jnp.float32) * weight.scale[index][..., None]
    values, scale, zero = (
        None if x is None else x[..., index.reshape(-1)] for x in (weight.values, weight.scale, weight.zero)
    )
    return dequantize(dataclasses.replace(weight, values=values, scale=scale, zero=zero)).reshape(
        *index.shape, -1
    )


@jax.custom_jvp
def quantized_product(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """x @ dequantize(weight).T in float32. x: [..., K]. Returns [..., N]. Gradients are those of the
    dequantized product.
    """
    x_MK = x.reshape(-1, x.shape[-1])
    cpu = _int8_product if isinstance(weight, Int8Weight) else _grouped_product
    return lax.platform_dependent(x_MK, weight, cpu=cpu, default=_plain_product).reshape(*x.shape[:-1], -1)


@quantized_product.defjvp
def _quantized_product_jvp(primals, tangents):
    (x, weight), (x_dot, weight_dot) = primals, tangents

    def plain(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) @ dequantize(dataclasses.replace(weight, scale=scale)).T

    return quantized_product(x, weight), jax.jvp(plain, (x, weight.scale), (x_dot, weight_dot.scale))[1]


def _plain_product(x_MK: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """What other devices do: the matrix in the type of x, a scale per output applied behind the product."""
    if isinstance(weight, Int8Weight):
        return dot(x_MK, weight.values.astype(x_MK.dtype)) * weight.scale
    return dot(x_MK, dequantize(weight).astype(x_MK.dtype))


def _int8_product(x_MK: jax.Array, weight: Int8Weight) -> jax.Array:
    x_MK = x_MK.astype(jnp.float32)
    most_M = jnp.abs(x_MK).max(1)
    step_M1 = jnp.where(most_M == 0, 1, most_M)[:, None] / 127
    exact_MK = x_MK / step_M1
    high_MK = jnp.round(exact_MK)
    low_MK = jnp.round((exact_MK - high_MK) * 254)
    split = jnp.concatenate([high_MK, low_MK]).astype(jnp.int8)
    form = in_front if len(x_MK) <= _FEW_ROWS and len(weight.values) <= _FEW_OUTPUTS else dot
    high_MN, low_MN = jnp.split(form(split, weight.values, dtype=jnp.int32).astype(jnp.float32), 2)
    return (high_MN + low_MN / 254) * step_M1 * weight.scale


def _grouped_product(x_MK: jax.Array, weight: GroupedWeight) -> jax.Array:
    x_MK = x_MK.astype(jnp.float32)
    if weight.order is not None:
        x_MK = x_MK[:, weight.order]
    G, J = weight.scale.shape[0], weight.group
    x_MGJ = jnp.pad(x_MK, ((0, 0), (0, G * J - x_MK.shape[1]))).reshape(-1, G, J)
    product = _one_row if len(x_MK) == 1 else _tiled
    y_MN = product(_shares(x_MGJ, weight.values), weight.values, weight.scale)
    if weight.zero is None:
        return y_MN
    zero, scale, sum_MG = lax.optimization_barrier((weight.zero, weight.scale, x_MGJ.sum(-1)))
    return y_MN - dot(sum_MG, zero.astype(jnp.float32) * scale.astype(jnp.float32), 0)


def _shares(x_MGJ: jax.Array, values: jax.Array) -> tuple[jax.Array, ...]:
    """What each of `_levels` is multiplied with: low * x + high * y = low * (x - y/16) + (low + 16 high) *
    y/16.
    """
    if values.dtype == jnp.int8:
        return (x_MGJ,)
    first, second = jnp.split(x_MGJ, 2, axis=-1)
    return first - second / 16, second / 16


def _levels(values: jax.Array) -> tuple[jax.Array, ...]:
    """int8 as it is; of int4 the low half of each byte, and the whole byte: no shift is needed."""
    wide = values.astype(jnp.int32)  # 8-bit arithmetic is compiled to slower code
    return tuple(x.astype(jnp.float32) for x in ((wide,) if values.dtype == jnp.int8 else (wide & 15, wide)))


def _one_row(shares: tuple[jax.Array, ...], values: jax.Array, scale: jax.Array) -> jax.Array:
    """The barriers tie the weights to x, or XLA would convert all of them ahead of the decode loop."""
    shares, values, scale = lax.optimization_barrier((shares, values, scale))
    G, rows, N = values.shape
    unrolled = _UNROLLED if rows % _UNROLLED == 0 else rows
    values = values.reshape(G, -1, unrolled, N)
    sum_GPN = jnp.zeros((G, rows // unrolled, N), jnp.float32)
    for j in range(unrolled):
        for share, level_GPN in zip(shares, _levels(values[:, :, j]), strict=True):
            sum_GPN += share.reshape(G, -1, unrolled)[:, :, j, None] * level_GPN
    # A product with ones: a sum over groups would join the same loop, which is then compiled without vector
    # instructions.
    sum_PN = (sum_GPN * scale.astype(jnp.float32)[:, None]).reshape(-1, N)
    return dot(jnp.ones((1, len(sum_PN))), sum_PN, 0)


def _tiled(shares: tuple[jax.Array, ...], values: jax.Array, scale: jax.Array) -> jax.Array:
    G, rows, N = values.shape
    shares = tuple(x.reshape(-1, G * rows) for x in shares)

    def columns(first: jax.Array, size: int, values: jax.Array, scale: jax.Array) -> jax.Array:
        part, step = (lax.dynamic_slice_in_dim(x, first, size, x.ndim - 1) for x in (values, scale))
        matrices = [(level * step.astype(jnp.float32)[:, None]).reshape(-1, size) for level in _levels(part)]
        products = [dot(x, matrix, 0) for x, matrix in zip(shares, matrices, strict=True)]
        return sum(products[1:], start=products[0])

    return tile_by_tile(columns, shares[0], N, 4 * G * rows * len(shares), values, scale)


def _dequantized(values: jax.Array, scale: jax.Array, zero: jax.Array | None) -> jax.Array:
    """float32 [G * J, N]."""
    levels = (
        values if values.dtype == jnp.int8 else jnp.concatenate([values & 15, values >> 4], axis=1)
    ).astype(jnp.float32)
    if zero is not None:
        levels -= zero.astype(jnp.float32)[:, None]
    return (levels * scale.astype(jnp.float32)[:, None]).reshape(-1, values.shape[-1])
