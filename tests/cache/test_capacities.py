"""Capacities that are not a multiple of 8: the arrays have more slots, which change nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import CONFIGS, build

import xinfer_jax as xj
from xinfer_jax import kernels_pallas
from xinfer_jax.cache.ring import Ring
from xinfer_jax.families.reading import from_hf
from xinfer_jax.model.forward_parts import hidden_states

pytestmark = [pytest.mark.full, pytest.mark.oldest]

forward = jax.jit(xj.forward, static_argnums=1)


@pytest.fixture(scope="module")
def model():
    return build("qwen2")


def filled_cache(model, capacity, counts):
    """A cache of that capacity after prefilling counts[b] tokens of each row, two at a time."""
    tokens_BT = np.random.RandomState(3).randint(0, 100, (len(counts), 8)).astype(np.int32)
    cache = xj.init_cache(model[1], len(counts), capacity)
    for first in range(0, max(counts), 2):
        left_B = np.clip(np.array(counts, np.int32) - first, 0, 2)
        cache = forward(*model, tokens_BT[:, first : first + 2], cache, left_B)[1]
    return cache


@pytest.mark.parametrize("counts", [[7, 4], [7]], ids=["ragged", "one-row"])
def test_tokens_beyond_the_capacity_are_dropped_and_flagged(model, counts):
    """Seven tokens for five slots: the third call crosses the end, the fourth is beyond it."""
    cache = filled_cache(model, 5, counts)
    enough = filled_cache(model, 8, counts)
    assert cache.capacity == 5 and not isinstance(cache.layers[0], Ring) and cache.reached_B is None
    assert cache.length_B.tolist() == [min(n, 5) for n in counts]
    assert cache.overflow_B.tolist() == [n > 5 for n in counts]
    for full, short in zip((*enough.k, *enough.v), (*cache.k, *cache.v), strict=True):
        np.testing.assert_allclose(short[:, :, :5], full[:, :, :5], atol=1e-5)
        assert short.shape == full.shape and not np.asarray(short[:, :, 5:]).any()
    one_more = np.zeros(len(counts), np.int32)
    step = xj.decode_step(*model, one_more, cache)[1]
    assert step.overflow_B[0] and step.length_B[0] == 5 and not np.asarray(step.k[0][0, :, 5:]).any()


def test_a_full_row_is_saved_and_loaded(model, tmp_path):
    prefix = xj.types.Prefix([[1, 2, 3, 4, 5]], filled_cache(model, 5, [5]))
    xj.save_prefix(*model, prefix, tmp_path / "prefix")
    again = xj.load_prefix(*model, tmp_path / "prefix").cache
    assert again.capacity == 5
    jax.tree.map(np.testing.assert_array_equal, again, prefix.cache)


def test_the_requested_capacity_decides_which_layers_are_rings():
    config = from_hf(CONFIGS["windows-nope-untied"])  # 576 slots for a window of 7
    for capacity, ring in ((570, False), (576, False), (577, True)):
        cache = xj.init_cache(config, 1, capacity)
        rings = [isinstance(layer, Ring) for layer in cache.layers]
        assert rings == [ring and window is not None for window in config.layer_windows]
        assert (cache.reached_B is not None) == ring
        assert [k.shape[2] for k in cache.k] == [576 if is_ring or not ring else 584 for is_ring in rings]


def test_a_decode_step_on_hopper_does_not_copy_the_cache(monkeypatch):
    """Bulk copies need a multiple of 8 slots: else each step would copy a cache of 61 to pad it to 64."""
    config = from_hf(CONFIGS["qwen2"] | dict(head_dim=16))
    params = jax.eval_shape(lambda: xj.init_params(config, jax.random.key(0), "bfloat16"))
    a_card = kernels_pallas.Selection("mosaic", "an imaginary GPU")
    monkeypatch.setattr(kernels_pallas.dispatch, "device_impl", lambda: a_card)

    def pads(capacity):
        cache = jax.eval_shape(lambda: xj.init_cache(config, 2, capacity, "bfloat16"))
        token_BT = jax.ShapeDtypeStruct((2, 1), jnp.int32)
        step = jax.make_jaxpr(lambda *args: hidden_states(args[0], config, *args[1:]))
        padded = [
            eqn.invars[0].aval.shape for eqn in all_equations(step(params, token_BT, cache).jaxpr, "pad")
        ]
        return sum(len(shape) == 4 and 60 < shape[2] for shape in padded), len(padded)

    assert pads(61)[0] == pads(64)[0] == 0 < pads(61)[1]  # queries always are


def all_equations(jaxpr, name):
    """The equations of a jaxpr that use a primitive, also in nested jaxprs."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        for inner in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from all_equations(inner, name)
