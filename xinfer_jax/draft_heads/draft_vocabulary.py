"""The vocabulary of a head that drafts only some tokens of its target's: id i of the head is id i + d2t[i] of
the target.
"""

import jax
import jax.numpy as jnp

from ..weights.param_specs import ParamSpec

_NEVER = -1e30  # the logit of a token that the head does not know; finite, as masks of attention are


def d2t_spec(draft_vocab_size: int) -> ParamSpec:
    """Returns the spec of the leaf `d2t`, the numbers that are added to the ids of the head."""
    return ParamSpec((draft_vocab_size,), (None,), 0.0, dtype="int32")


def target_logits(logits: jax.Array, d2t: jax.Array | None, vocab_size: int) -> jax.Array:
    """Returns logits over the target's vocabulary, [..., vocab_size], of logits over the head's. d2t: None:
    both are one vocabulary.
    """
    if d2t is None:
        return logits
    id_V = jnp.arange(len(d2t), dtype=jnp.int32) + d2t
    unknown = jnp.full((*logits.shape[:-1], vocab_size), _NEVER, logits.dtype)
    return unknown.at[..., id_V].set(logits)
