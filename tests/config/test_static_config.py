"""A config is a pytree without leaves: `jax.jit` takes it as it is, and compiles a program for each."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import QWEN

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

CONFIG = xj.ModelConfig.from_hf(QWEN | dict(num_hidden_layers=1))
TOKENS = np.ones((1, 4), np.int32)


def test_a_config_has_no_leaves_and_maps_to_itself():
    assert jax.tree.leaves(CONFIG) == [] and jax.tree.map(lambda x: 0, CONFIG) is CONFIG
    assert jax.tree.structure(CONFIG) == jax.tree.structure(
        xj.ModelConfig.from_hf(QWEN | dict(num_hidden_layers=1))
    )
    assert jax.tree.structure(CONFIG) != jax.tree.structure(dataclasses.replace(CONFIG, embed_scale=2.0))


def test_jit_needs_no_static_argnums():
    params = xj.init_params(CONFIG, jax.random.key(0), "float32")
    want_BTV, _ = jax.jit(xj.forward, static_argnums=1)(params, CONFIG, TOKENS)
    got_BTV, _ = jax.jit(xj.forward)(params, CONFIG, TOKENS)
    np.testing.assert_array_equal(got_BTV, want_BTV)
    loss = lambda params, config: -xj.score(params, config, TOKENS).logprobs_BT.sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(params, CONFIG)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    each = jax.vmap(
        lambda params, config, tokens_T: xj.forward(params, config, tokens_T[None])[0][0], (None, None, 0)
    )
    np.testing.assert_allclose(each(params, CONFIG, TOKENS), want_BTV, atol=1e-5)


def test_each_config_is_traced_once():
    seen = []

    @jax.jit
    def width(config, x):
        seen.append(config)
        return x * config.hidden_size

    for config in (CONFIG, xj.ModelConfig.from_hf(QWEN | dict(num_hidden_layers=1))):
        assert width(config, 1.0) == CONFIG.hidden_size
    assert len(seen) == 1
    assert width(dataclasses.replace(CONFIG, hidden_size=3), 1.0) == 3


@pytest.mark.parametrize(
    "name, values",
    [
        ("eos_token_ids", [(1,), (2, 3)]),
        ("placeholder_ids", [{4: "an image"}, {}]),
        ("quantization_config", [{"bits": 4}, {"bits": 8}, None]),
    ],
)
def test_a_traced_function_sees_fields_that_are_not_compared(name, values):
    """`==` ignores them. A program that read those of an earlier config would be wrong."""

    @jax.jit
    def length(config, x):
        return x + len(repr(getattr(config, name)))

    configs = [dataclasses.replace(CONFIG, **{name: value}) for value in values]
    assert all(config == CONFIG for config in configs)
    assert [int(length(config, jnp.int32(0))) for config in configs] == [len(repr(value)) for value in values]
