"""Draft tokens in `decode_loop`: the tokens are those of a loop without them, and acceptance is that of
`generate`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_cases import HEADS, draft_case
from quick import full_except

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

PROMPTS = [[5, 9, 20, 3], [8, 1, 6, 4, 7, 2, 11]]
LENGTHS = np.array([4, 7], np.int32)
TOKENS = np.array([[*row, 0, 0, 0][:7] for row in PROMPTS], np.int32)
SIZE = 12
NONE = np.zeros(0, np.int32)


def history(size=SIZE):
    return jnp.pad(TOKENS, ((0, 0), (0, size)))


def rollout(case, draft, temperature=0.0, eos=NONE, capacity=40, loop=None):
    """Runs a rollout in a jit, whose parameters and temperature are traced."""
    config = case.model.config

    @jax.jit
    def run(params, own, temperature):
        given = dataclasses.replace(draft, params=own) if hasattr(draft, "params") else draft
        cache = xj.init_cache(config, 2, capacity)
        args = params, config, TOKENS, LENGTHS, cache
        drafting = None
        if draft is None:
            logits_BV, cache = xj.prefill(*args)
        else:
            logits_BV, cache, drafting = xj.prefill_with_draft(*args, given)
        sampling = xj.SamplingConfig(temperature=temperature)
        return xj.decode_loop(
            params, config, logits_BV, cache, jax.random.key(5), sampling, eos, SIZE, history_BS=history(),
            drafting=drafting, **loop or {},
        )  # fmt: skip

    return run(case.model.params, getattr(draft, "params", None), temperature)


def assert_equal(out, plain):
    np.testing.assert_array_equal(out.tokens_BT, plain.tokens_BT)
    np.testing.assert_array_equal(out.length_B, plain.length_B)
    np.testing.assert_array_equal(out.finished_B, plain.finished_B)
    np.testing.assert_array_equal(out.at_capacity_B, plain.at_capacity_B)
    np.testing.assert_array_equal(out.cache.length_B, plain.cache.length_B)
    np.testing.assert_allclose(out.logprobs_BT, plain.logprobs_BT, atol=1e-4)
    assert not out.cache.overflow_B.any()
    assert (out.passes_B + out.accepted_BT.sum(1) + 1 >= out.length_B).all()
    assert plain.passes_B is None and plain.accepted_BT is None


@pytest.mark.parametrize("name", full_except((), HEADS, soak={*HEADS} - {"mtp"}))
def test_tokens_and_acceptance(name):
    case = draft_case(name)
    model = case.model
    drafted = rollout(case, case.draft)
    assert_equal(drafted, rollout(case, None))
    options = xj.GenerateOptions(max_tokens=SIZE, eos_token_ids=(), draft=case.draft)
    out = xj.generate(model.params, model.config, PROMPTS, options)
    assert drafted.tokens_BT.tolist() == out.tokens
    assert drafted.accepted_BT.tolist() == out.stats.accepted
    assert drafted.passes_B.tolist() == out.stats.passes


def sevens(history_BS, length_B, count):
    return jnp.full((len(length_B), count), 7)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["itself", "lookup", "function"])
def test_other_drafts(name):
    case = draft_case("mtp")
    draft = dict(itself=case.model, lookup="lookup", function=sevens)[name]
    drafted = rollout(case, draft)
    assert_equal(drafted, rollout(case, None))
    if name == "itself":  # the first token comes from the prompts
        assert drafted.accepted_BT.tolist() == [[3, 3, 2]] * 2 and drafted.passes_B.tolist() == [3, 3]


@pytest.mark.soak
def test_sampled_rows_that_end():
    case = draft_case("mtp")
    eos = np.asarray(rollout(case, None, 0.8).tokens_BT[0, 5:6])
    args = dict(temperature=0.8, eos=eos, loop=dict(logprobs=2, return_support=True))
    drafted, plain = (rollout(case, draft, **args) for draft in ("mtp", None))
    assert_equal(drafted, plain)
    assert plain.length_B[0] <= 6
    np.testing.assert_array_equal(drafted.alternatives.support_BTW, plain.alternatives.support_BTW)
    np.testing.assert_allclose(
        drafted.alternatives.processed_logprobs_BT, plain.alternatives.processed_logprobs_BT, atol=1e-3
    )


@pytest.mark.soak
def test_stop_is_called_after_each_token():
    case = draft_case("mtp")
    stop = dict(stop=lambda state: state.length_B >= jnp.array([3, 8]))
    drafted, plain = (rollout(case, draft, loop=stop) for draft in (case.model, None))
    assert_equal(drafted, plain)
    assert drafted.length_B.tolist() == [3, 8] and drafted.passes_B.tolist() == [1, 2]


@pytest.mark.soak
def test_the_end_of_the_cache():
    case = draft_case("mtp")
    drafted, plain = (rollout(case, draft, capacity=12) for draft in ("mtp", None))
    assert_equal(drafted, plain)
    assert plain.length_B.tolist() == [9, 6] and plain.at_capacity_B.all()


@pytest.mark.soak
def test_processors_and_grammars():
    case = draft_case("mtp")

    def apply(state, logits_BV, context):
        return logits_BV - 2.0 * context.seen_BV

    processors = [(xj.LogitsProcessor(None, apply), np.zeros(2))]
    drafted, plain = (rollout(case, draft, loop=dict(processors=processors)) for draft in ("mtp", None))
    assert_equal(drafted, plain)


def test_invalid_arguments():
    case = draft_case("mtp")
    params, config = case.model.params, case.model.config
    cache = xj.init_cache(config, 2, 40)
    args = params, config, TOKENS, LENGTHS
    unread = jax.eval_shape(lambda: xj.prefill_with_draft(*args, cache, "mtp"))
    logits_BV, cache, drafting = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), unread)
    sampled = jax.random.key(5), xj.SamplingConfig(), NONE, SIZE

    def loop(**given):
        settings = dict(history_BS=history(), drafting=drafting) | given
        xj.decode_loop(params, config, logits_BV, cache, *sampled, **settings)

    for given, named in (
        (dict(history_BS=None), "drafting needs history_BS"),
        (dict(history_BS=history(2)), "history_BS has space for 9 tokens of a row"),
        (dict(drafting="mtp"), "drafting must come from prefill_with_draft"),
        (dict(return_routed_experts=True), "return_routed_experts cannot be combined with drafting"),
        (dict(taps={0: xj.Tap.steer(np.zeros(config.hidden_size))}), "taps cannot be combined with drafting"),
    ):
        with pytest.raises(xj.InputError, match=named):
            loop(**given)
    one = jax.tree.map(lambda x: x[:1], drafting.unread)
    with pytest.raises(xj.InputError, match="drafting has 1 rows, and the cache 2"):
        loop(drafting=dataclasses.replace(drafting, cache=None, unread=one))
    for draft, tokens, named in (
        ("mtp", 17, "draft_tokens must be"),
        ("other", 3, "draft must be a model"),
        (xj.load_model(), 3, "the draft's vocabulary of"),
    ):
        with pytest.raises(xj.InputError, match=named):
            xj.prefill_with_draft(*args, xj.init_cache(config, 2, 40), draft, tokens)
    filled = dataclasses.replace(xj.init_cache(config, 2, 40), length_B=jnp.array([1, 0]))
    with pytest.raises(xj.InputError, match="needs an empty cache"):
        xj.prefill_with_draft(*args, filled, "mtp")
