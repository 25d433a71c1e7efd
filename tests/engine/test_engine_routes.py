"""Routes of an engine's answers: those that `score` finds, on every path that keys can take."""

import asyncio

import jax
import parity_cases as cases
import pytest
from routed_engines import NAMES, SHAPE, build, check, prompt

import xinfer_jax as xj

pytestmark = pytest.mark.newest

OPTIONS = xj.GenerateOptions(max_tokens=40, sampling=xj.SamplingConfig(temperature=1.0), eos_token_ids=())


@pytest.mark.parametrize(
    "name, how",
    [
        pytest.param(NAMES[0], dict(draft="lookup"), marks=pytest.mark.full),
        pytest.param(NAMES[1], {}, marks=pytest.mark.soak),
    ],
)
def test_answers_have_the_routes_of_their_tokens(name, how):
    """Prompts of several chunks that begin alike, in so few pages that rows are preempted; log-probabilities
    of a prompt; several answers.
    """
    model = build(name)
    engine = xj.Engine(model, **SHAPE | how)
    common = prompt(0, 66)
    asked = [[*common, *prompt(i, 3 * i)] for i in (1, 2)] + [prompt(4, 140)]
    options = [xj.GenerateOptions(max_tokens=180, eos_token_ids=(), n=2), OPTIONS, OPTIONS]
    each = zip(asked, options, (None, None, 1), strict=True)
    requests = [
        engine.submit(ids, own, key=jax.random.key(i), return_routed_experts=True, prompt_logprobs=top)
        for i, (ids, own, top) in enumerate(each)
    ]
    plain = engine.submit(asked[2], OPTIONS, key=jax.random.key(2))
    while engine.load:
        engine.core._pacing.step_seconds = 0.1  # so that a step decodes few tokens
        engine.step()
    for ids, request in zip(asked, requests, strict=True):
        out = request.result()
        for answer, routed_experts in zip(request.answers, out.routed_experts, strict=True):
            check(model, ids, answer)
            assert (routed_experts == answer.routed_experts).all()
    assert engine.stats.hits and engine.stats.preemptions
    assert plain.result().routed_experts is None and plain.answers[0].routed_experts is None
    assert plain.answers[0].tokens == requests[2].answers[0].tokens


@pytest.mark.full
def test_what_has_no_routes():
    model = build(NAMES[0])
    with xj.Engine(model, **SHAPE) as engine:
        ids = prompt(5, 9)
        sampled = asyncio.run(engine.sample(ids, OPTIONS, seed=3, return_routed_experts=True))
        assert sampled.routed_experts.shape == (49, 1, 2) and (sampled.routed_experts[:-1] >= 0).all()
        waiting = engine.submit(ids, xj.GenerateOptions(), return_routed_experts=True, deadline=1e-9)
        assert (waiting.result().routed_experts[0] == -1).all()
    plain = xj.Engine(model, **SHAPE | dict(routed_experts=False))
    with pytest.raises(xj.InputError, match="make it with routed_experts=True"):
        plain.submit(ids, return_routed_experts=True)
    dense = cases.CASES["qwen2-gqa-tied-old"].config
    params = cases.params_from(dense, cases.random_tensors(dense, 3))
    with pytest.raises(xj.InputError, match="this model has none"):
        xj.Engine(xj.Model(params, dense), **SHAPE)
