"""x @ matrix.T, on CPU at memory speed. Of all products: M rows (a batch's tokens), I inputs, O outputs.

Which form is fastest depends on the processor and on the rows, nothing else: `__init__` has the speeds.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

import kernels_pallas

from .processor import multiplies, multiplies_int8_fast

_FEW_ROWS = 64  # up to this many rows a product may be faster with the matrix in front
_FEW_INT8_ROWS = 8
_FEW_OUTPUTS = 8192  # the same in int8
_LEAST = 1e-5  # of a row's largest number: what it is divided by
_ROWS_TO_WIDEN = 32  # from more on, int8 is widened to float32 where the processor has no product of it
_TILE_BYTES = 8 << 20  # of a narrow matrix that are float32 at one time


def product(x_MI: jax.Array, matrix_OI: jax.Array) -> jax.Array:
    """float32 [M, O]. float32 multiplies in full on every backend (no TF32); narrower types add up in it."""
    forms = {jnp.dtype("float32"): _float32_product, jnp.dtype("bfloat16"): _bfloat16_product}
    cpu = forms.get(matrix_OI.dtype, widened_product)
    return lax.platform_dependent(x_MI, matrix_OI, cpu=cpu, default=dot)


def dot(a: jax.Array, b: jax.Array, axis: int = 1, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """The last axis of a with an axis of b, accumulated in dtype."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    axes = ((a.ndim - 1,), (axis,)), ((), ())
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=dtype)


def in_front(x_MI: jax.Array, matrix_OI: jax.Array, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """x @ matrix.T as (matrix @ x.T).T. Without the barrier XLA would turn it around again."""
    return lax.optimization_barrier(dot(matrix_OI, x_MI, dtype=dtype)).T


def rounded(x_MI: jax.Array, over: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Rows as int8 numbers, and what these were multiplied by, float32 [M, 1]; as transformers rounds for
    BitNet. over: an axis of a mesh along which I is divided.
    """
    x_MI = x_MI.astype(jnp.float32)
    most_M1 = jnp.abs(x_MI).max(1, keepdims=True)
    most_M1 = most_M1 if over is None else lax.pmax(most_M1, over)
    factor_M1 = 127 / jnp.maximum(most_M1, _LEAST)
    return jnp.round(x_MI * factor_M1).astype(jnp.int8), factor_M1


def rounded_product(x_MI: jax.Array, values_OI: jax.Array) -> jax.Array:
    """`rounded` x with int8 values, float32 [M, O]. Sums are exact: a row's are the same in any company."""
    whole_MI, factor_M1 = rounded(x_MI)
    rows = len(x_MI)  # one alone takes twenty times as long as two
    whole_MI = jnp.pad(whole_MI, ((0, 1), (0, 0))) if rows == 1 else whole_MI
    sums_MO = int8_form(rows, len(values_OI))(whole_MI, values_OI, dtype=jnp.int32)[:rows]
    return sums_MO.astype(jnp.float32) / factor_M1


def _float32_product(x_MI: jax.Array, matrix_OI: jax.Array) -> jax.Array:
    return in_front(x_MI, matrix_OI) if 1 < len(x_MI) <= _FEW_ROWS else dot(x_MI, matrix_OI)


def int8_form(rows: int, outputs: int) -> Callable[..., jax.Array]:
    """`in_front` or `dot`: what multiplies so many rows faster by an int8 matrix."""
    if "int8" not in multiplies():
        return in_front if 1 < rows <= _FEW_INT8_ROWS else dot
    # Wide outputs in front are a tenth as fast on jax 0.12 without matrix units.
    narrow = "amx" in multiplies() or outputs <= _FEW_OUTPUTS
    return in_front if rows <= _FEW_INT8_ROWS and narrow else dot


def widens_int8(rows: int) -> bool:
    """Whether so many rows are faster by `widened_product` than two int8 numbers an activation."""
    return rows > _ROWS_TO_WIDEN and not multiplies_int8_fast()


def _bfloat16_product(x_MI: jax.Array, matrix_OI: jax.Array) -> jax.Array:
    """XLA's bfloat16 product is fast from two rows on; alone, one row takes ten times as long."""
    rows = len(x_MI)
    (outputs, inputs) = matrix_OI.shape
    has = multiplies()
    if rows > _FEW_ROWS and "bfloat16" not in has:
        return widened_product(x_MI, matrix_OI)
    front = "amx" in has or (outputs < inputs if "bfloat16" in has else rows > 1)
    x_MI = x_MI.astype(jnp.bfloat16)
    x_MI = jnp.pad(x_MI, ((0, 1), (0, 0))) if rows == 1 else x_MI
    if front and rows <= _FEW_ROWS:
        return in_front(x_MI, matrix_OI)[:rows]
    # What `in_front` gave is transposed. XLA would take the transpose into this product, and has none of
    # bfloat16 with such an operand.
    return dot(lax.optimization_barrier(x_MI), matrix_OI)[:rows]


def widened_product(x_MI: jax.Array, matrix_OI: jax.Array) -> jax.Array:
    """What has no fast product on a CPU, in float32: float16, and others where the processor lacks them."""
    x_MI = x_MI.astype(jnp.float32)

    def some(first: jax.Array, size: int, matrix_OI: jax.Array) -> jax.Array:  # [M, size]
        return dot(x_MI, lax.dynamic_slice_in_dim(matrix_OI, first, size, 0).astype(jnp.float32))

    return tile_by_tile(some, x_MI, len(matrix_OI), 4 * matrix_OI.shape[1], matrix_OI)


def tile_by_tile(
    some: Callable[..., jax.Array], x_MI: jax.Array, outputs: int, width: int, *narrow: jax.Array
) -> jax.Array:
    """A product whose matrix is widened, multiplied and forgotten a tile of outputs at a time. On CPU.

    XLA would widen the whole operand of a 16-bit dot or slice, and hoist that out of the decode loop: a
    float32 copy of all weights. The barrier ties the tile to the loop counter: nothing is left to hoist. The
    loop starts from what is made of x, or all layers' buffers would be filled first. One tile is no loop.
    The signs cancel: an update that takes in a negation is compiled once for all layers, a bare one for each.

    Args:
        some: (first output, how many, *narrow) -> float32 [M, how many].
        x_MI, outputs, width: float32; O; bytes of an output's weights as float32.
        narrow: the arrays that hold the matrix.
    """
    tiles = max(2, -(-outputs * width // _TILE_BYTES))  # of even size: what the last two share is made twice
    tile = min(-(-outputs // 2), -(-outputs // tiles // 16) * 16)

    def body(i, y_MO):  # slice and update both move the last tile back inside the array, to the same outputs
        *tied, i = lax.optimization_barrier((*narrow, i))
        return lax.dynamic_update_slice_in_dim(y_MO, -some(i * tile, tile, *tied), i * tile, 1)

    start = kernels_pallas.varying_as(jnp.broadcast_to(x_MI[:, :1], (len(x_MI), outputs)), x_MI, *narrow)
    return -lax.fori_loop(0, -(-outputs // tile), body, start)
