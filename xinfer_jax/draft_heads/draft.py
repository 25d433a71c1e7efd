"""`Draft`: a draft head with its parameters, from files of its own."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from ..config.model_config import ModelConfig
from ..errors import ShortRepr
from ..sharding import RULES, concrete_mesh_of
from ..weights.layout import partition_specs
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
    """Returns the head for this model, and its parameters on the devices of the model. Raises InputError if
    it is a head of another model, or the devices do not divide its heads or widths.
    """
    return draft.head.bound(config), place_draft(draft, params).params


def place_draft(draft: Draft, params: Params) -> Draft:
    """Returns the head with its parameters on the devices of a model: over its mesh by their axes, or on its
    device. The last copy is kept with the head, so further calls move no bytes.
    """
    norm = params["final_norm"]
    if isinstance(norm, jax.core.Tracer):  # the caller's jit places its arrays
        return draft
    mesh = concrete_mesh_of(params)
    place: Any = mesh
    if mesh is None and getattr(norm, "committed", False):
        place = norm.sharding
    if not isinstance(place, jax.sharding.Mesh | SingleDeviceSharding):
        return draft
    copies = vars(draft).setdefault("_copies", {})
    if place not in copies:
        where: Any = place
        if mesh is not None:
            specs = partition_specs(draft.head.param_specs(), draft.params, mesh, RULES)
            is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
            where = jax.tree.map(partial(NamedSharding, mesh), specs, is_leaf=is_spec)
        copies.clear()
        copies[place] = (
            jax.tree.map(_put, draft.params, where) if mesh else jax.device_put(draft.params, where)
        )
    return dataclasses.replace(draft, params=copies[place])


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    """Returns the array over a mesh, of which this process may have a part."""
    if sharding.is_fully_addressable or getattr(x, "sharding", None) == sharding:
        return jax.device_put(x, sharding)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
