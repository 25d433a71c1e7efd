"""The TPU kernels without a TPU: emulated on a CPU with race detection, against their references, and
compiled for TPUs where libtpu is installed.
"""

import importlib.util
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import BF16, F32, assert_near, attention_case
from paths import ROOT, SUPPORT
from quick import full_except

from xinfer_jax import kernels_pallas
from xinfer_jax.kernels_pallas import HeadNorms, Latents, SideBySide, reference, reference_append
from xinfer_jax.kernels_pallas.key_layouts import LANES, join, quantize

pytestmark = pytest.mark.newest

SD = jax.ShapeDtypeStruct
Q = SD((2, 1, 4, 64), jnp.bfloat16)
KV = SideBySide(SD((2, 2, 64, 128), jnp.bfloat16))


def run(kernel, *args, **options):
    return jax.jit(partial(kernels_pallas.run_kernel, "interpret_tpu", kernel, **options))(*args)


def side_by_side(args):
    (q, k, v, start, length) = args
    if isinstance(k, Latents):
        widths = [(0, 0)] * 3 + [(0, -k.shape[3] % LANES)]
        return q, Latents(jnp.pad(k.values, widths), k.rank), v, start, length
    return q, join(k, v), None, start, length


# Pages and slots that no query may see are NaN in `attention_case`, and so is memory before it is written.
ATTENTION = {
    "ragged-f32": (F32, 1, 4, 4, 320, 64, (299, 0, 0, 128, -1), (300, 1, 0, 129, 0)),
    "group-7-cap-bf16": (BF16, 1, 14, 2, 128, 64, (99, 32), (100, 33), dict(window=20, soft_cap=2.0)),
    "length-beyond-the-cache": (F32, 1, 2, 1, 64, 64, (63, 65, 69), (64, 66, 70), dict(window=40)),
    "slots-all-at-once": (F32, 3, 2, 1, 40, 64, (0, 30, 37), (0, 20, 40), dict(window=5)),
    "pages-sink": (F32, 1, 4, 2, 0, 64, (150, 0, 64, -1), (151, 1, 65, 0), dict(pages=4, sink=True)),
    "pages-17-queries-bf16": (
        *(BF16, 17, 7, 1, 0, 128, (150, 0, 64), (167, 10, 81)),
        dict(pages=3, sink=True, window=20),
    ),
    "ring-wrapped": (F32, 2, 4, 2, 128, 64, (250, 3, 126), (252, 5, 128), dict(ring=True, window=50)),
    "int8": (F32, 3, 4, 2, 256, 64, (190, 0), (193, 2), dict(bits=8)),
    "prompt-offset": (F32, 37, 4, 4, 128, 64, (60, 0, 3, 0), (97, 37, 4, 0)),
    "prompt-pages-int8": (F32, 40, 4, 2, 0, 64, (64, 30), (104, 33), dict(pages=2, bits=8)),
    "bias": (F32, 2, 4, 2, 320, 64, (299, 63), (301, 65), dict(bits=8, pairs=32)),
    "prompt-pages-bias-bf16": (BF16, 40, 14, 2, 0, 64, (64, 30), (104, 33), dict(pages=2, bits=8, pairs=32)),
    "prompt-ring": (F32, 70, 4, 2, 128, 64, (250, 0, 126), (320, 70, 196), dict(ring=True, window=50)),
    "width-512-pages-sink": (BF16, 1, 8, 2, 0, 512, (150, 0, -1), (151, 1, 0), dict(pages=3, sink=True)),
    "width-512-ring-int8": (F32, 5, 4, 2, 128, 512, (250, 3), (255, 5), dict(bits=8, ring=True, window=60)),
    "width-512-prompt-cap": (BF16, 40, 3, 1, 128, 512, (60, 0), (100, 40), dict(soft_cap=2.0)),
    "latents-20-heads-bf16": (BF16, 1, 20, 1, 320, 576, (299, 0, -1), (300, 1, 0), dict(rank=512)),
    "latents-drafts-pages": (F32, 3, 8, 2, 0, 160, (150, 0), (153, 2), dict(rank=128, pages=3)),
    "latents-17-queries-in-tiles": (BF16, 17, 64, 1, 128, 192, (60, 0), (77, 10), dict(rank=128)),
    "latents-prompt": (F32, 40, 5, 1, 128, 192, (60, 0, 3), (97, 37, 4), dict(rank=128)),
    "first-key": (F32, 3, 4, 2, 128, 64, (90, 0), (93, 3), dict(first_key=1)),
    "first-key-prompt-pages": (F32, 40, 4, 2, 0, 64, (64, 0), (104, 33), dict(pages=2, first_key=1)),
    "first-key-latents": (F32, 3, 8, 2, 0, 160, (150, 0), (153, 2), dict(rank=128, pages=3, first_key=1)),
}


