"""Experts' packed matrices with more outputs and groups than the model has, for TPUs."""

import dataclasses
from typing import Any, Self

import jax

from ..kernels_pallas.key_layouts import LANES
from .quantized_weight import QuantizedWeight
from .weight_leaf import WeightLeaf

_GROUPS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class PaddedWeight(WeightLeaf):
    """Matrices [X, O, I] in arrays that fill tiles. XLA stores arrays [X, ..., O] with experts in the lanes
    if X is a multiple of 128 and O is not. It stores arrays [X, Q, O] with experts in sublanes if the Q
    groups of one expert fill none. Then it would copy all experts for a kernel that reads one.
    """

    base: Any  # a `QuantizedWeight` whose arrays go on with zeros, of more outputs and groups
    outputs: int = dataclasses.field(metadata=dict(static=True))  # O

    @classmethod
    def padded(cls, weight: QuantizedWeight) -> QuantizedWeight | Self:
        """Returns the matrices with outputs and groups rounded up to multiples of 128 and 8. Matrices that
        have such sizes stay.
        """
        (*_, outputs, _) = weight.shape
        padded = {}
        for name, x in _by_outputs(weight):
            more = 0 if name == "values" else -x.shape[-2] % _GROUPS, -outputs % LANES
            if any(more):
                padding = [(0, 0)] * (x.ndim - 2) + [(0, size) for size in more]
                padded[name] = x.__array_namespace__().pad(x, padding)
        leaf: Any = weight  # a kind is a dataclass
        return cls(dataclasses.replace(leaf, **padded), outputs) if padded else weight

    def for_files(self) -> QuantizedWeight:
        """Returns the matrices without padding. For one expert, whose arrays lack their first axis, it
        returns the expert's matrix.
        """
        groups = -(-self.base.inputs // self.base.group)
        cut = {
            name: x[..., : self.outputs] if name == "values" else x[..., :groups, : self.outputs]
            for name, x in _by_outputs(self.base)
        }
        return without_padding(dataclasses.replace(self.base, **cut))

    @property
    def shape(self) -> tuple[int, ...]:
        (*experts, _, inputs) = self.base.shape
        return *experts, self.outputs, inputs

    def field_axes(self, *axes: str | None) -> dict[str, tuple[str | None, ...]]:
        return {"base": axes}

    def product(self, x: jax.Array) -> jax.Array:
        return self.for_files().product(x)

    def dequantize(self) -> jax.Array:
        return self.for_files().dequantize()


def stored_weight(weight: Any) -> Any:
    """Returns a leaf as it is in memory. A `PaddedWeight` includes its padding."""
    return weight.base if isinstance(weight, PaddedWeight) else weight


def without_padding(params: Any) -> Any:
    """Returns parameters, or a leaf, without the padding of each `PaddedWeight`, and in the order of
    files.
    """

    differs = lambda leaf: hasattr(leaf, "for_files")  # noqa: E731
    return jax.tree.map(lambda x: x.for_files() if differs(x) else x, params, is_leaf=differs)


def _by_outputs(weight: QuantizedWeight) -> list[tuple[str, Any]]:
    """Returns its arrays whose last axis is outputs, by name."""
    axes = weight.field_axes(*(None,) * (len(weight.shape) - 2), "outputs", None)
    names = [name for name, of_field in axes.items() if of_field[-1] == "outputs"]
    return [(name, x) for name in names if (x := getattr(weight, name)) is not None]
