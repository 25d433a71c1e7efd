"""The TPU kernel of the router of a mixture of experts, emulated on a CPU with race detection, against the
layer's own operations.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
from quick import full_except

from xinfer_jax.backends.kernels.expert_kernels import ROUTE
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.feed_forward.mixture import route
from xinfer_jax.ops.operation import Call, run
from xinfer_jax.weights.layers import linear

pytestmark = pytest.mark.newest
BF16 = jnp.bfloat16
NAME = "qwen3-next-sparse-step"
NORMALIZED = dict(norm_topk_prob=True)


def model(name, **changes):
    """A config, and random leaves of what comes before its experts."""
    config = cases.Case(cases.CASES[name].hf | changes).config
    tree = cases.params_from(config, cases.random_tensors(config, 3))["layers"][-1]
    return config, {part: tree[part] for part in ("router", "shared_gate", "mlp_norm") if part in tree}


def route_by_kernel(config):
    """The operation, by the emulated kernel."""
    plain = partial(route, config=config, spec=config.experts)

    def by_kernel(x_BTD, layer, given_BTU):
        operands = dict(x_BTD=x_BTD, leaves=layer, given_BTU=given_BTU)
        impl = RunConfig("interpret_tpu")
        return run("route", plain, impl, derivative=plain, static=dict(config=config), **operands)

    return by_kernel


def check(draws, name, rows, dtype, **changes):
    config, layer = model(name, **changes)
    weight = layer["router"]["weight"]
    layer["router"]["weight"] = weight.at[1::3].set(weight[: len(weight[1::3])])  # equal scores
    router_dtype = jnp.float32 if config.experts.router.kind == "grouped_topk" else dtype
    layer = {
        part: jax.tree.map(lambda x, to=router_dtype if part == "router" else dtype: jnp.asarray(x, to), leaf)
        for part, leaf in layer.items()
    }
    x_BTD = jnp.asarray(draws.standard_normal((rows, 1, config.hidden_size)), dtype)
    bad = draws.integers(rows)
    x_BTD = x_BTD.at[bad, 0, 0].set(jnp.nan) if rows > 1 else x_BTD
    plain = partial(route, config=config, spec=config.experts)
    got = jax.jit(route_by_kernel(config))(x_BTD, layer, None)
    want = jax.jit(plain)(x_BTD, layer, None)
    # The norms may differ in the last bit: the kernel's choice is compared with that of its own norm.
    assert np.allclose(*(np.asarray(x[0], np.float32) for x in (got, want)), rtol=2**-6, equal_nan=True)
    bare = {part: leaf for part, leaf in layer.items() if part != "mlp_norm"}
    _, _, weight_MU, expert_MU = jax.jit(plain)(got[0], bare, None)
    is_real = np.arange(rows) != bad if getattr(config.experts.router, "n_group", 1) > 1 else slice(None)
    np.testing.assert_array_equal(got[3][is_real], expert_MU[is_real])  # no group of NaN is the best one
    np.testing.assert_allclose(got[2], weight_MU, rtol=1e-4)
    if got[1] is not None:  # the layer rounds the product too
        gate_BT1 = np.asarray(jax.nn.sigmoid(linear(got[0], layer["shared_gate"], jnp.float32)))
        gate_BTD = np.broadcast_to(gate_BT1, x_BTD.shape)
        np.testing.assert_allclose(np.asarray(got[1], np.float32), gate_BTD, rtol=2**-8)
    assert rows == 1 or np.isnan(got[2][bad]).all()


@pytest.mark.full
@pytest.mark.parametrize(("name", "rows", "dtype"), [(NAME, 3, BF16), ("gpt-oss-published", 9, jnp.float32)])
def test_chooses_as_the_layer(name, rows, dtype):
    check(np.random.default_rng(0), name, rows, dtype, **NORMALIZED if name == NAME else {})


GROUPED = {  # a family of each scoring function and of each kind of groups
    "deepseek-v3-yarn-groups": (3, BF16),
    "deepseek-v2-groups": (9, jnp.float32),
    "deepseek-v2-greedy": (1, BF16),
    "glm4-moe-lite-defaults": (8, BF16),
}


@pytest.mark.parametrize("name", full_except(["deepseek-v3-yarn-groups"], GROUPED))
def test_chooses_within_groups_as_the_layer(name):
    rows, dtype = GROUPED[name]
    check(np.random.default_rng(0), name, rows, dtype)


@pytest.mark.soak
def test_chooses_as_the_layer_at_random_shapes():
    for seed in range(100):
        draws = np.random.default_rng(seed)
        experts = int(draws.integers(2, 300))
        sizes = NORMALIZED | dict(hidden_size=8 * int(draws.integers(1, 60)), num_experts=experts)
        sizes["num_experts_per_tok"] = int(draws.integers(1, min(experts, 10) + 1))
        rows = int(draws.choice([1, 2, 7, 8, 33, 64]))
        check(draws, NAME, rows, (BF16, jnp.float32)[seed % 2], **sizes)


def test_has_values_and_derivative_of_the_layer():
    config, layer = model(NAME, **NORMALIZED)
    x_BTD = jnp.asarray(np.random.default_rng(0).standard_normal((3, 1, config.hidden_size)), jnp.float32)
    plain = partial(route, config=config, spec=config.experts)
    call = route_by_kernel(config)

    def results(route):
        def loss(x_BTD, layer):
            x_BTD, gate_BTD, weight_MU, expert_MU = route(x_BTD, layer, None)
            weighted = weight_MU * jnp.arange(1, 1 + weight_MU.shape[1])
            return (x_BTD * gate_BTD).sum() + weighted.sum(), (x_BTD, gate_BTD, weight_MU, expert_MU)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x_BTD, layer)

    for got, want in zip(*(jax.tree.leaves(results(chosen)) for chosen in (call, plain)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_what_it_takes():
    config, layer = model(NAME, **NORMALIZED)
    x_BTD = jnp.zeros((64, 1, config.hidden_size))

    def chosen(x_BTD=x_BTD, layer=layer, given=None, config=config, impl="interpret_tpu"):
        operands = dict(x_BTD=x_BTD, leaves=layer, given_BTU=given)
        return ROUTE.select(Call(route, operands, dict(config=config), RunConfig(impl))).impl

    assert chosen() == "interpret_tpu"
    assert chosen(x_BTD[:1].repeat(65, 1)) == "xla"  # a prompt
    assert chosen(given=jnp.zeros((64, 1, 2), int)) == "xla"  # routes of another model
    assert chosen(x_BTD.astype(BF16)) == "xla"  # with matrices of float32
    assert chosen(impl="interpret") == "xla"  # a GPU
    scaled = dataclasses.replace(config.experts.router, per_expert_scale=True)
    experts = dataclasses.replace(config.experts, router=scaled)
    layers = tuple(dataclasses.replace(x, feed_forward=experts) if x.experts else x for x in config.layers)
    assert chosen(config=dataclasses.replace(config, layers=layers)) == "xla"
    config, layer = model("gemma4-experts")  # with a norm of its own
    assert chosen(layer=layer, config=config) == "xla"
    config, _ = model(NAME)
    assert chosen(config=config) == "xla"
    config, layer = model("glm4-moe-groups")
    layer["router"]["bias"] = jnp.zeros(config.num_experts)
    assert chosen(layer=layer, config=config) == "xla"
