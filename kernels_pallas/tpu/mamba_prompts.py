"""Prompts in Mamba-2 on TPUs, in blocks of 64 tokens (SSD, Dao and Gu 2024). The kernel does everything
between the products, except the gate and the norm.

The grid walks the tokens of a row in order, for some heads. Their states stay in on-chip memory meanwhile.
Products of c with b, of c with the states, and of x with b are one product each for all heads of a group. The
product of weights with x is one for each head, or for two heads of width 64, which are side by side in lanes.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..delta_blocks import (
    BLOCK,
    LogDecay,
    decay_between,
    decays_within,
    distances,
    in_blocks,
    pad_tokens,
    split,
)  # fmt: skip
from ..dispatch import result_type
from ..key_layouts import LANES
from ..reference_delta import before_tokens, inputs_after
from ..reference_mamba import MambaState, MambaToken, MambaWeights, log_steps
from .parts import emulator
from .prompt_blocks import (
    SUBLANES,
    TOKENS,
    VMEM_BYTES,
    convolve,
    dot_parts,
    rows_before,
    tile_within,
    walk_blocks,
)  # fmt: skip

_HEADS = 8  # of a grid step at most


class _Refs(NamedTuple):
    """The operands, results and memory of the kernel, in their order. A grid step has n heads."""

    start: Any  # in scalar memory, as the next one
    count: Any
    new: Any  # x, b and c of a step's tokens and heads, [1, tokens, heads · width]
    total: LogDecay  # [1, 1, blocks, n / p, p · C]: of the decay, of p heads side by side
    columns: Any  # [1, 1, tokens, 3n]: the same, then dt
    taps: Any  # of x, b and c, [W + 1, heads · width]
    biases: Any  # of x, b and c, [1, heads · width]
    skip: Any  # D, float32 [1, heads · Y]
    before: Any  # inputs of x, b and c before the tokens, float32 [1, 8, heads · width]
    old: Any  # the states, [1, n, Y, S]
    out: Any
    after: Any  # the same memory as the old states
    inputs: Any  # the last 8 of x, b and c, float32 [8 + C, heads · width]


def mamba_prefill(
    new: MambaToken, weights: MambaWeights, old: MambaState, start_B, num_tokens_B, *, interpret=False
) -> tuple[jax.Array, MambaState]:
    """Computes `reference_mamba.mamba_prefill`. The tokens are float32 or bfloat16. interpret: True: emulate
    a TPU on a CPU, slowly, and raise if accesses to memory race.
    """
    T = new.x.shape[1]
    B, N, Y, S = old.state.shape
    G = old.b.shape[1]
    new = pad_tokens(new)
    before = before_tokens(old[:3], start_B, num_tokens_B)
    n = heads_of_step(N, N // G)
    steps = N // n
    tokens = min(TOKENS, new.x.shape[1])
    p = _heads_in_lanes(Y, min(n, N // G))
    by_step = jax.tree.leaves(in_blocks(*log_steps(new, weights, num_tokens_B)))
    by_step = [x.reshape(B, steps, n, *x.shape[2:]) for x in by_step]
    columns = jnp.moveaxis(jnp.concatenate(by_step, 2).reshape(B, steps, 3 * n, -1), 2, 3)
    total = [jnp.moveaxis(x, 2, 3).reshape(B, steps, -1, n // p, p * BLOCK) for x in by_step[:2]]
    rows = rows_before(before)
    skip = jnp.repeat(weights.skip_N.astype(jnp.float32), Y)[None]
    operands = _Refs(
        start_B, num_tokens_B, new[:3], total, columns, tuple(x.T for x in weights[:3]),
        tuple(x[None] for x in weights[3:6]), skip, rows, old.state, None, None, None,
    )  # fmt: skip
    tile = partial(tile_within, tokens)
    heads = (n, max(1, n * G // N), max(1, n * G // N))  # of x, and groups of b and c
    widths = [size * width for size, width in zip(heads, (Y, S, S), strict=True)]
    repeats = (1, max(1, N // G // n), max(1, N // G // n))  # steps with the same block

    def lane_blocks(shape: tuple[int, ...], index: Any) -> list[pl.BlockSpec]:
        """Returns blocks of x, b and c of these shapes, without the lanes. index: a function of the grid's
        indices that gives all but the last index.
        """

        def block(width: int, repeat: int) -> pl.BlockSpec:
            return pl.BlockSpec((*shape, width), lambda b, g, t, *s: (*index(b, t, *s), g // repeat))

        return list(map(block, widths, repeats))

    of_new = lane_blocks((1, tokens), lambda b, t, start, count: (b, tile(count, b, t)))
    of_total = pl.BlockSpec(
        (1, 1, tokens // BLOCK, *total[0].shape[3:]),
        lambda b, g, t, _, count: (b, g, tile(count, b, t), 0, 0),
    )
    of_columns = pl.BlockSpec((1, 1, tokens, 3 * n), lambda b, g, t, _, count: (b, g, tile(count, b, t), 0))
    of_taps = [lane_blocks((len(x),), lambda *_: (0,)) for x in (operands.taps[0], operands.biases[0])]
    of_skip = pl.BlockSpec((1, n * Y), lambda b, g, *_: (0, g))
    of_before = lane_blocks((1, SUBLANES), lambda b, *_: (b, 0))
    of_states = pl.BlockSpec((1, n, Y, S), lambda b, g, *_: (b, g, 0, 0))
    of_out = pl.BlockSpec((1, tokens, n * Y), lambda b, g, t, *_: (b, t, g))
    scratch = [pltpu.VMEM((SUBLANES + BLOCK, width), jnp.float32) for width in widths]
    structure = jax.tree.structure(operands._replace(out=new.x, after=old.state, inputs=scratch))
    arrays = jax.tree.leaves(operands)
    out, state = pl.pallas_call(
        lambda *refs: _kernel(jax.tree.unflatten(structure, refs)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, steps, pl.cdiv(new.x.shape[1], tokens)),
            in_specs=jax.tree.leaves(
                [of_new, [of_total] * 2, of_columns, of_taps, of_skip, of_before, of_states]
            ),
            out_specs=[of_out, of_states],
            scratch_shapes=scratch,
        ),
        out_shape=[result_type(x.shape, jnp.float32, *arrays) for x in (new.x, old.state)],
        input_output_aliases={len(arrays) - 1: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=emulator(interpret),
        name="mamba_prefill",
    )(*arrays)
    return out[:, :T], MambaState._make([*inputs_after(before, new, num_tokens_B), state])


def heads_of_step(heads: int, group: int) -> int:
    """Returns the number of heads of a grid step: whole groups, or a part of one. group: heads of a group."""
    numbers = (n for n in range(1, _HEADS + 1) if heads % n == 0)
    return max(n for n in numbers if n % group == 0 or group % n == 0)


def _heads_in_lanes(width: int, heads: int) -> int:
    """Returns the number of heads whose numbers are side by side in a register. heads: of a group."""
    number = max(1, LANES // width)
    return number if heads % number == 0 else 1


def _kernel(refs: _Refs) -> None:
    walk_blocks(refs, partial(_block, refs))


def _block(refs: _Refs, i: Any, at: Any, left: Any) -> None:
    """Computes block i of a grid step, `left` of whose tokens are valid. Each stage is done for all heads, so
    that the compiler has other work while products are on their way.
    """
    (n, Y, S) = refs.after.shape[1:]
    pairs = refs.total[0].shape[3]
    p = n // pairs
    is_real_C1 = lax.broadcasted_iota(jnp.int32, (BLOCK, 1), 0) < left
    x, b, c = (convolve(refs, j, at, is_real_C1, refs.biases[j][...].astype(jnp.float32)) for j in range(3))
    coarse, fine, dt = (refs.columns[0, 0, at, j * n : (j + 1) * n] for j in range(3))
    from_begin = jnp.exp(coarse + fine)
    to_end = jnp.exp(decay_between((coarse[-1:], fine[-1:]), (coarse, fine)))
    groups = b.shape[1] // S
    size = pairs // groups  # pairs of heads of a group here
    parts = [[split(z[:, g * S : (g + 1) * S]) for g in range(groups)] for z in (b, c)]
    with_b = [
        dot_parts(c_CS, [jnp.concatenate([part] * p, 0) for part in b_CS], 1)
        for b_CS, c_CS in zip(*parts, strict=True)
    ]
    states = [
        refs.after[0, g * size * p : (g + 1) * size * p].reshape(size * p * Y, S) for g in range(groups)
    ]
    with_states = [dot_parts(c_CS, split(state), 1) for c_CS, state in zip(parts[1], states, strict=True)]
    lanes = [slice(j * p * Y, (j + 1) * p * Y) for j in range(pairs)]
    written = [_spread(dt, j, p, Y) * x[:, lanes[j]] for j in range(pairs)]
    inside = [_inside(refs, i, j, (coarse, fine), with_b[j // size], written[j]) for j in range(pairs)]
    for g in range(groups):
        of_group = range(g * size, (g + 1) * size)
        added = split(jnp.concatenate([_spread(to_end, j, p, Y) * written[j] for j in of_group], 1))
        more = dot_parts([part.T for part in added], parts[0][g], 0)
        for j, m in enumerate(range(g * size * p, (g + 1) * size * p)):
            decay_11 = from_begin[-1:, m : m + 1]
            refs.after[0, m] = refs.after[0, m] * decay_11 + more[j * Y : (j + 1) * Y]
        for j in of_group:
            of_state = with_states[g][:, lanes[j - g * size]]
            out = (
                _spread(from_begin, j, p, Y) * of_state + inside[j] + refs.skip[:, lanes[j]] * x[:, lanes[j]]
            )
            refs.out[0, at, lanes[j]] = jnp.where(is_real_C1, out, 0)


def _inside(
    refs: _Refs, i: Any, j: int, columns: LogDecay, with_b: jax.Array, written: jax.Array
) -> jax.Array:
    """Returns the part of the results that comes from tokens of block i, of p heads side by side.

    Args:
        refs: the references of the kernel.
        i, j: the block, and the heads' number.
        columns: the logarithm of the decay up to each token, of all heads.
        with_b: products of c with b, as often as there are heads.
        written: dt x.
    """
    p = refs.after.shape[1] // refs.total[0].shape[3]
    width = written.shape[1] // p
    distance = distances(with_b.shape)
    lane = lax.broadcasted_iota(jnp.int32, with_b.shape, 1)
    for k in range(1, p):
        distance = jnp.where(lane < k * BLOCK, distance, distance + BLOCK)
    total = [_spread(x, j, p, BLOCK) for x in columns]
    decays = decays_within(distance, total, [ref[0, 0, i, j : j + 1] for ref in refs.total])
    head = lax.broadcasted_iota(jnp.int32, written.shape, 1) // width
    rows = [jnp.where(head == k, written, 0) for k in range(p)] if p > 1 else [written]
    return dot_parts(split(with_b * decays), split(jnp.concatenate(rows, 0)), 0)


def _spread(columns: jax.Array, j: int, p: int, width: int) -> jax.Array:
    """Returns the j-th p columns, each in `width` lanes: [C, p · width]."""
    spread = jnp.broadcast_to(columns[:, j * p : j * p + 1], (len(columns), p * width))
    lane = lax.broadcasted_iota(jnp.int32, spread.shape, 1)
    for k in range(1, p):
        spread = jnp.where(lane < k * width, spread, columns[:, j * p + k : j * p + k + 1])
    return spread
