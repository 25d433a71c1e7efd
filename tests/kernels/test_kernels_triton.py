"""The Triton kernels of the greedy token against their references, in Pallas's interpreter. All Triton
kernels lowered for a GPU that need not be present.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import attention_case
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec
from quick import full_except

from xinfer_jax.kernels_pallas import reference, triton

pytestmark = [
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
F32 = jnp.float32
BF16 = jnp.bfloat16
F16 = jnp.float16
SD = jax.ShapeDtypeStruct


def draw(seed, dtype, *shapes):
    draws = np.random.RandomState(seed)
    return [draws.standard_normal(shape).astype(dtype) for shape in shapes]


def run(f, *args, **options):
    return jax.jit(partial(f, **options))(*args)


@pytest.mark.parametrize("dtype", full_except([BF16], [F32, BF16, F16]))
def test_argmax_kernel_equals_its_reference(dtype):
    (x_BV,) = draw(0, dtype, (9, 2500))
    x_BV[0, [1200, 2400]] = 7  # equal, in different blocks
    x_BV[1, [30, 20]] = 7
    x_BV[2, [2000, 2100, 50]] = np.nan, np.nan, np.inf
    x_BV[3, 2499] = np.inf
    x_BV[4:6] = -np.inf
    x_BV[5, 2300] = -7
    x_BV[6] = -0.0
    x_BV[6, 2300] = 0
    x_BV[7] = np.nan
    got = run(triton.argmax, x_BV, interpret=True)
    assert got.dtype == jnp.int32
    assert got.tolist() == run(reference.argmax, x_BV).tolist()
    assert got.tolist()[:8] == [1200, 20, 2000, 2499, 0, 2300, 0, 0]


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype,B,D,V,options",
    [
        (F32, 5, 100, 300, {}),
        (BF16, 1, 128, 700, {}),
        (F16, 70, 40, 130, {}),
        (F32, 3, 100, 300, dict(soft_cap=30.0)),
    ],
    ids=["f32", "one-row-bf16", "two-tiles-of-rows-f16", "cap-f32"],
)
def test_lm_head_argmax(dtype, B, D, V, options):
    x_BD, weight_VD = draw(1, dtype, (B, D), (V, D))
    weight_VD[V - 2] = weight_VD[3]
    x_BD[B - 1] = 3 * weight_VD[3]  # a tie between the first block and the last
    got = run(triton.lm_head_argmax, x_BD, weight_VD, **options, interpret=True)
    want = run(reference.lm_head_argmax, x_BD, weight_VD, **options)
    assert [x.dtype for x in got] == [jnp.int32, jnp.float32]
    assert got[0].tolist() == want[0].tolist()
    assert got[0][-1] == 3
    np.testing.assert_allclose(got[1], want[1], atol=2e-5)


@pytest.mark.parametrize("B,D,V", [(3, 100, 300), (20, 64, 130)], ids=["narrow", "two-tiles-of-inputs"])
def test_int8_head_argmax(B, D, V):
    (x_BD,) = draw(4, BF16, (B, D))
    numbers = np.random.RandomState(5)
    values_VD = numbers.randint(-127, 128, (V, D)).astype(np.int8)
    scale_V = (0.01 + numbers.random_sample(V) / 100).astype(np.float32)
    values_VD[V - 2] = values_VD[3]
    scale_V[[3, V - 2]] = 0.03
    x_BD[B - 1] = values_VD[3] / 2000  # a tie between the first block and the last
    args = x_BD, values_VD, scale_V
    got = run(triton.int8_head_argmax, *args, soft_cap=30.0, interpret=True)
    want = run(reference.int8_head_argmax, *args, soft_cap=30.0)
    assert got[0].tolist() == want[0].tolist()
    assert got[0][-1] == 3
    np.testing.assert_allclose(got[1], want[1], atol=2e-4)


@pytest.mark.parametrize("biased", [None, [True, False, True]], ids=["plain", "bias"])
def test_summarize_logits(biased):
    """A bias of a row that has none, and seen tokens of a row without a penalty, must not be read."""
    logits_BV, bias_BV = draw(6, F32, (3, 2500), (3, 2500))
    logits_BV[2, 2:] = -np.inf
    seen_BV = np.random.RandomState(7).random_sample((3, 2500)) < 0.3
    args = logits_BV, np.float32([1.3, 1, 0.7]), seen_BV
    if biased is not None:
        bias_BV[0, 9] = -np.inf
        want = reference.summarize_logits(*args, bias_BV, np.array(biased))
        bias_BV[1] = np.nan
        args = *args, bias_BV, np.array(biased)
    else:
        want = reference.summarize_logits(*args)
    got = run(triton.summarize_logits, *args, interpret=True)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)


def test_summarized_logits_of_nan_and_infinity():
    logits_BV = np.zeros((4, 3000), np.float32)
    logits_BV[[0, 1], [7, 2700]] = np.nan, np.inf
    logits_BV[2] = -np.inf
    _, logsumexp_B = run(triton.summarize_logits, logits_BV, np.ones(4), logits_BV > 9, interpret=True)
    np.testing.assert_allclose(logsumexp_B, [np.nan, np.inf, -np.inf, np.log(3000)], rtol=1e-6)


def test_many_rows_are_not_split():
    """Rows times heads that give each multiprocessor a program: there are no partial results to merge."""
    for B, K, kernels in ((64, 2, 1), (64, 4, 1), (8, 2, 2), (32, 2, 2)):
        q, kv, row = (SD(shape, dtype) for shape, dtype in (
            ((B, 1, 4 * K, 64), BF16), ((B, K, 4096, 64), BF16), ((B,), jnp.int32)))  # fmt: skip
        decode = partial(triton.decode_attention, scale=1.0)
        assert lower(decode, q, kv, kv, row, row).count("__gpu$xla.gpu.triton") == kernels


@pytest.mark.full
def test_lm_head_argmax_takes_the_first_nan():
    x_BD, weight_VD = draw(2, F32, (2, 16), (300, 16))
    weight_VD[[280, 140, 141]] = np.nan
    ids_B, log_probability_B = run(triton.lm_head_argmax, x_BD, weight_VD, interpret=True)
    assert ids_B.tolist() == [140, 140] and np.isnan(log_probability_B).all()


def calls(interpret):
    """Each kernel as a function of arrays only, with small arguments."""
    args, options = attention_case(F32, 3, 4, 2, 40, 16, (37, 0), (40, 3))
    options |= {"interpret": interpret}
    x_BD, weight_VD = draw(3, F32, (2, 24), (150, 24))
    return {
        "prefill": (lambda *args: triton.prefill_attention(*args, **options), args),
        "decode": (lambda *args: triton.decode_attention(*args, **options, splits=2), args),
        "argmax": (lambda x: triton.argmax(x, interpret=interpret), (weight_VD.T,)),
        "lm_head": (lambda *args: triton.lm_head_argmax(*args, interpret=interpret), (x_BD, weight_VD)),
        "summarize": (
            lambda *args: triton.summarize_logits(*args, interpret=interpret),
            (weight_VD.T, weight_VD[0], weight_VD.T > 0, weight_VD.T, weight_VD[0] > 0),
        ),
    }


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["prefill", "decode", "argmax", "lm_head", "summarize"])
def test_vmap_of_kernels_equals_a_loop(kernel):
    f, args = calls(interpret=True)[kernel]
    stacked = [np.stack([x, x[::-1]]) for x in args]
    one = jax.jit(f)
    loop = [one(*(x[i] for x in stacked)) for i in range(2)]
    jax.tree.map(
        lambda got, *want: np.testing.assert_array_equal(got, np.stack(want)),
        run(jax.vmap(f), *stacked),
        *loop,
    )


GPU = AbstractDevice(device_kind="NVIDIA A100-SXM4-80GB", num_cores=None, platform="gpu")


def lower(f, *args, mesh=None, specs=None):
    """The program of f for CUDA, as text."""
    mesh = mesh or AbstractMesh((), (), abstract_device=GPU)
    specs = specs or [PartitionSpec()] * len(args)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))
        for x, s in zip(args, specs, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def in_a_loop(f):
    """f in a while loop, where its first argument depends on the previous result."""

    def step(args, state):
        i, x = state
        return i + 1, x + jax.tree.leaves(f(x, *args))[0].reshape(-1)[0].astype(x.dtype)

    return lambda x, *args: lax.while_loop(lambda state: state[0] < 3, partial(step, args), (0, x))


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["prefill", "decode", "argmax", "lm_head", "summarize"])
@pytest.mark.parametrize("how", ["plain", "vmap", "while_loop"])
def test_kernels_lower_for_cuda(kernel, how):
    f, args = calls(interpret=False)[kernel]
    if how == "vmap":
        f = jax.vmap(f)
        args = [np.stack([x, x]) for x in args]
    elif how == "while_loop":
        f = in_a_loop(f)
    kernels = 2 if kernel == "decode" else 1  # the splits' results are merged
    assert lower(f, *args).count("__gpu$xla.gpu.triton") == kernels


@pytest.mark.full
@pytest.mark.parametrize("dtype,H", [(F32, 8), (F16, 80), (BF16, 256)], ids=["f32-8", "f16-80", "bf16-256"])
def test_attention_of_any_width_lowers_for_cuda(dtype, H):
    args, options = attention_case(dtype, 9, 14, 2, 40, H, (30, 0), (39, 9), window=5, soft_cap=2.0)
    assert lower(lambda *args: triton.prefill_attention(*args, **options), *args)
    assert lower(lambda *args: triton.decode_attention(*args, **options), *args)


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["prefill", "decode", "lm_head"])
def test_kernels_lower_inside_shard_map(kernel):
    f, args = calls(interpret=False)[kernel]
    heads, of_queries = PartitionSpec(None, "x"), PartitionSpec(None, None, "x")
    specs, out = (of_queries, heads, heads, PartitionSpec(), PartitionSpec()), of_queries
    if kernel == "lm_head":
        specs, out = (PartitionSpec(), PartitionSpec("x")), PartitionSpec("x")
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,), abstract_device=GPU)
    assert lower(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out), *args, mesh=mesh, specs=specs)
