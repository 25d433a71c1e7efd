"""The Mosaic kernels without a GPU: in JAX's GPU interpreter against the references, with race detection, and
lowered for CUDA.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from paths import ROOT, SUPPORT
from test_kernels import SD, lowered_for_cuda

import kernels_pallas

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
    assert len(errors) == 15 and all(
        value <= bounds[name.split()[0].strip(",")] for name, value in errors.items()
    ), errors


def attention_shapes(B, T, N, K, S, H, dtype):
    q = (B, N, H) if T is None else (B, T, N, H)
    return SD(q, dtype), SD((B, K, S, H), dtype), SD((B, K, S, H), dtype)


@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_attention_lowers_for_cuda(width, dtype):
    """Lowering rejects tiles that do not fit shared memory, invalid wgmma shapes and impossible layouts."""
    rows = SD((3,), jnp.int32)
    settings = dict(scale=0.1, window=100, soft_cap=20.0)
    for kernel, T, positions in (("decode_attention", None, 1), ("prefill_attention", 70, 2)):

        def run(*args, kernel=kernel):
            return kernels_pallas.run_kernel("mosaic", kernel, *args, **settings)

        assert "mosaic_gpu" in lowered_for_cuda(
            run, *attention_shapes(3, T, 14, 2, 1000, width, dtype), *[rows] * positions
        )


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
    q, k, v = attention_shapes(2, None, 8, 2, 256, 64, jnp.bfloat16)
    length = SD((2,), jnp.int32)

    def step(q, k, v, length):
        return kernels_pallas.run_kernel("mosaic", "decode_attention", q, k, v, length, scale=0.1)

    def loop(q, k, v, length):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1], k, v, length)), (0, q))

    stacked = [SD((3, *x.shape), x.dtype) for x in (q, k, v, length)]
    assert "mosaic_gpu" in lowered_for_cuda(jax.vmap(step), *stacked)
    assert "mosaic_gpu" in lowered_for_cuda(loop, q, k, v, length)
