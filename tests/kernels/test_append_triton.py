"""RoPE with the append to a cache: the kernel against its reference, in Pallas's interpreter. Decode steps of
models that run on it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import full_except

from xinfer_jax.cache.contiguous import Contiguous
from xinfer_jax.cache.ring import Ring
from xinfer_jax.cache.stored_kv import cache_dtype_of
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.kernels_pallas import Latents, Levels, reference_append, triton
from xinfer_jax.mixers.rope_append import rotate_and_append

pytestmark = [
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
F32 = jnp.float32
BF16 = jnp.bfloat16
CASES = {  # T, N, K, H, pairs, slots, start_B, num_tokens_B, dtypes, and what else there is
    "row": (1, 4, 2, 16, 8, 24, (5,), (1,), (BF16, BF16), {}),
    "rows-partial-width": (3, 6, 2, 20, 6, 24, (0, 7, 22), (3, 2, 3), (BF16, BF16), dict(capacity=23)),
    "no-rope": (2, 2, 2, 8, 0, 8, (0, 7), (0, 2), (F32, BF16), {}),
    "ring": (3, 3, 1, 16, 8, 8, (6, 30), (3, 3), (F32, F32), dict(ring=True, capacity=32)),
    "int8-partial-width": (2, 2, 1, 20, 6, 8, (0, 6), (2, 2), (BF16, 8), {}),
    "width-512-int8": (2, 2, 1, 512, 256, 8, (0, 6), (2, 2), (BF16, 8), {}),
    "int4-pages": (3, 4, 2, 16, 8, 4, (3, 6), (3, 3), (BF16, 4), dict(pages=2)),
    "pages": (3, 14, 2, 16, 8, 4, (3, 8, 6), (3, 0, 3), (BF16, F32), dict(pages=2)),
    "latents-pages": (3, 4, 1, 36, 0, 4, (3, 8, 6), (3, 0, 3), (BF16, F32), dict(pages=2, rank=28)),
}


@pytest.mark.parametrize("name", full_except(["pages"], CASES))
def test_rope_append(name):
    T, N, K, H, pairs, S, start, count, (dtype, cache_dtype), options = CASES[name]
    B = len(start)
    draws = np.random.default_rng(0)
    normal = lambda *shape, dtype=dtype: jnp.asarray(draws.standard_normal(shape), dtype)  # noqa: E731
    new = [normal(B, T, heads, H) for heads in (N, K, K)]
    angles = [normal(B, T, pairs, dtype=F32) for _ in range(2)] if pairs else [None, None]
    options = dict(capacity=100) | options
    P = B
    if pages := options.pop("pages", 0):
        P = B * pages + 1
        options["table_BP"] = 1 + jnp.asarray(draws.permutation(P - 1).reshape(B, pages), jnp.int32)
    if cache_dtype in (8, 4):
        shape = (P, K, S, H * cache_dtype // 8)
        caches = [Levels(jnp.full(shape, 7, jnp.uint8), jnp.ones((P, K, S, 2), jnp.float16))] * 2
    else:
        caches = [normal(P, K, S, H, dtype=cache_dtype) for _ in range(2)]
    if rank := options.pop("rank", 0):
        caches = [Latents(caches[0], rank), None]
    args = (*new, *angles, *caches, jnp.array(start), jnp.array(count))
    got = jax.jit(partial(triton.rope_append, **options, interpret=True))(*args)
    want = jax.jit(partial(reference_append.rope_append, **options))(*args)
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x.astype(F32), y.astype(F32), atol=1e-6 if dtype == F32 else 0.02)
    jax.tree.map(np.testing.assert_array_equal, got[2], want[2])  # values are not rotated


@pytest.mark.full
@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_of_a_layer_it_equals_xla_under_vmap(kind):
    """A stack of calls, over one cache that they share; a contiguous one and a ring."""
    draws = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(draws.standard_normal(shape), F32)  # noqa: E731
    qkv = tuple(normal(3, 2, 2, heads, 8) for heads in (4, 2, 2))
    angles = (normal(3, 2, 2, 3), normal(3, 2, 2, 3))
    start_3B = jnp.array([[0, 2], [3, 6], [7, 1]])
    count_B = jnp.array([2, 1])
    empty = cache_dtype_of(kind).empty((2, 2, 8, 8))
    for kv in (Contiguous(empty, empty, None, 8), Ring(empty, empty, 4, 100)):

        def run(qkv, angles, start_B, impl, kv=kv):
            return rotate_and_append(qkv, None, angles, kv, start_B, count_B, RunConfig(impl))

        got, want = (
            jax.vmap(partial(run, impl=impl))(qkv, angles, start_3B) for impl in ("interpret", "xla")
        )
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x.astype(F32), y.astype(F32), atol=1e-6)


@pytest.mark.full
def test_its_gradient_is_that_of_xla():
    draws = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(draws.standard_normal(shape), F32)  # noqa: E731
    qkv = tuple(normal(2, 1, heads, 8) for heads in (4, 2, 2))
    angles = (normal(2, 1, 4), normal(2, 1, 4))
    caches = (normal(2, 2, 8, 8), normal(2, 2, 8, 8))

    def loss(qkv, caches, impl):
        kv = Contiguous(*caches, None, 8)
        outs = rotate_and_append(qkv, None, angles, kv, jnp.array([3, 7]), jnp.array([1, 1]), RunConfig(impl))
        return sum(jnp.sum(x**3) for x in jax.tree.leaves(outs))

    got, want = (jax.grad(loss, (0, 1))(qkv, caches, impl) for impl in ("interpret", "xla"))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), got, want)
