"""Causal attention at any offset, by blocks of queries and keys: 8k tokens need no 8k × 8k matrix."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import kernels_pallas

from ..cache.contiguous import Block, Contiguous
from ..errors import InputError
from .layers import soft_cap

QUERY_BLOCK = 512
KEY_BLOCK = 256
DECODE_BLOCK = 1024  # keys per loop step for a single query: the step itself costs more than its keys
ROW_BLOCK = 64  # the same for one row on CPU, where steps are cheap
ROW_QUERIES = 17  # a token and 16 draft tokens: up to this number of queries, CPU attends row by row
_ONE_ROW = str.maketrans({"b": "", "t": ""})
_MASKED = -1e30  # finite: a query that sees no key gives zeros, not NaN


class _Scoring(NamedTuple):
    """How scores are computed from queries and keys."""

    scale: float
    soft_cap: float | None


class _Kernel(NamedTuple):
    """One of `kernels_pallas.KERNELS` and its implementation."""

    name: str
    impl: str
    platform: str | None  # whose programs run it; others run the plain jnp below; None: all


class _Softmax(NamedTuple):
    """Online softmax over the keys so far, float32: the largest score, and sums relative to it."""

    max_BKTG: jax.Array
    sum_BKTG: jax.Array  # of weights
    values_BKTGH: jax.Array  # of weighted values


def attention(  # noqa: PLR0913
    q_BTNH: jax.Array,
    kv: Contiguous,
    *,
    length_B: jax.Array,
    start_B: jax.Array | None = None,
    scale: float,
    soft_cap: float | None = None,
    sink_N: jax.Array | None = None,
    impl: str | None = None,
) -> jax.Array:
    """Scaled dot-product attention (Vaswani et al. 2017), online softmax (Milakov & Gimelshein 2018).

    Query t of row b has position p = start_B[b] + t and sees the keys at positions 0 … p, with a window
    p-window+1 … p, that lie below length_B[b]. Keys at or past length_B may hold anything, NaN included.

    Args:
        q_BTNH: queries. N is a multiple of K: heads share keys in groups of N/K.
        kv: a layer cache with keys, values and their window; `uncached_kv` makes one of arrays.
        length_B: number of valid keys per row.
        start_B: position of the first query; None: 0 for every row. Then all loops have static bounds, and
            the result has a reverse-mode gradient.
        scale: factor on the scores.
        soft_cap: None, or c: scores become c tanh(score / c).
        sink_N: None, or one more score of each head, whose weight counts in the softmax but has no value.
        impl: None, or one of `kernels_pallas.IMPLS`. The gradient of a kernel is that of "xla", the plain
            jnp.

    Returns:
        [B, T, N, width of a value] in the dtype of q.

    Raises:
        InputError: the named impl does not support these arguments.
    """
    few = q_BTNH.shape[1] <= ROW_QUERIES and start_B is not None
    kernel = "decode_attention" if few else "prefill_attention"
    chosen = select_attention(kernel, impl, q_BTNH, kv).impl
    static = start_B is None
    length_B = kv.stored_length(length_B)
    start_B = jnp.zeros(len(q_BTNH), jnp.int32) if static else start_B
    scoring = _Scoring(scale, soft_cap)
    sink_N = None if sink_N is None else sink_N.astype(jnp.float32)
    arrays = (q_BTNH, kv, start_B, length_B, sink_N)
    if chosen == "xla":
        return _blocked(*arrays, scoring, static)
    platform = kernels_pallas.platform_of(chosen, impl)
    return _by_kernel(_Kernel(kernel, chosen, platform), scoring, *arrays)


def select_attention(kernel: str, impl: str | None, q_BTNH: Any, kv: Contiguous) -> kernels_pallas.Selection:
    """The implementation for these queries and keys; raises as `select_kernel`."""
    k, v = kv.kernel_arrays()
    obstacle = kv.kernel_obstacle
    return select_kernel(kernel, impl, q_BTNH, k, v, _key_bias(kv), obstacle=obstacle)


def _key_bias(kv: Contiguous) -> kernels_pallas.KeyBias | None:
    bias = kv.key_bias_fn
    return None if bias is None else kernels_pallas.KeyBias(bias.near_KTH, bias.cos_RP, bias.sin_RP)


def check_impl(impl: str | None) -> None:
    """Raises InputError where this process cannot run the implementation."""
    if reason := kernels_pallas.unavailable_reason(impl):
        raise InputError(reason)


def select_kernel(
    kernel: str, impl: str | None, *args: Any, obstacle: str | None = None
) -> kernels_pallas.Selection:
    """The implementation that `kernels_pallas` selects. Raises InputError with its reason where there is
    none.
    """
    try:
        return kernels_pallas.select(kernel, impl, *args, obstacle=obstacle)
    except ValueError as error:
        raise InputError(str(error)) from error


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_kernel(kernel: _Kernel, scoring: _Scoring, q_BTNH, kv, start_B, length_B, sink_N):
    """[B, T, N, H] by a kernel of `kernels_pallas`."""
    run = partial(kernels_pallas.run_kernel, kernel.impl, kernel.name)
    run = partial(run, scale=scoring.scale, window=kv.window, soft_cap=scoring.soft_cap)

    def by_kernel(q_BTNH, kv, start_B, length_B, sink_N):
        options = kv.kernel_options()
        if (bias := _key_bias(kv)) is not None:
            options["key_bias"] = bias
        if sink_N is not None:
            options["sink_N"] = sink_N
        return run(q_BTNH, *kv.kernel_arrays(), start_B, length_B, **options)

    plain = partial(_blocked, scoring=scoring, static=False)
    operands = (q_BTNH, kv, start_B, length_B, sink_N)
    return kernels_pallas.run_on_platform(kernel.platform, by_kernel, plain, *operands)


def _forward(*args):
    return _by_kernel(*args), args[2:]


def _backward(kernel, scoring, saved, gradient):
    q_BTNH, kv, start_B, length_B, sink_N = saved
    blocked = lambda q, kv, sink: _blocked(q, kv, start_B, length_B, sink, scoring, True)  # noqa: E731
    of_q, of_kv, of_sink = jax.vjp(blocked, q_BTNH, kv, sink_N)[1](gradient)
    return of_q, of_kv, None, None, of_sink


_by_kernel.defvjp(_forward, _backward)


def _blocked(q_BTNH, kv: Contiguous, start_B, length_B, sink_N, scoring: _Scoring, static: bool):
    """Attention in plain jnp. static: loops with fixed bounds, which have a reverse-mode gradient."""
    B, T, N, H = q_BTNH.shape
    K = kv.k.shape[1]
    q_BKTGH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4)
    sink_KG = None if sink_N is None else sink_N.reshape(K, N // K)
    run = partial(_query_block, scoring=scoring, static=static)
    if T <= ROW_QUERIES and not static:
        arrays = (q_BKTGH, kv, start_B, length_B, sink_KG)
        out_BKTGH = lax.platform_dependent(*arrays, cpu=partial(_by_row, scoring=scoring), default=run)
    elif T <= QUERY_BLOCK:
        out_BKTGH = run(q_BKTGH, kv, start_B, length_B, sink_KG)
    else:
        blocks = -(-T // QUERY_BLOCK)
        padded = jnp.pad(q_BKTGH, ((0, 0), (0, 0), (0, blocks * QUERY_BLOCK - T), (0, 0), (0, 0)))
        stacked = jnp.moveaxis(padded.reshape(B, K, blocks, QUERY_BLOCK, N // K, H), 2, 0)
        # The backward pass recomputes a block of queries at a time instead of storing every score.
        step = jax.checkpoint(lambda block: run(block[0], kv, start_B + block[1], length_B, sink_KG))
        outs = lax.map(step, (stacked, QUERY_BLOCK * jnp.arange(blocks)))
        out_BKTGH = jnp.moveaxis(outs, 0, 2).reshape(B, K, blocks * QUERY_BLOCK, N // K, -1)[:, :, :T]
    return out_BKTGH.transpose(0, 2, 1, 3, 4).reshape(B, T, N, -1)


def _by_row(q_BKTGH, kv: Contiguous, start_B, length_B, sink_KG, scoring: _Scoring):
    """`_query_block` for one row after the other: a row's cost and bits depend on no other row."""

    def one(row):
        q_1KTGH, start_1, length_1, number_1 = row
        return _query_block(q_1KTGH, kv, start_1, length_1, sink_KG, scoring, False, number_1[0])

    rows = (q_BKTGH, start_B, length_B, jnp.arange(len(q_BKTGH)))
    if len(q_BKTGH) == 1:  # no loop: compiles faster
        return one(rows)
    return lax.map(one, jax.tree.map(lambda x: x[:, None], rows))[:, 0]


