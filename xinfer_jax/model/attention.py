"""Causal attention: grouped heads, sliding windows, queries at any offset. In plain jnp, and on GPUs by the
kernels of `kernels_pallas`.

Cost follows the length and not the capacity: only the key blocks that some query can see are read. Scores
exist for one block of queries and one block of keys at a time, so 8k tokens need no 8k × 8k matrix.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import kernels_pallas

from ..cache.quantized import by_slot, widen
from ..errors import InputError

QUERY_BLOCK = 512
KEY_BLOCK = 256
DECODE_BLOCK = 1024  # keys per step for a single query: the steps cost more than the keys
_MASKED = -1e30  # finite: a row that sees no key at all gives zeros, not NaN


class _Rule(NamedTuple):
    """How a query scores keys, and which of them it sees."""

    scale: float
    window: int | None
    soft_cap: float | None
    ring: bool


class _Kernel(NamedTuple):
    """One of `kernels_pallas.KERNELS`, and what runs it."""

    name: str
    impl: str
    only_on_gpu: bool  # elsewhere the plain jnp below


def attention(  # noqa: PLR0913
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    *,
    length_B: jax.Array,
    start_B: jax.Array | None = None,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    ring: bool = False,
    impl: str | None = None,
) -> jax.Array:
    """Scaled dot-product attention (Vaswani et al. 2017) with the online softmax of Milakov & Gimelshein
    2018.

    Query t of row b has position p = start_B[b] + t and sees the keys at positions 0 … p, with a window
    p-window+1 … p, that lie below length_B[b]. Keys at or past length_B may hold anything, NaN included.

    Args:
        q_BTNH: queries. N is a multiple of K: heads share keys in groups of N/K.
        k_BKSH: keys in order of position; quantized ones are widened a block at a time.
        v_BKSH: values.
        length_B: number of valid keys per row.
        start_B: position of the first query; None: 0 for every row, which also makes the bounds of all loops
            static, so that the result has a reverse-mode gradient.
        scale: factor on the scores.
        window: None, or how many keys a query sees at most, itself included.
        soft_cap: None, or c: scores become c tanh(score / c).
        ring: position p lies in slot p % S, and the last S positions below length_B are there; no kernel
            reads that.
        impl: None, or one of `kernels_pallas.IMPLS`. A kernel's gradient is that of "xla", the plain jnp
            below.

    Returns:
        [B, T, N, H] in the dtype of q.

    Raises:
        InputError: the named impl does not serve these arguments.
    """
    kernel = "decode_attention" if q_BTNH.shape[1] == 1 and start_B is not None else "prefill_attention"
    chosen = selected(kernel, impl, q_BTNH, k_BKSH, v_BKSH, ring=ring).impl
    static = start_B is None
    start_B = jnp.zeros(len(q_BTNH), jnp.int32) if static else start_B
    rule, arrays = _Rule(scale, window, soft_cap, ring), (q_BTNH, k_BKSH, v_BKSH, start_B, length_B)
    if chosen == "xla":
        return _blocked(*arrays, rule, static)
    return _by_kernel(_Kernel(kernel, chosen, impl is None), rule, *arrays)


def check_impl(impl: str | None) -> None:
    """Raises InputError where this process cannot run the implementation."""
    if reason := kernels_pallas.unavailable(impl):
        raise InputError(reason)


def selected(kernel: str, impl: str | None, *args: jax.Array, ring: bool = False) -> kernels_pallas.Selection:
    """What `kernels_pallas` selects, or an InputError with its reason."""
    try:
        return kernels_pallas.select(kernel, impl, *args, ring=ring)
    except ValueError as error:
        raise InputError(str(error)) from error


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_kernel(kernel: _Kernel, rule: _Rule, q_BTNH, k_BKSH, v_BKSH, start_B, length_B):
    run = partial(kernels_pallas.run, kernel.impl, kernel.name)
    run = partial(run, scale=rule.scale, window=rule.window, soft_cap=rule.soft_cap)

    def fast(q_BTNH, k_BKSH, v_BKSH, start_B, length_B):
        if kernel.name == "decode_attention":
            seen_B = jnp.minimum(length_B, start_B + 1)  # that kernel's query is the last of these
            return run(q_BTNH[:, 0], k_BKSH, v_BKSH, seen_B)[:, None]
        return run(q_BTNH, k_BKSH, v_BKSH, start_B, length_B)

    arrays = (q_BTNH, k_BKSH, v_BKSH, start_B, length_B)
    if not kernel.only_on_gpu:
        return fast(*arrays)
    return lax.platform_dependent(
        *arrays,
        cuda=fast,
        default=lambda q, k, v, start, length: _blocked(q, k, v, start, length, rule, False),
    )


def _forward(*args):
    return _by_kernel(*args), args[2:]


def _backward(kernel, rule, saved, gradient):
    *qkv, start_B, length_B = saved
    pull = jax.vjp(lambda q, k, v: _blocked(q, k, v, start_B, length_B, rule, True), *qkv)[1]
    return *pull(gradient), None, None


_by_kernel.defvjp(_forward, _backward)


def _blocked(q_BTNH, k_BKSH, v_BKSH, start_B, length_B, rule: _Rule, static: bool):
    """The same in plain jnp. `static`: loops with fixed bounds, which have a reverse-mode gradient."""
    B, T, N, H = q_BTNH.shape
    K, S = k_BKSH.shape[1:3]
    q_BKTGH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4)
    run = partial(_query_block, k_BKSH, v_BKSH, length_B, rule, static)
    if T <= QUERY_BLOCK:
        out_BKTGH = run(q_BKTGH, start_B)
    else:
        blocks = -(-T // QUERY_BLOCK)
        padded = jnp.pad(q_BKTGH, ((0, 0), (0, 0), (0, blocks * QUERY_BLOCK - T), (0, 0), (0, 0)))
        stacked = jnp.moveaxis(padded.reshape(B, K, blocks, QUERY_BLOCK, N // K, H), 2, 0)
        # The backward pass recomputes a block of queries at a time instead of keeping every score.
        step = jax.checkpoint(lambda block: run(block[0], start_B + block[1]))
        done = lax.map(step, (stacked, QUERY_BLOCK * jnp.arange(blocks)))
        out_BKTGH = jnp.moveaxis(done, 0, 2).reshape(B, K, blocks * QUERY_BLOCK, N // K, H)[:, :, :T]
    return out_BKTGH.transpose(0, 2, 1, 3, 4).reshape(B, T, N, H)


def _query_block(k_BKSH, v_BKSH, length_B, rule: _Rule, static: bool, q_BKTGH, start_B):
    """One block of queries over all the key blocks that it can see."""
    B, K, T, G, H = q_BKTGH.shape
    S, (scale, window, soft_cap, ring) = k_BKSH.shape[2], rule
    width = min(S, DECODE_BLOCK if T == 1 else KEY_BLOCK)
    blocks = -(-S // width)
    query_BT = start_B[:, None] + jnp.arange(T)

    def update(i, state):
        max_BKTG, sum_BKTG, acc_BKTGH = state
        first = i * width
        # The last block overlaps the one before it where the width does not divide S.
        at = jnp.minimum(first, S - width)
        slot_S = at + jnp.arange(width)
        last_B1 = length_B[:, None] - 1
        key_BS = last_B1 - (last_B1 - slot_S) % S if ring else slot_S[None]
        cut = partial(lax.dynamic_slice_in_dim, start_index=at, slice_size=width, axis=2)
        k, v = (widen(x if blocks == 1 else by_slot(cut, x)) for x in (k_BKSH, v_BKSH))
        valid_BS = (slot_S >= first) & (key_BS >= 0) & (key_BS <= last_B1)
        seen_BTS = valid_BS[:, None] & (key_BS[:, None] <= query_BT[..., None])
        if window is not None:
            seen_BTS &= key_BS[:, None] > query_BT[..., None] - window
        seen = seen_BTS[:, None, :, None]
        scores = (
            jnp.einsum(
                "bktgh,bksh->bktgs", q_BKTGH, k, preferred_element_type=jnp.float32, precision=_precision(k)
            )
            * scale
        )
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen, scores, _MASKED)
        new_max = jnp.maximum(max_BKTG, scores.max(-1))
        # 0 where masked, even where a row sees no key at all.
        weights = jnp.exp(scores - jnp.maximum(new_max, _MASKED / 2)[..., None])
        shrink = jnp.exp(max_BKTG - new_max)
        v = jnp.where(valid_BS[:, None, :, None], v, 0)  # a weight of 0 does not silence a NaN
        add = jnp.einsum(
            "bktgs,bksh->bktgh",
            weights.astype(v.dtype),
            v,
            preferred_element_type=jnp.float32,
            precision=_precision(v),
        )
        return new_max, sum_BKTG * shrink + weights.sum(-1), acc_BKTGH * shrink[..., None] + add

    zeros = jnp.zeros((B, K, T, G), jnp.float32)
    state = (zeros + _MASKED, zeros, jnp.zeros((B, K, T, G, H), jnp.float32))
    state = kernels_pallas.varying_as(state, q_BKTGH, k_BKSH, v_BKSH, start_B, length_B)
    high = -(-jnp.minimum(jnp.max(length_B), jnp.max(start_B) + T) // width)
    high = jnp.minimum(high, blocks) if ring else high
    low = 0 if window is None or ring else jnp.maximum(jnp.min(start_B) - window + 1, 0) // width
    if blocks == 1:
        state = update(0, state)
    elif static:
        state = lax.fori_loop(
            0, blocks, lambda i, s: lax.cond((i >= low) & (i < high), update, lambda _, s: s, i, s), state
        )
    else:
        state = lax.fori_loop(low, high, update, state)
    _, sum_BKTG, acc_BKTGH = state
    return (acc_BKTGH / jnp.maximum(sum_BKTG, 1e-30)[..., None]).astype(q_BKTGH.dtype)


def _precision(x: jax.Array) -> lax.Precision | None:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
