"""Causal attention at any offset, a block of queries and keys at a time: 8k tokens need no 8k × 8k matrix."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import kernels_pallas

from ..cache.kinds import Block, Contiguous
from ..errors import InputError
from .layers import soft_cap

QUERY_BLOCK = 512
KEY_BLOCK = 256
DECODE_BLOCK = 1024  # keys per step for a single query: the steps cost more than the keys
ROW_BLOCK = 64  # and of one row on CPU, where they do not
FEW = 17  # queries of a row, a token and 16 guesses: on CPU rows are then read one after the other
_ONE_ROW = str.maketrans({"b": "", "t": ""})
_MASKED = -1e30  # finite: a row that sees no key at all gives zeros, not NaN


class _Rule(NamedTuple):
    """How a query scores keys."""

    scale: float
    soft_cap: float | None


class _Kernel(NamedTuple):
    """One of `kernels_pallas.KERNELS`, and what runs it."""

    name: str
    impl: str
    only_on_gpu: bool  # elsewhere the plain jnp below


class _Softmax(NamedTuple):
    """Over the keys so far, float32: the largest score, and sums relative to it."""

    max_BKTG: jax.Array
    sum_BKTG: jax.Array  # of weights
    values_BKTGH: jax.Array  # of weighted values


def attention(  # noqa: PLR0913
    q_BTNH: jax.Array,
    keys: Contiguous,
    *,
    length_B: jax.Array,
    start_B: jax.Array | None = None,
    scale: float,
    soft_cap: float | None = None,
    impl: str | None = None,
) -> jax.Array:
    """Scaled dot-product attention (Vaswani et al. 2017), online softmax (Milakov & Gimelshein 2018).

    Query t of row b has position p = start_B[b] + t and sees the keys at positions 0 … p, with a window
    p-window+1 … p, that lie below length_B[b]. Keys at or past length_B may hold anything, NaN included.

    Args:
        q_BTNH: queries. N is a multiple of K: heads share keys in groups of N/K.
        keys: keys, values and their window, of one of `cache.kinds`; `fresh` makes it of arrays.
        length_B: number of valid keys per row.
        start_B: position of the first query; None: 0 for every row, which also makes the bounds of all loops
            static, so that the result has a reverse-mode gradient.
        scale: factor on the scores.
        soft_cap: None, or c: scores become c tanh(score / c).
        impl: None, or one of `kernels_pallas.IMPLS`. A kernel's gradient is that of "xla", the plain jnp.

    Returns:
        [B, T, N, H] in the dtype of q.

    Raises:
        InputError: the named impl does not serve these arguments.
    """
    kernel = "decode_attention" if q_BTNH.shape[1] == 1 and start_B is not None else "prefill_attention"
    chosen = attention_impl(kernel, impl, q_BTNH, keys).impl
    static = start_B is None
    length_B = keys.held(length_B)
    start_B = jnp.zeros(len(q_BTNH), jnp.int32) if static else start_B
    rule = _Rule(scale, soft_cap)
    arrays = (q_BTNH, keys, start_B, length_B)
    if chosen == "xla":
        return _blocked(*arrays, rule, static)
    return _by_kernel(_Kernel(kernel, chosen, impl is None), rule, *arrays)


def attention_impl(kernel: str, impl: str | None, q_BTNH: Any, keys: Contiguous) -> kernels_pallas.Selection:
    """What serves these queries and keys; an InputError as `selected`."""
    return selected(kernel, impl, q_BTNH, keys.k, keys.v, ring=not keys.in_order)


def check_impl(impl: str | None) -> None:
    """Raises InputError where this process cannot run the implementation."""
    if reason := kernels_pallas.unavailable(impl):
        raise InputError(reason)


def selected(kernel: str, impl: str | None, *args: Any, ring: bool = False) -> kernels_pallas.Selection:
    """What `kernels_pallas` selects, or an InputError with its reason."""
    try:
        return kernels_pallas.select(kernel, impl, *args, ring=ring)
    except ValueError as error:
        raise InputError(str(error)) from error


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_kernel(kernel: _Kernel, rule: _Rule, q_BTNH, keys, start_B, length_B):
    """[B, T, N, H] by a kernel of `kernels_pallas`, which reads keys in order as they lie."""
    run = partial(kernels_pallas.run, kernel.impl, kernel.name)
    run = partial(run, scale=rule.scale, window=keys.window, soft_cap=rule.soft_cap)

    def fast(q_BTNH, keys, start_B, length_B):
        k_BKSH, v_BKSH = keys.ordered()
        if kernel.name == "decode_attention":
            visible_B = jnp.minimum(length_B, start_B + 1)  # that kernel's query is the last of these
            return run(q_BTNH[:, 0], k_BKSH, v_BKSH, visible_B)[:, None]
        return run(q_BTNH, k_BKSH, v_BKSH, start_B, length_B)

    arrays = (q_BTNH, keys, start_B, length_B)
    if not kernel.only_on_gpu:
        return fast(*arrays)
    return lax.platform_dependent(*arrays, cuda=fast, default=partial(_blocked, rule=rule, static=False))


def _forward(*args):
    return _by_kernel(*args), args[2:]


def _backward(kernel, rule, saved, gradient):
    q_BTNH, keys, start_B, length_B = saved
    pull = jax.vjp(lambda q, keys: _blocked(q, keys, start_B, length_B, rule, True), q_BTNH, keys)[1]
    return *pull(gradient), None, None


_by_kernel.defvjp(_forward, _backward)


def _blocked(q_BTNH, keys: Contiguous, start_B, length_B, rule: _Rule, static: bool):
    """The same in plain jnp. `static`: loops with fixed bounds, which have a reverse-mode gradient."""
    B, T, N, H = q_BTNH.shape
    K = keys.k.shape[1]
    q_BKTGH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4)
    run = partial(_query_block, rule=rule, static=static)
    if T <= FEW and not static:
        arrays = (q_BKTGH, keys, start_B, length_B)
        out_BKTGH = lax.platform_dependent(*arrays, cpu=partial(_by_row, rule=rule), default=run)
    elif T <= QUERY_BLOCK:
        out_BKTGH = run(q_BKTGH, keys, start_B, length_B)
    else:
        blocks = -(-T // QUERY_BLOCK)
        padded = jnp.pad(q_BKTGH, ((0, 0), (0, 0), (0, blocks * QUERY_BLOCK - T), (0, 0), (0, 0)))
        stacked = jnp.moveaxis(padded.reshape(B, K, blocks, QUERY_BLOCK, N // K, H), 2, 0)
        # The backward pass recomputes a block of queries at a time instead of keeping every score.
        step = jax.checkpoint(lambda block: run(block[0], keys, start_B + block[1], length_B))
        done = lax.map(step, (stacked, QUERY_BLOCK * jnp.arange(blocks)))
        out_BKTGH = jnp.moveaxis(done, 0, 2).reshape(B, K, blocks * QUERY_BLOCK, N // K, H)[:, :, :T]
    return out_BKTGH.transpose(0, 2, 1, 3, 4).reshape(B, T, N, H)


def _by_row(q_BKTGH, keys: Contiguous, start_B, length_B, rule: _Rule):
    """`_query_block`, one row after the other: each costs what its own keys cost, and sees no other's."""

    def one(row):
        q_1KTGH, start_1, length_1, number_1 = row
        return _query_block(q_1KTGH, keys, start_1, length_1, rule, False, number_1[0])

    rows = (q_BKTGH, start_B, length_B, jnp.arange(len(q_BKTGH)))
    if len(q_BKTGH) == 1:  # no loop: compiled sooner
        return one(rows)
    return lax.map(one, jax.tree.map(lambda x: x[:, None], rows))[:, 0]


