"""Attention against the textbook formula, over offsets, lengths, groups and windows, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import full_except

from xinfer_jax.cache.contiguous import uncached_kv
from xinfer_jax.mixers.attention import Scoring, VisibleKeys, attention

pytestmark = pytest.mark.oldest

attend = jax.jit(attention, static_argnames="scoring")


def reference(q_BTNH, k_BKSH, v_BKSH, length_B, start_B, scale, window):
    """Softmax over the whole score matrix, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q_BTNH, k_BKSH, v_BKSH))
    B, T, N, H = q.shape
    group = N // k.shape[1]
    out = np.zeros((B, T, N, H))
    for b in range(B):
        for t in range(T):
            position = start_B[b] + t
            first = 0 if window is None else max(0, position - window + 1)
            last = min(position + 1, length_B[b])
            if first >= last:
                continue
            for n in range(N):
                scores = k[b, n // group, first:last] @ q[b, t, n] * scale
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ v[b, n // group, first:last] / weights.sum()
    return out


def arrays(seed, B, T, N, K, S, H):
    draws = np.random.RandomState(seed)
    return tuple(
        draws.standard_normal(s).astype(np.float32) for s in ((B, T, N, H), (B, K, S, H), (B, K, S, H))
    )


SHAPES = {  # T, S, starts, lengths
    "one-token": (1, 40, (0, 17), (1, 18)),
    "one-token-long": (1, 600, (599, 3), (600, 4)),
    "chunk": (7, 600, (250, 500), (257, 503)),
    "long-chunk": (600, 700, (0, 64), (600, 664)),
    "empty-row": (4, 9, (5, 0), (9, 0)),
}
# Each two of shape, heads and window.
QUICK = [
    ("one-token", (6, 2), None), ("one-token-long", (6, 2), 300), ("chunk", (4, 4), 300),
    ("long-chunk", (6, 2), None), ("empty-row", (3, 1), 5),
]  # fmt: skip
OTHERS = [
    ("one-token", (3, 1), 300), ("one-token", (4, 4), 5), ("one-token-long", (4, 4), None),
    ("one-token-long", (3, 1), 5), ("chunk", (6, 2), 5), ("chunk", (3, 1), None), ("long-chunk", (4, 4), 5),
    ("long-chunk", (3, 1), 300), ("empty-row", (4, 4), 300), ("empty-row", (6, 2), None),
]  # fmt: skip


@pytest.mark.parametrize("shape, heads, window", full_except(QUICK, QUICK + OTHERS))
def test_attention_equals_the_textbook_formula(shape, heads, window):
    T, S, start, length = SHAPES[shape]
    N, K = heads
    q, k, v = arrays(0, 2, T, N, K, S, 8)
    start = np.array(start, np.int32)
    length = np.array(length, np.int32)
    got = attend(q, uncached_kv(k, v, window), VisibleKeys(start, length), scoring=Scoring(0.3))
    real = np.arange(T)[None] < (length - start)[:, None]  # padding queries are undefined
    np.testing.assert_allclose(
        np.asarray(got)[real], reference(q, k, v, length, start, 0.3, window)[real], atol=2e-6
    )


@pytest.mark.parametrize("T", full_except([700], [40, 700]))
def test_never_written_slots_do_not_leak(T):
    q, k, v = arrays(1, 2, 3, 4, 2, T, 8)
    length = np.array([T - 9, 5], np.int32)
    poisoned = [x.copy() for x in (k, v)]
    for x in poisoned:
        for b, n in enumerate(length):
            x[b, :, n:] = np.nan
    visible = VisibleKeys(length - 3, length)
    clean, got = (attend(q, uncached_kv(*keys), visible, scoring=Scoring(1.0)) for keys in ((k, v), poisoned))
    np.testing.assert_array_equal(got, clean)


@pytest.mark.full
@pytest.mark.parametrize("T", [30, 600], ids=["one-block", "blocks"])
@pytest.mark.parametrize("window", [None, 20])
def test_the_gradient_equals_that_of_a_single_softmax(T, window):
    q, k, v = arrays(2, 1, T, 4, 2, T, 8)
    length = np.array([T - 4], np.int32)
    mix = (
        np.random.RandomState(3).standard_normal((1, T, 4, 8)).astype(np.float32)
        * (np.arange(T) < T - 4)[None, :, None, None]
    )

    def plain(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=1) for x in (k, v))
        scores = jnp.einsum("btnh,bnsh->bnts", q, k) * 0.4
        at = np.arange(T)[:, None]
        key = np.arange(T)[None]
        seen = (key <= at) & (key < T - 4) & (key > at - (window or T))
        seen[T - 4 :, 0] = True  # padding queries: anything but an empty softmax
        return jnp.einsum("bnts,bnsh->btnh", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1), v)

    def loss(function):
        return jax.jit(jax.grad(lambda q, k, v: jnp.sum(function(q, k, v) * mix), argnums=(0, 1, 2)))(q, k, v)

    for got, want in zip(
        loss(
            lambda q, k, v: attention(q, uncached_kv(k, v, window), VisibleKeys(None, length), Scoring(0.4))
        ),
        loss(plain),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_long_prompt_needs_no_score_matrix():
    """The temporary memory of 8k tokens stays far below one 8k x 8k float32 matrix per head (2 GiB for these
    eight heads).
    """
    T = 8192
    q = jnp.zeros((1, T, 8, 32))
    k = jnp.zeros((1, 2, T, 32))
    for start in (None, np.zeros(1, np.int32)):
        visible = VisibleKeys(start, np.array([T], np.int32))
        compiled = attend.lower(q, uncached_kv(k, k), visible, scoring=Scoring(1.0)).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 128 * 2**20
