"""The decode step of Mamba-2 on NVIDIA GPUs, in place: all that is between the input product and the gate.

All heads of a group read the inputs of the convolution of b and c, and these move by one. So there are two
kernels:

- A program of the first kernel takes b and c of a group of a row. It moves their inputs, and stores their
  convolutions.
- A program of the second kernel takes about `_TILE` numbers of the state of a head: whole rows of S numbers,
  which are full lines of memory.

With one kernel, a program would have to take all heads of a group. Nemotron-3-Nano has 8 groups of 2**16
numbers of the state, and Granite 4 has one group: less than a tenth of the multiprocessors would have work
for a row. If each head computed the convolutions of b and c by itself, it would read a sixth more than its
part of the state, and an operation of XLA with a copy would move the inputs.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..reference_mamba import MambaState, MambaToken, MambaWeights, decay_and_dt
from .recurrent import Convolution, call_kernel

_TILE = 2**12  # numbers of the state that a program has
_LINE = 32  # float32 numbers of a line of memory: the least columns of x that a program has


class _Group(NamedTuple):
    """The operands and results of the first kernel, in their order."""

    start: Any
    count: Any
    new: Any  # b and c of the token, as all others
    taps: Any
    biases: Any
    old: Any  # the inputs of the convolutions, [B, G, W, S]
    out: Any  # float32 [B, G S]
    after: Any  # the same memory as the old inputs


class _Head(NamedTuple):
    """The operands and results of the second kernel, in their order."""

    start: Any
    count: Any
    x: Any  # of the token
    dt: Any
    b: Any  # float32 [B, G S], after the convolution
    c: Any
    weights: MambaWeights  # without those of b and c
    old: Any  # the inputs of the convolution of x, and the state
    out: Any
    after: Any  # the same memory as the old ones


def mamba_step(
    new: MambaToken, weights: MambaWeights, old: MambaState, start_B, num_tokens_B, *, interpret=False
) -> tuple[jax.Array, MambaState]:
    """Computes `reference_mamba.mamba_step`, and writes the state in place. XLA copies the state if it is
    used again. Widths of heads and states are powers of two. interpret: True: run on any device, slowly, by
    Pallas's interpreter.
    """
    (B, N, Y, S) = old.state.shape
    G = old.b.shape[1]
    call = partial(call_kernel, interpret=interpret, in_place=2)
    kind = jax.ShapeDtypeStruct(new.b.shape, jnp.float32)
    of_groups = start_B, num_tokens_B, new[1:3], weights[1:3], weights[4:6], old[1:3]
    outs = (kind, kind), old[1:3]
    kernel = partial(_convolve_group, interpret)
    (b, c), (after_b, after_c) = call(kernel, (G, B), of_groups, outs, "mamba_groups", 4)
    columns = min(Y, max(_TILE // S, _LINE))
    kind = jax.ShapeDtypeStruct(new.x.shape, jnp.float32)
    moved = old.x, old.state
    weights = weights._replace(b=None, c=None, bias_b=None, bias_c=None)
    of_heads = start_B, num_tokens_B, new.x, new.dt, b, c, weights, moved
    kernel = partial(_step, columns, interpret)
    out, (after_x, state) = call(kernel, (Y // columns, N, B), of_heads, (kind, moved), "mamba_step", 4)
    return out, MambaState(after_x, after_b, after_c, state)


def _convolve_group(interpret: bool, *operands: Any) -> None:
    """Runs the first kernel: b and c of a group of a row."""
    refs = _Group(*operands)
    group, row = map(pl.program_id, range(2))
    begins = refs.start[row] == 0

    @pl.when(refs.count[row] > 0)
    def _convolve() -> None:
        for i, out in enumerate(refs.out):
            S = refs.old[i].shape[3]
            convolution = Convolution(refs.old[i], refs.new[i], refs.taps[i], refs.after[i], refs.biases[i])
            y_S = convolution.step((row, group), 0, S, begins, interpret)
            out[row, pl.ds(group * S, S)] = y_S


def _step(width: int, interpret: bool, *operands: Any) -> None:
    """Runs the second kernel: some columns of a head of a row."""
    refs = _Head(*operands)
    part, n, row = map(pl.program_id, range(3))
    begins = refs.start[row] == 0
    (old_x, old_state) = refs.old
    (after_x, after_state) = refs.after
    N, Y, S = old_state.shape[1:]
    first = part * width
    of_out = row, pl.ds(n * Y + first, width)
    has_token = refs.count[row] > 0

    @pl.when(has_token)
    def _take_token() -> None:
        place = row, n, pl.ds(first, width)
        state_YS = jnp.where(begins, 0, old_state[place])
        group = lax.div(n, N // (refs.b.shape[1] // S))
        b_S, c_S = (ref[row, pl.ds(group * S, S)] for ref in (refs.b, refs.c))
        weights = refs.weights
        decay, dt = decay_and_dt(refs.dt[row, n], weights.log_rate_N[n], weights.dt_bias_N[n])
        convolution = Convolution(old_x, refs.x, weights.x, after_x, weights.bias_x)
        x_Y = convolution.step((row, n), first, width, begins, interpret)
        state_YS = state_YS * jnp.exp(decay) + (dt * x_Y)[:, None] * b_S[None]
        after_state[place] = state_YS
        refs.out[of_out] = (state_YS * c_S[None]).sum(1) + weights.skip_N[n].astype(jnp.float32) * x_Y

    @pl.when(jnp.logical_not(has_token))
    def _clear() -> None:
        refs.out[of_out] = jnp.zeros(width, jnp.float32)
