"""`DraftFiles`: the files of a kind of draft head that stands alone: config.json, and names of tensors."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..draft_heads.draft_head import DraftHead
from ..weights.params import Params
from .family import Names
from .naming import draft_specs

_SKIPPED = ("confidence_head.", "t2d", "rotary_emb.")  # beginnings of names that no head reads


def without_model(name: str) -> str:
    """Returns the name of a tensor without "model.", which some files have."""
    return name.removeprefix("model.")


@dataclasses.dataclass(frozen=True)
class DraftFiles:
    """The files of a kind of draft head.

    Attributes:
        read: returns the head without a target, from config.json and the tensors by their names. Only names
            and shapes of tensors are used.
        write: returns config.json of a head: the inverse of `read`.
        names: the names of leaves that differ from `naming.NAMES`.
        layer_prefix: the prefix of a layer's tensors, with "{}" in the place of its number.
        rename: returns the name that `names` has, from the name of a tensor in the files.
        skipped: the beginnings of names of tensors that are not read.
    """

    read: Callable[[Mapping[str, Any], Mapping[str, Any]], DraftHead]
    write: Callable[[Any], dict[str, Any]]
    names: Names
    layer_prefix: str = "layers.{}."
    rename: Callable[[str], str] = without_model
    skipped: tuple[str, ...] = _SKIPPED

    def specs(self, head: DraftHead) -> Params:
        """Returns the parameter tree of a head with a `FileSpec` at every leaf."""
        return draft_specs(head.param_specs(), head.config, self.names, self.layer_prefix)
