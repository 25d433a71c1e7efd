"""Heads 512 wide, as in Gemma 4's full layers, whose key heads differ from those of sliding layers: kernels
against their references over random shapes, emulated, and a model of which an engine runs on them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import BF16, F32, PAGE, assert_near, attention_case
from small_models import QWEN

import kernels_pallas
import xinfer_jax as xj
from kernels_pallas import Levels, reference, reference_append
from kernels_pallas.key_layouts import join, quantize
from xinfer_jax.families.reading import from_hf

pytestmark = [
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

WIDTH = 512
EMULATED = ("interpret", "interpret_tpu")


def shape_of_call(draws, seed, width):
    """Sizes and options of an attention call with draft tokens, of a prompt or of one token; some rows are
    empty.
    """
    K, group, B = draws.randint(1, 4), draws.randint(1, 9), draws.randint(1, 4)
    T = (draws.randint(2, 18), draws.randint(18, 70), 1)[seed % 3]
    place = draws.choice(["contiguous", "pages", "ring"])
    window = draws.randint(1, 90) if place == "ring" or draws.randint(2) else None
    options = {} if window is None else dict(window=int(window))
    slots = int(64 * draws.randint(1, 4))
    if place == "ring":
        slots = 64 * -(-int(window + T - 1) // 64)
        options |= dict(ring=True)
    if place == "pages":
        options |= dict(pages=slots // PAGE)
    if draws.randint(2):
        options |= dict(soft_cap=2.0)
    if draws.randint(2):
        options |= dict(sink=True)
    most = 3 * slots if place == "ring" else slots
    start = draws.randint(0, max(most - T, 0) + 1, B)
    length = np.where(draws.randint(0, 4, B) == 0, 0, start + draws.randint(1, T + 1, B))
    if place != "ring":
        length = np.minimum(length, most)
    return (int(T), int(K * group), int(K), slots, width, start, length), options


def check_attention(impl, dtype, sizes, options, bits=None):
    args, options = attention_case(dtype, *sizes, bits=bits, **options)
    if impl == "interpret_tpu":
        q, k, v, start, length = args
        args = q, join(k, v), None, start, length
    kernel = "decode_attention" if sizes[0] <= 17 else "prefill_attention"
    got = jax.jit(partial(kernels_pallas.run_kernel, impl, kernel, **options))(*args)
    assert got.dtype == dtype
    assert_near(got, jax.jit(partial(reference.prefill_attention, **options))(*args))


@pytest.mark.parametrize("impl", EMULATED)
def test_attention_of_one_token(impl):
    """Over pages, with a row that is empty."""
    sizes = 1, 8, 2, 0, WIDTH, (150, 0, 64, -1), (151, 1, 65, 0)
    check_attention(impl, BF16, sizes, dict(pages=3, sink=True))


@pytest.mark.full
@pytest.mark.parametrize("impl", EMULATED)
def test_attention_of_any_shape(impl, request):
    """100 random shapes with `--soak`; float32, bfloat16 and levels of 8 bits; on GPUs also other widths."""
    draws = np.random.RandomState(7)
    for seed in range(100 if request.config.getoption("soak") else 2):
        bits = 8 if seed % 4 == 1 else None
        width = 320 if impl == "interpret" and seed % 5 == 4 else WIDTH
        check_attention(impl, F32 if seed % 4 == 0 else BF16, *shape_of_call(draws, seed, width), bits)


def check_append(impl, draws, dtype, bits):
    K, group, B, T = draws.randint(1, 4), draws.randint(1, 5), draws.randint(1, 4), draws.randint(1, 24)
    slots, pages = (PAGE, draws.randint(1, 4)) if draws.randint(2) else (PAGE * draws.randint(1, 5), 0)
    P = 1 + B * pages if pages else B
    normal = lambda *shape: jnp.asarray(draws.standard_normal(shape), dtype)  # noqa: E731
    new = [normal(B, T, heads, WIDTH) for heads in (K * group, K, K)]
    angle_BTP = draws.standard_normal((B, T, WIDTH // 2)).astype(np.float32)
    old = [normal(P, K, slots, WIDTH) for _ in "kv"]
    if bits:
        old = [Levels(*quantize(x, bits)) for x in old]
    caches = (join(*old), None) if impl == "interpret_tpu" else old
    most = slots * (pages or 1)
    options = dict(capacity=most)
    if pages:
        options["table_BP"] = draws.permutation(np.arange(1, P)).reshape(B, pages).astype(np.int32)
    elif slots == 4 * PAGE:  # a ring has more than the tokens of a call
        options = dict(capacity=1000, ring=True)
        most = 3 * slots
    counts = (draws.randint(0, n, B).astype(np.int32) for n in (most, T + 1))
    args = (*new, np.cos(angle_BTP), np.sin(angle_BTP), *caches, *counts)
    got = jax.jit(partial(kernels_pallas.run_kernel, impl, "rope_append", **options))(*args)
    want = jax.jit(partial(reference_append.rope_append, **options))(*args)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(z, F32) for z in (x, y))
        if dtype == F32:
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-6 * np.abs(y).max())
        else:  # products may be rounded before they are added, or not, and then the sum to 16 or 8 bits
            assert np.isclose(x, y, rtol=0, atol=1e-6).mean() > 0.999
            np.testing.assert_allclose(x, y, rtol=2**-7, atol=1 if bits else 2**-7)


@pytest.mark.full
@pytest.mark.parametrize("impl", EMULATED)
def test_append_of_any_shape(impl, request):
    """100 random shapes with `--soak`."""
    draws = np.random.RandomState(8)
    for seed in range(100 if request.config.getoption("soak") else 2):
        check_append(impl, draws, (F32, BF16)[seed % 2], 8 if seed % 3 == 1 else None)


HF = QWEN | dict(model_type="gemma4_text", num_attention_heads=2, head_dim=64, global_head_dim=WIDTH)
HF |= dict(num_key_value_heads=2, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=9)
HF |= dict(layer_types=["sliding_attention", "full_attention"], hidden_size_per_layer_input=0)
GEMMA4 = from_hf(HF)


@pytest.mark.parametrize(
    "capability, platform, impl, others",
    [
        ((9, 0), "cuda", "mosaic", "1 of 2 layers by triton: here; head width 512 is above 256"),
        ((8, 0), "cuda", "triton", None),
        (None, "tpu", "tpu", None),
    ],
)
def test_kernels_used_says_which_layers_have_another_one(capability, platform, impl, others):
    params = jax.eval_shape(lambda: xj.init_params(GEMMA4, jax.random.key(1), "bfloat16"))
    with kernels_pallas.assume_device(capability, "here", platform):
        used = xj.kernels_used(params, GEMMA4, kv_dtype="bfloat16")
    for kernel in ("prefill_attention", "decode_attention"):
        assert used[kernel] == (impl, "here" if others is None else f"here; {others}")