def _query_block(  # noqa: PLR0913
    q_BKTGH, kv: Contiguous, start_B, length_B, sink_KG, scoring: _Scoring, static: bool, row=None
):
    """Attention of one block of queries over all visible key blocks, [B, K, T, G, H]. row: that row only."""
    B, K, T, G, _ = q_BKTGH.shape
    if T > 1:
        max_width = KEY_BLOCK
    else:
        max_width = DECODE_BLOCK if row is None else ROW_BLOCK
    width, blocks = kv.block_layout(max_width)
    query_BT = start_B[:, None] + jnp.arange(T)

    def update(i, softmax):
        block = kv.get_block(i, width, length_B, row)
        return _add_block(softmax, q_BKTGH, block, _visible(block, query_BT, kv.window), scoring)

    zeros = jnp.zeros((B, K, T, G), jnp.float32)
    softmax = _Softmax(zeros + _MASKED, zeros, jnp.zeros((B, K, T, G, kv.value_width), jnp.float32))
    if sink_KG is not None:  # the first score, of weight 1, without a value
        softmax = softmax._replace(max_BKTG=zeros + sink_KG[:, None], sum_BKTG=zeros + 1)
    softmax = kernels_pallas.match_varying_axes(softmax, q_BKTGH, kv, start_B, length_B)
    low, high = kv.visible_blocks(width, start_B, T, length_B)
    if blocks == 1:
        softmax = update(0, softmax)
    elif static:  # a fixed number of steps, as reverse mode demands
        step = lambda i, s: lax.cond((i >= low) & (i < high), update, lambda _, s: s, i, s)  # noqa: E731
        softmax = lax.fori_loop(0, blocks, step, softmax)
    else:
        softmax = lax.fori_loop(low, high, update, softmax)
    return (softmax.values_BKTGH / jnp.maximum(softmax.sum_BKTG, 1e-30)[..., None]).astype(q_BKTGH.dtype)


