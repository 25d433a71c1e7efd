"""`Family`: what a family's file says, and the names of tensors in a Hugging Face checkpoint."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Joined:
    """A tensor that may hold several leaves of a layer, one after the other along its rows.

    Attributes:
        name: of the tensor, without "model.layers.N." and without ".weight" or ".bias".
        leaves: which it holds, in order.
        groups: the field of the config, or of the linear attention, that says how many groups of rows it has,
            each with an equal part of every leaf; "": one.
        stacked: it has those of all experts, and no ".weight" in its name.
        interleaved: its inputs come first; its outputs are by turns those of the leaves.
        depthwise: it is the weight of a convolution, [rows, 1, width].
        is_published: published files have it; False: they have its leaves, and it is read all the same.
    """

    name: str
    leaves: tuple[str, ...]
    groups: str = ""
    stacked: bool = False
    interleaved: bool = False
    depthwise: bool = False
    is_published: bool = True


@dataclasses.dataclass(frozen=True)
class Names:
    """Where the leaves of a layer are in the files, where it differs from `naming.NAMES`.

    Attributes:
        leaves: name of a leaf, as "q" or "experts.gate", to that of its tensor or module.
        joined: tensors that may hold several leaves.
    """

    leaves: Mapping[str, str] = dataclasses.field(default_factory=dict)
    joined: tuple[Joined, ...] = ()


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        defaults: of config.json, as in transformers.
        read: returns the fields of `ModelConfig` that this family sets, from config.json with its defaults
            and the number of layers.
        names: of the tensors; names of no layer are among `leaves` too.
        linear_names: of the layers of linear attention, beside these.
    """

    defaults: dict[str, Any]
    read: Callable[[Mapping, int], dict[str, Any]]
    names: Names = Names()
    linear_names: Names = Names()
