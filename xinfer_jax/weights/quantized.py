"""Weights in fewer bytes: int8 with a scale per output, int8 or int4 in groups. Made, multiplied, widened.
A matrix has O outputs and I inputs, Q groups of J; Y bytes hold one output's group, J of int8, J/2 of int4.

How CPU products read those bytes at memory speed (int8 with a scale per output: the room's `__init__`):
- int4 is not taken apart. A byte is low + 16 high, the numbers of inputs j and j + J/2, to be multiplied by
  their activations x and y: low * x + high * y = low * (x - y/16) + byte * y/16. So activations change once,
  and no weight is shifted. Zero points come off the result: each times the sum of its activations.
- A row times int4 is one loop nest that reads each byte once: the innermost loop adds up a run of bytes of a
  group, LLVM unrolls it, and what is left goes over the outputs in vectors. Up to 8 rows go one by one.
- More rows: a tile of outputs is dequantized, multiplied and forgotten at a time.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..brief import Brief
from ..errors import InputError
from ..host import aligned, by_blocks
from .products import dot, int8_form, rounded_product, tile_by_tile, widened_product, widens_int8
from .ternary import TernaryWeight, ternary_leaf, ternary_product, widened

_METHOD_BITS = dict(int8=8, int4=4, ternary=2)
METHODS = ("int8", "int4")  # of any model; "ternary" is for those trained with such weights
GROUP = 64  # inputs that share a scale in int4
_SMALL = 64
_SMALL_GROUP = {8: 8, 4: 32}  # a side of so many at most: more scales (the room says why)
_STRETCHES = np.linspace(1, 1.1, 11)  # of the least step that leaves nothing out, for int8 in groups
_RUN = 16  # bytes that one sum adds up: 8 are 15% slower, and of 32 LLVM unrolls none: a tenth of the speed
_ROW_BY_ROW = 8  # up to so many rows of int4 are faster one by one: two 4 times, eight by a fifth


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Int8Weight(Brief):
    """A matrix [O, I] as `values * scale` with a scale per output."""

    values: jax.Array  # int8 [O, I]
    scale: jax.Array  # float32 [O]
    # On a CPU activations are rounded to int8 once, not split in two numbers.
    once: bool = dataclasses.field(default=False, repr=False, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class GroupedWeight(Brief):
    """A matrix [O, I] as `(values - zero) * scale`, by groups of inputs. Outputs last: added elementwise."""

    values: jax.Array  # int8 [Q, Y, O], I padded to Q * J; uint8 for int4, as `pack` makes it
    scale: jax.Array  # float16 or float32 [Q, O]
    zero: jax.Array | None  # uint8 [Q, O]; None: 0
    order: jax.Array | None  # int32 [I]: group by group, which inputs belong to it; None: in their own order
    inputs: int = dataclasses.field(metadata=dict(static=True))  # I

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[-1], self.inputs

    @property
    def group(self) -> int:
        """J."""
        return self.values.shape[1] * (2 if self.values.dtype == jnp.uint8 else 1)


QuantizedWeight = Int8Weight | GroupedWeight | TernaryWeight


def own_part(x: jax.Array, weight: QuantizedWeight, over: str) -> tuple[jax.Array, QuantizedWeight]:
    """A device's inputs [..., I] and weight, where I is divided along an axis of a mesh, as those of a matrix
    of its own. Inputs that stand in another order come from all devices.
    """
    if isinstance(weight, Int8Weight):
        return x, weight
    if isinstance(weight, TernaryWeight):
        return x, dataclasses.replace(weight, inputs=x.shape[-1], over=over)
    if weight.order is not None:
        x = lax.all_gather(x, over, axis=x.ndim - 1, tiled=True)[..., weight.order]
    return x, dataclasses.replace(weight, order=None, inputs=x.shape[-1])


def check_method(quantize: str | None) -> None:
    """Raises InputError unless None or one of `METHODS`."""
    if quantize is not None and quantize not in METHODS:
        raise InputError(f"quantize={quantize!r} is not supported: use None or one of {', '.join(METHODS)}")


def check_activations(activations: str | None, quantize: str | None, group: int | None = None) -> None:
    """Raises InputError unless activations can be rounded as asked beside weights quantized so; group: inputs
    that share a scale.
    """
    if activations not in (None, "int8"):
        raise InputError(f"activations={activations!r} is not supported: use None or int8")
    if activations and quantize != "int8":
        raise InputError(
            f"activations={activations!r} needs quantize='int8', got {quantize!r}: give that too, or leave"
            " out activations (a checkpoint that was written with them has them)"
        )
    if activations and group is not None:
        raise InputError(f"group={group} with activations={activations!r}: int8 activations have no groups")


def rounding_once(params: Any) -> Any:
    """The parameters, of which int8 matrices with a scale per output have their activations rounded once."""

    def leaf(x: Any) -> Any:
        return dataclasses.replace(x, once=True) if isinstance(x, Int8Weight) else x

    return jax.tree.map(leaf, params, is_leaf=is_quantized)


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedWeight)


def quantized_leaf(matrix_OI: Any, name: str, quantize: str, group: int | None = None) -> QuantizedWeight:
    """A checkpoint's matrix as `quantize` says, on the host; arguments as in `quantize_matrix`."""
    bits = _bits(name, quantize)
    if bits == 2:
        return ternary_leaf(matrix_OI, name)
    leaf = quantize_matrix(matrix_OI, bits, group)
    if np.isfinite(leaf.scale).all():
        return leaf

    def refuse(at: slice) -> None:
        if not np.isfinite(matrix_OI[at].astype(np.float32)).all():
            raise InputError(
                f"{name} holds NaN or inf, which cannot be quantized: fetch the checkpoint again"
            )

    by_blocks(refuse, leaf.shape[0], 4 * leaf.shape[1])
    raise InputError(f"{name} holds numbers too large to be quantized: load it without quantize")


