"""`Draft`: a draft head with its parameters, from files of its own."""

import dataclasses
from typing import Any

import jax

from ..config.model_config import ModelConfig
from ..errors import ShortRepr
from ..weights.params import Params
from .draft_head import DraftHead


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Draft(ShortRepr):
    """A draft head that stands alone, for the argument `draft` of `generate`, `stream` and `Engine`.
    `load_draft` returns it.

    Attributes:
        params: its parameters, a pytree.
        head: the kind of head and its config.
    """

    params: Params
    head: DraftHead = dataclasses.field(metadata=dict(static=True))


def bind_draft(draft: Any, params: Params, config: ModelConfig) -> tuple[DraftHead, Params]:
    """Returns the head for this model, and its parameters. Raises InputError if it is a head of another
    model.
    """
    return draft.head.bound(config), draft.params
