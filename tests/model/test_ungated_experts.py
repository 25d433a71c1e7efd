"""Experts without gates, also latent ones: their outputs by NumPy, gradients, quantized leaves, kernels."""

import dataclasses
from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
from random_matrices import quantized_experts, random_params

import xinfer_jax as xj
from xinfer_jax.backends import expert_tiles
from xinfer_jax.backends.cpu import layer_forms
from xinfer_jax.backends.kernels.expert_kernels import select_experts
from xinfer_jax.config.layer_spec import LayerSpec
from xinfer_jax.config.run_config import PLAIN, RunConfig
from xinfer_jax.feed_forward.grouped_topk import GroupedTopkSpec
from xinfer_jax.feed_forward.ungated_experts import UngatedExpertsSpec
from xinfer_jax.weights.param_specs import param_specs

pytestmark = pytest.mark.newest

BASE = cases.CASES["nemotron-h-published"].config
X, U, F, SHARED, LATENT = 8, 2, 24, 36, 20
SPEC = UngatedExpertsSpec(X, U, F, GroupedTopkSpec(), shared_intermediate_size=SHARED)
SPECS = {
    "latent-bias": dataclasses.replace(SPEC, latent_size=LATENT, shared_bias=True),
    "plain": SPEC,
    "no-shared": dataclasses.replace(SPEC, shared_intermediate_size=0),
}


@cache
def build(name):
    """A config with one layer, which has only a mixture, and its parameters."""
    config = dataclasses.replace(BASE, layers=(LayerSpec((), SPECS[name]),), num_hidden_layers=1)
    params = random_params(config, 3)
    return config, dict(params["layers"][0])


def mixture(params, x_BTD, config, given_BTU=None, impl=None):
    return config.feed_forward(0).forward(params, x_BTD, None, None, RunConfig(impl), given_BTU)


def hidden_states(tokens):
    return np.random.default_rng(tokens).standard_normal((1, tokens, BASE.hidden_size)).astype(np.float32)


def by_numpy(params, x_MD, weight_MU, expert_MU):
    """The output in float64 for these experts."""
    tree = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def mlp(x, up, down):
        inner = np.maximum(x @ up["weight"].T + up.get("bias", 0), 0) ** 2
        return inner @ down["weight"].T + down.get("bias", 0)

    inputs = x_MD
    if "latent_in" in tree:
        inputs = x_MD @ tree["latent_in"]["weight"].T + tree["latent_in"].get("bias", 0)
    out = np.zeros_like(inputs)
    for m, (weights, experts) in enumerate(zip(weight_MU, expert_MU, strict=True)):
        for weight, expert in zip(weights, experts, strict=True):
            of_expert = [dict(weight=tree["experts"][name]["weight"][expert]) for name in ("up", "down")]
            out[m] += weight * mlp(inputs[m], *of_expert)
    if "latent_out" in tree:
        out = out @ tree["latent_out"]["weight"].T + tree["latent_out"].get("bias", 0)
    return out + (mlp(x_MD, tree["shared"]["up"], tree["shared"]["down"]) if "shared" in tree else 0)


@pytest.mark.parametrize("tokens, is_tiled", [(3, False), (40, False), (40, True)])
@pytest.mark.parametrize("name", SPECS)
def test_outputs_by_numpy(name, tokens, is_tiled):
    """By the chosen experts one after the other, by all experts, and by tiles. The router reads the hidden
    states. Given experts have the weights of the router.
    """
    config, params = build(name)
    x_BTD = hidden_states(tokens)
    given_BTU = np.arange(tokens * U, dtype=np.int32).reshape(1, tokens, U) % X
    given_BTU[:, ::2] = -1
    with mock.patch.object(layer_forms, "is_tiled", lambda *_: is_tiled):
        out_BTD, expert_MU = jax.jit(lambda *args: mixture(args[0], args[1], config, args[2]))(
            params, x_BTD, given_BTU
        )
    weight_MU, chosen_MU = config.feed_forward(0).route(params, x_BTD, None, PLAIN, given_BTU)[2:]
    np.testing.assert_array_equal(expert_MU, chosen_MU)
    np.testing.assert_array_equal(expert_MU[1::2], given_BTU[0, 1::2])
    want = by_numpy(params, x_BTD[0].astype(np.float64), np.asarray(weight_MU), np.asarray(expert_MU))
    np.testing.assert_allclose(out_BTD[0], want, atol=2e-5 * np.abs(want).max())


@pytest.mark.full
def test_gradients_by_tiles_are_those_of_the_plain_form():
    config, params = build("latent-bias")
    x_BTD = hidden_states(40)
    slopes = []
    for is_tiled in (False, True):
        with mock.patch.object(expert_tiles, "is_tiled", lambda *_, value=is_tiled: value):
            loss = lambda *args: jnp.sin(mixture(*args, config)[0]).sum()  # noqa: E731
            slopes.append(jax.jit(jax.grad(loss, (0, 1)))(params, x_BTD))
    assert slopes[0][0]["experts"].keys() == {"up", "down"}
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(slopes[0][0]["experts"]))
    for want, found in zip(*map(jax.tree.leaves, slopes), strict=True):
        np.testing.assert_allclose(found, want, atol=2e-5 * np.abs(want).max() + 1e-6)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_experts_are_the_numbers_that_they_stand_for(quantize):
    config, params = build("latent-bias")
    x_BTD = hidden_states(3)
    rounded = quantized_experts(params, quantize, 4)
    outs = [
        jax.jit(lambda *args: mixture(*args, config)[0])(tree, x_BTD)
        for tree in (rounded, xj.params.dequantize(rounded, "float32"))
    ]
    np.testing.assert_allclose(*outs, atol=1e-4 * np.abs(outs[1]).max())


def test_parameters():
    """There is no gate, and only the router is float32 in every model."""
    config, _ = build("latent-bias")
    (layer,) = param_specs(config)["layers"]
    assert layer.keys() == {"mlp_norm", "router", "experts", "latent_in", "latent_out", "shared"}
    shapes = jax.tree.map(lambda spec: spec.shape, layer, is_leaf=lambda x: hasattr(x, "shape"))
    assert shapes["experts"] == dict(up=dict(weight=(X, F, LATENT)), down=dict(weight=(X, LATENT, F)))
    assert shapes["latent_out"] == dict(weight=(BASE.hidden_size, LATENT), bias=(BASE.hidden_size,))
    assert shapes["shared"]["up"] == dict(weight=(SHARED, BASE.hidden_size), bias=(SHARED,))
    assert {spec.name for spec in jax.tree.leaves(layer) if spec.dtype} == {
        "layers.0.router.weight",
        "layers.0.router.correction_bias",
    }


@pytest.mark.full
def test_kernels_take_experts_without_a_gate():
    """A mixture by the kernel for TPUs is that of plain jnp. Experts with biases have no kernel."""
    config, params = build("plain")
    x_BTD = hidden_states(3)
    selected = select_experts("interpret_tpu", x_BTD[0], params["experts"])
    assert selected.impl == "interpret_tpu"
    outs = [
        jax.jit(lambda *args, impl=impl: mixture(*args, config, impl=impl)[0])(params, x_BTD)
        for impl in ("interpret_tpu", "xla")
    ]
    np.testing.assert_allclose(*outs, atol=1e-4 * np.abs(outs[1]).max())
    up = params["experts"]["up"] | dict(bias=np.zeros((X, F), np.float32))
    with pytest.raises(xj.InputError, match="experts with biases and without a gate"):
        select_experts("interpret_tpu", x_BTD[0], params["experts"] | dict(up=up))
