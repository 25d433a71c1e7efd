"""The grouped kernels of a mixture of experts in int8, int4 and FP8, in Pallas's interpreters: against their
reference, and in `mixture_of_experts`.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_changes import with_experts
from parity_cases import CASES
from random_matrices import FP8, INT4, matrix, quantized_experts, random_params

import xinfer_jax as xj
from xinfer_jax.backends.kernels.expert_kernels import select_experts
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.feed_forward.experts import mixture_of_experts
from xinfer_jax.kernels_pallas import reference, triton
from xinfer_jax.weights.fp8_weight import fp8_struct
from xinfer_jax.weights.quantization import quantized_leaf, with_int8_activations

pytestmark = [
    pytest.mark.oldest,  # in two thirds of the time of the newest, which compiles these kernels
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
KINDS = ["int8", INT4, "fp8", *[(4, 32, False), (4, 96, True), (8, 32, False)], FP8[1]]


def case(  # noqa: PLR0913
    seed, kind, tokens, U, X, D, F, dtype="bfloat16", experts=None, biases=False
):
    """Arguments of the kernels. experts: that a token chooses from. Those in the middle are here."""
    draws = np.random.default_rng(seed)
    experts = experts or X
    expert_MU = np.stack([draws.permutation(experts)[:U] for _ in range(tokens)]) - (experts - X) // 2
    x_MD = jnp.asarray(draws.standard_normal((tokens, D)) / 4, dtype)
    weight_MU = jnp.asarray(draws.uniform(-1, 1, expert_MU.shape), jnp.float32)

    def of_experts(outputs, inputs):
        several = [matrix(draws, kind, outputs, inputs, dtype, biases) for _ in range(X)]
        return jax.tree.map(lambda *x: jnp.stack(x), *several)

    several = [of_experts(F, D), of_experts(F, D), of_experts(D, F)]
    added = [x.bias for x in several] if biases else []
    return x_MD, weight_MU, jnp.asarray(expert_MU), *(x._replace(bias=None) for x in several), *added


def check(args, num_experts=None, limit=None):
    """A token that is NaN stays in its row."""
    given = dict(activation=jax.nn.silu, limit=limit)
    got = jax.jit(partial(triton.gated_experts, interpret=True, num_experts=num_experts, **given))(*args)
    want = np.asarray(jax.jit(partial(reference.gated_experts, **given))(*args))
    assert got.dtype == want.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=2e-2 * np.nanmax(np.abs(want), initial=1e-9))


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=() if x in ("int8", INT4) else pytest.mark.full) for x in KINDS]
)
def test_kernels_equal_their_reference(kind):
    check(case(0, kind, 9, 2, 6, 384, 192))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["int8", INT4])
def test_many_experts_and_those_of_other_devices(kind):
    x_MD, *others = case(1, kind, 150, 3, 4, 64, 64, "float16", 12, True)
    check((x_MD.at[2].set(jnp.nan), *others), 12, 0.7)
    check(case(2, kind, 9, 8, 128, 64, 64))


@pytest.mark.soak
def test_random_shapes():
    for seed in range(100):
        draws = np.random.default_rng(seed)
        kind = KINDS[seed % len(KINDS)]
        D, F = np.lcm(kind[1] if isinstance(kind, tuple) else 16, 16) * draws.integers(1, 5, 2)
        X = draws.integers(1, 20)
        experts = X + draws.choice([0, 6])
        tokens = draws.choice([1, 3, 17, 70, 130])
        U = draws.integers(1, min(experts, 8) + 1)
        dtype = draws.choice(["bfloat16", "float16"])
        x_MD, *others = case(seed, kind, tokens, U, X, D, F, dtype, experts, draws.choice([False, True]))
        x_MD = x_MD.at[0].set(jnp.nan) if draws.integers(3) == 0 else x_MD
        check((x_MD, *others), experts, draws.choice([None, 0.7]))


@pytest.mark.full
def test_bits_of_a_choice_depend_on_no_other_choice():
    run = jax.jit(partial(triton.gated_experts, interpret=True, activation=jax.nn.silu))
    x, weight, expert, *several = case(3, INT4, 40, 2, 6, 64, 64)
    out_MD = np.asarray(run(x, weight, expert, *several))
    order = np.random.RandomState(1).permutation(40)
    np.testing.assert_array_equal(run(x[order], weight[order], expert[order], *several), out_MD[order])
    crowded = jnp.broadcast_to(expert[:1], expert.shape)
    np.testing.assert_array_equal(run(x, weight, crowded, *several)[0], out_MD[0])


def layer_of(quantize, group):
    config = with_experts(
        dataclasses.replace(CASES["moe-defaults"].config, hidden_size=64), intermediate_size=96
    )
    layer = random_params(config, dtype="bfloat16")["layers"][0]
    x_BTD = jax.random.normal(jax.random.key(1), (2, 5, 64), "bfloat16")
    return config, quantized_experts(layer, quantize, group), x_BTD


@pytest.mark.full
def test_layer_and_its_gradient_equal_those_of_xla():
    """The gradient is that of xla, from the same cotangent."""
    impl = "interpret"
    config, layer, x_BTD = layer_of("int4", 32)
    x_BTD = x_BTD[:1, :3]
    assert select_experts(impl, x_BTD[0], layer["experts"]).impl == impl

    def loss(x_BTD, layer, impl):
        out_BTD = mixture_of_experts(x_BTD, layer, config, run_config=RunConfig(impl))
        return jnp.sum(out_BTD * jnp.arange(64.0)), out_BTD

    gradients = jax.jit(jax.grad(loss, (0, 1), has_aux=True, allow_int=True), static_argnums=2)
    (got, got_BTD), (want, want_BTD) = (gradients(x_BTD, layer, name) for name in (impl, "xla"))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    want_BTD = np.asarray(want_BTD, np.float32)
    np.testing.assert_allclose(np.asarray(got_BTD, np.float32), want_BTD, atol=2e-2 * np.abs(want_BTD).max())


@pytest.mark.full
def test_reasons_for_which_other_experts_stay_with_xla():
    _, layer, x_BTD = layer_of("int4", 32)
    int4 = layer["experts"]
    float_DF = jnp.ones((len(int4["up"]["weight"].values), 64, 96))

    def of(weight, dtype="bfloat16"):
        return x_BTD[0].astype(dtype), {name: {"weight": weight} for name in int4}

    small, padded, large = (
        quantized_leaf(np.ones((2, 64, 96), np.float32), "", quantize, group)
        for quantize, group in (("int8", 8), ("int4", 64), ("int8", 96))
    )
    values = jax.ShapeDtypeStruct((2**17, 192, 96), np.int8)
    for message, (x_MD, experts) in {
        "dtype float32": (x_BTD[0].astype("float32"), int4),
        "groups of 8 bytes, not a multiple of 16": of(small),
        "experts in groups with padding": of(padded),
        "experts with int8 activations": of(with_int8_activations(large)),
        "numbers of 8 bits in an array": of(dataclasses.replace(large, values=values)),
        "experts whose matrices have different formats": (x_BTD[0], int4 | {"up": {"weight": float_DF}}),
    }.items():
        with pytest.raises(xj.InputError, match=f"does not support gated_experts here: .*{message}"):
            select_experts("interpret", x_MD, experts)
    for impl in ("interpret", "interpret_tpu"):
        assert select_experts(impl, *of(fp8_struct((2, 64, 96), True))).impl == impl
