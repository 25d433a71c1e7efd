"""The protocol of a leaf of parameters that is no float array."""

from typing import Self

import jax

from ..errors import ShortRepr


class WeightLeaf(ShortRepr):
    """A matrix [O, I], or the matrices of experts, whose arrays have a first axis for them. A kind is a
    pytree, a frozen dataclass in a separate file. The core finds it in the parameters, and calls these
    methods.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """[O, I], or [X, O, I] of experts."""
        raise NotImplementedError

    def product(self, x: jax.Array) -> jax.Array:
        """Returns x @ matrix.T in float32, [..., I] -> [..., O]."""
        raise NotImplementedError

    def rows(self, index: jax.Array) -> jax.Array:
        """Returns rows of the matrix, float32 [..., I], as an embedding does. index: int32 [...]."""
        raise NotImplementedError

    def local_shard(self, x: jax.Array, axis_name: str) -> tuple[jax.Array, Self]:
        """Returns a device's activations [..., I] and this leaf as a separate matrix, inside a `shard_map`.
        The leaf's inputs are divided along the mesh axis `axis_name`.
        """
        return x, self

    def field_axes(self, *axes: str | None) -> dict[str, tuple[str | None, ...]]:
        """Returns the logical axes of each of its arrays. axes: the axes of the matrix: outputs and inputs,
        and for experts their axis first.
        """
        raise NotImplementedError

    def for_tpu(self) -> "WeightLeaf":
        """Returns this leaf as kernels on TPUs read it."""
        return self

    @property
    def block(self) -> tuple[int, int]:
        """Outputs and inputs that stay on one device."""
        return 1, 1

    @property
    def groups_with_padding(self) -> int:
        """Returns the number of inputs that share a scale, if it does not divide I. 0: it does."""
        return 0
