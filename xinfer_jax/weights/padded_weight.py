"""Experts' packed matrices with more outputs than the model has, for TPUs."""

import dataclasses
from typing import Any, Self

import jax

from .quantized_weight import QuantizedWeight
from .weight_leaf import WeightLeaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class PaddedWeight(WeightLeaf):
    """Matrices [X, O, I] as the first outputs of others, as many as fill tiles. XLA stores arrays [X, ..., O]
    with experts in the lanes where X is a multiple of 128 and O is not: it would copy all of them for a
    kernel, which reads one expert. For other X it has outputs there, and pads them so itself.
    """

    base: Any  # a `QuantizedWeight` of more outputs, whose last ones are zeros
    outputs: int = dataclasses.field(metadata=dict(static=True))  # O

    @classmethod
    def padded(cls, weight: QuantizedWeight, multiple: int) -> QuantizedWeight | Self:
        """Returns the matrices, or their shapes, with outputs up to a multiple; those that have one stay."""
        (*_, outputs, _) = weight.shape
        more = -outputs % multiple
        if not more:
            return weight
        if isinstance(weight.values, jax.ShapeDtypeStruct):
            return jax.eval_shape(lambda weight: cls.padded(weight, multiple), weight)

        def pad(x: Any) -> Any:
            return x.__array_namespace__().pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)])

        leaf: Any = weight  # a kind is a dataclass
        return cls(dataclasses.replace(leaf, **{name: pad(x) for name, x in _by_outputs(weight)}), outputs)

    def unpadded(self) -> QuantizedWeight:
        """The matrices without padding; of one expert, whose arrays lack their first axis, its own."""
        cut = {name: x[..., : self.outputs] for name, x in _by_outputs(self.base)}
        return dataclasses.replace(self.base, **cut)

    @property
    def shape(self) -> tuple[int, ...]:
        (*experts, _, inputs) = self.base.shape
        return *experts, self.outputs, inputs

    @property
    def groups_with_padding(self) -> int:
        return self.base.groups_with_padding

    def field_axes(self, *axes: str | None) -> dict[str, tuple[str | None, ...]]:
        return {"base": axes}

    def product(self, x: jax.Array) -> jax.Array:
        return self.base.product(x)[..., : self.outputs]

    def rows(self, index: jax.Array) -> jax.Array:
        return self.base.rows(index)


def stored_weight(weight: Any) -> Any:
    """A leaf as it is in memory: of a `PaddedWeight` with padding."""
    return weight.base if isinstance(weight, PaddedWeight) else weight


def without_padding(params: Any) -> Any:
    """Parameters, or a leaf, without the padding of each `PaddedWeight`."""
    is_padded = lambda x: isinstance(x, PaddedWeight)  # noqa: E731
    return jax.tree.map(lambda x: x.unpadded() if is_padded(x) else x, params, is_leaf=is_padded)


def _by_outputs(weight: QuantizedWeight) -> list[tuple[str, Any]]:
    """Its arrays whose last axis is that of outputs, by name."""
    axes = weight.field_axes(*(None,) * (len(weight.shape) - 2), "outputs", None)
    names = [name for name, of_field in axes.items() if of_field[-1] == "outputs"]
    return [(name, x) for name in names if (x := getattr(weight, name)) is not None]
