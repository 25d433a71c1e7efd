"""Sampling masks: the ids that a token could be sampled from, as bits. DeepSeek-V3.2 (2025) trains with them,
so that the trainer's distribution is over the same ids as the sampler's.

If the processors and filters left id v, bit v % 32 of word v // 32 is set. On the host NumPy unpacks masks:
`np.unpackbits(support_TW.view(np.uint8), axis=-1, bitorder="little")[:, :V]` has the shape [T, V].
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import check_array
from ..errors import InputError


def pack_support(logits_BV: jax.Array) -> jax.Array:
    """Returns uint32 [B, ceil(V/32)]: the ids whose logits are above -inf."""
    B, V = logits_BV.shape
    bits_BV = jnp.pad(logits_BV > -jnp.inf, ((0, 0), (0, -V % 32))).astype(jnp.uint32)
    return jnp.sum(bits_BV.reshape(B, -1, 32) << jnp.arange(32, dtype=jnp.uint32), -1, dtype=jnp.uint32)


def keep_support(logits_BTV: jax.Array, support_BTW: jax.Array) -> jax.Array:
    """Returns the logits of the ids in each token's mask. Others become -inf. A mask without any id keeps
    all.
    """
    id_V = np.arange(logits_BTV.shape[-1], dtype=np.uint32)
    is_in_BTV = (support_BTW[..., id_V // 32] >> (id_V % 32) & 1) > 0
    is_empty_BT1 = jnp.all(support_BTW == 0, -1, keepdims=True)
    return jnp.where(is_in_BTV | is_empty_BT1, logits_BTV, -jnp.inf)


def check_support(support_BTW: Any, rows: int, tokens: int, vocab_size: int) -> None:
    """Raises InputError for an array of another shape or type than uint32 [rows, tokens, ceil(V/32)]."""
    check_array("support", support_BTW, np.integer, rows, tokens, -(-vocab_size // 32))
    if support_BTW.dtype != np.uint32:
        raise InputError(f"support must have the dtype uint32, got {support_BTW.dtype}")
