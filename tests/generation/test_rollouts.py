"""Rollouts for training: recorded log-probabilities, limits of rows, prompts and answers in one row, answers
that go on.
"""

import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest

import xinfer_jax as xj

CONFIG = cases.Case(cases.CASES["qwen2-gqa-tied-old"].hf | dict(num_hidden_layers=1)).config
PARAMS = cases.params_from(CONFIG, cases.random_tensors(CONFIG, 3))
PROMPTS = np.array([[5, 6, 7, 0], [8, 9, 0, 0]], np.int32)
LENGTHS = np.array([3, 2], np.int32)
NONE = np.zeros(0, np.int32)
SAMPLING = xj.SamplingConfig(temperature=0.7, top_k=5)


def rollout(limit, capacity=32, **how):
    keys = jax.random.split(jax.random.key(1), 2)
    cache = xj.init_cache(CONFIG, 2, capacity)
    logits_BV, cache = xj.prefill(PARAMS, CONFIG, PROMPTS, LENGTHS, cache)
    return xj.decode_loop(PARAMS, CONFIG, logits_BV, cache, keys, SAMPLING, NONE, limit, **how)


@pytest.fixture(scope="module")
def recorded():
    return jax.jit(lambda: rollout(6, logprobs=5))()


def test_recorded_log_probabilities_are_those_that_were_sampled_from(recorded):
    out = recorded
    packed = xj.rollouts.pack_rollout(PROMPTS, LENGTHS, out)
    assert packed.num_tokens_B.tolist() == [9, 8] and packed.mask_BT.sum(1).tolist() == [6, 6]
    for row in range(2):
        n = LENGTHS[row]
        both = [*PROMPTS[row, :n], *out.tokens_BT[row]]
        assert packed.tokens_BT[row, : len(both)].tolist() == both
    scores_BT = xj.score(PARAMS, CONFIG, packed.tokens_BT, packed.num_tokens_B).logprobs_BT
    np.testing.assert_allclose(scores_BT[packed.mask_BT], out.logprobs_BT.ravel(), atol=1e-5)
    logits_BTV, _ = jax.jit(xj.forward, static_argnums=1)(PARAMS, CONFIG, packed.tokens_BT)
    best_BTk = jax.lax.top_k(logits_BTV[:, :-1] / 0.7, 5)[0]
    kept_BT = logits_BTV[:, :-1] / 0.7
    target_BT = jnp.take_along_axis(kept_BT, packed.tokens_BT[:, 1:, None], -1)[..., 0]
    want_BT = jnp.where(packed.mask_BT, target_BT - jax.nn.logsumexp(best_BTk, -1), 0)
    np.testing.assert_allclose(packed.logprobs_BT, want_BT, atol=1e-5)
    assert out.alternatives.id_BTA.shape == (2, 6, 5)
    assert (out.alternatives.processed_id_BTA == out.tokens_BT[..., None]).any(-1).all()


@pytest.mark.full
@pytest.mark.oldest
def test_each_row_has_its_limit():
    alone = rollout(6)
    out = rollout(np.array([2, 6], np.int32))
    assert out.length_B.tolist() == [2, 6]
    np.testing.assert_array_equal(out.tokens_BT[0], [*alone.tokens_BT[0, :2], 0, 0, 0, 0])
    np.testing.assert_array_equal(out.tokens_BT[1], alone.tokens_BT[1])
    clipped = rollout(9, output_size=5)  # which is the most
    assert clipped.tokens_BT.shape == (2, 5) and clipped.length_B.tolist() == [5, 5]
    traced = jax.jit(lambda limit_B: rollout(limit_B, output_size=6))(np.array([2, 6]))
    np.testing.assert_array_equal(traced.tokens_BT, out.tokens_BT)
    for bad, message in ((np.array([0, 6]), "max_tokens: 0"), (np.array([1, 2, 3]), "max_tokens")):
        with pytest.raises(xj.InputError, match=message):
            rollout(bad)


def test_bad_arguments_of_packing_and_going_on_raise(recorded):
    out = recorded
    for how, message in (
        ((PROMPTS, LENGTHS + 2, out), "num_tokens_B: 5 is outside 0 … 4"),
        ((PROMPTS, LENGTHS, out, np.zeros((2, 4, 1, 2), int)), "the answer has no routed experts"),
        ((PROMPTS.tolist(), LENGTHS, out), "prompt_BT must be an array of integers"),
    ):
        with pytest.raises(xj.InputError, match=message):
            xj.rollouts.pack_rollout(*how)
    with pytest.raises(xj.InputError, match="num_tokens_B: -1 is outside 0 … 4"):
        xj.rollouts.continue_rows(PARAMS, CONFIG, out, PROMPTS, np.array([1, -1]))


@pytest.mark.full
@pytest.mark.oldest
def test_a_row_that_fills_its_cache_ends():
    whole = rollout(8)
    out = jax.jit(lambda: rollout(8, capacity=6))()
    assert out.length_B.tolist() == [4, 5]  # the last token is not in the cache
    assert out.at_capacity_B.tolist() == [True, True] and not out.cache.overflow_B.any()
    for row, n in enumerate(out.length_B):
        np.testing.assert_array_equal(out.tokens_BT[row, :n], whole.tokens_BT[row, :n])
    assert not whole.at_capacity_B.any()


@pytest.mark.full
@pytest.mark.oldest
def test_answers_go_on_after_the_result_of_a_tool():
    out = rollout(3)
    result_BT = np.array([[1, 2], [3, 0]], np.int32)
    count_B = np.array([2, 1], np.int32)
    logits_BV, cache = xj.rollouts.continue_rows(PARAMS, CONFIG, out, result_BT, count_B)
    packed = xj.rollouts.pack_rollout(PROMPTS, LENGTHS, out)
    for row in range(2):
        text = [*packed.tokens_BT[row, : packed.num_tokens_B[row]], *result_BT[row, : count_B[row]]]
        alone, _ = xj.forward(PARAMS, CONFIG, np.array([text], np.int32))
        np.testing.assert_allclose(logits_BV[row], alone[0, -1], atol=1e-5)
        assert cache.length_B[row] == len(text)


@pytest.mark.full
@pytest.mark.oldest
def test_repeated_rows_and_inputs_in_place_of_ids():
    cache = xj.init_cache(CONFIG, 2, 32)
    inputs_BTD = xj.embed_tokens(PARAMS, CONFIG, PROMPTS)
    zeros = np.zeros_like(PROMPTS)
    logits_BV, cache = xj.prefill(PARAMS, CONFIG, zeros, LENGTHS, cache, inputs_BTD=inputs_BTD)
    want_BV, _ = xj.prefill(PARAMS, CONFIG, PROMPTS, LENGTHS, xj.init_cache(CONFIG, 2, 32))
    np.testing.assert_allclose(logits_BV, want_BV, atol=1e-6)
    three = cache.repeat_rows(3)
    assert three.length_B.tolist() == [3, 3, 3, 2, 2, 2]
    step_BV, _ = xj.decode_step(PARAMS, CONFIG, np.full(6, 4, np.int32), three)
    alone_BV, _ = xj.decode_step(PARAMS, CONFIG, np.full(2, 4, np.int32), cache)
    np.testing.assert_allclose(step_BV, np.repeat(alone_BV, 3, 0), atol=1e-5)
