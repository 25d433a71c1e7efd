"""Options with a caller's processors and taps are the same in `generate` and in an engine."""

import jax.numpy as jnp
import numpy as np
import pytest

import xinfer_jax as xj
from xinfer_jax import InputError

pytestmark = [pytest.mark.full, pytest.mark.oldest]  # quick tests have one form of each

PUSH = xj.LogitsProcessor(None, lambda by_BV, logits_BV, context: logits_BV + by_BV)
DOUBLE = xj.LogitsProcessor(None, lambda by_B, logits_BV, context: logits_BV * by_B[:, None], last=True)
PROMPTS = [[5, 6, 7], [8, 9], [10]]


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return xj.load_model()


@pytest.fixture(scope="module")
def vectors(model):
    return np.random.default_rng(0).normal(size=(2, model.config.hidden_size)).astype(np.float32)


@pytest.fixture(scope="module")
def engine(model, vectors):
    none_V = np.zeros(model.config.vocab_size, np.float32)
    engine = xj.Engine(
        model,
        rows=2,
        capacity=128,
        processors=dict(push=(PUSH, none_V), double=(DOUBLE, 1.0)),
        taps=dict(one={1: vectors[0]}, calm={1: vectors[0], 2: vectors[1]}, loud={3: vectors[1]}),
    )
    yield engine
    engine.close()


def pushed(model, rows):
    """Arguments of `PUSH` by which each row prefers a token of its own."""
    by_BV = np.zeros((rows, model.config.vocab_size), np.float32)
    by_BV[np.arange(rows), 20 + np.arange(rows)] = 1e3
    return by_BV


def test_processors_have_one_form(model, engine):
    """A list of pairs, whose arguments have a row for each prompt."""
    pairs = [(PUSH, pushed(model, 3)), (DOUBLE, 2.0)]
    options = xj.GenerateOptions(max_tokens=3, processors=pairs)
    want = xj.generate(model.params, model.config, PROMPTS, options).tokens
    assert want == [[20 + i] * 3 for i in range(3)]
    assert [out.tokens[0] for out in engine.generate(PROMPTS, options)] == want
    one = xj.GenerateOptions(max_tokens=3, processors=[(PUSH, pushed(model, 1))])
    assert engine.generate([PROMPTS[2]], one)[0].tokens == [[20] * 3]
    named = xj.GenerateOptions(max_tokens=3, processors=dict(push=pushed(model, 1)[0], double=2.0))
    assert engine.generate([PROMPTS[2]], named)[0].tokens == [[20] * 3]


def test_taps_have_one_form(model, engine, vectors):
    """Taps are given by layer, as `Tap.steer` makes them."""
    steer = lambda layers, factor: {  # noqa: E731
        layer: xj.Tap.steer(vectors[i], factor) for layer, i in layers.items()
    }
    for taps, named in (
        (steer({1: 0, 2: 1}, 3.0), dict(calm=3.0)),
        (steer({3: 1}, -2), dict(loud=-2)),
        (steer({1: 0, 2: 1}, 1.5) | steer({3: 1}, 0.5), dict(calm=1.5, loud=0.5)),
    ):
        options = xj.GenerateOptions(max_tokens=6, taps=taps)
        plain = xj.generate(model.params, model.config, PROMPTS, xj.GenerateOptions(max_tokens=6))
        want = xj.generate(model.params, model.config, PROMPTS, options)
        got = engine.generate(PROMPTS, options)
        assert [out.tokens[0] for out in got] == want.tokens and want.logprobs != plain.logprobs
        for out, row in zip(got, want.logprobs, strict=True):
            np.testing.assert_allclose(out.logprobs[0], row, atol=1e-4)
        by_name = engine.generate(PROMPTS, xj.GenerateOptions(max_tokens=6, taps=named))
        assert [out.logprobs for out in by_name] == [out.logprobs for out in got]


def test_what_the_engine_does_not_hold_is_an_error(model, engine, vectors):
    other = xj.LogitsProcessor(None, lambda s, logits_BV, context: logits_BV)
    edit = xj.Tap(1.0, lambda x, by: x * by)
    for options, message in (
        (dict(processors=[(other, 0.0)]), "the engine holds push, double, and none that applies"),
        (dict(processors=[(DOUBLE, 1.0), (PUSH, pushed(model, 1))]), "in the order push, double"),
        (dict(processors=[(PUSH, pushed(model, 2))]), "for 1 row"),
        (dict(processors=[PUSH]), "must be a list of .LogitsProcessor, arguments of the rows."),
        (dict(taps={1: edit}), "the tap of layer 1 is not of Tap.steer"),
        (dict(taps={1: xj.Tap.steer(vectors[1])}), "holds one, calm, loud, and none .* of layer 1"),
        (dict(taps={3: xj.Tap.steer(vectors[0])}), "none with the vector of layer 3"),
        (
            dict(taps={1: xj.Tap.steer(vectors[0], 1.0), 2: xj.Tap.steer(vectors[1], 2.0)}),
            "none with the vector of layer 2",
        ),
    ):
        with pytest.raises(InputError, match=message):
            engine.submit([5, 6], xj.GenerateOptions(max_tokens=2, **options))
    for bad, message in (
        (lambda: xj.Tap.steer(vectors), "the vector of Tap.steer must be an array .D. of numbers"),
        (lambda: xj.Tap.steer(vectors[0], [1.0]), "the factor of Tap.steer must be a number, got .1.0."),
        (lambda: xj.Tap.steer(vectors[0][:3]), "has 3 numbers, and the model's states 128"),
    ):
        with pytest.raises(InputError, match=message):
            options = xj.GenerateOptions(max_tokens=2, taps={1: bad()})
            xj.generate(model.params, model.config, [[5]], options)
    with pytest.raises(InputError, match="for 3 rows"):
        engine.generate(PROMPTS, xj.GenerateOptions(max_tokens=2, processors=[(PUSH, pushed(model, 2))]))
    assert jnp.isfinite(engine.generate([[5]], xj.GenerateOptions(max_tokens=1))[0].logprobs[0][0])
