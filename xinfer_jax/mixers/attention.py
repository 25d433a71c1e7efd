"""Causal attention at any offset, by blocks of queries and keys: 8k tokens need no 8k × 8k matrix."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..cache.contiguous import Block, Contiguous
from ..config.run_config import DEFAULT, RunConfig
from ..errors import InputError
from ..ops.operation import match_varying_axes, run
from ..ops.product import float_precision
from ..weights.layers import soft_cap

QUERY_BLOCK = 512
KEY_BLOCK = 256
DECODE_BLOCK = 1024  # keys per loop step for a single query: the step itself costs more than its keys
ROW_QUERIES = 17  # a token and 16 draft tokens: so many queries are a decode step
_ONE_ROW = str.maketrans({"b": "", "t": ""})
_MASKED = -1e30  # finite: a query that sees no key gives zeros, not NaN


class Scoring(NamedTuple):
    """The settings by which scores are computed from queries and keys."""

    scale: float  # a factor on them
    soft_cap: float | None = None  # c: scores become c tanh(score / c)
    first_key: int = 0  # no query sees a key before this position, except its own


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FirstKey:
    """The first position that the queries of all rows see, in place of `first_BT`. It is static. A query
    before it sees its own key alone.
    """

    position: int


class VisibleKeys(NamedTuple):
    """The keys that queries see: keys up to their own positions that are valid and belong to their
    segment.
    """

    start_B: Any  # position of each row's first query; None: 0 for every row
    length_B: Any  # number of valid keys per row
    # Position of the first key that each query sees: packed segments. Or a `FirstKey`.
    first_BT: Any = None
    further: Block | None = None  # keys that are not in the cache, with `first_BT` only


class _Softmax(NamedTuple):
    """Online softmax over the keys so far, float32: the largest score, and sums relative to it."""

    max_BKTG: jax.Array
    sum_BKTG: jax.Array  # of weights
    values_BKTGH: jax.Array  # of weighted values


def attention(
    q_BTNH: jax.Array,
    kv: Contiguous,
    visible: VisibleKeys,
    scoring: Scoring,
    sink_N: jax.Array | None = None,
    ahead: int = 0,
    run_config: RunConfig = DEFAULT,
) -> jax.Array:
    """Computes scaled dot-product attention (Vaswani et al. 2017) with an online softmax (Milakov &
    Gimelshein 2018).

    Query t of row b has position p = start_B[b] + t and sees the keys at positions 0 … p, with a window
    p-window+1 … p, that lie below length_B[b]. Keys at or past length_B may hold anything, NaN included.

    Args:
        q_BTNH: queries. N is a multiple of K: heads share keys in groups of N/K.
        kv: a layer cache with keys, values and their window. `uncached_kv` makes one of arrays.
        visible: the keys that the queries see. An array `first_BT` is in plain jnp only.
        scoring: static.
        sink_N: None, or one more score of each head, whose weight counts in the softmax but has no value.
        ahead: without `start_B`: the number of keys after its own position that a query sees too. The window
            ends there.
        run_config: its `impl` names a kernel. The gradient of a kernel, and of loops over the blocks that
            rows have, is the gradient of the plain jnp over all blocks. cuDNN has its own gradient.

    Returns:
        [B, T, N, width of a value] in the dtype of q.

    Raises:
        InputError: the named impl does not support these arguments.
    """
    static = visible.start_B is None
    visible = visible._replace(length_B=kv.stored_length(visible.length_B))
    if static:
        visible = visible._replace(start_B=jnp.full(q_BTNH.shape[0], ahead, jnp.int32))
    sink_N = None if sink_N is None else sink_N.astype(jnp.float32)
    if isinstance(visible.first_BT, FirstKey):
        scoring = scoring._replace(first_key=visible.first_BT.position)
        visible = visible._replace(first_BT=None)
    few = not static and q_BTNH.shape[1] <= ROW_QUERIES
    if visible.first_BT is not None:
        if run_config.impl not in (None, "xla"):
            raise InputError(
                f"packed segments have no attention kernel, got impl={run_config.impl!r}: leave it out"
            )
        # Packed segments have gradients, and blocks of draft heads have not.
        return blocked_attention(q_BTNH, kv, visible, sink_N, scoring, static=visible.further is None)
    fixed = partial(blocked_attention, scoring=scoring, static=True)
    plain = fixed if static else partial(blocked_attention, scoring=scoring, static=False)
    options = dict(scoring=scoring, few=few)
    by_kernel = partial(run, "attention", plain, run_config, derivative=fixed, static=options)
    operands: dict[str, Any] = dict(q_BTNH=q_BTNH, kv=kv, visible=visible, sink_N=sink_N)
    if static and not ahead:
        return run("causal_attention", by_kernel, run_config, static=options, **operands)
    return by_kernel(**operands)


def blocked_attention(
    q_BTNH, kv: Contiguous, visible: VisibleKeys, sink_N, scoring: Scoring, static: bool, attend=None
):
    """Computes attention in plain jnp.

    Args:
        visible: the visible keys, with `start_B`.
        static: loops have fixed bounds, which have a reverse-mode gradient.
        attend: the function for a block of queries. None: `query_block`.
    """
    B, T, N, H = q_BTNH.shape
    K = kv.k.shape[1]
    q_BKTGH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4)
    sink_KG = None if sink_N is None else sink_N.reshape(K, N // K)
    attend = partial(attend or query_block, scoring=scoring, static=static)
    if isinstance(T, int) and T <= QUERY_BLOCK:  # else it may be symbolic
        out_BKTGH = attend(q_BKTGH, kv, visible, sink_KG)
    else:
        blocks = -(-T // QUERY_BLOCK)
        padded = jnp.pad(q_BKTGH, ((0, 0), (0, 0), (0, blocks * QUERY_BLOCK - T), (0, 0), (0, 0)))
        stacked = jnp.moveaxis(padded.reshape(B, K, blocks, QUERY_BLOCK, N // K, H), 2, 0)
        first_BT = visible.first_BT
        if first_BT is not None:  # queries of the padding see no key
            first_BT = jnp.pad(first_BT, ((0, 0), (0, blocks * QUERY_BLOCK - T)), constant_values=T)
            first_BT = jnp.moveaxis(first_BT.reshape(B, blocks, QUERY_BLOCK), 1, 0)

        # The backward pass recomputes a block of queries at a time instead of storing every score.
        @jax.checkpoint
        def step(block: Any) -> jax.Array:
            q_BKTGH, offset, first_BT = block
            moved = visible._replace(start_B=visible.start_B + offset, first_BT=first_BT)
            return attend(q_BKTGH, kv, moved, sink_KG)

        outs = lax.map(step, (stacked, QUERY_BLOCK * jnp.arange(blocks), first_BT))
        out_BKTGH = jnp.moveaxis(outs, 0, 2).reshape(B, K, blocks * QUERY_BLOCK, N // K, -1)[:, :, :T]
    return out_BKTGH.transpose(0, 2, 1, 3, 4).reshape(B, T, N, -1)


def query_block(
    q_BKTGH,
    kv: Contiguous,
    visible: VisibleKeys,
    sink_KG,
    scoring: Scoring,
    static: bool,
    row=None,
    decode_block=DECODE_BLOCK,
):
    """Computes attention of one block of queries over all visible key blocks, [B, K, T, G, H].

    Args:
        row: the row of the cache to which the queries belong. None: all rows.
        decode_block: keys per loop step for a single query.
    """
    start_B, length_B, first_BT, further = visible
    B, K, T, G, _ = q_BKTGH.shape
    width, blocks = kv.block_layout(KEY_BLOCK if T > 1 else decode_block)
    query_BT = start_B[:, None] + jnp.arange(T)
    if scoring.first_key:
        first_BT = jnp.minimum(query_BT, scoring.first_key)

    def update(i, softmax):
        block = kv.get_block(i, width, length_B, row)
        return _add_block(softmax, q_BKTGH, block, _visible(block, query_BT, kv.window, first_BT), scoring)

    zeros = jnp.zeros((B, K, T, G), jnp.float32)
    softmax = _Softmax(zeros + _MASKED, zeros, jnp.zeros((B, K, T, G, kv.value_width), jnp.float32))
    if sink_KG is not None:  # the first score, of weight 1, without a value
        softmax = softmax._replace(max_BKTG=zeros + sink_KG[:, None], sum_BKTG=zeros + 1)
    softmax = match_varying_axes(softmax, q_BKTGH, kv, start_B, length_B)
    low, high = kv.visible_blocks(width, start_B, T, length_B)
    low = low if visible.first_BT is None else jnp.maximum(low, jnp.min(first_BT) // width)
    if blocks == 1:
        softmax = update(0, softmax)
    elif static:  # a fixed number of steps, as reverse mode demands
        step = lambda i, s: lax.cond((i >= low) & (i < high), update, lambda _, s: s, i, s)  # noqa: E731
        softmax = lax.fori_loop(0, blocks, step, softmax)
    else:
        softmax = lax.fori_loop(low, high, update, softmax)
    if further is not None:
        visible_BTS = _visible(further, query_BT, kv.window, first_BT)
        softmax = _add_block(softmax, q_BKTGH, further, visible_BTS, scoring)
    return (softmax.values_BKTGH / jnp.maximum(softmax.sum_BKTG, 1e-30)[..., None]).astype(q_BKTGH.dtype)


def _visible(block: Block, query_BT, window: int | None, first_BT=None):
    """Returns bool [B, T, S]: the keys of a block that each query sees: up to its own position, within the
    window and its segment.
    """
    key_B1S = block.position_BS[:, None]
    query_BT1 = query_BT[..., None]
    visible_BTS = block.valid_BS[:, None] & (key_B1S <= query_BT1)
    if first_BT is not None:
        visible_BTS &= key_B1S >= first_BT[..., None]
    return visible_BTS if window is None else visible_BTS & (key_B1S > query_BT1 - window)


def _add_block(softmax: _Softmax, q_BKTGH, block: Block, visible_BTS, scoring: Scoring) -> _Softmax:
    """Takes one step of the online softmax: earlier sums are rescaled to the new largest score."""
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
    """Returns the einsum in float32. float32 operands are not rounded first."""
    B, K, T, G, _ = x_BKTGX.shape
    product = partial(
        jnp.einsum,
        preferred_element_type=jnp.float32,
        precision=float_precision(y_BKSH.dtype),
    )
    if B != 1:
        return product(subscripts, x_BKTGX, y_BKSH)
    # One matrix product per key head: with more axes XLA would transpose the keys first.
    z_KMX = product(subscripts.translate(_ONE_ROW), x_BKTGX.reshape(K, T * G, -1), y_BKSH[0])
    return z_KMX.reshape(B, K, T, G, -1)
