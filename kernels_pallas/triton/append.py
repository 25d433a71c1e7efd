"""RoPE of queries and keys, and the append of keys and values to a cache, in one launch.

A program serves one key head of one token, with the G = N/K queries that share it. The caches are aliased
with the results: only the slots of new tokens are written, and nothing is read from them. In `Levels` a
vector is quantized to nearest, between its smallest and its largest number.
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from ..dispatch import result_type
from ..key_layouts import Latents, Levels


class _Settings(NamedTuple):
    """The settings that are the same for every program."""

    inputs: tuple[str, ...]  # names of the arrays that are read; the caches follow
    outs: tuple[str, ...]
    pairs: int  # of a head that RoPE rotates
    capacity: int
    ring: bool


def rope_append(  # noqa: PLR0913
    q_BTNH, k_BTKH, v_BTKH, cos_BTP, sin_BTP, k_PKSH, v_PKSH, start_B, num_tokens_B, *, capacity,
    table_BP=None, ring=False, interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Rotates queries and keys by their angles, and writes the keys and values of new tokens to a cache: of
    `Latents` the keys alone. XLA copies the cache if it is used again.

    It takes the arguments of the reference, and returns its results. interpret: True: run on any device,
    slowly, by Pallas's interpreter.
    """
    B, T, N, H = q_BTNH.shape
    K, S = k_PKSH.shape[1:3]
    if not ring:
        capacity = min(capacity, S if table_BP is None else S * table_BP.shape[1])
    inputs = {"start": start_B, "count": num_tokens_B, "new_k": k_BTKH}
    if not isinstance(k_PKSH, Latents):
        inputs["new_v"] = v_BTKH
    caches = (k_PKSH, v_PKSH)
    names = _cache_names(k_PKSH)
    outs = dict(zip(names, jax.tree.leaves(caches), strict=True))
    if table_BP is not None:
        inputs["table"] = table_BP
    if cos_BTP is not None:
        inputs |= {"q": q_BTNH, "cos": cos_BTP, "sin": sin_BTP}
        outs["rotated"] = q_BTNH
    arrays = (*inputs.values(), *jax.tree.leaves(caches))
    pairs = 0 if cos_BTP is None else cos_BTP.shape[-1]
    results = pl.pallas_call(
        partial(_kernel, settings=_Settings(tuple(inputs), tuple(outs), pairs, capacity, ring)),
        grid=(K, T, B),
        out_shape=[result_type(x.shape, x.dtype, *arrays) for x in outs.values()],
        input_output_aliases={len(inputs) + i: i for i in range(len(names))},
        compiler_params=pltriton.CompilerParams(num_warps=1 if N // K * H <= 1024 else 4, num_stages=1),
        interpret=interpret,
        name="rope_append",
    )(*arrays)
    k_PKSH, v_PKSH = jax.tree.unflatten(jax.tree.structure(caches), results[: len(names)])
    return q_BTNH if pairs == 0 else results[-1], k_PKSH, v_PKSH


def _cache_names(k: Any) -> tuple[str, ...]:
    """Returns the names of the arrays of a cache with such keys."""
    if isinstance(k, Latents):
        return ("k",)
    return ("k", "k_scale", "v", "v_scale") if isinstance(k, Levels) else ("k", "v")


def _kernel(*refs, settings: _Settings):
    ref = dict(zip(settings.inputs, refs, strict=False))
    ref |= dict(zip(settings.outs, refs[-len(settings.outs) :], strict=True))
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
        if "k_scale" in ref:
            angle_refs = [ref["cos"], ref["sin"]] if angles else []
            place = (owner, head, slot)
            _quantize([ref["new_k"], *angle_refs], (row, t), head, (ref["k"], ref["k_scale"]), place)
            _quantize([ref["new_v"]], (row, t), head, (ref["v"], ref["v_scale"]), place)
            return
        head_1 = head + jnp.arange(1)
        new = (row, t, head_1)
        place = (owner, head_1, slot)
        _rotate(ref["new_k"], new, ref["k"], place, angles, settings.pairs)
        if "v" in ref:
            _rotate(ref["new_v"], new, ref["v"], place, [], 0)


def _rotate(x_ref, source, out_ref, target, angles, pairs: int, heads: int = 1) -> None:
    """Stores the vectors of some heads, rotated by the angles of the first pairs of numbers.

    source, target: indices of x_ref and out_ref without the columns. One of them is a vector of heads, of
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


def _quantize(refs, token, head, out_refs, place) -> None:
    """Stores a vector as levels, with their step and low.

    Args:
        refs: the vectors, and cosine and sine if it is rotated.
        token: its row and number.
        out_refs: levels and scale.
        place: indices of these without the columns.
    """
    x_ref = refs[0]
    H = x_ref.shape[-1]
    C = out_refs[0].shape[-1]
    top = 2 ** (8 * C // H) - 1
    offset_W = jnp.arange(pl.next_power_of_2(C))
    real_W = offset_W < C
    parts = [_rotated(refs, token, head, first + offset_W, real_W) for first in range(0, H, C)]
    low = reduce(jnp.minimum, [jnp.where(real_W, x_W, jnp.inf).min() for x_W in parts])
    high = reduce(jnp.maximum, [jnp.where(real_W, x_W, -jnp.inf).max() for x_W in parts])
    step = jnp.maximum((high - low) / top, float(jnp.finfo(jnp.float16).smallest_normal))
    scale_2 = jnp.where(jnp.arange(2) == 0, step, low).astype(jnp.float16)
    _store(out_refs[1], place, jnp.arange(2), scale_2)
    # Levels compensate for the rounding of these two.
    step, low = (x.astype(jnp.float16).astype(jnp.float32) for x in (step, low))
    byte_W = jnp.zeros(offset_W.shape, jnp.int32)
    for i, x_W in enumerate(parts):
        byte_W |= jnp.clip(_round((x_W - low) / step), 0, top).astype(jnp.int32) << (4 * i)
    _store(out_refs[0], place, offset_W, byte_W.astype(jnp.uint8), real_W)


def _round(x: jax.Array) -> jax.Array:
    """Rounds to the nearest integer, and half to even. Triton has no `jnp.round`."""
    down = jnp.floor(x)
    rest = x - down
    is_odd = down != 2 * jnp.floor(down / 2)
    return jnp.where((rest > 0.5) | (rest == 0.5) & is_odd, down + 1, down)


def _rotated(refs, token, head, column_W, real_W) -> jax.Array:
    """Returns float32: columns of a vector, rotated, and rounded to its dtype."""
    (x_ref, *angle_refs) = refs

    def load(ref, axes, at_W, mask_W, other=0):
        index = tuple(jnp.broadcast_to(i, at_W.shape) for i in (*axes, at_W))
        return pltriton.load(ref.at[index], mask=mask_W, other=other).astype(jnp.float32)

    x_W = load(x_ref, (*token, head), column_W, real_W)
    if not angle_refs:
        return x_W
    pairs = angle_refs[0].shape[-1]
    first_W = column_W < pairs
    in_pair_W = real_W & (column_W < 2 * pairs)
    other_W = jnp.where(first_W, column_W + pairs, column_W - pairs)
    across_W = load(x_ref, (*token, head), other_W, in_pair_W)
    angle_W = lax.rem(column_W, pairs)
    cos_W = load(angle_refs[0], token, angle_W, in_pair_W, 1)
    sin_W = load(angle_refs[1], token, angle_W, in_pair_W)
    rotated_W = x_W * cos_W + across_W * jnp.where(first_W, -sin_W, sin_W)
    return rotated_W.astype(x_ref.dtype).astype(jnp.float32)


def _store(ref, place, column_W, x_W, mask=None) -> None:
    index = tuple(jnp.broadcast_to(i, column_W.shape) for i in (*place, column_W))
    pltriton.store(ref.at[index], x_W, mask=mask)


def _load(ref, source, first: int, count: int, heads: int | None = None) -> jax.Array:
    """Returns float32: `count` columns, then zeros up to the size of a tile."""
    at, mask = _indices(source, first, count, heads)
    return pltriton.load(ref.at[at], mask=mask, other=0).astype(jnp.float32)


def _indices(axes, first: int, count: int, heads: int | None) -> tuple[tuple[Any, ...], jax.Array]:
    """Returns the indices of a tile with these columns, [G, W], or [W] if `axes` has no heads, and a mask of
    the ones that exist.
    """
    offset_W = jnp.arange(pl.next_power_of_2(count))
    mask = offset_W < count
    if heads is not None:
        axes = [i[:, None] if i.ndim else i for i in axes]
        mask = (jnp.arange(pl.next_power_of_2(heads)) < heads)[:, None] & mask
    return tuple(jnp.broadcast_to(i, mask.shape) for i in (*axes, first + offset_W)), mask
