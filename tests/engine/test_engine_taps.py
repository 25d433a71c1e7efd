"""An engine with vectors that requests add to hidden states: equality with taps, bits, pages, bad input."""

import compiling
import jax
import numpy as np
import pytest
from soak import engine_requests
from soak.engine_requests import answer_of as answer

import xinfer_jax as xj
from xinfer_jax.engine.held_vectors import HeldVectors

pytestmark = [pytest.mark.full, pytest.mark.oldest]  # else test_taps.py

SAMPLED = xj.SamplingConfig(1.0)
SHAPE = dict(rows=3, capacity=384, chunk=128, pages=24)
PROMPT = [i % 50 + 3 for i in range(150)]
NEW = 20
D = 64
V_2D = np.random.RandomState(0).standard_normal((2, D)).astype(np.float32)
TAPS = dict(calm={0: V_2D[0], 1: V_2D[1]}, loud={1: V_2D[0]})
NAMED = [None, dict(calm=1.0), dict(calm=-2, loud=0.5), dict(loud=0.0)]


def added(x_BTD, v_D):
    return x_BTD + v_D


def tap(v_D):
    return xj.Tap(v_D, added)


AS_TAPS = [
    None,
    {0: tap(V_2D[0]), 1: tap(V_2D[1])},
    {0: tap(-2 * V_2D[0]), 1: tap(-2 * V_2D[1] + np.float32(0.5) * V_2D[0])},
    None,
]


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return engine_requests.random_model("qwen2", None)


@pytest.fixture(scope="module")
def engine(model):
    return xj.Engine(model, **SHAPE, taps=TAPS, warm_up=True)


def submit(engine, named, **how) -> xj.Request:
    options = xj.GenerateOptions(NEW, SAMPLED, eos_token_ids=(), taps=named)
    return engine.submit(PROMPT, options, key=jax.random.key(0), **how)


def test_rows_have_their_own_vectors_and_the_bits_that_they_have_alone(engine, model):
    assert model.config.hidden_size == D
    with compiling.events() as seen:
        alone = [answer(submit(engine, named)) for named in NAMED]
        for order in ([0, 1, 2, 3], [2, 0, 1, 0, 2]):
            requests = [submit(engine, NAMED[i]) for i in order]
            assert [answer(request) for request in requests] == [alone[i] for i in order]
        request = submit(engine, NAMED[2])
        assert answer(request) == alone[2]
        assert engine.replay(request, {0: model.params}) == alone[2][1]
    assert seen == []
    assert alone[0] == alone[3] and len({str(tokens) for tokens, _ in alone}) == 3
    for taps, (tokens, logprobs) in zip(AS_TAPS, alone, strict=True):
        options = xj.GenerateOptions(NEW, SAMPLED, eos_token_ids=(), taps=taps)
        want = xj.generate(model.params, model.config, [PROMPT], options, key=jax.random.key(0))
        assert want.tokens[0] == tokens
        np.testing.assert_allclose(logprobs, want.logprobs[0], atol=1e-4)


def test_pages_of_steered_requests_are_never_shared(engine):
    """Neither with others nor with requests of equal vectors; and none of theirs are kept. With factors of 0
    they are shared.
    """
    hits = []
    cached = []
    for i in (0, 1, 1, 0, 2, 3, 0):
        request = submit(engine, NAMED[i], salt="pages", share_answers=True)
        request.result()
        hits.append(request.answers[0].row.hits)
        cached.append(engine.stats.pages_cached)
    assert hits == [0, 0, 0, 128, 0, 128, 128]
    assert cached[1:3] == cached[:1] * 2


def test_factors_are_put_on_the_devices_once(model):
    """And few of those of earlier rows are kept."""
    held = HeldVectors(TAPS, model.params, model.config)

    def factors(calm):
        return held.of_rows([(calm, 0.0), ()], None)[1]

    first = factors(1.0)
    assert factors(1.0) is first
    for i in range(100):
        np.testing.assert_array_equal(factors(float(i)), [[i, 0], [0, 0]])
    assert factors(1.0) is not first


def test_a_preempted_row_keeps_its_vectors(engine):
    alone = answer(submit(engine, NAMED[1]))
    rows = [submit(engine, NAMED[1]) for _ in range(3)]
    while min(len(row.answers[0].sampled) for row in rows) < 4:
        engine.core._pacing.step_seconds = 0.1
        engine.step()
    before = engine.stats.preemptions
    submit(engine, None, priority=16).result()
    assert [answer(row) for row in rows] == [alone] * 3
    assert engine.stats.preemptions > before


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (dict(other=1), "no tap is called 'other': the engine has calm, loud"),
        ({0: xj.Tap()}, "no tap is called 0: the engine has calm, loud"),
        (3, "taps of a request must be factors by name of the engine's, got 3"),
        (dict(calm=np.nan), "tap 'calm': the factor must be a number up to 1e6, got nan"),
        (dict(calm="x"), "tap 'calm': the factor must be a number up to 1e6, got 'x'"),
        (dict(calm=[1.0]), "tap 'calm': the factor must be a number up to 1e6, got .1.0."),
    ],
    ids=str,
)
def test_wrong_factors_of_a_request(engine, named, message):
    with pytest.raises(xj.InputError, match=message):
        submit(engine, named)


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ([V_2D], "taps of an engine must be a dict of names and vectors by layer"),
        (dict(calm=V_2D[0]), "tap 'calm' must be vectors by layer, got"),
        ({"": {0: V_2D[0]}}, "the name of a tap must be a short text, got ''"),
        (dict(calm={99: V_2D[0]}), "tap 'calm': layer must be .*, got 99"),
        (dict(calm={0: V_2D}), "tap 'calm': layer 0 must have 64 numbers that are finite in float32, got"),
        (dict(calm={0: V_2D[0] * np.inf}), "tap 'calm': layer 0 must have 64 numbers that are finite"),
    ],
    ids=["list", "vector", "name", "layer", "shape", "infinite"],
)
def test_wrong_vectors_of_an_engine(model, taps, message):
    with pytest.raises(xj.InputError, match=message):
        xj.Engine(model, **SHAPE, taps=taps)
