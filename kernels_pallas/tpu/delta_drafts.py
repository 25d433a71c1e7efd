"""Draft tokens of linear attention (Gated DeltaNet) on TPUs: a grid step takes some heads of a row, about as
many as a decode step's, through its tokens.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..delta_drafts import DraftTokens, draft_call
from ..dispatch import result_type
from ..reference_delta import DeltaState, DeltaWeights, NewToken, normed_results
from .delta import VMEM_BYTES, groups_of_heads, rows_on_chip, take_token
from .parts import emulator, keep_in_hbm


class _Refs(NamedTuple):
    """The operands, results and memory of the kernel, in their order."""

    block: Any  # the row whose state each step has; in scalar memory, as the next three
    accepted: Any
    start: Any
    count: Any
    tokens: DraftTokens  # of a row, [1, S, heads, width]; the last two [1, 1, S, n]
    old: Any  # the states [1, n, H, Y]
    out: Any  # [1, S, n, Y]
    after: Any  # the same memory as the old states
    state: Any  # [n, H, Y], after tokens that may be rejected


def delta_drafts(  # noqa: PLR0913
    new: NewToken, weights: DeltaWeights, old: DeltaState, steps, accepted_B, start_B, num_tokens_B,
    *, holds: bool, eps: float, interpret=False,
):  # fmt: skip
    """Returns the results [B, T, N Y] of `delta_drafts.draft_call`, the call, and the state after its
    accepted draft slots, or without `holds` after its T tokens too.
    """
    call = draft_call(new, weights, old, steps, accepted_B, start_B, num_tokens_B)
    (B, N, H, Y) = old.state.shape
    (_, S, K, _) = call.tokens.k.shape
    groups = groups_of_heads(K, 4 * N * H * Y)
    n = N // groups
    *qkv, shrink, beta = call.tokens
    by_group = (jnp.moveaxis(x.reshape(B, S, groups, n), 2, 1) for x in (shrink, beta))
    tokens = DraftTokens(*qkv, *by_group)

    def of_heads(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, S, x.shape[2] // groups, x.shape[3]), lambda g, b, *_: (b, 0, g, 0))

    of_group = pl.BlockSpec((1, 1, S, n), lambda g, b, *_: (b, g, 0, 0))
    of_state = pl.BlockSpec((1, n, H, Y), lambda g, b, block, *_: (block[b], g, 0, 0))
    memory = pltpu.VMEM((n, H, Y), jnp.float32)
    scalars = rows_on_chip(accepted_B + num_tokens_B), accepted_B, start_B, num_tokens_B
    structure = jax.tree.structure(_Refs(*scalars, tokens, old.state, tokens.v, old.state, memory))
    arrays = jax.tree.leaves((scalars, tokens))
    out, state = pl.pallas_call(
        lambda *refs: _kernel(jax.tree.unflatten(structure, refs), steps.shape[2], holds),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(groups, B),
            in_specs=[*map(of_heads, qkv), of_group, of_group, of_state],
            out_specs=[of_heads(tokens.v), of_state],
            scratch_shapes=[memory],
        ),
        out_shape=[result_type(x.shape, x.dtype, *arrays, old.state) for x in (tokens.v, old.state)],
        input_output_aliases={len(arrays): 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=emulator(interpret),
        name="delta_drafts",
    )(*arrays, keep_in_hbm(old.state, interpret))
    return normed_results(out[:, steps.shape[2] :], new, weights, num_tokens_B, eps), call, state


def _kernel(refs: _Refs, P: int, holds: bool) -> None:
    row = pl.program_id(1)
    accepted = refs.accepted[row]
    count = refs.count[row]
    first = refs.block[0]
    after = refs.after.at[0]

    @pl.when((row == 0) & (refs.accepted[first] + refs.count[first] == 0))
    def _keep() -> None:  # no row has a token: the block is written back all the same
        after[...] = refs.old[0]

    def apply(first: Any, count: Any, state: Any) -> None:
        lax.fori_loop(first, first + count, lambda s, _: _step(refs, s, state), None)

    @pl.when(accepted + count > 0)
    def _steps() -> None:
        is_kept = (refs.start[row] > 0) | (count == 0)
        after[...] = jnp.where(is_kept, refs.old[0], 0)
        apply(0, accepted, after)
        if holds:
            refs.state[...] = after[...]
        apply(P, count, refs.state if holds else after)


def _step(refs: _Refs, s: Any, state: Any) -> None:
    gates = [ref[0, 0, pl.ds(s, 1)] for ref in refs.tokens[3:]]
    token = (*(ref[0, s] for ref in refs.tokens[:3]), *gates)
    take_token(token, lambda n: state[n], state, refs.out.at[0, s])
