"""The TPU kernel of a mixture of experts, emulated on a CPU with race detection: floats and quantized ones,
few tokens and many, read at once and in parts.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import full_except
from random_matrices import BF16, FP8, INT4, matrix
from test_kernels_experts import layer_of

from xinfer_jax import kernels_pallas
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.feed_forward.experts import mixture_of_experts
from xinfer_jax.kernels_pallas import Mxfp4, reference, tpu
from xinfer_jax.kernels_pallas.mxfp4 import dequantize_mxfp4, values_for_tpu, values_from_tpu
from xinfer_jax.kernels_pallas.tpu import expert_blocks

pytestmark = pytest.mark.newest
F32 = jnp.float32
# kind, tokens, choices of one, experts here, of how many, F, D, whether there are biases, bytes of a part
CASES = {
    "float": ("float", 3, 2, 6, 6, 48, 72, True, None),
    "float32-in-parts": (F32, 70, 2, 4, 8, 256, 128, False, 2**17),
    "float-in-ragged-parts": ("float", 9, 2, 6, 12, 208, 200, True, 2**16),
    "int8": ("int8", 5, 2, 9, 9, 96, 160, True, None),
    "int8-many-in-parts": ("int8", 70, 2, 4, 8, 256, 128, False, 2**15),
    "int4": (INT4, 3, 2, 6, 6, 512, 128, False, None),
    "int4-one-group": ((4, 128, False), 33, 1, 40, 50, 128, 384, True, None),
    "int4-many-in-parts": (INT4, 70, 2, 4, 4, 192, 640, False, 2**16),
    "fp8-scales-by-inputs": (FP8[0], 3, 1, 130, 130, 48, 600, True, None),
    "fp8-many-in-ragged-parts": (FP8[0], 70, 2, 3, 6, 300, 160, False, 2**14),
    "mxfp4": ("mxfp4", 5, 2, 6, 6, 128, 320, True, None),
    "mxfp4-in-ragged-parts": ("mxfp4", 70, 1, 3, 5, 320, 384, True, 2**16),
}


def mxfp4_of_file(draws, X, outputs, inputs):
    shape = X, inputs // 32, 16, outputs
    values = jnp.asarray(draws.integers(0, 256, shape), jnp.uint8)
    scale = jnp.asarray(draws.integers(117, 125, (*shape[:2], outputs)), jnp.uint8)
    return Mxfp4(values, scale.at[0, 0, 0].set(0))


def experts(draws, kind, X, outputs, inputs):
    """Random matrices of X experts, and their biases."""
    if kind == "mxfp4":
        packed = mxfp4_of_file(draws, X, outputs, inputs)
        scale = jnp.pad(packed.scale, ((0, 0), (0, -inputs // 32 % 8), (0, 0)))
        packed = Mxfp4(values_for_tpu(packed.values), scale)
        return packed, jnp.asarray(draws.standard_normal((X, outputs)), BF16)
    dtype = F32 if kind == F32 else BF16
    of_each = [
        matrix(draws, "float" if kind == F32 else kind, outputs, inputs, dtype, True) for _ in range(X)
    ]
    (stacked, bias) = (jax.tree.map(lambda *x: jnp.stack(x), *parts) for parts in (
        [m._replace(bias=None) for m in of_each], [m.bias for m in of_each]
    ))  # fmt: skip
    return stacked.values / 8 if kind in ("float", F32) else stacked, bias


def case(draws, kind, tokens, choices, X, of_all, F, D, has_biases):  # noqa: PLR0913
    x_MD = jnp.asarray(draws.standard_normal((tokens, D)), F32 if kind == F32 else BF16)
    expert_MU = np.stack([draws.permutation(of_all)[:choices] for _ in range(tokens)]) - (of_all - X) // 2
    weight_MU = jnp.asarray(draws.uniform(-1, 1, expert_MU.shape), F32)
    parts = [experts(draws, kind, X, outputs, inputs) for outputs, inputs in ((F, D), (F, D), (D, F))]
    matrices, biases = zip(*parts, strict=True)
    args = x_MD, weight_MU, jnp.asarray(expert_MU, jnp.int32), *matrices, *(biases if has_biases else ())
    options = dict(activation=jax.nn.silu, limit=7.0 if has_biases else None)
    return args, options | dict(num_experts=of_all)


def check(draws, monkeypatch, kind, *sizes, part_bytes, is_gated=True):
    if part_bytes:
        monkeypatch.setattr(expert_blocks, "_EXPERT_BYTES", part_bytes)
        monkeypatch.setattr(expert_blocks, "_PART_BYTES", part_bytes)
    args, options = case(draws, kind, *sizes)
    if not is_gated:
        args = *args[:3], None, *args[4:]
        options |= dict(activation=lambda x: jnp.square(jax.nn.relu(x)))
    tokens = len(args[0])
    bad = draws.integers(tokens) if tokens > 1 else None
    if bad is not None:  # a NaN stays in its row
        args = args[0].at[bad, 0].set(jnp.nan), *args[1:]
    got = np.asarray(jax.jit(partial(tpu.gated_experts, **options, interpret=True))(*args))
    want = np.asarray(jax.jit(partial(reference.gated_experts, **options))(*args))
    if bad is not None:
        is_chosen = ((np.asarray(args[2][bad]) >= 0) & (np.asarray(args[2][bad]) < sizes[2])).any()
        assert np.isnan(got[bad]).all() or not is_chosen
        got, want = (np.delete(x, bad, 0) for x in (got, want))
    error = np.linalg.norm(got - want, axis=-1)
    limit = 1e-5 if kind == F32 else 2**-6
    assert (error <= limit * np.linalg.norm(want, axis=-1).max()).all(), error


@pytest.mark.parametrize("name", full_except(["int4"], CASES))
def test_equals_its_reference(name, monkeypatch):
    *sizes, part_bytes = CASES[name]
    check(np.random.default_rng(0), monkeypatch, *sizes, part_bytes=part_bytes)


@pytest.mark.parametrize("name", full_except([], ["float", "int8-many-in-parts", "fp8-many-in-ragged-parts"]))
def test_experts_without_a_gate(name, monkeypatch):
    *sizes, part_bytes = CASES[name]
    sizes[-1] = False  # no biases
    check(np.random.default_rng(0), monkeypatch, *sizes, part_bytes=part_bytes, is_gated=False)


@pytest.mark.soak
def test_equals_its_reference_at_random_shapes(monkeypatch):
    for seed in range(100):
        with monkeypatch.context() as patches:
            check_random(np.random.default_rng(seed), patches)


def check_random(draws, monkeypatch):
    kinds = "float", F32, "int8", INT4, (4, 128, True), (4, 64, False), "mxfp4", *FP8
    kind = kinds[draws.integers(len(kinds))]
    unit = kind[1] if isinstance(kind, tuple) else 64 if kind == "mxfp4" else 8
    F, D = (int(unit * draws.integers(1, 640 // unit)) for _ in range(2))
    X = int(draws.integers(1, 40))
    of_all = X + int(draws.integers(0, 20))
    choices = int(draws.integers(1, min(of_all, 8) + 1))
    tokens = int(draws.choice([1, 2, 7, 8, 33, 64, 65, 150]))
    part_bytes = int(draws.choice([0, 2**15, 2**17]))
    sizes = tokens, choices, X, of_all, F, D, bool(draws.integers(2))
    is_gated = sizes[-1] or bool(draws.integers(2))
    check(draws, monkeypatch, kind, *sizes, part_bytes=part_bytes, is_gated=is_gated)


def test_mxfp4_for_tpus_has_its_numbers():
    values = np.random.default_rng(0).integers(0, 256, (2, 4, 16, 3), np.uint8)
    np.testing.assert_array_equal(values_from_tpu(values_for_tpu(values)), values)
    packed = mxfp4_of_file(np.random.default_rng(1), 2, 5, 128)
    for_tpu = experts(np.random.default_rng(1), "mxfp4", 2, 5, 128)[0]
    np.testing.assert_array_equal(dequantize_mxfp4(for_tpu), dequantize_mxfp4(packed))


def test_which_experts_it_takes():
    draws = np.random.default_rng(0)
    wide = jax.ShapeDtypeStruct((128, 1, 16, 2880), np.uint8), jax.ShapeDtypeStruct((128, 1, 2880), np.uint8)
    with pytest.raises(ValueError, match="128 experts of 2880 outputs, which XLA stores by expert"):
        kernels_pallas.select("gated_experts", "interpret_tpu", jnp.zeros((1, 32), BF16), *[Mxfp4(*wide)] * 3)
    odd = [mxfp4_of_file(draws, 2, 64, 96)] * 3
    with pytest.raises(ValueError, match="MXFP4 in the order of files"):
        kernels_pallas.select("gated_experts", "interpret_tpu", jnp.zeros((1, 96), BF16), *odd)
    for kind, dtype, reason in (
        ("mxfp4", BF16, None),
        ("int8", BF16, None),
        ("fp8", BF16, None),
        ("int8", F32, "quantized experts with activations of float32"),
        ((4, 32, True), BF16, "experts in int8 groups, or groups that are no multiple of 64"),
        ((8, 64, True), BF16, "experts in int8 groups, or groups that are no multiple of 64"),
    ):
        matrices = [experts(draws, kind, 2, 64, 64)[0]] * 3
        args = "interpret_tpu", jnp.zeros((1, 64), dtype), *matrices
        if reason is None:
            assert kernels_pallas.select("gated_experts", *args).impl == "interpret_tpu"
            continue
        with pytest.raises(ValueError, match=f"does not support gated_experts here: {reason}"):
            kernels_pallas.select("gated_experts", *args)


@pytest.mark.full
def test_layer_on_a_tpu_equals_that_of_xla():
    config, layer, x_BTD = layer_of()
    x_BTD = x_BTD[:1, :2]
    run = jax.jit(partial(mixture_of_experts, config=config), static_argnames="run_config")
    got, want = (run(x_BTD, layer, run_config=RunConfig(impl)) for impl in ("interpret_tpu", "xla"))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
