"""Registries: what is added from outside the package is found, and a wrong addition is rejected."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import QWEN

import xinfer_jax as xj
from xinfer_jax import plugins

pytestmark = pytest.mark.oldest


@pytest.fixture
def registries(monkeypatch):
    """Entries that a test adds are gone after it."""
    monkeypatch.setattr(plugins, "_REGISTERED", {})
    yield
    plugins.load.cache_clear()


def test_a_registered_kind_of_rope_turns_queries_and_keys(registries):
    config = xj.from_hf(QWEN)

    def halved(rope, inverse, original, length_B):
        return inverse / 2, 1.0

    assert plugins.load("rope", "halved") is None
    xj.register("rope", "halved", halved)
    assert "halved" in plugins.names("rope")
    changed = dataclasses.replace(config, rope=dataclasses.replace(config.rope, rope_type="halved"))
    linear = dataclasses.replace(
        config, rope=dataclasses.replace(config.rope, rope_type="linear", factor=2.0)
    )
    params = xj.init_params(config, jax.random.key(0), "float32")
    tokens = jnp.array([[3, 5, 7, 11]])
    ours, theirs, plain = (xj.forward(params, c, tokens)[0] for c in (changed, linear, config))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert np.abs(ours - plain).max() > 1e-4


@pytest.mark.parametrize(
    "kind, name, message",
    [
        ("familie", "own", "there is no registry 'familie': use one of"),
        ("device", "memory of mine", "there is no registry 'device'"),
        ("family", "qwen2", "the registry 'family' has 'qwen2' already: choose another name"),
        ("family", 3, "the name of an entry must be a text, got 3"),
    ],
)
def test_wrong_entries_are_rejected(registries, kind, name, message):
    with pytest.raises(xj.InputError, match=message):
        xj.register(kind, name, object())
