"""The operands of the product kernel, and its reference in plain jnp and float32.

M rows, I inputs, O outputs. A packed matrix has Q groups of J inputs, each Y bytes an output.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FEW_ROWS = 64  # up to this number of rows the kernel reads matrices once, and takes norms and float matrices
FP8_BLOCK = 128  # outputs and inputs that share a scale in FP8
ACTIVATIONS = {
    "silu": lambda x: x * jax.nn.sigmoid(x),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x * x * x))),
    "relu2": lambda x: jnp.square(jnp.maximum(x, 0)),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowAdapters:
    """Low-rank adapters of a matrix, of rank R, one for each row (LoRA). Of several the last is not used."""

    a_NRI: Any
    b_NOR: Any
    adapter_M: Any  # int32: the adapter of each row; negative: it has none
    scale: float = dataclasses.field(metadata=dict(static=True))


class Matrix(NamedTuple):
    """A matrix with I inputs and O outputs, the bias of its product, and the adapters that add to it.

    - 16-bit floats: values [O, I].
    - int8 with a scale per output: values [O, I], scale [O].
    - FP8: values float8_e4m3fn [O, I] without NaN, scale float32 [O] or, for blocks, [⌈O/128⌉, ⌈I/128⌉].
    - In groups, (values - zero) * scale: values int8 [Q, J, O], or int4 as uint8 [Q, J/2, O] with input j in
      a byte's low half and j + J/2 in its high half. The scale is [Q, O], and zero is uint8 [Q, O] or None. Q
      J is I or more.
    """

    values: Any
    scale: Any = None
    zero: Any = None
    bias: Any = None  # [O]
    adapters: Any = None  # `RowAdapters`

    @property
    def outputs(self) -> int:
        """O."""
        return self.values.shape[0 if self.values.ndim == 2 else 2]

    @property
    def halves(self) -> int:
        """Inputs of a value: two of a byte with int4."""
        return 2 if self.values.dtype == jnp.uint8 else 1


def product(  # noqa: PLR0913
    x_MI, matrices, norm_I=None, residual_MO=None, step_M=None, *, eps=0.0, offset=0.0, activation=None,
    dtype=None,
) -> list[jax.Array]:  # fmt: skip
    """Returns x · matrixᵀ + bias for each matrix, [M, O].

    - If there is a weight norm_I (to which the offset is added), x first gets an RMS norm.
    - With an activation, two matrices of one kind and shape give activation(first) * second.
    - The residual is added to the only result.
    - With step_M x is int8, in steps of that size.

    dtype: the dtype of the results.
    """
    x_MI = x_MI.astype(jnp.float32)
    if step_M is not None:
        x_MI *= step_M[:, None]
    if norm_I is not None:
        x_MI *= lax.rsqrt(jnp.mean(jnp.square(x_MI), -1, keepdims=True) + eps)
        x_MI *= offset + norm_I.astype(jnp.float32)
    ys = [_product(x_MI, matrix) for matrix in matrices]
    if activation is not None:
        ys = [ACTIVATIONS[activation](ys[0]) * ys[1]]
    if residual_MO is not None:
        ys = [ys[0] + residual_MO.astype(jnp.float32)]
    return [y.astype(dtype or jnp.float32) for y in ys]


def matrix_floats(matrix: Matrix) -> jax.Array:
    """Returns the matrix, float32 [I, O]. For groups I is Q J."""
    values = matrix.values
    if values.ndim == 2 and matrix.scale is not None and matrix.scale.ndim == 2:
        return (values.astype(jnp.float32) * spread_blocks(matrix.scale, *values.shape)).T
    if values.ndim == 2:
        matrix_IO = values.astype(jnp.float32).T
        return matrix_IO if matrix.scale is None else matrix_IO * matrix.scale
    levels_QJO = values
    if matrix.halves == 2:
        levels_QJO = jnp.concatenate([values & 15, values >> 4], 1)
    levels_QJO = levels_QJO.astype(jnp.float32)
    if matrix.zero is not None:
        levels_QJO -= matrix.zero.astype(jnp.float32)[:, None]
    scaled_QJO = levels_QJO * matrix.scale.astype(jnp.float32)[:, None]
    return scaled_QJO.reshape(-1, matrix.outputs)


def spread_blocks(scale: jax.Array, outputs: int, inputs: int) -> jax.Array:
    """Returns the scale of each number, [O, I], from the scales of blocks of FP8."""
    rows = jnp.repeat(scale, FP8_BLOCK, -2, total_repeat_length=FP8_BLOCK * scale.shape[-2])[:outputs]
    return jnp.repeat(rows, FP8_BLOCK, -1, total_repeat_length=FP8_BLOCK * scale.shape[-1])[:, :inputs]


def _product(x_MI, matrix: Matrix):
    matrix_IO = matrix_floats(matrix)[: x_MI.shape[1]]
    y_MO = jnp.dot(x_MI, matrix_IO, precision=lax.Precision.HIGHEST)
    if matrix.adapters is not None:
        a_MRI, b_MOR = (
            x[matrix.adapters.adapter_M].astype(jnp.float32)
            for x in (matrix.adapters.a_NRI, matrix.adapters.b_NOR)
        )
        added_MO = jnp.einsum("mi,mri,mor->mo", x_MI, a_MRI, b_MOR, precision=lax.Precision.HIGHEST)
        has_one_M1 = matrix.adapters.adapter_M[:, None] >= 0
        y_MO += jnp.where(has_one_M1, added_MO * matrix.adapters.scale, 0)
    return y_MO if matrix.bias is None else y_MO + matrix.bias.astype(jnp.float32)
