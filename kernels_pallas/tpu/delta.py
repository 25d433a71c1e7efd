"""The decode step of linear attention (Gated DeltaNet) on TPUs, in place: all that is between the product for
queries, keys and values and the output product.

A grid step takes some value heads of one row, about `_STEP_BYTES` of its state, which the pipeline copies
while the step before computes. Steps of rows without a token have the block of a row before or after, so
nothing is copied for them (but row 0 if no row has a token). Keys and queries are transposed once for all
heads of a step: their numbers are then in sublanes, as the state has them, and a product with it is one
multiplication and a sum of registers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..dispatch import result_type
from ..reference_delta import DeltaState, DeltaWeights, NewToken, decay_and_beta, gated_norm, unit
from .parts import emulator, keep_in_hbm

_STEP_BYTES = 2**20  # of the state that a grid step takes
_ROWS = 64  # whose tokens are on the chip at once
_SUBLANES = 8
VMEM_BYTES = 48 * 2**20


class _Refs(NamedTuple):
    """The operands, results and memory of the kernel, in their order."""

    block: Any  # the row whose state each step has; in scalar memory, as the next two
    start: Any
    count: Any
    new: Any  # `NewToken`: of the rows of a tile
    weights: Any  # `DeltaWeights`, the taps [W + 1, heads · width], others [1, …]
    old: Any  # `DeltaState`: of one row, inputs [1, W, heads, width]
    out: Any
    after: Any  # `DeltaState`, the same memory as the old one
    inputs: Any  # of q, k and v: float32 [R, heads, width]
    taps: Any  # of q, k and v: float32 [W + 1, heads, width]
    shrink: Any  # [groups, R, heads of a group]: exp of the decay
    beta: Any
    results: Any  # float32 [R, heads, Y]


def delta_step(
    new: NewToken, weights: DeltaWeights, old: DeltaState, start_B, num_tokens_B, *, eps, interpret=False
) -> tuple[jax.Array, DeltaState]:
    """Computes `reference_delta.delta_step`, and writes the state in place. XLA copies the state if it is
    used again. The token is float32 or bfloat16. interpret: True: emulate a TPU on a CPU, slowly, and raise
    if accesses to memory race.
    """
    B, K, W, H = old.q.shape
    N, _, Y = old.state.shape[1:]
    groups = groups_of_heads(K, 4 * N * H * Y)
    # XLA stores inputs in this order of axes, so that heads fill tiles: nothing is copied.
    old = DeltaState._make([*(jnp.swapaxes(x, 1, 2) for x in old[:3]), old.state])
    R = min(B, _ROWS)
    tiles = pl.cdiv(B, R)
    count_B = jnp.pad(num_tokens_B, (0, tiles * R - B))
    scalars = rows_on_chip(count_B), jnp.pad(start_B, (0, tiles * R - B)), count_B
    weights = DeltaWeights(*(x.T for x in weights[:3]), *(x[None] for x in weights[3:]))
    heads = (K // groups, K // groups, N // groups)
    widths = (H, H, Y)

    def of_tile(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((R, x.shape[1] // groups), lambda g, t, r, *_: (t, g))

    def of_group(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((x.shape[0], x.shape[1] // groups), lambda g, t, r, *_: (0, g))

    def of_row(x: Any, axis: int) -> pl.BlockSpec:
        """Returns the heads, on that axis, of a group."""
        shape = [1, *x.shape[1:]]
        shape[axis] //= groups
        before, after = [0] * (axis - 1), [0] * (3 - axis)
        return pl.BlockSpec(shape, lambda g, t, r, block, *_: (block[t * R + r], *before, g, *after))

    def of_call(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0, 0))

    new_blocks = [*map(of_tile, new[:4]), *(pl.BlockSpec((R, N), lambda g, t, *_: (t, 0)) for _ in "ba")]
    weight_blocks = [*map(of_group, weights[:3]), *map(of_call, weights[3:])]
    state_blocks = DeltaState(*map(of_row, old, (2, 2, 2, 1)))
    vectors = [pltpu.VMEM((R, *shape), jnp.float32) for shape in zip(heads, widths, strict=True)]
    taps = [pltpu.VMEM((W + 1, *shape), jnp.float32) for shape in zip(heads, widths, strict=True)]
    steps = pltpu.VMEM((groups, R, heads[2]), jnp.float32)
    arrays = jax.tree.leaves((scalars, new, weights))
    out_types = [result_type(x.shape, x.dtype, *arrays, *old) for x in (new.z, *old)]
    refs = _Refs(*scalars, new, weights, old, new.z, old, vectors, taps, steps, steps, vectors[2])
    structure = jax.tree.structure(refs)
    out, *after = pl.pallas_call(
        lambda *refs: _kernel(jax.tree.unflatten(structure, refs), eps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(groups, tiles, R),
            in_specs=[*new_blocks, *weight_blocks, *state_blocks],
            out_specs=[of_tile(new.z), *state_blocks],
            scratch_shapes=[*vectors, *taps, steps, steps, vectors[2]],
        ),
        out_shape=out_types,
        input_output_aliases={len(arrays) + i: 1 + i for i in range(len(old))},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=emulator(interpret),
        name="delta_step",
    )(*arrays, *keep_in_hbm(old, interpret))
    *inputs, state = after
    return out, DeltaState._make([*(jnp.swapaxes(x, 1, 2) for x in inputs), state])


def groups_of_heads(key_heads: int, size: int) -> int:
    """Returns the number of groups of key heads, which fill tiles, into which a row is divided. size: bytes
    of the state of a row.
    """
    most = min(size // _STEP_BYTES, key_heads // _SUBLANES)
    return max((n for n in range(1, most + 1) if key_heads % (n * _SUBLANES) == 0), default=1)


def rows_on_chip(count_B: jax.Array) -> jax.Array:
    """Returns, int32 [B], the row whose state the step of each row has on the chip. It is the row itself, or
    the last row with a token before it. The first rows have the first row with a token, or 0 if there is
    none.
    """
    row_B = jnp.arange(len(count_B), dtype=jnp.int32)
    order_BB = jnp.where(row_B <= row_B[:, None], row_B, ~row_B)
    best_B = jnp.where(count_B > 0, order_BB, -len(count_B) - 1).max(1)
    return jnp.where(best_B < 0, ~best_B, best_B) % len(count_B)


def _kernel(refs: _Refs, eps: float) -> None:
    group = pl.program_id(0)
    tile = pl.program_id(1)
    r = pl.program_id(2)
    row = tile * pl.num_programs(2) + r
    pl.when(r == 0)(partial(_prepare, refs))

    @pl.when((row == 0) & (refs.count[refs.block[0]] == 0))
    def _keep() -> None:  # no row has a token: the block is written back all the same
        for before, after in zip(refs.old, refs.after, strict=True):
            after[...] = before[...]

    pl.when(refs.count[row] > 0)(partial(_step, refs, group, r, refs.start[row] == 0))
    pl.when(r == pl.num_programs(2) - 1)(partial(_finish, refs, eps))


def _prepare(refs: _Refs) -> None:
    """Puts heads into rows, and computes decay and beta, for all rows of a tile."""
    for x_ref, taps_ref, inputs_ref, to_ref in zip(
        refs.new[:3], refs.weights[:3], refs.inputs, refs.taps, strict=True
    ):
        (_, heads, width) = inputs_ref.shape
        for n in range(heads):
            columns = slice(n * width, (n + 1) * width)
            inputs_ref[:, n] = x_ref[:, columns].astype(jnp.float32)
            to_ref[:, n] = taps_ref[:, columns].astype(jnp.float32)
    numbers = refs.new.a, refs.new.b, *refs.weights[3:5]
    decay_RN, beta_RN = decay_and_beta(*(ref[...] for ref in numbers))
    shrink_RN = jnp.exp(decay_RN)
    (groups, _, heads) = refs.shrink.shape
    for group in range(groups):
        refs.shrink[group] = shrink_RN[:, group * heads : (group + 1) * heads]
        refs.beta[group] = beta_RN[:, group * heads : (group + 1) * heads]
    refs.results[...] = jnp.zeros(refs.results.shape, jnp.float32)


def _step(refs: _Refs, group: Any, r: Any, begins: Any) -> None:
    """Returns row r of a tile."""
    q_KH, k_KH, v_NY = (_convolve(refs, i, r, begins) for i in range(3))
    shrink_1N, beta_1N = (ref[group, pl.ds(r, 1)] for ref in (refs.shrink, refs.beta))

    def old_state(n: int) -> jax.Array:
        return jnp.where(begins, 0, refs.old.state[0, n])

    q_KH = unit(q_KH) * q_KH.shape[1] ** -0.5
    token = q_KH, unit(k_KH), v_NY, shrink_1N, beta_1N
    take_token(token, old_state, refs.after.state.at[0], refs.results.at[r])


def take_token(
    token: tuple[jax.Array, ...], old_state: Callable[[int], jax.Array], after: Any, results: Any
) -> None:
    """Writes the states of heads after a token, [N, H, Y], and its results [N, Y].

    Args:
        token: its query over the square root of H, and its key, of length 1, [K, H], its values [N, Y], and
            exp of the decay, and beta, [1, N].
        old_state: a function that gives the state of a head before it.
        after, results: references.
    """
    q_KH, k_KH, v_NY, shrink_1N, beta_1N = token
    K = len(k_KH)
    groups = len(v_NY) // K
    agreement_K1 = (q_KH * k_KH).sum(-1, keepdims=True)
    padding = [jnp.zeros((-2 * K % _SUBLANES, q_KH.shape[1]), jnp.float32)] * (2 * K % _SUBLANES > 0)
    columns = jnp.concatenate([q_KH, k_KH, *padding], 0).T
    for n in range(len(v_NY)):
        head = n // groups
        q_H1 = columns[:, head : head + 1]
        k_H1 = columns[:, K + head : K + head + 1]
        shrink = shrink_1N[:, n : n + 1]
        beta = beta_1N[:, n : n + 1]
        state_HY = old_state(n)
        of_key_1Y = (state_HY * k_H1).sum(0, keepdims=True)
        of_query_1Y = (state_HY * q_H1).sum(0, keepdims=True)
        added_1Y = beta * (v_NY[n : n + 1] - shrink * of_key_1Y)
        results[n : n + 1] = shrink * of_query_1Y + agreement_K1[head : head + 1] * added_1Y
        after[n] = state_HY * shrink + k_H1 * added_1Y


def _convolve(refs: _Refs, i: int, r: Any, begins: Any) -> jax.Array:
    """Returns silu of the convolution, float32 [heads, width], of q, k or v. Moves its inputs by one."""
    old_ref = refs.old[i]
    after_ref = refs.after[i]
    taps_ref = refs.taps[i]
    new = refs.inputs[i][r]
    W = old_ref.shape[1]
    inputs = [jnp.where(begins, 0, old_ref[0, w]) for w in range(W)] + [new]
    total = inputs[0] * taps_ref[0]
    for w in range(1, W + 1):
        total += inputs[w] * taps_ref[w]
        after_ref[0, w - 1] = inputs[w]
    return jax.nn.silu(total)


def _finish(refs: _Refs, eps: float) -> None:
    """Applies norms and gates to all rows of a tile."""
    (_, heads, Y) = refs.results.shape
    for n in range(heads):
        columns = slice(n * Y, (n + 1) * Y)
        args = refs.results[:, n], refs.new.z[:, columns], refs.weights.norm_Y[...], eps
        refs.out[:, columns] = gated_norm(*args)
