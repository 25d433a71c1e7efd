"""What the Triton kernels share: the sizes of their tiles, products in full precision, and the types of their
results.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

LOWEST = -1e30  # the maximum of nothing: finite, so that differences are never NaN


def tile(size: int) -> int:
    """The tile that holds `size` rows or columns: Triton's are powers of two, and at least 16 where a product
    reads them.
    """
    return max(16, pl.next_power_of_2(size))


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a · b in float32: the highest precision keeps float32 operands from being rounded to TF32."""
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """2**x by the GPU's own instruction. `jnp.exp2` spends three more around it, for results too small to
    matter in a sum.
    """
    if interpret:
        return jnp.exp2(x)
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    (power,) = pltriton.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[kind]
    )
    return power


def result(shape: tuple[int, ...], dtype, *inputs: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result. Inside `jax.shard_map` it varies over each mesh axis that an input
    varies over.
    """
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in inputs))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=varying))
