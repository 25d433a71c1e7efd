"""Attention of draft heads, in which no token sees slot 0: by kernels and in plain jnp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xinfer_jax as xj
from xinfer_jax.cache.contiguous import Contiguous
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.mixers.attention import FirstKey, Scoring, VisibleKeys, attention

START_B = np.array([70, 0, 1], np.int32)


def attended(tokens: int, impl: str | None, first_BT, unseen: float = 1.0) -> np.ndarray:
    """Returns the attention of tokens after rows of `START_B` tokens. unseen: a factor of slot 0."""
    draws = np.random.default_rng(tokens)
    q_BTNH = jnp.asarray(draws.standard_normal((3, tokens, 4, 16)), jnp.float32)
    k, v = (
        jnp.asarray(draws.standard_normal((3, 2, 128, 16)), jnp.float32).at[:, :, 0].mul(unseen) for _ in "kv"
    )
    visible = VisibleKeys(START_B, START_B + tokens, first_BT)
    run_config = RunConfig(impl=impl)
    call = jax.jit(lambda q, kv: attention(q, kv, visible, Scoring(0.25), run_config=run_config))
    return np.asarray(call(q_BTNH, Contiguous(k, v, None, 128)))


@pytest.mark.parametrize("impl", ["xla", None, "interpret"])
@pytest.mark.parametrize("tokens", [2, 20])
def test_the_first_key_equals_an_array_of_first_keys(tokens, impl):
    first_BT = jnp.minimum(START_B[:, None] + jnp.arange(tokens), 1)
    want = attended(tokens, "xla", first_BT)
    np.testing.assert_allclose(attended(tokens, impl, FirstKey(1)), want, rtol=1e-5, atol=1e-6)


def test_only_slot_0_itself_depends_on_slot_0():
    for tokens in (1, 3):
        own = attended(tokens, None, FirstKey(1))
        other = attended(tokens, None, FirstKey(1), unseen=-3.0)
        differs_BT = (own != other).any((2, 3))
        position_BT = START_B[:, None] + np.arange(tokens)
        np.testing.assert_array_equal(differs_BT, position_BT == 0)


@pytest.mark.unit
def test_the_report_of_kernels_has_the_layer_of_a_head():
    model = xj.load_model(draft_head=True)
    used = xj.kernels_used(model.params, model.config)
    assert used["draft_head_decode_attention"].impl == used["decode_attention"].impl
    plain = xj.kernels_used(xj.load_model().params, xj.load_model().config)
    assert {*used} - {*plain} == {"draft_head_decode_attention", "draft_head_prefill_attention"}
