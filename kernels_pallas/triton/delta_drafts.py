"""Draft tokens of linear attention (Gated DeltaNet) on NVIDIA GPUs: a program takes some columns of a value
head's state through the tokens of a row.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..delta_drafts import DraftTokens, draft_call
from ..reference_delta import DeltaState, DeltaWeights, NewToken, normed_results
from .recurrent import call_kernel

_TILE = 2**12  # numbers of the state that a program has


def delta_drafts(  # noqa: PLR0913
    new: NewToken, weights: DeltaWeights, old: DeltaState, steps, accepted_B, start_B, num_tokens_B,
    *, holds: bool, eps: float, interpret=False,
):  # fmt: skip
    """Returns the results [B, T, N Y] of `delta_drafts.draft_call`, the call, and the state after its
    accepted draft slots, or without `holds` after its T tokens too. Widths of heads are powers of two.
    """
    call = draft_call(new, weights, old, steps, accepted_B, start_B, num_tokens_B)
    (B, N, H, Y) = old.state.shape
    columns = min(Y, _TILE // H)
    operands = call.tokens, accepted_B, start_B, num_tokens_B, old.state
    kernel = partial(_kernel, steps.shape[2], holds, columns)
    outs = call.tokens.v, old.state
    out, state = call_kernel(
        kernel, (Y // columns, N, B), operands, outs, "delta_drafts", 4, interpret, in_place=1
    )
    return normed_results(out[:, steps.shape[2] :], new, weights, num_tokens_B, eps), call, state


def _kernel(  # noqa: PLR0913
    P: int, holds: bool, width: int, tokens: DraftTokens, accepted_ref, start_ref, count_ref, old_ref,
    out_ref, after_ref,
) -> None:  # fmt: skip
    part, n, row = map(pl.program_id, range(3))
    head = lax.div(n, tokens.v.shape[2] // tokens.k.shape[2])
    place = row, n, slice(None), pl.ds(part * width, width)
    accepted = accepted_ref[row]
    count = count_ref[row]

    def step(s, state_HC):
        q_H1, k_H1 = (ref[row, s, head, :][:, None] for ref in tokens[:2])
        state_HC *= tokens.shrink[row, s, n]
        columns = row, s, n, place[3]
        added_C = tokens.beta[row, s, n] * (tokens.v[columns] - (state_HC * k_H1).sum(0))
        state_HC += k_H1 * added_C[None]
        out_ref[columns] = (state_HC * q_H1).sum(0)
        return state_HC

    @pl.when(accepted + count > 0)  # of other rows the state stays where it is
    def _steps() -> None:
        is_kept = (start_ref[row] > 0) | (count == 0)
        state_HC = jnp.where(is_kept, old_ref[place], 0)
        state_HC = lax.fori_loop(0, accepted, step, state_HC)
        if holds:
            after_ref[place] = state_HC
        state_HC = lax.fori_loop(P, P + count, step, state_HC)
        if not holds:
            after_ref[place] = state_HC
