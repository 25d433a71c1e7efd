"""Sampling masks of an engine's answers: those of `generate`, with which `score` gives `processed`."""

import asyncio

import jax
import numpy as np
import parity_cases as cases
import pytest

import xinfer_jax as xj

CONFIG = cases.Case(cases.CASES["qwen2-gqa-tied-old"].hf | dict(num_hidden_layers=1)).config
PARAMS = cases.params_from(CONFIG, cases.random_tensors(CONFIG, 3))
MODEL = xj.Model(PARAMS, CONFIG)
SHAPE = dict(rows=2, capacity=128, pages=8, chunk=64)
OPTIONS = xj.GenerateOptions(
    max_tokens=9, sampling=xj.SamplingConfig(temperature=0.7, top_k=4), eos_token_ids=()
)
IDS = [5, 6, 7]
score = jax.jit(xj.score, static_argnums=1)


@pytest.mark.parametrize("how", [{}, pytest.param(dict(draft="lookup"), marks=pytest.mark.soak)], ids=len)
def test_masks_of_answers(how):
    with xj.Engine(MODEL, **SHAPE, **how, support=True) as engine:
        key = jax.random.key(3)
        asked = engine.submit(IDS, OPTIONS, key=key, return_support=True)
        plain = engine.submit(IDS, OPTIONS, key=key, processed_logprobs=True)
        (answer,) = asked.answers
        out = asked.result()
        assert plain.result().support is None and plain.answers[0].support is None
        assert (
            plain.answers[0].tokens == answer.tokens
            and plain.answers[0].processed_logprobs == answer.processed_logprobs
        )
        sampled = asyncio.run(engine.sample(IDS, OPTIONS, seed=3, return_support=True))
    wanted = xj.generate(
        PARAMS, CONFIG, [IDS], xj.GenerateOptions(**vars(OPTIONS) | dict(support=True)), key=key
    )
    assert wanted.tokens == out.tokens
    np.testing.assert_array_equal(out.support[0], wanted.support[0])
    np.testing.assert_array_equal(sampled.support, wanted.support[0])
    assert out.support[0].dtype == np.uint32
    tokens = np.array([[*IDS, *sampled.tokens_T]])
    support = np.pad(sampled.support, ((len(IDS), 0), (0, 0)))[None]
    found = score(PARAMS, CONFIG, tokens, temperature=0.7, support=support).logprobs_BT
    np.testing.assert_allclose(found[0, len(IDS) - 1 :], sampled.processed_logprobs_T, atol=1e-5)


def test_masks_end_with_the_tokens_before_a_stop_string(good):
    model = xj.load_model(good)
    options = xj.GenerateOptions(
        max_tokens=20, sampling=xj.SamplingConfig(temperature=1.0, top_k=3), eos_token_ids=()
    )
    with xj.Engine(model, **SHAPE, support=True) as engine:
        key = jax.random.key(0)
        whole = engine.submit([5, 6], options, key=key, return_support=True).result()
        text = model.tokenizer.decode(whole.tokens[0][3:6])
        stopping = xj.GenerateOptions(**vars(options) | dict(stop_strings=(text,)))
        out = engine.submit([5, 6], stopping, key=key, return_support=True).result()
    assert 0 < len(out.support[0]) == len(out.logprobs[0]) < 20
    np.testing.assert_array_equal(out.support[0], whole.support[0][: len(out.support[0])])


def test_what_has_no_masks():
    with xj.Engine(MODEL, **SHAPE) as engine:
        with pytest.raises(xj.InputError, match="make it with support=True"):
            engine.submit(IDS, OPTIONS, return_support=True)
        options = xj.GenerateOptions(max_tokens=3, support=True)
        with pytest.raises(xj.InputError, match="support=True is not for a request: give return_support"):
            engine.submit(IDS, options)
