"""A request gets the bits that it gets alone in an engine of the same shape."""

import random

import pytest
from soak import engine_requests

import xinfer_jax as xj

pytestmark = [pytest.mark.full, pytest.mark.oldest]


def test_a_request_gets_the_bits_it_gets_alone():
    """40 requests of all kinds, in so few pages and such short time slices that rows are preempted.
    scripts/soak_engine.py has other families.
    """
    rng = random.Random(3)
    small = engine_requests.random_model("gemma3", None)
    shape = dict(rows=4, capacity=512, pages=9, chunk=128, time_slice=1e-3)
    asked = engine_requests.draw(rng, 512, 40, 200, shape)
    found = engine_requests.check(small, asked, shape, rng, 0, 2, 2e-4)
    assert (found["differ"], found["differ_from_generate"]) == (0, 0)
    assert found["preemptions"] > 0 and found["hits"] > 0, "no drawn request was preempted, or shared a page"
    assert sum(found["pages_left"]) == 8 and found["pages_left"][0] == 0


def test_prompt_lookup_gives_the_same_tokens():
    model = xj.load_model()
    ids = xj.encode_prompt(model, "Count: 1 2 3 4 5 1 2 3 4 5 1 2 3")
    options = xj.GenerateOptions(max_tokens=40, eos_token_ids=())
    engine = xj.Engine(model, rows=3, capacity=512, chunk=128, draft="lookup", draft_tokens=2)
    one = engine.submit(ids, options)
    other = engine.submit([5] * 70, options)
    out = one.result()
    assert out.tokens == xj.generate(model.params, model.config, [ids], options).tokens
    assert out.stats.passes[0] < 40 and 0 < out.stats.acceptance[0] <= 1
    other.result()
    assert engine.submit([5] * 70, options).result().logprobs == other.result().logprobs
    engine.core.scheduler.time_slice = 1e-9
    prompts = [ids, [5] * 70, ids[1:], [7] * 70, ids[2:]]
    requests = [engine.submit(prompt, options, client=str(i)) for i, prompt in enumerate(prompts)]
    found = [request.result().logprobs for request in requests]
    assert found == [engine.submit(prompt, options).result().logprobs for prompt in prompts]
    assert engine.stats.preemptions > 5
