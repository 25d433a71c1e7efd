"""Masks of the entries of `score`: entries at padding are 0, and entries that read an id that is no token are
NaN.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config.model_config import ModelConfig


def are_tokens(ids: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns which ids are of the vocabulary."""
    return (ids >= 0) & (ids < config.vocab_size)


def mask_scores(
    scores: Mapping[str, Any], config: ModelConfig, tokens_BT: jax.Array, num_tokens_B: Any,
    segment_ids_BT: Any, reads_tokens: bool,
) -> dict[str, Any]:  # fmt: skip
    """Returns the fields [B, T-1] of `Scores`, or None: 0 if the target is padding, NaN if a token before it
    in its segment is not of the vocabulary.

    reads_tokens: True: the model has read tokens_BT. False: only the reference has read it, for `kl_BT`.
    """
    at_1T = jnp.arange(tokens_BT.shape[1])[None]
    last_other_BT = lax.cummax(jnp.where(are_tokens(tokens_BT, config), -1, at_1T), axis=1)
    first_BT: Any = 0
    is_real_BT = tokens_BT[:, 1:] >= 0
    if num_tokens_B is not None:
        is_real_BT &= at_1T[:, 1:] < num_tokens_B[:, None]
    if segment_ids_BT is not None:
        is_same_BT = segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1]
        first_BT = lax.cummax(jnp.pad(jnp.where(is_same_BT, 0, at_1T[:, 1:]), ((0, 0), (1, 0))), axis=1)
        is_real_BT &= is_same_BT
    is_known_BT = (last_other_BT < first_BT)[:, :-1]

    def mask(name: str, x_BT: jax.Array) -> jax.Array:
        known_BT = jnp.where(is_known_BT, x_BT, jnp.nan) if reads_tokens or name == "kl_BT" else x_BT
        return jnp.where(is_real_BT, known_BT, 0)

    return {name: None if x_BT is None else mask(name, x_BT) for name, x_BT in scores.items()}
