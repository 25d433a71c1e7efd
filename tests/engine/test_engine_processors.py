"""An engine with logits processors of a caller: bits beside other rows, states, drafts, bad input."""

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import full_except
from soak import engine_requests
from soak.engine_requests import answer_of as answer

import xinfer_jax as xj
from xinfer_jax.engine.held_processors import HeldProcessors, repeated

pytestmark = pytest.mark.oldest

SAMPLED = xj.SamplingConfig(1.0, top_p=0.95)
SHAPE = dict(rows=3, capacity=384, chunk=128, pages=24)
PROMPT = [i % 50 + 3 for i in range(150)]
NEW = 30


def count(state, token_B, context):
    return state | dict(count=state["count"].at[jnp.arange(len(token_B)), token_B].add(1))


PRESENCE = xj.Processor(
    lambda penalty_B, context: dict(penalty=penalty_B, count=jnp.zeros(context.seen_BV.shape, int)),
    lambda state, logits_BV, context: logits_BV - state["penalty"][:, None] * (state["count"] > 0),
    count,
)
NOISE = xj.Processor(
    None,
    lambda s, logits_BV, context: (
        logits_BV
        + s["by"][:, None] * jax.vmap(lambda k: jax.random.normal(k, logits_BV.shape[1:]))(context.key_B)
    ),
    last=True,
)
PROCESSORS = dict(presence=(PRESENCE, 0.0), noise=(NOISE, dict(by=1.0)))
NAMED = [None, dict(presence=2.0), dict(noise=None), dict(noise=dict(by=3)), dict(presence=30.0, noise=None)]


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return engine_requests.random_model("qwen2", None)


@pytest.fixture(scope="module")
def engine(model):
    return xj.Engine(model, **SHAPE, processors=PROCESSORS, warm_up=True)


def submit(engine, named, prompt=PROMPT, seed=0, new=NEW, sampling=SAMPLED, **how) -> xj.Request:
    options = xj.GenerateOptions(new, sampling, eos_token_ids=(), processors=named)
    return engine.submit(prompt, options, key=jax.random.key(seed), **how)


def generated(model, named, **how):
    given = []
    for name, arguments in (named or {}).items():
        processor, default = PROCESSORS[name]
        given.append((processor, default if arguments is None else arguments))
    options = xj.GenerateOptions(NEW, SAMPLED, eos_token_ids=(), processors=given or None, **how)
    return xj.generate(model.params, model.config, [PROMPT], options, key=jax.random.key(0)).tokens[0]


@pytest.mark.full
def test_rows_have_their_own_processors_and_the_bits_that_they_have_alone(engine, model):
    with compiling.events() as seen:
        alone = [answer(submit(engine, named)) for named in NAMED]
        for order in ([0, 1, 2, 3, 4], [4, 0, 2, 1, 0, 3]):
            requests = [submit(engine, NAMED[i]) for i in order]  # with pages of the prompt
            assert [answer(request) for request in requests] == [alone[i] for i in order]
        for i in range(20):
            submit(engine, dict(presence=float(i), noise=dict(by=i / 10)), new=3).result()
    assert seen == []
    assert len({str(tokens) for tokens, _ in alone}) == 5
    for named, (tokens, _) in zip(NAMED, alone, strict=True):
        assert tokens == generated(model, named)
    plain = xj.Engine(model, **SHAPE)
    for sampling in (xj.SamplingConfig(), SAMPLED):
        beside = submit(engine, dict(presence=9.0), sampling=sampling)
        without = answer(submit(plain, None, sampling=sampling))
        assert answer(submit(engine, None, sampling=sampling)) == without != answer(beside)
    request = submit(engine, NAMED[1])
    assert answer(request) == alone[1]
    assert engine.replay(request, {0: model.params}) == alone[1][1]


@pytest.mark.full
def test_a_preempted_row_keeps_its_state(engine):
    alone = answer(submit(engine, NAMED[1]))
    rows = [submit(engine, NAMED[1]) for _ in range(3)]
    while min(len(row.answers[0].sampled) for row in rows) < 4:
        engine.core._pacing.step_seconds = 0.1
        engine.step()
    before = engine.stats.preemptions
    urgent = submit(engine, NAMED[4], priority=16)
    assert answer(urgent) == answer(submit(engine, NAMED[4]))
    assert [answer(row) for row in rows] == [alone] * 3
    assert engine.stats.preemptions > before


@pytest.mark.full
def test_nan_ends_its_own_request(engine):
    beside = submit(engine, NAMED[1])
    wrong = submit(engine, dict(noise=dict(by=np.nan)))
    with pytest.raises(xj.InputError, match="step 0: apply .*lambda.* of a processor returned nan"):
        wrong.result()
    assert answer(beside) == answer(submit(engine, NAMED[1]))


