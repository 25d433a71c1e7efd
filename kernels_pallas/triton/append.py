"""RoPE of queries and keys, and the append of keys and values to a cache, in one launch.

A program serves one key head of one token, with the G = N/K queries that share it. The caches are aliased
with the results: only the slots of new tokens are written, and nothing is read from them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from .parts import result_type


class _Settings(NamedTuple):
    """What is the same for every program."""

    inputs: tuple[str, ...]  # names of the arrays that are read; the caches follow
    outs: tuple[str, ...]
    pairs: int  # of a head that RoPE rotates
    capacity: int
    ring: bool


def rope_append(  # noqa: PLR0913
    q_BTNH, k_BTKH, v_BTKH, cos_BTP, sin_BTP, k_PKSH, v_PKSH, start_B, num_tokens_B, *, capacity,
    table_BP=None, ring=False, interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Rotates queries and keys by their angles, and writes the keys and values of new tokens to a cache.

    Args:
        q_BTNH, k_BTKH, v_BTKH: of the new tokens. N is a multiple of K.
        cos_BTP, sin_BTP: float32, of the pairs (i, i + P) of a head; the rest of a head stays. None for both:
            no RoPE.
        k_PKSH, v_PKSH: the caches, in float numbers; XLA copies them where they are used again.
        start_B: int32, the position of each row's first token.
        num_tokens_B: int32, how many of the T tokens are written.
        capacity: positions from it on are not written.
        table_BP: int32, the block table: position p is in slot p % S of page table_BP[b, p // S].
        ring: position p is in slot p % S.
        interpret: run on any device, slowly, by Pallas's interpreter.

    Returns:
        The rotated queries of all tokens, in their dtype, and the caches.
    """
    B, T, N, H = q_BTNH.shape
    K, S = k_PKSH.shape[1:3]
    if not ring:
        capacity = min(capacity, S if table_BP is None else S * table_BP.shape[1])
    inputs = {"start": start_B, "count": num_tokens_B, "new_k": k_BTKH, "new_v": v_BTKH}
    outs = {"k": k_PKSH, "v": v_PKSH}
    if table_BP is not None:
        inputs["table"] = table_BP
    if cos_BTP is not None:
        inputs |= {"q": q_BTNH, "cos": cos_BTP, "sin": sin_BTP}
        outs["rotated"] = q_BTNH
    arrays = (*inputs.values(), k_PKSH, v_PKSH)
    pairs = 0 if cos_BTP is None else cos_BTP.shape[-1]
    results = pl.pallas_call(
        partial(_kernel, settings=_Settings(tuple(inputs), tuple(outs), pairs, capacity, ring)),
        grid=(K, T, B),
        out_shape=[result_type(x.shape, x.dtype, *arrays) for x in outs.values()],
        input_output_aliases={len(inputs): 0, len(inputs) + 1: 1},
        compiler_params=pltriton.CompilerParams(num_warps=1 if N // K * H <= 1024 else 4, num_stages=1),
        interpret=interpret,
        name="rope_append",
    )(*arrays)
    k_PKSH, v_PKSH, *rotated = results
    return rotated[0] if rotated else q_BTNH, k_PKSH, v_PKSH


def _kernel(*refs, settings: _Settings):
    ref = dict(zip(settings.inputs, refs, strict=False))
    ref |= dict(zip(settings.outs, refs[len(ref) + 2 :], strict=True))
    # Not in the branch, where the interpreter has no program_id.
    (head, t, row) = (pl.program_id(axis) for axis in range(3))
    S = ref["k"].shape[2]
    angles = [_load(ref[name], (row, t), 0, settings.pairs) for name in ("cos", "sin") if name in ref]
    if angles:
        G = ref["q"].shape[2] // ref["k"].shape[1]
        group = (row, t, head * G + jnp.arange(pl.next_power_of_2(G)))
        _rotate(ref["q"], group, ref["rotated"], group, angles, settings.pairs, G)
    position = ref["start"][row] + t

    @pl.when((t < ref["count"][row]) & (position < settings.capacity))
    def _append():
        owner = row
        slot = position
        if "table" in ref:
            owner = ref["table"][row, lax.div(position, S)]
        if "table" in ref or settings.ring:
            slot = lax.rem(position, S)
        head_1 = head + jnp.arange(1)
        new = (row, t, head_1)
        place = (owner, head_1, slot)
        _rotate(ref["new_k"], new, ref["k"], place, angles, settings.pairs)
        _rotate(ref["new_v"], new, ref["v"], place, [], 0)


def _rotate(x_ref, source, out_ref, target, angles, pairs: int, heads: int = 1) -> None:  # noqa: PLR0913
    """Stores the vectors of some heads, rotated by the angles of the first pairs of numbers.

    source, target: indices of x_ref and out_ref but for the columns; one of them is a vector of heads, of
    which only the first `heads` exist.
    """
    load = partial(_load, x_ref, source, heads=heads)

    def store(first: int, count: int, x_GW: jax.Array) -> None:
        at, mask = _indices(target, first, count, heads)
        pltriton.store(out_ref.at[at], x_GW.astype(x_ref.dtype).astype(out_ref.dtype), mask=mask)

    if angles:
        (cos_W, sin_W) = angles
        a_GW = load(0, pairs)
        b_GW = load(pairs, pairs)
        store(0, pairs, a_GW * cos_W - b_GW * sin_W)
        store(pairs, pairs, b_GW * cos_W + a_GW * sin_W)
    rest = x_ref.shape[-1] - 2 * pairs
    if rest:
        store(2 * pairs, rest, load(2 * pairs, rest))


def _load(ref, source, first: int, count: int, heads: int | None = None) -> jax.Array:
    """float32: `count` columns, then zeros up to the size of a tile."""
    at, mask = _indices(source, first, count, heads)
    return pltriton.load(ref.at[at], mask=mask, other=0).astype(jnp.float32)


def _indices(axes, first: int, count: int, heads: int | None) -> tuple[tuple[Any, ...], jax.Array]:
    """The indices of a tile with these columns, [G, W], or [W] where `axes` has no heads; and which exist."""
    offset_W = jnp.arange(pl.next_power_of_2(count))
    mask = offset_W < count
    if heads is not None:
        axes = [i[:, None] if i.ndim else i for i in axes]
        mask = (jnp.arange(pl.next_power_of_2(heads)) < heads)[:, None] & mask
    return tuple(jnp.broadcast_to(i, mask.shape) for i in (*axes, first + offset_W)), mask
