"""The common part of the kernels for draft tokens of linear attention (Gated DeltaNet).

A cache with draft slots keeps the state before the last call of at most P tokens, and next to it these
tokens. A call first applies the tokens that were accepted, then its own T tokens, one after the other. So the
state is read and written once. S = P + T. Other letters are as in `reference_delta`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .reference_delta import DeltaState, DeltaWeights, NewToken, before_tokens, convolved, log_steps


class DraftTokens(NamedTuple):
    """The inputs of the kernels for S tokens, float32. A token with decay 1 and beta 0 changes no state."""

    q: Any  # [B, S, K, H]
    k: Any
    v: Any  # [B, S, N, Y]
    shrink: Any  # [B, S, N]: exp of the decay
    beta: Any


class DraftCall(NamedTuple):
    """A call, as its kernel gets it. The inputs of the convolution, [B, heads, W + T, width], are the W
    before the T tokens, and theirs.
    """

    tokens: DraftTokens
    inputs: tuple[Any, ...]
    steps: Any  # of the T tokens: the logarithm of the decay, and beta [B, N, T, 2]; 0 past the length


def draft_call(
    new: NewToken, weights: DeltaWeights, old: DeltaState, steps, accepted_B, start_B, num_tokens_B
) -> DraftCall:
    """Returns the tokens in draft slots and the tokens of the call [B, T, ...], side by side.

    Args:
        new, weights: the T tokens, and the weights of the layer.
        old: the state, with P draft slots after the W inputs of the convolution.
        steps: the steps of the draft slots, [B, N, P, 2].
        accepted_B: the number of draft slots that are applied.
        start_B, num_tokens_B: the position of the first of the T tokens, and their number.
    """
    B, T = new.q.shape[:2]
    P = steps.shape[2]
    W = old.q.shape[2] - P
    of_row = jax.vmap(lambda x, first: lax.dynamic_slice_in_dim(x, first, W, 1))
    before = before_tokens([of_row(x, accepted_B) for x in old[:3]], start_B, num_tokens_B)
    inputs = tuple(
        jnp.concatenate([x, jnp.swapaxes(y.astype(jnp.float32).reshape(B, T, *x.shape[1::2]), 1, 2)], 2)
        for x, y in zip(before, new[:3], strict=True)
    )
    held = [jnp.swapaxes(x[:, :, W:], 1, 2).reshape(B, P, -1) for x in old[:3]]
    of_held = convolved([x[:, :, :W] for x in old[:3]], held, weights, accepted_B)
    of_call = convolved(before, new, weights, num_tokens_B)
    qkv = (jnp.concatenate(pair, 1) for pair in zip(of_held, of_call, strict=True))
    is_accepted_BP11 = (jnp.arange(P) < accepted_B[:, None])[..., None, None]
    held_steps = jnp.where(is_accepted_BP11, jnp.swapaxes(steps, 1, 2), 0)
    steps_BTN2 = jnp.stack(log_steps(new, weights, num_tokens_B), -1)
    decay, beta = jnp.moveaxis(jnp.concatenate([held_steps, steps_BTN2], 1), 3, 0)
    tokens = DraftTokens._make([*qkv, jnp.exp(decay), beta])
    return DraftCall(tokens, inputs, jnp.swapaxes(steps_BTN2, 1, 2))