def _query_block(q_BKTGH, keys: Contiguous, start_B, length_B, rule: _Rule, static: bool, row=None):
    """One block of queries over all the key blocks that it can see, [B, K, T, G, H]; `row`: of that alone."""
    B, K, T, G, H = q_BKTGH.shape
    most = KEY_BLOCK if T > 1 else DECODE_BLOCK if row is None else ROW_BLOCK
    width, blocks = keys.blocks(most)
    query_BT = start_B[:, None] + jnp.arange(T)

    def update(i, softmax):
        block = keys.block(i, width, length_B, row)
        return _with_block(softmax, q_BKTGH, block, _visible(block, query_BT, keys.window), rule)

    zeros = jnp.zeros((B, K, T, G), jnp.float32)
    softmax = _Softmax(zeros + _MASKED, zeros, jnp.zeros((B, K, T, G, H), jnp.float32))
    softmax = kernels_pallas.varying_as(softmax, q_BKTGH, keys, start_B, length_B)
    low, high = keys.span(width, start_B, T, length_B)
    if blocks == 1:
        softmax = update(0, softmax)
    elif static:  # as many steps whatever the lengths: reverse mode passes no other loop
        step = lambda i, s: lax.cond((i >= low) & (i < high), update, lambda _, s: s, i, s)  # noqa: E731
        softmax = lax.fori_loop(0, blocks, step, softmax)
    else:
        softmax = lax.fori_loop(low, high, update, softmax)
    return (softmax.values_BKTGH / jnp.maximum(softmax.sum_BKTG, 1e-30)[..., None]).astype(q_BKTGH.dtype)


