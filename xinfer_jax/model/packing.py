"""Several texts in one row: the beginning of each token's text, and the token's position in it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import check_array
from ..config.model_config import ModelConfig
from ..config.unsupported import check_causal
from ..errors import InputError


def packed_positions(config: ModelConfig, inputs: Any, cache: Any) -> tuple[jax.Array | None, jax.Array]:
    """Returns, int32 [B, T], the index at which each token's segment begins (None without segments), and the
    positions for RoPE.

    Args:
        config: the model.
        inputs: `decoder.Inputs` with segments, positions or both.
        cache: the cache of the call, which must be None.

    Raises:
        InputError: the shape or type is another, or the call or the model takes neither segments nor
            positions.
    """
    shape = inputs.tokens_BT.shape
    for name in ("segment_ids_BT", "positions_BT"):
        given = getattr(inputs, name)
        if given is not None:
            check_array(name, given, np.integer, *shape)
    if cache is not None:
        raise InputError("segment_ids_BT and positions_BT do not go with a cache: leave it out")
    check_causal(config, "segment_ids_BT")
    if any(rope.rope_type in ("dynamic", "longrope") for rope in config.ropes):
        raise InputError("RoPE of this model depends on a row's length: give each text a row of its own")
    if inputs.segment_ids_BT is None:
        return None, jnp.asarray(inputs.positions_BT)
    ids_BT = jnp.asarray(inputs.segment_ids_BT)
    index_T = jnp.arange(shape[1])
    begins_BT = jnp.pad(ids_BT[:, 1:] != ids_BT[:, :-1], ((0, 0), (1, 0)))
    first_BT = lax.cummax(jnp.where(begins_BT, index_T, 0), 1)
    given_BT = inputs.positions_BT
    return first_BT, index_T - first_BT if given_BT is None else jnp.asarray(given_BT)