@pytest.mark.full
@pytest.mark.parametrize(
    ("named", "message"),
    [
        (dict(other=1), "no processor is called 'other': the engine has presence, noise"),
        ([(PRESENCE, 1.0)], "processors of a request must be arguments by name"),
        (
            dict(presence="x"),
            "arguments of the processor 'presence' must be as array.0., dtype=float32.*got 'x'",
        ),
        (dict(presence=[1.0, 2.0]), "arguments of the processor 'presence' must be as"),
        (dict(noise=dict(at=1.0)), "arguments of the processor 'noise' must be as {'by'"),
        (dict(noise=dict(by=np.ones(2))), "arguments of the processor 'noise' must be as {'by'"),
        (dict(noise=3), "arguments of the processor 'noise' must be as {'by'.*got 3"),
        (dict(noise=dict(by=1e300)), "arguments of the processor 'noise' must be as {'by'.*got .*1e.300"),
    ],
)
def test_wrong_arguments_of_a_request(engine, named, message):
    with pytest.raises(xj.InputError, match=message):
        submit(engine, named)


def test_arguments_are_those_of_the_call():
    """Not what the caller writes into an array later."""
    array_V = np.ones(4, np.float32)
    held = HeldProcessors(dict(bias=(PRESENCE, array_V)))
    of_request = held.of_request(dict(bias=array_V))
    array_V[:] = 5
    for callers in (of_request, held.of_request(dict(bias=None))):
        np.testing.assert_array_equal(callers.states[0], np.ones((1, 4)))


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ([PRESENCE], "processors of an engine must be a dict of names"),
        (np.zeros(2), "processors of an engine must be a dict of names"),
        (dict(a=(PRESENCE, np.array(2**40))), "arguments of the processor 'a' must be a pytree of numbers"),
        ({"": (PRESENCE, 0.0)}, "the name of a processor must be a short text, got ''"),
        (
            dict(a=PRESENCE),
            "the processor 'a' must be .Processor, arguments of a request that gives none., got",
        ),
        (
            dict(a=(PRESENCE, "x")),
            "arguments of the processor 'a' must be a pytree of numbers or arrays, got 'x'",
        ),
        (
            dict(a=(xj.Processor(None, lambda _, x, c: x[:, 1:]), 0.0)),
            "apply .*lambda.* returned float32.1, 511., expected float32.1, 512.",
        ),
        (
            dict(a=(xj.Processor(None, lambda _, x, c: x, lambda s, *_: s[0]), 0.0)),
            "update .* returned float32.., exp",
        ),
        (
            dict(a=(xj.Processor(None, lambda _, x, c: x if x.sum() else x), 0.0)),
            "apply .* cannot be traced: Attempt",
        ),
    ],
)
def test_wrong_processors_of_an_engine(model, processors, message):
    with pytest.raises(xj.InputError, match=message):
        xj.Engine(model, **SHAPE, processors=processors)


def test_a_function_that_keeps_a_traced_value_is_named_before_any_request(model):
    kept = []

    def keeps(_, logits_BV, context):
        kept.append(logits_BV)
        return logits_BV + kept[0].sum()

    with pytest.raises(xj.InputError, match="keeps: a function of yours uses a traced value of another call"):
        xj.Engine(model, **SHAPE, processors=dict(a=(xj.Processor(None, keeps), 0.0)))


@pytest.mark.full
def test_functions_have_to_work_for_all_rows(model):
    """An engine has programs of one row and of all: a function that serves one row only is found at once."""
    of_one = xj.Processor(None, lambda s, x, c: x - s.reshape(1, 1))
    with pytest.raises(TypeError, match="cannot reshape"):
        xj.Engine(model, **SHAPE, processors=dict(a=(of_one, 0.0)))


def test_states_may_be_keys_of_any_kind():
    key_1 = jax.random.key(3, impl="rbg")[None]
    keys_B = repeated(key_1, 2)
    assert jax.random.key_data(keys_B).tolist() == jax.random.key_data(key_1).tolist() * 2


@pytest.mark.parametrize("draft", full_except((), ["lookup", "itself"], soak=["itself"]))
def test_states_follow_drafts(model, draft):
    """The state after each accepted token, in `generate` and in an engine, is that of plain decoding."""
    want = {i: generated(model, NAMED[i]) for i in (1, 4)}
    for i, tokens in want.items():
        assert generated(model, NAMED[i], draft=model if draft == "itself" else draft) == tokens
    if draft == "itself":
        return
    engine = xj.Engine(model, **SHAPE, processors=PROCESSORS, draft="lookup")
    requests = {i: submit(engine, NAMED[i]) for i in (1, 4, 0)}
    for i, tokens in want.items():
        assert answer(requests[i])[0] == tokens
    assert answer(requests[0])[0] == generated(model, None)
