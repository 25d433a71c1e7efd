"""Draft heads in calls and engines: the tokens are those of plain decoding, and each draft token is the one
that the head drafts after the certain tokens alone, so acceptance is known to the token.
"""

import jax
import numpy as np
import pytest
from draft_cases import HEADS, draft_case, expected_accepted, prompts
from quick import full_except

import xinfer_jax as xj
from xinfer_jax.cache.page_size import PAGE_SIZE

pytestmark = pytest.mark.oldest

SAMPLED = xj.SamplingConfig(temperature=1.0, top_p=0.95, repetition_penalty=1.1)
DRAFTS = 3
# The heads of CI: others have the same path through calls and engines.
CI = ("mtp", "dspark")
each_head = pytest.mark.parametrize("name", full_except((), HEADS, soak={*HEADS} - {*CI}))
COUNTS = [12, pytest.param(200, marks=pytest.mark.soak)]  # of prompts


def options(**given):
    return xj.GenerateOptions(**dict(max_tokens=24, eos_token_ids=(), draft_tokens=DRAFTS) | given)


def generate(case, ids, **given):
    model = case.model
    key = jax.random.key(3) if "sampling" in given else None
    return xj.generate(model.params, model.config, ids, options(**given), key=key)


def make_engine(case, draft, **given):
    settings = dict(rows=4, capacity=256, chunk=64, draft=draft, draft_tokens=DRAFTS)
    return xj.Engine(case.model, **settings | given)


@each_head
@pytest.mark.parametrize("count", COUNTS)
def test_calls_give_the_tokens_of_plain_decoding(name, count):
    case = draft_case(name)
    ids = prompts(count, case.model.config.vocab_size)
    plain = generate(case, ids)
    drafted = generate(case, ids, draft=case.draft)
    assert drafted.tokens == plain.tokens
    np.testing.assert_allclose(drafted.logprobs, plain.logprobs, atol=1e-4)
    sampled = [generate(case, ids, sampling=SAMPLED, draft=draft) for draft in (None, case.draft)]
    assert sampled[0].tokens == sampled[1].tokens
    rows = 3 if count < 100 else 40
    expected = [
        expected_accepted(case, prompt, tokens, DRAFTS)
        for prompt, tokens in zip(ids[:rows], plain.tokens, strict=False)
    ]
    assert drafted.stats.accepted[:rows] == expected
    assert np.sum(drafted.stats.accepted) > 0, "no draft token was right by chance"
    passes = [
        len(tokens) - 1 - sum(row) for tokens, row in zip(plain.tokens, drafted.stats.accepted, strict=True)
    ]
    assert drafted.stats.passes == passes


@pytest.mark.parametrize("name", full_except((), HEADS, soak={*HEADS} - {"mtp"}))
@pytest.mark.parametrize("count", COUNTS)
def test_engines_give_the_same_bits_alone_and_together(name, count):
    """Prompts share as many tokens as without drafts: all pages of common beginnings."""
    case = draft_case(name)
    ids = prompts(count, case.model.config.vocab_size)
    plain = generate(case, ids)
    with make_engine(case, case.draft, pages=20 * count) as engine:
        together = engine.generate(ids, options())
        stats = engine.stats
        alone = [engine.generate([row], options())[0] for row in ids[:12]]
    assert stats.hits == PAGE_SIZE * (count // 3 - 1)
    assert [out.tokens[0] for out in together] == plain.tokens
    accepted = [out.stats.accepted[0] for out in together]
    assert np.sum(accepted, 0).tolist() == stats.accepted
    assert stats.drafted == DRAFTS * stats.passes
    assert accepted == generate(case, ids, draft=case.draft).stats.accepted
    for one, other in zip(alone, together, strict=False):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs
        assert one.stats.accepted == other.stats.accepted


@pytest.mark.parametrize("name", full_except((), HEADS, soak={*HEADS} - {"mtp"}))
def test_rows_that_are_preempted_and_weights_that_change(name):
    case = draft_case(name)
    config = case.model.config
    ids = prompts(9, config.vocab_size)
    long = options(max_tokens=100)
    plain = generate(case, ids, max_tokens=100)
    drafted = generate(case, ids, max_tokens=100, draft=case.draft)
    params = jax.tree.map(lambda x: x * 1.1 if x.ndim > 1 else x, case.model.params)
    with make_engine(case, case.draft, pages=9) as engine:
        outs = engine.generate(ids, long)
        assert engine.stats.preemptions
        requests = [engine.submit(row, long) for row in ids]
        next(iter(requests[0]))
        engine.update(params, mode="recompute")
        changed = [request.result() for request in requests]
        later = engine.generate(ids, options())
    assert [out.tokens[0] for out in outs] == plain.tokens
    assert [out.stats.accepted[0] for out in outs] == drafted.stats.accepted
    new = generate(case._replace(model=xj.Model(params, config)), ids)
    assert [out.tokens[0] for out in later] == new.tokens
    # The last row had not begun, and the first one had a token of the old weights.
    assert changed[-1].tokens[0][:24] == new.tokens[-1]
    assert changed[0].tokens[0][0] == plain.tokens[0][0]
