"""Ternary weights with int8 activations, as BitNet b1.58 has them (Ma et al. 2024): two bits a weight, exact
integer sums. A matrix has O outputs and I inputs, W words of 32 of them.

Two planes of bits say which weights are 1 and which -1, and on CPU a row's activations become eight, one for
each bit of an int8 number. A sum of products is then what bits two planes have in common, counted: 32 weights
for an `and`, a count and a sum for each pair of planes. One row of the layers of b1.58-2B-4T, on 2 cores of a
Xeon with AVX-512, in billions of weights a second: so 32; four numbers of a byte mixed as int4's two are 19;
int8 and int4 weights 13. With AVX2 alone 13, 19 and 13. Sums of 4 words are the fastest: of 8 run at 23.

Up to 8 rows go one by one (0.45 ms each for [6912, 2560] there); more take int8 tiles: words split into
bytes, bytes masked (4 ms a matrix; words masked 17), and XLA's int8 product, which has half of the work that
int8 weights give it: one int8 row a token. A layer takes 3.8 times as long as in int8 at 8 rows, 1.7 at 64,
0.57 at 512: what is left is unpacking.
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
from .products import dot, rounded, tile_by_tile

_WORD = 32  # inputs in a word
_RUN = 4  # words that one sum adds up
_ROW_BY_ROW = 8  # up to so many rows are faster one by one
_LEAST = 1e-5  # of a matrix's mean magnitude: what it is divided by


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class TernaryWeight(Brief):
    """A matrix [O, I] of -scale, 0 and scale, whose products round activations to int8, one scale a token."""

    values: jax.Array  # int32 [W, 2, O]: bit k of a word is input 32 w + k: whether it is 1, and whether -1
    scale: jax.Array  # float32 [O]
    inputs: int = dataclasses.field(metadata=dict(static=True))  # I
    # An axis of a mesh along which I is divided: a token's scale is that of all its inputs (`own_part`).
    over: str | None = dataclasses.field(default=None, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[-1], self.inputs

    @property
    def group(self) -> int:
        """Inputs that cannot be divided."""
        return _WORD


def ternary_form(shape: tuple[int, ...]) -> TernaryWeight:
    """Shapes and types of a matrix [O, I], `jax.ShapeDtypeStruct` in the leaf."""
    (outputs, inputs) = shape
    words = -(-shape[1] // _WORD)
    form: Any = jax.ShapeDtypeStruct
    return TernaryWeight(form((words, 2, outputs), np.int32), form((outputs,), np.float32), inputs)


def ternary_leaf(matrix_OI: Any, name: str) -> TernaryWeight:
    """A float matrix rounded to -1, 0 and 1 times its mean magnitude, on the host.

    Args:
        matrix_OI: any float type, [O, I]: an array, or what reads rows of one when asked for them.
        name: for the error.

    Raises:
        InputError: NaN or inf in it.
    """
    outputs, inputs = matrix_OI.shape
    sums: list[float] = []
    by_blocks(lambda at: sums.append(_magnitude(matrix_OI[at])), outputs, 4 * inputs)
    mean = np.float32(math.fsum(sums) / (outputs * inputs))
    if not np.isfinite(mean):
        raise InputError(f"{name} holds NaN or inf, which cannot be quantized: fetch the checkpoint again")
    # As transformers does it: times the rounded reciprocal, divided by it.
    factor = np.float32(1) / max(mean, np.float32(_LEAST))

    def levels(at: slice) -> np.ndarray:
        return np.clip(np.rint(matrix_OI[at].astype(np.float32) * factor), -1, 1)

    return packed(levels, matrix_OI.shape, np.float32(1) / factor)


def _magnitude(block_OI: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        return float(np.abs(block_OI.astype(np.float32)).sum(dtype=np.float64))


def packed(levels: Any, shape: tuple[int, ...], scale: np.float32) -> TernaryWeight:
    """The leaf, NumPy arrays in it, of a matrix [O, I]. levels: gives outputs of a slice, of -1, 0 and 1."""
    weight = jax.tree.map(aligned, ternary_form(shape))
    (outputs, inputs) = shape
    weight.scale[:] = scale

    def fill(at: slice) -> None:
        levels_OI = levels(at)
        planes_2OI = np.stack([levels_OI == 1, levels_OI == -1])
        bits = np.packbits(np.pad(planes_2OI, ((0, 0), (0, 0), (0, -inputs % _WORD))), 2, "little")
        weight.values[..., at] = bits.view("<i4").transpose(2, 0, 1)

    by_blocks(fill, outputs, 4 * inputs)
    return weight


def levels_of(values_W2O: jax.Array, inputs: int) -> jax.Array:
    """The numbers -1, 0 and 1, int8 [I, O]."""
    bytes_W4 = jnp.stack([(values_W2O >> at).astype(jnp.uint8) for at in (0, 8, 16, 24)], 1)
    # Bytes first, then bits, or every bit would be taken from 32 and narrowed: a quarter of the speed.
    plus, minus = jnp.split(lax.optimization_barrier(bytes_W4), 2, 2)  # each [W, 4, 1, O]
    bits = (1 << np.arange(8)).astype(np.uint8)[:, None]
    signs = ((plus & bits) != 0).astype(jnp.int8) - ((minus & bits) != 0).astype(jnp.int8)
    return signs.reshape(-1, values_W2O.shape[-1])[:inputs]


def widened(weight: TernaryWeight) -> jax.Array:
    """The matrix, float32 [O, I]."""
    return levels_of(weight.values, weight.inputs).astype(jnp.float32).T * weight.scale[:, None]


def ternary_product(x_MI: jax.Array, weight: TernaryWeight) -> jax.Array:
    """float32 [M, O]: sums of whole numbers, so a row's bits are the same in any company, on any device."""
    x_MI, factor_M1 = rounded(x_MI, weight.over)
    sums_MO = lax.platform_dependent(x_MI, weight.values, cpu=_sums, default=_plain_sums)
    return sums_MO / factor_M1 * weight.scale