@pytest.mark.parametrize("name", full_except(["pages-sink"], ATTENTION))
def test_attention(name):
    *shape, start, length, options = (*ATTENTION[name], {})[:9]
    args, options = attention_case(*shape, start, length, **options)
    args = side_by_side(args)
    got = run("prefill_attention", *args, **options)
    assert got.dtype == shape[0]
    assert_near(got, jax.jit(partial(reference.prefill_attention, **options))(*args))


@pytest.mark.full
def test_attention_of_a_row_has_the_same_bits_beside_others():
    args, options = attention_case(BF16, 1, 4, 2, 0, 64, (150, 70, 0), (151, 71, 0), pages=4, sink=True)
    q, kv, _, start, length = side_by_side(args)
    table = options.pop("table_BP")
    together = run("decode_attention", q, kv, None, start, length, table_BP=table, **options)
    for row in ([1], [1, 0]):
        alone = run(
            "decode_attention", q[row], kv, None, start[row], length[row], table_BP=table[row], **options
        )
        np.testing.assert_array_equal(np.asarray(alone[0], F32), np.asarray(together[1], F32))


def append_case(  # noqa: PLR0913
    dtype, T, K, S, H, start, count, capacity=1000, pages=0, quantized=False, norms=(), rank=0, **options
):
    draws = np.random.RandomState(T + S)
    B = len(start)
    rows = 1 + B * pages if pages else B
    q, k, v = (jnp.asarray(draws.standard_normal((B, T, n, H)), dtype) for n in (2 * K, K, K))
    angle_BTP = draws.standard_normal((B, T, H // 4)).astype(np.float32)
    old = [jnp.asarray(draws.standard_normal((rows, K, S, H)), dtype).at[0].set(np.nan) for _ in "kv"]
    kv = join(*(quantize(x, 8) for x in old)) if quantized else join(*old)
    options |= {"capacity": capacity}
    if norms:
        weights = (jnp.asarray(draws.standard_normal(H), dtype) for _ in "qk")
        options["norms"] = HeadNorms(*weights, 1e-5, *norms)
    if pages:
        options["table_BP"] = draws.permutation(np.arange(1, rows)).reshape(B, pages).astype(np.int32)
    counts = (np.array(x, np.int32) for x in (start, count))
    if rank:
        latents = Latents(jnp.pad(old[0], [(0, 0)] * 3 + [(0, -H % LANES)]), rank)
        return (q, k, v, None, None, latents, None, *counts), options
    return (q, k, v, np.cos(angle_BTP), np.sin(angle_BTP), kv, None, *counts), options


APPEND = {
    "one-token-bf16": (BF16, 1, 2, 64, 64, (5, 63, 64, 0), (1, 1, 1, 0), dict(capacity=64)),
    "norms-int8-128": (F32, 1, 2, 128, 128, (5, 63, 127), (1, 0, 1), dict(quantized=True, norms=(None,))),
    "width-256": (F32, 1, 1, 64, 256, (5, 0), (1, 1), dict(ring=True)),
    "width-512-int8": (BF16, 5, 2, 64, 512, (62, 190), (5, 3), dict(pages=3, quantized=True, capacity=192)),
    "ring-wraps-f32": (F32, 5, 2, 64, 64, (62, 130), (5, 3), dict(ring=True)),
    "pages-17-tokens": (BF16, 17, 2, 64, 64, (60, 130), (17, 3), dict(pages=3)),
    "pages-int8": (BF16, 5, 2, 64, 64, (62, 190), (5, 3), dict(pages=3, quantized=True, capacity=192)),
    "prompt-pages": (BF16, 100, 2, 64, 64, (60, 0), (100, 64), dict(pages=3)),
    "prompt-int8": (F32, 100, 1, 256, 64, (60, 250), (100, 64), dict(quantized=True)),
    "latents": (BF16, 1, 1, 64, 576, (5, 63, 64, 20), (1, 1, 1, 0), dict(rank=512, capacity=64)),
    "latents-pages-17-tokens": (F32, 17, 2, 64, 160, (60, 130), (17, 3), dict(rank=128, pages=3)),
    "latents-prompt": (BF16, 100, 1, 256, 160, (60, 250), (100, 64), dict(rank=128)),
}


@pytest.mark.parametrize("name", full_except(["pages-17-tokens"], APPEND))
def test_append(name):
    *case, options = APPEND[name]
    args, options = append_case(*case, **options)
    got = run("rope_append", *args, **options)
    want = jax.jit(partial(reference_append.rope_append, **options))(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(z, F32) for z in (x, y))
        # The compiler may round products before it adds them, or not; numbers of 8 and 16 bits are equal.
        largest = np.abs(y[np.isfinite(y)]).max()
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-7 * largest)


def test_a_tpu_selects_its_kernels_and_xla_for_the_rest():
    with kernels_pallas.assume_device(None, "TPU v5 lite", "tpu"):
        assert kernels_pallas.select("decode_attention", None, Q, KV, None) == ("tpu", "TPU v5 lite")
        assert kernels_pallas.select("argmax", None, SD((1, 10), jnp.float32)).impl == "xla"
        assert kernels_pallas.select("product", "tpu", Q) == ("tpu", "requested by name")
        assert kernels_pallas.unavailable_reason("tpu") is None
        assert "9.0 (TPU v5 lite)" in kernels_pallas.unavailable_reason("mosaic")
    assert "needs a TPU (no NVIDIA GPU or TPU here)" in kernels_pallas.unavailable_reason("tpu")
    with pytest.raises(ValueError, match="side by side are for TPUs"):
        kernels_pallas.select("decode_attention", "triton", Q, KV, None)


def test_select_states_its_reasons():
    def kv(slots, width, dtype, scale=None):
        return SideBySide(SD((2, 2, slots, 2 * width), dtype), scale)

    def latents(width, rank, dtype=BF16):
        return Latents(SD((2, 1, 64, width), dtype), rank), None

    apart = SD((2, 2, 64, 64), jnp.bfloat16)
    bias = kernels_pallas.KeyBias(None, None, None)
    for kernel, args, reason in [
        ("decode_attention", (Q, apart, apart), "side by side"),
        ("decode_attention", (Q, kv(72, 64, BF16), None, bias), "a bias of keys in 72 slots"),
        ("decode_attention", (SD((2, 1, 4, 80), BF16), kv(64, 80, BF16), None), "head width 80"),
        ("decode_attention", (Q, kv(64, 128, BF16), None), "keys and values of 256 numbers"),
        ("decode_attention", (Q, kv(64, 64, F32), None), "dtypes bfloat16, float32"),
        ("decode_attention", (Q, kv(64, 64, jnp.uint8), None), "dtype uint8 without scales"),
        ("decode_attention", (Q, kv(8200, 64, BF16), None), "8200 slots of a row, not a multiple of 64"),
        ("rope_append", (Q, kv(72, 64, BF16), None), "72 slots, not a multiple of 16"),
        ("decode_attention", (Q, *latents(576, 512)), "latents of 512 numbers in keys of 576, not multiples"),
        ("decode_attention", (Q, *latents(256, 96)), "latents of 96 numbers in keys of 256, not multiples"),
        ("decode_attention", (Q, *latents(256, 128, F32)), "dtypes bfloat16, float32"),
        ("decode_attention", (Q, *latents(256, 128), bias), "latents with a bias of keys"),
    ]:
        with pytest.raises(ValueError, match=reason):
            kernels_pallas.select(kernel, "tpu", *args)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_kernels_compile_for_a_tpu():
    """The kernels compile for v6e, without copies of the cache. This runs in its own process, which may load
    libtpu next to another one.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    command = [sys.executable, str(SUPPORT / "compile_for_tpu.py"), "v6e"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
