"""`FeedForward`: the part of a layer that works on one token at a time, with its parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from ..config.model_config import ModelConfig
from ..weights.params import Params


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """A feed-forward of a model. A kind is a subclass with a line in `plugins.TABLE`."""

    config: ModelConfig
    spec: Any  # the `FeedForwardSpec`, of its kind

    # The names of leaves in a Hugging Face checkpoint, within a layer, of families that have no others.
    names: ClassVar[Mapping[str, str]] = {}

    def param_specs(self) -> Params:
        """The specs of its parameters by name, without those of norms around it."""
        raise NotImplementedError

    @property
    def unsupported(self) -> dict[str, str]:
        """Features that it does not support, of `config.unsupported`, with the part that is the reason."""
        return {}
