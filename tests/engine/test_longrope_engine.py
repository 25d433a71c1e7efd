"""Engines of longrope models: rows with the short factors beside rows with the long ones."""

import dataclasses

import numpy as np
import parity_cases as cases
import pytest

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf

pytestmark = pytest.mark.oldest

SWITCH = 96  # tokens
SHAPE = dict(rows=3, capacity=256, chunk=64)


@pytest.fixture(scope="module")
def model() -> xj.Model:
    hf = cases.CASES["phi3-longrope-both-partial"].hf
    config = from_hf(hf | dict(num_hidden_layers=2, original_max_position_embeddings=SWITCH))
    params = cases.params_from(config, cases.random_tensors(config, 1))
    return xj.Model(params, config)


@pytest.mark.full
@pytest.mark.parametrize("draft", [None, "lookup"])
def test_rows_of_both_sides_get_what_they_get_alone(model, draft):
    """Prompts that begin alike: pages of one side are no hits of the other. With look-up one program has the
    whole model.
    """
    ids = np.random.RandomState(0).randint(3, cases.VOCAB, 200).tolist()
    options = xj.GenerateOptions(max_tokens=20, eos_token_ids=())
    prompts = [ids[:70], ids[:150], ids[:74], ids[:100], ids[100:110], ids[:160]]
    with xj.Engine(model, **SHAPE, draft=draft) as engine:
        requests = [engine.submit(prompt, options) for prompt in prompts]
        together = [request.result() for request in requests]
        engine.update(model.params)  # which empties the prefix cache
        alone = []
        for prompt in prompts:
            alone.append(engine.submit(prompt, options).result())
        scored = engine.submit(prompts[1], options, prompt_logprobs=0)
        assert scored.result().tokens == alone[1].tokens
        found = [token.logprob for token in scored.prompt_logprobs]
        for new in (23, 40):  # a sequence does not go from one side to the other
            with pytest.raises(xj.InputError, match=f"longrope.*{SWITCH}.*between 74 and {74 + new}"):
                engine.submit(prompts[2], dataclasses.replace(options, max_tokens=new))
    assert [out.logprobs for out in together] == [out.logprobs for out in alone]
    assert [out.stats.reused_tokens for out in alone] == [0, 0, 64, 64, 0, 128]
    for prompt, out in zip(prompts, alone, strict=True):
        assert out.tokens == xj.generate(model.params, model.config, [prompt], options).tokens
    exact = xj.score(model.params, model.config, np.array(prompts[1:2])).logprobs_BT[0]
    np.testing.assert_allclose(found[-len(exact) :], exact, atol=1e-4)