def quantized_form(
    shape: tuple[int, ...], name: str, quantize: str, group: int | None = None
) -> QuantizedWeight:
    """Shapes and types of `quantized_leaf`, `jax.ShapeDtypeStruct` in the leaf."""
    return _form(shape, _bits(name, quantize), group)


def group_for(shape: tuple[int, ...], name: str, quantize: str, parts: int) -> int:
    """`group_size` of a matrix; or less where its inputs are divided into so many parts, so that each has
    whole groups.
    """
    bits = _bits(name, quantize)
    inputs = shape[1]
    J = group_size(shape, bits)
    while parts > 1 and J < inputs and inputs // parts % J and J > 2:
        J //= 2
    return J


def _bits(name: str, quantize: str) -> int:
    """The matrix of the vocabulary stays int8: it errs in every logit."""
    return 8 if "embed_tokens" in name or name.startswith("lm_head") else _METHOD_BITS[quantize]


def quantize_matrix(matrix_OI: Any, bits: int = 8, group: int | None = None) -> QuantizedWeight:
    """Rounds to nearest, some outputs at a time on each core: without a float32 copy of the whole matrix.

    Args:
        matrix_OI: any float type, [outputs, inputs]: an array, or what reads rows of one when asked for them.
        bits: 8 or 4.
        group: inputs that share a scale; None: as `group_size` chooses.

    Returns:
        NumPy arrays in the leaf. 8 bits are symmetric; 4 have a zero point, too few to waste a side.
    """
    weight = jax.tree.map(aligned, _form(matrix_OI.shape, bits, group))
    outputs, inputs = matrix_OI.shape
    by_blocks(lambda at: _round(matrix_OI[at].astype(np.float32), weight, at), outputs, 4 * inputs)
    return weight


def _form(shape: tuple[int, ...], bits: int, group: int | None = None) -> QuantizedWeight:
    (outputs, inputs) = shape
    J = group or group_size(shape, bits)
    form = jax.ShapeDtypeStruct
    if bits == 8 and J >= inputs:
        return Int8Weight(form(shape, np.int8), form((outputs,), np.float32))
    return grouped_form(shape, bits, J)


