"""The Mosaic kernels without a GPU: in JAX's GPU interpreter against the references, with race detection, and
lowered for CUDA.
"""

import json
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from paths import ROOT, SUPPORT
from test_kernels import SD, lowered_for_cuda

from xinfer_jax import kernels_pallas

pytestmark = [pytest.mark.full, pytest.mark.newest]

NEWER = tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 11)


@pytest.mark.skipif(not NEWER, reason="the GPU interpreter is public from jax 0.11 on")
def test_kernels_equal_their_references_in_the_interpreter():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SUPPORT / "mosaic_interpreted.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    print(errors)
    bounds = {"prefill": 2e-2, "decode": 2e-2, "argmax": 0, "head": 2e-4}
    assert len(errors) == 24 and all(
        value <= bounds[name.split()[0].strip(",")] for name, value in errors.items()
    ), errors


def attention_shapes(B, T, N, K, S, H, dtype="bfloat16", pages=None):
    """Returns the shapes of q, k, v, starts and lengths: S slots per row, or per page of `pages`."""
    keys = SD((pages or B, K, S, H), dtype)
    return SD((B, T, N, H), dtype), keys, keys, SD((B,), jnp.int32), SD((B,), jnp.int32)


def attention_lowers(kernel, T, keys, *shape, **more):
    def run(*args):
        table, sink = args[5:] if keys == "pages" else (None, None)
        options = dict(scale=0.1, window=100, soft_cap=20.0, ring=keys == "ring") | more
        return kernels_pallas.run_kernel("mosaic", kernel, *args[:5], table_BP=table, sink_N=sink, **options)

    slots = {"contiguous": 1000, "pages": 64, "ring": 192}[keys]
    shapes = attention_shapes(3, T, 14, 2, slots, *shape, pages=30 if keys == "pages" else None)
    if keys == "pages":
        shapes += SD((3, 10), jnp.int32), SD((14,), jnp.float32)
    return "mosaic_gpu" in lowered_for_cuda(run, *shapes)


@pytest.mark.parametrize(
    "width, dtype",
    [*((width, jnp.bfloat16) for width in (64, 80, 96, 128, 256)), (64, jnp.float16)],
)
def test_attention_lowers_for_cuda(width, dtype):
    """Lowering rejects tiles that do not fit shared memory, invalid wgmma shapes and impossible layouts."""
    assert attention_lowers("decode_attention", 1, "contiguous", width, dtype)
    assert attention_lowers("decode_attention", 17, "pages", width, dtype)
    assert attention_lowers("prefill_attention", 70, "pages", width, dtype)


def test_attention_over_other_keys_lowers_for_cuda():
    assert attention_lowers("decode_attention", 3, "ring", 128)
    assert attention_lowers("prefill_attention", 70, "ring", 128)
    assert attention_lowers("prefill_attention", 70, "contiguous", 128)
    for width in (128, 256):  # of draft heads
        assert attention_lowers("decode_attention", 1, "pages", width, first_key=1, window=None)
        assert attention_lowers("prefill_attention", 70, "pages", width, first_key=1, window=None)


@pytest.mark.parametrize("rows", [1, 20, 70])
def test_argmax_and_head_lower_for_cuda(rows):
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        assert "mosaic_gpu" in lowered_for_cuda(
            lambda x: kernels_pallas.run_kernel("mosaic", "argmax", x), SD((rows, 50257), dtype)
        )
    x = SD((rows, 896), jnp.bfloat16)
    weight = SD((50257, 896), jnp.bfloat16)
    for cap in (None, 30.0):
        assert "mosaic_gpu" in lowered_for_cuda(
            lambda x, w, cap=cap: kernels_pallas.run_kernel("mosaic", "lm_head_argmax", x, w, soft_cap=cap),
            x,
            weight,
        )


def test_kernels_lower_inside_vmap_and_a_loop():
    shapes = attention_shapes(2, 1, 8, 2, 256, 64)
    step = partial(kernels_pallas.run_kernel, "mosaic", "decode_attention", scale=0.1)

    def loop(q, *others):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1], *others)), (0, q))

    stacked = [SD((3, *x.shape), x.dtype) for x in shapes]
    assert "mosaic_gpu" in lowered_for_cuda(jax.vmap(step), *stacked)
    assert "mosaic_gpu" in lowered_for_cuda(loop, *shapes)
