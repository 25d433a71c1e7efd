"""The grouped kernels of a mixture of experts, in Pallas's interpreter: against their reference, and in
`mixture_of_experts`.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec
from layer_changes import with_experts
from parity_cases import CASES
from quick import full_except
from random_matrices import random_params

from xinfer_jax import kernels_pallas
from xinfer_jax.backends.expert_tiles import sort_choices
from xinfer_jax.config.layer_spec import ClampedSwiglu
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.feed_forward.experts import mixture_of_experts
from xinfer_jax.kernels_pallas import reference, triton
from xinfer_jax.kernels_pallas.triton.experts import _sort

pytestmark = [
    pytest.mark.oldest,  # in two thirds of the time of the newest, which compiles these kernels
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
D = 48
F = 32
X = 6


@pytest.mark.parametrize("sort", [sort_choices, _sort], ids=["xla", "triton"])
@pytest.mark.parametrize("X", [9, 70_000])  # 31,000 choices of 70,000 experts are beyond int32
def test_choices_in_order_of_their_experts(sort, X):
    """Choices of other devices' experts, below 0 or from X on, are before or after all."""
    expert_C = np.random.RandomState(0).randint(-5, X + 5, 31_000)
    keys_C, start_X1 = map(np.asarray, sort(jnp.asarray(expert_C), X))
    order_C = np.argsort(np.clip(expert_C, -1, X), kind="stable")
    np.testing.assert_array_equal(keys_C % len(expert_C), order_C)
    np.testing.assert_array_equal(start_X1, np.searchsorted(np.sort(expert_C), np.arange(X + 1)))


def case(dtype, expert_MU, experts=X):
    draws = np.random.RandomState(0)
    shapes = (len(expert_MU), D), (experts, F, D), (experts, F, D), (experts, D, F)
    x_MD, *matrices = (jnp.asarray(draws.standard_normal(shape), dtype) for shape in shapes)
    weight_MU = jnp.asarray(draws.uniform(-1, 1, expert_MU.shape), jnp.float32)  # Gemma 4 scales them
    return x_MD, weight_MU, jnp.asarray(expert_MU, jnp.int32), *(matrix / 6 for matrix in matrices)


def distinct(M, U, experts=X):
    """Experts as a router chooses them: different ones for each token."""
    draws = np.random.RandomState(M)
    return np.stack([draws.permutation(experts)[:U] for _ in range(M)])


by_kernel = jax.jit(partial(triton.gated_experts, activation=jax.nn.silu, interpret=True))
by_reference = jax.jit(partial(reference.gated_experts, activation=jax.nn.silu))

CHOICES = {
    "one-token": (jnp.float32, distinct(1, 2)),
    "three-tokens-bf16": (jnp.bfloat16, distinct(3, 2)),
    "ragged": (jnp.float32, distinct(70, 3)),
    "all-to-one": (jnp.float16, np.full((70, 1), 3)),
    "of-other-devices": (jnp.float32, np.random.RandomState(5).randint(-X, 2 * X, (23, 2))),
    "none-here": (jnp.bfloat16, np.full((3, 2), X)),
}


@pytest.mark.parametrize("name", full_except(["of-other-devices"], CHOICES))
def test_kernels_equal_their_reference(name):
    args = case(*CHOICES[name])
    got = by_kernel(*args)
    want = np.asarray(by_reference(*args))
    assert got.dtype == want.dtype == np.float32
    limit = 1e-5 if args[0].dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(got, want, atol=limit * max(np.abs(want).max(), 1e-9))


@pytest.mark.parametrize("name", full_except(["three-tokens-bf16"], ["three-tokens-bf16", "ragged"]))
def test_experts_without_a_gate(name):
    args = list(case(*CHOICES[name]))
    args[3] = None
    options = dict(activation=lambda x: jnp.square(jax.nn.relu(x)))
    got, want = (
        np.asarray(jax.jit(partial(run, **options))(*args))
        for run in (partial(triton.gated_experts, interpret=True), reference.gated_experts)
    )
    limit = 1e-5 if args[0].dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(got, want, atol=limit * np.abs(want).max())


@pytest.mark.full
def test_biases_and_a_limit():
    args = case(jnp.float32, distinct(9, 2, 2 * X) - X)
    biases = [0.5 * jax.random.normal(jax.random.key(i), (X, n)) for i, n in enumerate((F, F, D))]
    got, want = (run(*args, *biases, activation=jax.nn.silu, limit=0.7) for run in (
        partial(triton.gated_experts, interpret=True), reference.gated_experts
    ))  # fmt: skip
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert np.abs(want - by_reference(*args)).max() > 0.1


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrices_in_mxfp4(dtype):
    """The matrices have all numbers of 4 bits, three groups of inputs, and three groups of features."""
    bytes_of = np.random.RandomState(0).randint
    draws = jax.random.split(jax.random.key(0), 5)
    shapes = [(X, 3, 16, 96)] * 3
    matrices = [
        kernels_pallas.Mxfp4(
            jnp.asarray(bytes_of(0, 256, shape), jnp.uint8),
            jnp.asarray(bytes_of(121, 126, (*shape[:2], shape[3])), jnp.uint8),
        )
        for shape in shapes
    ]
    x_MD = jax.random.normal(draws[0], (9, 96), dtype)
    biases = [jax.random.normal(key, (X, 96), dtype) for key in draws[1:4]]
    expert_MU = jnp.asarray(distinct(9, 2))
    args = (x_MD, jax.random.uniform(draws[4], expert_MU.shape), expert_MU, *matrices, *biases)
    given = dict(activation=jax.nn.silu, limit=7.0)
    got, want = triton.gated_experts(*args, interpret=True, **given), reference.gated_experts(*args, **given)
    np.testing.assert_allclose(got, want, atol=2e-2 * np.abs(want).max())
    assert kernels_pallas.select("gated_experts", "triton", x_MD, *matrices).impl == "triton"
    of_tpu = f"quantized experts with activations of {dtype if dtype == 'float16' else 'float32'}"
    for impl, tokens, message in (
        ("triton", x_MD.astype("float32"), "dtype float32"),
        ("interpret_tpu", x_MD if dtype == "float16" else x_MD.astype("float32"), of_tpu),
    ):
        with pytest.raises(ValueError, match=f"does not support gated_experts here: {message}"):
            kernels_pallas.select("gated_experts", impl, tokens, *matrices)