def grouped_form(
    shape: tuple[int, ...], bits: int, J: int, scale: Any = np.float16, ordered: bool = False
) -> GroupedWeight:
    """Shapes and types of a matrix [O, I] in groups of J; scale: that type; ordered: with an order."""
    (outputs, inputs) = shape
    form = jax.ShapeDtypeStruct
    Q = -(-inputs // J)
    (Y, kind) = (J, np.int8) if bits == 8 else (J // 2, np.uint8)
    return GroupedWeight(
        form((Q, Y, outputs), kind),
        form((Q, outputs), scale),
        None if bits == 8 else form((Q, outputs), np.uint8),
        form((inputs,), np.int32) if ordered else None,
        inputs,
    )


def _round(block_OI: np.ndarray, weight: Int8Weight | GroupedWeight, at: slice) -> None:
    """Some outputs of a weight, from float32 that is overwritten. NaN and inf show in the scales."""
    with np.errstate(all="ignore"):
        if isinstance(weight, Int8Weight):
            most = np.maximum(block_OI.max(1), -block_OI.min(1))
            weight.scale[at] = scale = np.where(most == 0, 1, most) / np.float32(127)
            weight.values[at] = np.rint(np.divide(block_OI, scale[:, None], out=block_OI), out=block_OI)
            return
        kind = weight.values.dtype
        if kind == np.uint8:  # outputs last in memory, as in the weight: all that follows is elementwise
            block_OI = np.asfortranarray(block_OI)
        levels_OQJ, step_OQ, zero_OQ = nearest(
            in_groups(block_OI, weight.group), 4 if kind == np.uint8 else 8
        )
        levels_QJO = levels_OQJ.astype(kind).transpose(1, 2, 0)
        weight.values[:, :, at] = pack(levels_QJO) if kind == np.uint8 else levels_QJO
        weight.scale[:, at] = step_OQ.T
        if weight.zero is not None:
            weight.zero[:, at] = zero_OQ.T


def group_size(shape: tuple[int, ...], bits: int) -> int:
    """How many inputs of a matrix [O, I] share a scale where nobody says."""
    if min(shape) <= _SMALL:
        return _SMALL_GROUP[bits]
    return GROUP if bits == 4 else shape[1]


def in_groups(x: Any, J: int, xp: Any = np) -> Any:
    """[rows, inputs] as [rows, Q, J], zeros behind the last. xp here and below: what the array is of."""
    return xp.pad(x, ((0, 0), (0, -x.shape[1] % J))).reshape(len(x), -1, J)


def nearest(block_OQJ: Any, bits: int, xp: Any = np) -> tuple[Any, Any, Any]:
    """Levels of a matrix in groups, [O, Q, J], and each group's step and zero, [O, Q]. All are floats."""
    if bits == 8:
        step_OQ = finest_step(block_OQJ, xp)
        return xp.clip(xp.rint(block_OQJ / step_OQ[..., None]), -127, 127), step_OQ, xp.zeros_like(step_OQ)
    low_OQ = xp.minimum(block_OQJ.min(-1), 0)
    high_OQ = xp.maximum(block_OQJ.max(-1), 0)
    step_OQ = float16_step((high_OQ - low_OQ) / 15, xp)
    zero_OQ = xp.clip(xp.rint(-low_OQ / step_OQ), 0, 15)
    return xp.clip(xp.rint(block_OQJ / step_OQ[..., None]) + zero_OQ[..., None], 0, 15), step_OQ, zero_OQ


def finest_step(block_OQJ: Any, xp: Any = np) -> Any:
    """The int8 step, [O, Q], of least squared error. Few numbers hit levels by luck: several tries."""
    most_OQ = xp.abs(block_OQJ).max(-1)
    steps = [float16_step(most_OQ * np.float32(stretch / 127), xp) for stretch in _STRETCHES]
    wide = [step[..., None] for step in steps]
    errors = [xp.square(xp.rint(block_OQJ / step) * step - block_OQJ).sum(-1) for step in wide]
    return xp.take_along_axis(xp.stack(steps), xp.stack(errors).argmin(0)[None], 0)[0]


def float16_step(step: Any, xp: Any = np) -> Any:
    """As it is stored, in float32."""
    return xp.maximum(step.astype(np.float16), np.finfo(np.float16).smallest_normal).astype(np.float32)


def pack(levels_QJO: np.ndarray) -> np.ndarray:
    """4-bit numbers, uint8 [Q, J, O], as [Q, J/2, O]: j of a group in a byte's low half, j + J/2 above."""
    half = levels_QJO.shape[1] // 2
    return levels_QJO[:, :half] | (levels_QJO[:, half:] << 4)


def dequantize(weight: QuantizedWeight) -> jax.Array:
    """The matrix, float32 [O, I]."""
    if isinstance(weight, TernaryWeight):
        return widened(weight)
    values = weight.values
    scale = weight.scale.astype(jnp.float32)
    if isinstance(weight, Int8Weight):
        return values.astype(jnp.float32) * scale[:, None]
    levels_QJO = values.astype(jnp.int32)
    if values.dtype == jnp.uint8:  # what `pack` did
        halves = (levels_QJO[:, None] >> np.array([0, 4], np.int32)[:, None, None]) & 15
        levels_QJO = halves.reshape(len(values), -1, values.shape[-1])
    levels_QJO = levels_QJO.astype(jnp.float32)
    if weight.zero is not None:
        levels_QJO -= weight.zero.astype(jnp.float32)[:, None]
    matrix_IO = (levels_QJO * scale[:, None]).reshape(-1, values.shape[-1])[: weight.inputs]
    if weight.order is not None:
        matrix_IO = jnp.zeros_like(matrix_IO).at[weight.order].set(matrix_IO)
    return matrix_IO.T


def rows_of(weight: QuantizedWeight, index: jax.Array) -> jax.Array:
    """Rows of the matrix, float32 [..., I], for an embedding; index: int32 [...]."""
    if isinstance(weight, Int8Weight):
        return weight.values[index].astype(jnp.float32) * weight.scale[index][..., None]
    parts = {name: getattr(weight, name) for name in ("values", "scale", "zero") if hasattr(weight, name)}
    rows = {name: None if x is None else x[..., index.reshape(-1)] for name, x in parts.items()}
    return dequantize(dataclasses.replace(weight, **rows)).reshape(*index.shape, -1)


@jax.custom_jvp
def quantized_product(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """x @ dequantize(weight).T in float32, [..., I] -> [..., O], with the gradients of that product, also
    where a ternary weight rounds x first.
    """
    x_MI = x.reshape(-1, x.shape[-1])
    if isinstance(weight, TernaryWeight):
        return ternary_product(x_MI, weight).reshape(*x.shape[:-1], -1)
    cpu = _int8_product if isinstance(weight, Int8Weight) else _grouped_product
    return lax.platform_dependent(x_MI, weight, cpu=cpu, default=_plain_product).reshape(*x.shape[:-1], -1)


@quantized_product.defjvp
def _quantized_product_jvp(primals, tangents):
    (x, weight) = primals
    (x_dot, weight_dot) = tangents

    def plain(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) @ dequantize(dataclasses.replace(weight, scale=scale)).T

    return quantized_product(x, weight), jax.jvp(plain, (x, weight.scale), (x_dot, weight_dot.scale))[1]


def _plain_product(x_MI: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """What other devices do: the matrix in the type of x, a scale per output applied behind the product."""
    if isinstance(weight, Int8Weight):
        return dot(x_MI, weight.values.astype(x_MI.dtype)) * weight.scale
    # Weights are tied to x, or XLA would widen those of all layers ahead.
    x_MI, weight = lax.optimization_barrier((x_MI, weight))
    return dot(x_MI, dequantize(weight).astype(x_MI.dtype))


def _int8_product(x_MI: jax.Array, weight: Int8Weight) -> jax.Array:
    if weight.once:
        return rounded_product(x_MI, weight.values) * weight.scale
    if widens_int8(len(x_MI)):
        return widened_product(x_MI, weight.values) * weight.scale
    x_MI = x_MI.astype(jnp.float32)
    most_M = jnp.abs(x_MI).max(1)
    step_M1 = jnp.where(most_M == 0, 1, most_M)[:, None] / 127
    exact_MI = x_MI / step_M1
    high_MI = jnp.round(exact_MI)
    low_MI = jnp.round((exact_MI - high_MI) * 254)
    split = jnp.concatenate([high_MI, low_MI]).astype(jnp.int8)
    form = int8_form(len(x_MI), len(weight.values))
    high_MO, low_MO = jnp.split(form(split, weight.values, dtype=jnp.int32).astype(jnp.float32), 2)
    return (high_MO + low_MO / 254) * step_M1 * weight.scale


def _grouped_product(x_MI: jax.Array, weight: GroupedWeight) -> jax.Array:
    x_MI = x_MI.astype(jnp.float32)
    if weight.order is not None:
        x_MI = x_MI[:, weight.order]
        weight = dataclasses.replace(weight, order=None)
    if len(x_MI) == 1:
        return _row(x_MI[0], weight)[None]
    if len(x_MI) <= _ROW_BY_ROW:
        return lax.map(lambda x_I: _row(x_I, weight), x_MI)

    def some(first: jax.Array, size: int, weight: GroupedWeight) -> jax.Array:  # [M, size]
        tile = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size, x.ndim - 1), weight)
        return dot(x_MI, dequantize(tile))

    return tile_by_tile(some, x_MI, weight.shape[0], 4 * weight.inputs, weight)


def _row(x_I: jax.Array, weight: GroupedWeight) -> jax.Array:
    """[O]. A group is C runs of `run` bytes, and a byte has `halves` inputs."""
    Q, Y, outputs = weight.values.shape
    halves = weight.group // Y
    run = math.gcd(Y, _RUN)
    parts = in_groups(x_I[None], weight.group, jnp).reshape(Q, halves, -1, run).swapaxes(1, 2)
    # What levels and, last, zero points are multiplied by. A dot, or what made x would be computed for every
    # output: XLA takes such steps into the loop, and LLVM would unroll it no more.
    mixed = np.kron([[1.0]] if halves == 1 else [[1, 0], [-1 / 16, 1 / 16]], np.eye(run))
    mixing = np.column_stack([mixed, np.ones(halves * run)]).astype(np.float32)
    factors = dot(parts.reshape(-1, halves * run), jnp.asarray(mixing), 0).reshape(Q, -1, halves * run + 1)
    # Weights are tied to x, or XLA would convert all ahead of the decode loop.
    factors, values, scale, zero = lax.optimization_barrier(
        (factors, weight.values, weight.scale, weight.zero)
    )
    *factors_QCY, total_QC1 = jnp.split(factors, (run, 2 * run)[:halves], axis=-1)
    wide = values.reshape(Q, -1, run, outputs).astype(jnp.int32)  # 8-bit arithmetic is slower code
    levels = (wide,) if halves == 1 else (wide & 15, wide)
    terms = [x[..., None] * y.astype(jnp.float32) for x, y in zip(factors_QCY, levels, strict=True)]
    # Not a + b: XLA has plain sums done by a library, which reads a float32 copy of all terms.
    sum_QCO = lax.reduce(sum(terms), np.float32(0), lambda a, b: -(-a - b), (2,))
    if zero is not None:
        sum_QCO -= total_QC1 * zero.astype(jnp.float32)[:, None]
    y_RO = (sum_QCO * scale.astype(jnp.float32)[:, None]).reshape(-1, outputs)
    # A product with ones: a sum over runs would join the loop, then compiled without vector instructions.
    return dot(jnp.ones(len(y_RO)), y_RO, 0)
