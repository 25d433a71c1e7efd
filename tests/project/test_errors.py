"""The public errors: what raises which, and that they cross processes."""

import pickle

import jax
import pytest

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

SPECIAL = (xj.ContextLengthError, xj.GrammarError, xj.NoTokenLeftError)


@pytest.fixture(scope="module")
def model():
    return xj.load_model()


@pytest.mark.parametrize("error", (xj.InputError, *SPECIAL))
def test_an_error_is_pickled_as_it_is(error):
    for text in ("two\nlines, and a \x1b", "x" * 1000):
        raised = error(text)
        loaded = pickle.loads(pickle.dumps(raised))
        assert type(loaded) is error and str(loaded) == str(raised) and len(str(raised)) <= 300
        assert isinstance(loaded, xj.InputError) and isinstance(loaded, ValueError)
    assert error.__doc__ and error.__module__ == "xinfer_jax.errors"


def test_too_many_tokens(model):
    context = model.config.context_length
    params, config = model.params, model.config
    ids = [5] * context
    cache = xj.init_cache(config, 1, 4)
    for call in (
        lambda: xj.generate(params, config, [ids]),
        lambda: xj.generate(params, config, [[5]], xj.GenerateOptions(max_tokens=9, capacity=4)),
        lambda: xj.generate_text(model, "a " * 2 * context),
        lambda: xj.beam_search(params, config, ids),
        lambda: xj.score_completions(params, config, [ids], [[5]]),
        lambda: xj.embed_texts(model, [[*ids, 5]]),
        lambda: xj.prefill(params, config, jax.numpy.ones((1, 5), int), jax.numpy.array([5]), cache),
        lambda: xj.forward(params, config, jax.numpy.ones((1, 5), int), cache),
    ):
        with pytest.raises(xj.ContextLengthError):
            call()
    assert xj.ContextLengthError.code == "context_length_exceeded"


def test_grammars_that_are_not_served(model):
    for call in (
        lambda: xj.grammar.json_schema("{"),
        lambda: xj.grammar.json_schema([]),
        lambda: xj.grammar.json_schema({"x-guidance": {}}),
        lambda: xj.grammar.regex("a" * 2**20),
        lambda: xj.grammar.compile_dfa("(?=a)b", model.tokenizer),
    ):
        with pytest.raises(xj.GrammarError):
            call()
    pytest.importorskip("llguidance")
    with pytest.raises(xj.GrammarError):
        xj.generate_text(model, "a", xj.GenerateOptions(max_tokens=4, grammar=xj.grammar.regex("(")))


def test_settings_that_leave_no_token(model):
    every = [*range(model.config.vocab_size)]
    settings = xj.SamplingConfig(forbidden_token_ids=every)
    with pytest.raises(xj.NoTokenLeftError):
        xj.generate_text(model, "a", xj.GenerateOptions(max_tokens=2, sampling=settings))
