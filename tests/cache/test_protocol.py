"""Compares the methods of every cache with keys and values with plain arrays: each kind of layer, each cache
dtype, and a latent cache (one head, keys of width 24, values of width 16).
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from quick import full_except

from xinfer_jax.backends.kernels.attention_kernels import kernel_arrays, select_attention
from xinfer_jax.cache.contiguous import Contiguous
from xinfer_jax.cache.paged import PAGE_SIZE, Paged, check_page_dtype
from xinfer_jax.cache.ring import Ring
from xinfer_jax.cache.stored_kv import cache_dtype_of, empty_pair
from xinfer_jax.errors import InputError
from xinfer_jax.mixers.attention import Scoring, VisibleKeys, attention
from xinfer_jax.plugins import names
from xinfer_jax.sharding import cache_specs
from xinfer_jax.weights.params import tree_bytes

DTYPES = ("float32", "bfloat16", *names("cache dtype"))
HEADS = (2, 8, 8)  # heads, width of keys, width of values
LATENT = (1, 24, 16)
# Of a number of a vector whose largest is about 3: levels of 8 and 4 bits, and 3 bits after the point.
CLOSE = dict(float32=0, bfloat16=0.02, int8=0.02, int4=0.3, gear=0.3, float8_e4m3fn=0.15)
CALLS = ((20, [20, 7, 0]), (1, [1, 0, 1]), (20, [3, 5, 4]), (1, [1, 1, 1]))  # T, and the tokens of each row
B = 3


def empty_layer(kind, dtype, sizes, window=None):
    K, H, V = sizes
    if kind is not Paged:
        return kind(*(cache_dtype_of(dtype).empty((B, K, 64, width)) for width in (H, V)), window, 60)
    pools = (cache_dtype_of(dtype).empty((5, K, PAGE_SIZE, width)) for width in (H, V))
    return Paged(*pools, window, 2 * PAGE_SIZE, jnp.array([[4, 0], [1, 0], [3, 2]]))


@jax.jit
def append(layer, *args):
    return layer.append(*args)


@functools.partial(jax.jit, static_argnums=2)
def get_block(layer, i, width, length_B):
    return layer.get_block(i, width, length_B)


@functools.cache
def filled(kind, dtype, sizes=HEADS, window=None):
    """A layer after `CALLS`; the keys and values of each row; their lengths."""
    K, H, V = sizes
    layer = empty_layer(kind, dtype, sizes, window)
    rng = np.random.RandomState(0)
    length_B = np.zeros(B, np.int32)
    rows = [([], []) for _ in range(B)]
    for T, counts in CALLS:
        new = [rng.standard_normal((B, T, K, width)).astype(np.float32) for width in (H, V)]
        layer = append(layer, *new, length_B, np.array(counts, np.int32))
        for row, b in zip(rows, range(B), strict=True):
            for stored, x_BTKX in zip(row, new, strict=True):
                stored.extend(x_BTKX[b, : counts[b]])
        length_B = length_B + np.array(counts, np.int32)
    return layer, rows, length_B


def assert_holds(layer, rows, length_B, close):
    """Blocks have the keys and values of each row at its positions, once."""
    width, count = layer.block_layout(16 if not isinstance(layer, Paged) else PAGE_SIZE)
    found = [{} for _ in rows]
    for i in range(count):
        k_BKSH, v_BKSH, *others = map(np.asarray, get_block(layer, i, width, length_B))
        position_BS, valid_BS = (np.broadcast_to(x, (B, width)) for x in others)
        for b, s in zip(*np.nonzero(valid_BS), strict=True):
            assert position_BS[b, s] not in found[b]
            found[b][int(position_BS[b, s])] = k_BKSH[b, :, s], v_BKSH[b, :, s]
    for of_row, (ks, vs), n in zip(found, rows, length_B, strict=True):
        assert sorted(of_row) == list(range(n))
        for p in range(n):
            for got, want in zip(of_row[p], (ks[p], vs[p]), strict=True):
                np.testing.assert_allclose(got, want, atol=close)


def cases():
    """Each kind with each dtype that it can hold; the latent cache of some, contiguous and in pages."""
    quick = {(Contiguous, "float8_e4m3fn", HEADS), (Ring, "int8", HEADS), (Paged, "float32", LATENT)}
    for kind, dtype, sizes in itertools.product((Contiguous, Ring, Paged), DTYPES, (HEADS, LATENT)):
        if (kind, dtype) == (Paged, "gear") or (kind, sizes) == (Ring, LATENT):
            continue
        if sizes == LATENT and dtype not in ("float32", "int8", "gear"):
            continue
        marks = () if (kind, dtype, sizes) in quick else pytest.mark.full
        name = f"{kind.__name__}-{dtype}{'-latent' if sizes == LATENT else ''}"
        yield pytest.param(kind, dtype, sizes, marks=marks, id=name)


@pytest.mark.parametrize("kind, dtype, sizes", list(cases()))
def test_a_layer_holds_what_was_appended(kind, dtype, sizes):
    window = 4 if kind is Ring else None
    layer, rows, length_B = filled(kind, dtype, sizes, window)
    assert layer.dtype_name == dtype
    assert layer.fits == (sizes[:2] if sizes[1] == sizes[2] else sizes)
    assert_holds(layer, rows, length_B, CLOSE[dtype])
    # Truncated: the next tokens overwrite the rest.
    shorter_B = length_B - 2
    assert np.all(layer.can_truncate(shorter_B, length_B))
    new = [np.ones((B, 1, sizes[0], width), np.float32) for width in sizes[1:]]
    again = append(layer, *new, shorter_B, np.ones(B, np.int32))
    kept = [
        ([*ks[: n - 2], new[0][0, 0]], [*vs[: n - 2], new[1][0, 0]])
        for (ks, vs), n in zip(rows, length_B, strict=True)
    ]
    assert_holds(again, kept, shorter_B + 1, CLOSE[dtype])
    # Bytes and shardings.
    per_slot = sum(map(cache_dtype_of(dtype).vector_bytes, sizes[1:]))
    pair = layer.k, layer.v
    basis = sum(x.basis.nbytes for x in pair) if dtype == "gear" else 0
    slots = layer.k.shape[0] * layer.k.shape[2]
    assert tree_bytes(pair) - basis == sizes[0] * slots * per_slot
    specs = jax.tree.leaves(
        cache_specs(pair, AbstractMesh((sizes[0],), ("model",))),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    assert {spec[1] for spec in specs} == {"model"}
    if kind is Paged:
        return
    # Rows in another order; in a file and back; draft tokens.
    assert_holds(layer.reorder(jnp.array([2, 0, 1])), [rows[i] for i in (2, 0, 1)], length_B[[2, 0, 1]], 0.3)
    on_host = jax.tree.map(np.asarray, layer.used_arrays(int(max(length_B))))
    if kind is Contiguous:
        assert_holds(empty_layer(kind, dtype, sizes).fill(*on_host), rows, length_B, CLOSE[dtype])
    assert layer.with_draft_slots(3, jnp.asarray(length_B)) is layer


@pytest.mark.parametrize(
    "kind, dtype, close",
    full_except(
        [(Paged, "float32", 1e-5)],
        [
            (kind, *of_dtype)
            for kind in (Contiguous, Paged)
            for of_dtype in (("float32", 1e-5), ("int8", 0.02))
        ],
    ),
)
def test_attention_over_a_latent_cache(kind, dtype, close):
    """Four query heads share the one head of keys. Values have another width. By row and for all rows."""
    layer, rows, length_B = filled(kind, dtype, LATENT)
    for T in (1, 20):
        q_BTNH = np.random.RandomState(1).standard_normal((B, T, 4, LATENT[1])).astype(np.float32)
        start_B = np.maximum(length_B - T, 0).astype(np.int32)
        got = jax.jit(lambda q, layer, *places: attention(q, layer, VisibleKeys(*places), Scoring(0.2)))(
            q_BTNH, layer, start_B, length_B
        )
        assert got.shape == (B, T, 4, LATENT[2])
        for b, (ks, vs) in enumerate(rows):
            for t in range(min(T, length_B[b])):
                k_SH, v_SV = (np.stack(x[: start_B[b] + t + 1])[:, 0] for x in (ks, vs))
                weights_NS = np.exp(0.2 * q_BTNH[b, t] @ k_SH.T)
                want_NV = weights_NS @ v_SV / weights_NS.sum(-1, keepdims=True)
                np.testing.assert_allclose(got[b, t], want_NV, atol=close)


def test_kernels_say_by_name_what_they_do_not_read():
    q_BTNH = jax.ShapeDtypeStruct((B, 1, 4, 24), jnp.float32)
    for dtype, sizes, reason in (
        ("float8_e4m3fn", (1, 24, 24), "keys in float8_e4m3fn"),
        ("gear", (1, 24, 24), "keys in GEAR's format"),
        ("float32", LATENT, "values of another width than keys (16 and 24)"),
    ):
        layer = empty_layer(Contiguous, dtype, sizes)
        assert kernel_arrays(layer) == (None, None)
        with pytest.raises(InputError, match=re.escape(reason)):
            select_attention("decode_attention", "interpret", q_BTNH, layer)
    with pytest.raises(InputError, match="cache_dtype='gear' has low-rank directions"):
        check_page_dtype("gear")


def test_float8_has_no_nan():
    """The cast makes NaN of 470: numbers of any size are scaled and clipped before it."""
    k, _ = empty_pair((1, 1, 8, 16), "float8_e4m3fn", False)
    x = np.random.RandomState(0).standard_normal((1, 1, 8, 16)).astype(np.float32)
    for size in (0, 1e-8, 1, 470, 1e6):
        got = np.asarray(k.encode(jnp.asarray(size * x)).decode())
        largest = np.abs(size * x).max(-1, keepdims=True)
        # Half of the last of three bits; and the smallest scale times half of the smallest number.
        assert np.all(
            np.abs(got - size * x) <= np.maximum(np.abs(size * x) / 16, largest / 448 / 1000) * 1.01 + 1e-7
        )
