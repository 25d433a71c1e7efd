"""Matrices in FP8: the product kernels against their reference in Pallas's interpreters, and the numbers of
their instructions.
"""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quick import full_except
from random_matrices import FP8, matrix

from xinfer_jax import kernels_pallas
from xinfer_jax.kernels_pallas import reference_products
from xinfer_jax.kernels_pallas.tpu import fp8 as tpu_fp8, streaming
from xinfer_jax.kernels_pallas.triton import fp8

TPUS = ("TPU v5 lite", "TPU v6 lite", "TPU7x")
ON_TPUS = [(FP8[0], TPUS[1]), (FP8[1], TPUS[2]), (FP8[0], TPUS[0])]
pytestmark = [
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_moved_bits_are_the_number_times_a_power_of_two(dtype):
    """Every byte except NaN is moved as the kernel's instructions move it."""
    shift, inverse, _ = fp8._FORMS[dtype]
    byte = np.delete(np.arange(256), [127, 255])
    high = (byte << 8).astype(np.uint16)
    moved = ((high & 0x7F00) >> shift | high & 0x8000).view(dtype).astype(np.float64)
    factor = np.uint16(int(inverse, 16) & 0xFFFF).view(dtype).astype(np.float64)
    want = byte.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(moved * factor, want)
    assert int(inverse, 16) >> 16 == int(inverse, 16) & 0xFFFF


@pytest.mark.parametrize("device, step", [("TPU v6 lite", 16), ("TPU7x", 1)])
def test_numbers_of_tpus(device, step):
    """Every byte except NaN is converted."""
    values = jnp.asarray(np.delete(np.arange(256), [127, 255]).astype(np.uint8).view(ml_dtypes.float8_e4m3fn))
    with kernels_pallas.assume_device(None, device, "tpu"):
        got = tpu_fp8._numbers(values)
    np.testing.assert_array_equal(step * got.astype(jnp.float32), values.astype(jnp.float32))


def check(impl, seed, rows, inputs, outputs, kind, dtype, options):
    draws = np.random.default_rng(seed)
    kinds = [kind] * len(outputs)
    matrices = [
        matrix(draws, kind, size, inputs, dtype, True) for kind, size in zip(kinds, outputs, strict=True)
    ]
    x_MI = jnp.asarray(draws.standard_normal((rows, inputs)) / 4, dtype)
    norm_I = jnp.asarray(draws.standard_normal(inputs), dtype) if "eps" in options else None
    args = (x_MI, matrices, norm_I)
    run = partial(kernels_pallas.run_kernel, impl, "product", **options)
    got = jax.jit(run)(*args)
    for have, need in zip(got, reference_products.product(*args, **options), strict=True):
        have, need = (np.asarray(y, np.float64) for y in (have, need))
        limit = 2**-7 * np.linalg.norm(need, axis=-1)
        assert (np.linalg.norm(have - need, axis=-1) <= limit).all(), seed


@pytest.mark.full
def test_gate_and_up_with_a_norm():
    check("interpret", 0, 3, 300, (200, 200), "fp8", "bfloat16", dict(eps=1e-6, activation="silu"))


@pytest.mark.parametrize("kind, device", full_except(ON_TPUS[:1], ON_TPUS))
def test_tiles_and_loops_of_a_tpu(kind, device, monkeypatch):
    """Ragged blocks, pairs of these and tiles."""
    in_parts(monkeypatch)
    with kernels_pallas.assume_device(None, device, platform="tpu"):
        check("interpret_tpu", 0, 3, 700, (200, 200), kind, "bfloat16", dict(eps=1e-6, activation="silu"))


def in_parts(monkeypatch):
    monkeypatch.setattr(streaming, "RESIDENT_BYTES", 0)
    monkeypatch.setattr(streaming, "STEP_BYTES", 2**15)
    monkeypatch.setattr(tpu_fp8, "_UNROLLED", 0)
    monkeypatch.setattr(tpu_fp8, "_STEP", 256)


@pytest.mark.full
def test_random_shapes(request):
    """100 with `--soak`. Errors are those of many outputs: in one alone terms may cancel."""
    for seed in range(100 if request.config.getoption("soak") else 2):
        draws = np.random.default_rng(seed)
        rows = int(draws.choice([1, 8, 20, 40, 64, 130]))
        dtype = str(draws.choice(["bfloat16", "float16"]))
        outputs = tuple(int(n) for n in draws.integers(16, 300, draws.integers(1, 4)))
        options = dict(eps=1e-6) if rows <= 64 and dtype == "bfloat16" and draws.integers(2) else {}
        inputs = int(draws.integers(1, 700))
        check("interpret", seed, rows, inputs, outputs, FP8[seed % 2], dtype, options)


@pytest.mark.soak
def test_random_shapes_on_tpus(monkeypatch):
    """Resident ones and in parts."""
    for seed in range(100):
        draws = np.random.default_rng(seed)
        outputs = tuple(int(n) for n in draws.choice([24, 100, 128, 256, 330], draws.integers(1, 4)))
        options = dict(eps=1e-6) if draws.integers(2) else {}
        sizes = int(draws.choice([1, 8, 20, 64])), int(draws.integers(1, 900)), outputs
        with monkeypatch.context() as patches:
            if draws.integers(2):
                in_parts(patches)
            with kernels_pallas.assume_device(None, TPUS[seed % 3], "tpu"):
                check("interpret_tpu", seed, *sizes, FP8[draws.integers(2)], "bfloat16", options)
