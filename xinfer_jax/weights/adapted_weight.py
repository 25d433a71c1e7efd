"""A matrix with low-rank adapters: LoRA (Hu et al. 2021), one adapter for all rows or one for each row. Also
a tied model's matrix whose embedding and head have different adapters.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from ..errors import InputError
from ..ops.product import float_product
from .weight_leaf import WeightLeaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class AdaptedWeight(WeightLeaf):
    """A matrix [O, I] of any kind and N adapters of it: x @ matrix.T + (x @ a.T * scale) @ b.T. Matrices of
    experts have a first axis X, and one adapter.

    The product of the matrix has the bits that it has alone. On GPUs and TPUs few rows have one kernel for
    both, in which another row's adapter, finite or not, changes nothing
    (`backends/kernels/product_kernels.py`).
    """

    base: Any  # an array [O, I] or a `WeightLeaf`
    lora_a: jax.Array  # [N, R, I], of experts [X, N, R, I]; adapters of a lower rank end with zeros
    lora_b: jax.Array  # [N, O, R], of experts [X, N, O, R]
    # int32: which one each row has; -1: the last, which is zeros. None: all rows have the only one.
    adapter_B: jax.Array | None = None
    scale: float = dataclasses.field(default=1.0, metadata=dict(static=True))
    # The mesh axis along which I is divided (`local_shard`).
    axis_name: str | None = dataclasses.field(default=None, repr=False, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def groups_with_padding(self) -> int:
        return self.base.groups_with_padding if isinstance(self.base, WeightLeaf) else 0

    def field_axes(self, *axes: str | None) -> dict[str, tuple[str | None, ...]]:
        *experts, outputs, inputs = axes
        return dict(
            base=axes, lora_a=(*experts, None, None, inputs), lora_b=(*experts, None, outputs, None),
            adapter_B=("rows",),
        )  # fmt: skip

    def local_shard(self, x: jax.Array, axis_name: str) -> tuple[jax.Array, Self]:
        """Returns x and the leaf of a device's shard. The base may take other inputs than the adapters, so
        `product` asks it.
        """
        return x, dataclasses.replace(self, axis_name=axis_name)

    def product(self, x: jax.Array) -> jax.Array:
        if self.axis_name is None or not isinstance(self.base, WeightLeaf):
            y = _product(x, self.base)
        else:
            (own_x, base) = self.base.local_shard(x, self.axis_name)
            y = base.product(own_x)
        return y + self.added(x)

    def added(self, x: jax.Array) -> jax.Array:
        """Returns, float32 [..., O], the values that the adapters add to the product of x."""
        if self.adapter_B is None:
            return _low_rank(x, self.lora_a[0], self.lora_b[0], self.scale)
        return jax.vmap(partial(_low_rank, scale=self.scale))(x, *self.of_rows(x))

    def of_rows(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the matrices [B, R, I] and [B, O, R] of the adapters of the rows of x."""
        self.check_rows(x)
        index_B = jnp.zeros(len(x), jnp.int32) if self.adapter_B is None else self.adapter_B
        return self.lora_a[index_B], self.lora_b[index_B]

    def check_rows(self, x: jax.Array) -> None:
        """Raises InputError if the rows of x are not the rows that have adapters."""
        if self.adapter_B is not None and len(self.adapter_B) != len(x):
            raise InputError(
                f"the parameters have adapters for {len(self.adapter_B)} rows, the call has {len(x)}"
            )

    def rows(self, index: jax.Array) -> jax.Array:
        """Returns rows of the matrix with the only adapter."""
        return _rows(self.base, index) + float_product(self.lora_b[0, index] * self.scale, self.lora_a[0].T)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class UntiedWeight(WeightLeaf):
    """A tied model's matrix [V, D] whose embedding and head differ. Each is an array or a `WeightLeaf`. Both
    may hold one base.
    """

    embedding: Any
    head: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.embedding.shape

    def field_axes(self, *axes: str | None) -> dict[str, tuple[str | None, ...]]:
        return dict(embedding=axes, head=axes)

    def product(self, x: jax.Array) -> jax.Array:
        return _product(x, self.head)

    def rows(self, index: jax.Array) -> jax.Array:
        return _rows(self.embedding, index)


def _product(x: jax.Array, matrix: Any) -> jax.Array:
    return matrix.product(x) if isinstance(matrix, WeightLeaf) else float_product(x, matrix)


def _rows(matrix: Any, index: jax.Array) -> jax.Array:
    return matrix.rows(index) if isinstance(matrix, WeightLeaf) else matrix[index].astype(jnp.float32)


def _low_rank(x: jax.Array, a_RI: jax.Array, b_OR: jax.Array, scale: float) -> jax.Array:
    """Returns, float32 [..., O], the values that an adapter adds to a product of x [..., I]. Its matrices are
    at least as wide as x, since a product may round x to the dtype of the matrix.
    """
    (a_RI, b_OR) = (m.astype(jnp.promote_types(m.dtype, x.dtype)) for m in (a_RI, b_OR))
    return float_product((float_product(x, a_RI) * scale).astype(x.dtype), b_OR)


class RowAdapters(NamedTuple):
    """The low-rank adapters of one matrix [O, I], which rows choose from."""

    a: jax.Array  # [N, R, I]; the last one is zeros
    b: jax.Array  # [N, O, R], with the adapters' scales


def with_row_adapters(tree: Any, adapters: Any, adapter_B: Any) -> Any:
    """Returns the tree, which may be a part of the model's, with an `AdaptedWeight` in place of each matrix
    that has `RowAdapters`.
    """
    if isinstance(adapters, RowAdapters):
        return AdaptedWeight(tree, adapters.a, adapters.b, adapter_B)
    if isinstance(adapters, tuple):
        return tuple(with_row_adapters(*pair, adapter_B) for pair in zip(tree, adapters, strict=True))
    shared = [name for name in adapters if name in tree]
    return {**tree, **{name: with_row_adapters(tree[name], adapters[name], adapter_B) for name in shared}}