def _visible(block: Block, query_BT, window: int | None):
    """Bool [B, T, S]: which keys of a block each query sees: the last up to its own that the window has."""
    key_B1S = block.position_BS[:, None]
    query_BT1 = query_BT[..., None]
    visible_BTS = block.valid_BS[:, None] & (key_B1S <= query_BT1)
    return visible_BTS if window is None else visible_BTS & (key_B1S > query_BT1 - window)


def _with_block(softmax: _Softmax, q_BKTGH, block: Block, visible_BTS, rule: _Rule) -> _Softmax:
    """One step of the online softmax: what was summed so far shrinks to the new largest score."""
    scores = soft_cap(_product("bktgh,bksh->bktgs", q_BKTGH, block.k_BKSH) * rule.scale, rule.soft_cap)
    scores = jnp.where(visible_BTS[:, None, :, None], scores, _MASKED)
    max_BKTG = jnp.maximum(softmax.max_BKTG, scores.max(-1))
    # 0 where masked, even where a row sees no key at all.
    weights = jnp.exp(scores - jnp.maximum(max_BKTG, _MASKED / 2)[..., None])
    shrink = jnp.exp(softmax.max_BKTG - max_BKTG)
    v = jnp.where(block.valid_BS[:, None, :, None], block.v_BKSH, 0)  # a weight of 0 does not silence a NaN
    added = _product("bktgs,bksh->bktgh", weights.astype(v.dtype), v)
    sum_BKTG = softmax.sum_BKTG * shrink + weights.sum(-1)
    return _Softmax(max_BKTG, sum_BKTG, softmax.values_BKTGH * shrink[..., None] + added)


def _product(subscripts: str, x_BKTGX: jax.Array, y_BKSH: jax.Array) -> jax.Array:
    """In float32; of float32 numbers without rounding them first."""
    B, K, T, G, _ = x_BKTGX.shape
    product = partial(
        jnp.einsum,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if y_BKSH.dtype == jnp.float32 else None,
    )
    if B > 1:
        return product(subscripts, x_BKTGX, y_BKSH)
    # One matrix for each key head: of products with more axes XLA transposes the keys first.
    z_KMX = product(subscripts.translate(_ONE_ROW), x_BKTGX.reshape(K, T * G, -1), y_BKSH[0])
    return z_KMX.reshape(B, K, T, G, -1)