def _plain_sums(x_MI: jax.Array, values_W2O: jax.Array) -> jax.Array:
    """What other devices do: int8 numbers are exact in bfloat16, and their sums in float32."""
    # Weights are tied to x, or XLA would widen those of all layers ahead.
    x_MI, values_W2O = lax.optimization_barrier((x_MI, values_W2O))
    levels_IO = levels_of(values_W2O, x_MI.shape[1])
    return dot(x_MI.astype(jnp.bfloat16), levels_IO.astype(jnp.bfloat16), 0)


def _sums(x_MI: jax.Array, values_W2O: jax.Array) -> jax.Array:
    if len(x_MI) == 1:
        return _row(x_MI[0], values_W2O)[None]
    if len(x_MI) <= _ROW_BY_ROW:
        return lax.map(lambda x_I: _row(x_I, values_W2O), x_MI)
    inputs = x_MI.shape[1]

    def some(first: jax.Array, size: int, values_W2O: jax.Array) -> jax.Array:  # [M, size]
        tile = lax.dynamic_slice_in_dim(values_W2O, first, size, 2)
        return dot(x_MI, levels_of(tile, inputs), 0, jnp.int32).astype(jnp.float32)

    start_MI = x_MI.astype(jnp.float32)
    return tile_by_tile(some, start_MI, values_W2O.shape[-1], 4 * inputs, values_W2O)


def _row(x_I: jax.Array, values_W2O: jax.Array) -> jax.Array:
    """float32 [O]. Inputs are C runs of words."""
    words, _, outputs = values_W2O.shape
    run = math.gcd(words, _RUN)
    x_W32 = jnp.pad(x_I.astype(jnp.int32), (0, -x_I.size % _WORD)).reshape(-1, _WORD)
    bits_W832 = (x_W32[:, None] >> np.arange(8)[:, None]) & 1
    # A dot, or what made x would be computed for every output.
    places = (1 << np.arange(_WORD, dtype=np.uint32)).view(np.int32)
    planes_W8 = dot(bits_W832, jnp.asarray(places), 0, jnp.int32)
    planes_W8, values_W2O = lax.optimization_barrier((planes_W8, values_W2O))
    planes_CR8 = planes_W8.reshape(-1, run, 8)
    plus_CRO, minus_CRO = (values_W2O.reshape(-1, run, 2, outputs)[:, :, sign] for sign in (0, 1))
    sum_CRO: Any = 0
    for bit in range(7, -1, -1):  # the sign's counts negative
        x_CR1 = planes_CR8[..., bit, None]
        common = lax.population_count(plus_CRO & x_CR1) - lax.population_count(minus_CRO & x_CR1)
        sum_CRO = -common if bit == 7 else sum_CRO + sum_CRO + common
    sum_CO = lax.reduce(sum_CRO, np.int32(0), lax.add, (1,)).astype(jnp.float32)
    # A product with ones: a sum over runs would join the loop, then compiled without vector instructions.
    return dot(jnp.ones(len(sum_CO)), sum_CO, 0)
