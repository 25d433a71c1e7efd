"""The decode step of linear attention (Gated DeltaNet) on NVIDIA GPUs, in place: all that is between the
product for queries, keys and values and the output product.

A program serves a key head of a row, with the value heads that share it: one that serves a value head could
read inputs of the convolution after another one has moved them. It takes the state in tiles of `_TILE`
numbers: with more, fewer programs would share a multiprocessor, and less would be read at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..reference_delta import DeltaState, DeltaWeights, NewToken, decay_and_beta, gated, rounded, unit
from .recurrent import Convolution, call_kernel

_TILE = 2**13  # numbers of the state that a program has at once
_COLUMNS = 64  # of these at most


class _Refs(NamedTuple):
    """The operands and results of the kernel, in their order."""

    start: Any
    count: Any
    new: Any  # `NewToken`
    weights: Any  # `DeltaWeights`
    old: Any  # `DeltaState`
    out: Any
    after: Any  # `DeltaState`, the same memory as the old one


def delta_step(
    new: NewToken, weights: DeltaWeights, old: DeltaState, start_B, num_tokens_B, *, eps, interpret=False
) -> tuple[jax.Array, DeltaState]:
    """Computes `reference_delta.delta_step`, and writes the state in place. XLA copies the state if it is
    used again. Widths of heads are powers of two. interpret: True: run on any device, slowly, by Pallas's
    interpreter.
    """
    B, K = old.q.shape[:2]
    operands = start_B, num_tokens_B, new, weights, old
    kernel = partial(_kernel, eps, interpret)
    return call_kernel(kernel, (K, B), operands, (new.z, old), "delta_step", 4, interpret, in_place=len(old))


def _kernel(eps: float, interpret: bool, *operands: Any) -> None:
    refs = _Refs(*operands)
    head = pl.program_id(0)
    row = pl.program_id(1)
    has_token = refs.count[row] > 0
    begins = refs.start[row] == 0
    groups = refs.old.v.shape[1] // refs.old.q.shape[1]
    heads = head * groups, (head + 1) * groups
    convolve = partial(_convolve, refs, row, begins, interpret=interpret)

    @pl.when(has_token)
    def _step() -> None:
        H = refs.old.q.shape[3]
        q_H, k_H = (convolve(i, head, 0, H) for i in range(2))
        q_H = unit(q_H) * H**-0.5
        k_H = unit(k_H)
        agreement = (q_H * k_H).sum()
        value_head = partial(_value_head, refs, row, begins, convolve, (q_H, k_H, agreement), eps)
        lax.fori_loop(*heads, lambda n, _: value_head(n), None)

    @pl.when(jnp.logical_not(has_token))
    def _clear() -> None:
        Y = refs.old.v.shape[3]

        def clear(n: Any, _: None) -> None:
            refs.out[row, pl.ds(n * Y, Y)] = jnp.zeros(Y, refs.out.dtype)

        lax.fori_loop(*heads, clear, None)


def _value_head(refs: _Refs, row, begins, convolve: Callable, of_key: tuple, eps: float, n) -> None:
    """Computes the result and the state of value head n. of_key: query, key, and their product."""
    q_H, k_H, agreement = of_key
    H, Y = refs.old.state.shape[2:]
    C = min(Y, _TILE // H, _COLUMNS)
    numbers = refs.new.a[row, n], refs.new.b[row, n], refs.weights.log_rate_N[n], refs.weights.decay_bias_N[n]
    decay, beta = decay_and_beta(*numbers)
    shrink = jnp.exp(decay)
    parts = []
    for first in range(0, Y, C):
        place = row, n, slice(None), pl.ds(first, C)
        state_HC = jnp.where(begins, 0, refs.old.state[place])
        of_key_C, of_query_C = ((state_HC * x_H[:, None]).sum(0) for x_H in (k_H, q_H))
        added_C = beta * (convolve(2, n, first, C) - shrink * of_key_C)
        parts.append(shrink * of_query_C + agreement * added_C)
        refs.after.state[place] = state_HC * shrink + k_H[:, None] * added_C[None]
    parts = [rounded(x, refs.out.dtype) for x in parts]
    squares: Any = sum((x * x).sum() for x in parts)
    factor = lax.rsqrt(squares / Y + eps)
    for i, x_C in enumerate(parts):
        columns = pl.ds(n * Y + i * C, C)
        norm_C = refs.weights.norm_Y[pl.ds(i * C, C)]
        refs.out[row, columns] = gated(x_C * factor, refs.new.z[row, columns], norm_C)


def _convolve(refs: _Refs, row, begins, i: int, n, first: int, width: int, interpret: bool) -> jax.Array:
    """Returns silu of the convolution of some columns of head n of q, k or v. Moves its inputs by one."""
    convolution = Convolution(refs.old[i], refs.new[i], refs.weights[i], refs.after[i])
    return convolution.step((row, n), first, width, begins, interpret)