def _visible(block: Block, query_BT, window: int | None):
    """Bool [B, T, S]: the keys of a block that each query sees: up to its own position, within the window."""
    key_B1S = block.position_BS[:, None]
    query_BT1 = query_BT[..., None]
    visible_BTS = block.valid_BS[:, None] & (key_B1S <= query_BT1)
    return visible_BTS if window is None else visible_BTS & (key_B1S > query_BT1 - window)


def _add_block(softmax: _Softmax, q_BKTGH, block: Block, visible_BTS, scoring: _Scoring) -> _Softmax:
    """One step of the online softmax: earlier sums are rescaled to the new largest score."""
    scores = soft_cap(_product("bktgh,bksh->bktgs", q_BKTGH, block.k_BKSH) * scoring.scale, scoring.soft_cap)
    scores = jnp.where(visible_BTS[:, None, :, None], scores, _MASKED)
    max_BKTG = jnp.maximum(softmax.max_BKTG, scores.max(-1))
    # 0 where masked, even where a row sees no key at all.
    weights = jnp.exp(scores - jnp.maximum(max_BKTG, _MASKED / 2)[..., None])
    shrink = jnp.exp(softmax.max_BKTG - max_BKTG)
    v = jnp.where(block.valid_BS[:, None, :, None], block.v_BKSH, 0)  # 0 * NaN is NaN
    added = _product("bktgs,bksh->bktgh", weights.astype(v.dtype), v)
    sum_BKTG = softmax.sum_BKTG * shrink + weights.sum(-1)
    return _Softmax(max_BKTG, sum_BKTG, softmax.values_BKTGH * shrink[..., None] + added)


def _product(subscripts: str, x_BKTGX: jax.Array, y_BKSH: jax.Array) -> jax.Array:
    """The einsum in float32; float32 operands are not rounded first."""
    B, K, T, G, _ = x_BKTGX.shape
    product = partial(
        jnp.einsum,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if y_BKSH.dtype == jnp.float32 else None,
    )
    if B > 1:
        return product(subscripts, x_BKTGX, y_BKSH)
    # One matrix product per key head: with more axes XLA would transpose the keys first.
    z_KMX = product(subscripts.translate(_ONE_ROW), x_BKTGX.reshape(K, T * G, -1), y_BKSH[0])
    return z_KMX.reshape(B, K, T, G, -1)
