"""Speculative decoding: the tokens are those of plain decoding, greedy or sampled, with any draft; accepted
draft tokens are counted.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.generation.speculation import prompt_lookup

pytestmark = pytest.mark.oldest

PROMPTS = ([1, 2, 3, 4, 5], [7, 8, 9, 7, 8, 9, 7], [30])
MIXED = (
    xj.SamplingConfig(),
    xj.SamplingConfig(0.8, 40, 0.95, 1.2, frequency_penalty=0.3),
    xj.SamplingConfig(temperature=1.0, no_repeat_ngram_size=3, min_p=0.02),
)


@pytest.fixture(scope="module")
def model():
    return tiny.shallow_model(2, dtype="float32")


@pytest.fixture(scope="module")
def drafts(model):
    """Drafts: the model itself, a smaller one, an unrelated one, prompt look-up, and a function."""
    small = tiny.shallow_model(1, dtype="float32")
    random = dataclasses.replace(model, params=xj.init_params(model.config, jax.random.key(9)))
    return {"itself": model, "small": small, "random": random, "lookup": "lookup", "function": sevens}


def sevens(history_BS, length_B, count):
    return jnp.full((len(length_B), count), 7)


def run(model, prompts=PROMPTS, **given) -> xj.GenerateOutput:
    options = xj.GenerateOptions(**dict(max_new_tokens=24, eos_token_ids=()) | given)
    return xj.generate(model.params, model.config, prompts, options, key=jax.random.key(4))


@pytest.mark.full
@pytest.mark.parametrize("draft", ["lookup", "small", "function"])
def test_tokens_equal_plain_decoding(model, drafts, draft):
    eos = tuple(run(model).tokens[0][9:10])
    for settings in (MIXED,) if draft == "lookup" else (xj.SamplingConfig(),):
        given = dict(sampling=settings, eos_token_ids=eos, logprobs=2)
        plain = run(model, **given)
        speculated = run(model, draft=drafts[draft], **given)
        assert speculated.tokens == plain.tokens and speculated.finish_reason == plain.finish_reason
        np.testing.assert_allclose(sum(speculated.logprobs, []), sum(plain.logprobs, []), atol=1e-4)
        for a, b in zip(sum(speculated.alternatives, []), sum(plain.alternatives, []), strict=True):
            assert a.id == b.id
            np.testing.assert_allclose(a.processed_logprob, b.processed_logprob, atol=1e-3)
        for row, rate, passes in zip(
            speculated.logprobs, speculated.stats.acceptance, speculated.stats.passes, strict=True
        ):
            assert 0 <= rate <= 1 and passes <= len(row) - 1 <= passes * 4


@pytest.mark.full
def test_a_draft_that_is_always_accepted(model, drafts):
    """Draft tokens are sampled with the same noise. So those of the model itself are always accepted, if the
    settings do not depend on earlier tokens.
    """
    settings = [xj.SamplingConfig(), xj.SamplingConfig(temperature=1.0), xj.SamplingConfig(0.7, 20, 0.9)]
    out = run(model, sampling=settings, draft=drafts["itself"], draft_tokens=4, max_new_tokens=21)
    assert out.stats.acceptance == [1.0] * 3 and out.stats.passes == [4] * 3
    wrong = run(model, sampling=settings, draft=drafts["random"], draft_tokens=4, max_new_tokens=21)
    assert max(wrong.stats.acceptance) < 0.2


@pytest.mark.full
@pytest.mark.parametrize("draft", ["lookup"])
def test_a_row_of_a_batch_is_the_row_alone_streamed_and_shared(model, drafts, draft):
    keys = jax.random.split(jax.random.key(1), 2)
    given = dict(
        max_new_tokens=16, eos_token_ids=(), draft=drafts[draft], sampling=xj.SamplingConfig(temperature=0.9)
    )
    options = xj.GenerateOptions(**given)
    batch = xj.generate(model.params, model.config, PROMPTS[:2], options, key=keys)
    for i in range(2):
        steps = xj.stream(model.params, model.config, PROMPTS[i : i + 1], options, key=keys[i : i + 1])
        assert [ids[0] for ids in steps] == batch.tokens[i]
    several, plain = (run(model, PROMPTS[:2], **given | dict(draft=d, n=2)) for d in (drafts[draft], None))
    assert several.tokens == plain.tokens


@pytest.mark.full
def test_sampled_tokens_follow_the_distribution(model, drafts):
    """The second token's frequencies over many keys, given the first: those of the model's own softmax."""
    rows = 512
    prompt = PROMPTS[0]
    settings = xj.SamplingConfig(temperature=0.7, top_k=4)
    first = run(model, [prompt]).tokens[0][0]
    options = xj.GenerateOptions(2, settings, eos_token_ids=(), draft=drafts["small"])
    out = xj.generate(model.params, model.config, [prompt + [first]] * rows, options, key=jax.random.key(8))
    logits_V = xj.forward(model.params, model.config, jnp.array([prompt + [first]]))[0][0, -1]
    best = np.argsort(-np.asarray(logits_V))[:4]
    share = np.asarray(jax.nn.softmax(logits_V[best] / 0.7))
    drawn = np.array([[row[0] == b for b in best] for row in out.tokens]).mean(0)
    assert np.all(np.abs(drawn - share) < 5 * np.sqrt(share * (1 - share) / rows) + 1e-3)


def test_prompt_lookup_continues_the_last_repetition():
    history = np.zeros((4, 16), np.int32)
    rows = ([5, 6, 7, 8, 5, 6], [1, 2, 1, 3, 1], [4, 4, 4], [9])
    for row, ids in zip(history, rows, strict=True):
        row[: len(ids)] = ids
    drafts_BT = np.asarray(prompt_lookup(jnp.array(history), jnp.array([len(row) for row in rows]), 3))
    assert drafts_BT[0].tolist() == [7, 8, 5]
    assert drafts_BT[1].tolist() == [3, 1, 3]  # of two places the later; it runs into the end and repeats
    assert drafts_BT[2].tolist() == [4, 4, 4]


def test_a_draft_with_another_vocabulary_raises(model):
    draft = dataclasses.replace(model, config=dataclasses.replace(model.config, vocab_size=7))
    with pytest.raises(xj.InputError, match="the draft's vocabulary of 7 is not the model's"):
        run(model, draft=draft)