def test_bits_of_a_choice_depend_on_no_other_choice():
    """They do not depend on its place in a tile either: rows run in another order, and one row runs next to
    others that chose its expert.
    """
    x, weight, expert, *matrices = case(jnp.bfloat16, distinct(40, 2))
    out_MD = np.asarray(by_kernel(x, weight, expert, *matrices))
    order = np.random.RandomState(1).permutation(40)
    np.testing.assert_array_equal(by_kernel(x[order], weight[order], expert[order], *matrices), out_MD[order])
    crowded = jnp.broadcast_to(expert[:1], expert.shape)
    np.testing.assert_array_equal(by_kernel(x, weight, crowded, *matrices)[0], out_MD[0])


@pytest.mark.full
def test_experts_that_nobody_chose_are_not_read():
    args = list(case(jnp.float32, distinct(9, 2, 4)))
    want = by_kernel(*args)
    args[3:] = (matrix.at[4:].set(jnp.nan) for matrix in args[3:])
    np.testing.assert_array_equal(by_kernel(*args), want)


@pytest.mark.full
def test_vmap_equals_a_loop():
    pairs = [case(jnp.float32, distinct(M, 2)[:3]) for M in (3, 4)]
    mapped = jax.vmap(by_kernel)(*(jnp.stack(pair) for pair in zip(*pairs, strict=True)))
    for got, args in zip(mapped, pairs, strict=True):
        np.testing.assert_allclose(got, by_kernel(*args), atol=1e-6)


def layer_of(dtype="float32", hidden_act="silu", **changes):
    config = dataclasses.replace(CASES["moe-defaults"].config, hidden_act=hidden_act)
    config = with_experts(config, intermediate_size=F, **changes)
    x_BTD = np.random.default_rng(1).standard_normal((2, 5, config.hidden_size))
    return config, random_params(config, dtype=dtype)["layers"][0], jnp.asarray(x_BTD, dtype)


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    full_except(
        [dict(swiglu=ClampedSwiglu(1.7, 1.0), bias=True)],
        [dict(hidden_act="silu"), dict(hidden_act="gelu_pytorch_tanh"), dict(hidden_act="relu2"),
            dict(swiglu=ClampedSwiglu(1.7, 1.0), bias=True)],
    ),
)  # fmt: skip
def test_layer_and_its_gradient_equal_those_of_xla(changes):
    config, layer, x_BTD = layer_of(**changes)

    def loss(x_BTD, layer, impl):
        out_BTD = mixture_of_experts(x_BTD, layer, config, run_config=RunConfig(impl))
        return jnp.sum(out_BTD**2), out_BTD

    gradients = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=2)
    got, want = (gradients(x_BTD, layer, name) for name in ("interpret", "xla"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max()), got, want)


def test_select_takes_triton_on_every_gpu(monkeypatch):
    config, layer, _ = layer_of("bfloat16")
    args = jnp.zeros((1, config.hidden_size), "bfloat16"), layer["experts"]["gate"]["weight"]
    card = kernels_pallas.Selection("mosaic", "an imaginary GPU")
    monkeypatch.setattr(kernels_pallas.dispatch, "device_impl", lambda: card)
    for impl in (None, "mosaic", "triton"):
        assert kernels_pallas.select("gated_experts", impl, *args).impl == "triton"
    in_float32 = [arg.astype("float32") for arg in args]
    assert kernels_pallas.select("gated_experts", None, *in_float32).impl == "xla"
    with pytest.raises(ValueError, match="24 × 48, not multiples of 16"):
        kernels_pallas.select("gated_experts", "triton", jnp.zeros((1, 48)), jnp.zeros((6, 24, 48)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("impl", "platform", "kernel", "kind", "calls"),
    [
        ("triton", "cuda", "__gpu$xla.gpu.triton", "NVIDIA H200", 2),
        ("tpu", "tpu", "tpu_custom_call", "TPU v6 lite", 1),
    ],
)
def test_layer_over_a_mesh_lowers(impl, platform, kernel, kind, calls):
    """The layer is lowered with the check of varying axes. A device runs its kernels, whatever it has to
    skip.
    """
    config, layer, x_BTD = layer_of("bfloat16", num_experts=8)
    layer = {name: layer[name] for name in ("router", "experts")}
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="tpu" if impl == "tpu" else "gpu")
    mesh = AbstractMesh((4,), ("model",), axis_types=(AxisType.Auto,), abstract_device=device)
    specs = PartitionSpec(), {"router": PartitionSpec(), "experts": PartitionSpec("model")}
    run = partial(mixture_of_experts, config=config, run_config=RunConfig(impl, over="model"))
    with jax.sharding.use_abstract_mesh(mesh):
        sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[0]))
        text = sharded.trace(x_BTD, layer).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(kernel) == calls
