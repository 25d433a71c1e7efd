"""An engine that holds adapters: bits beside others, adding and removing, versions, pages, bad input."""

import compiling
import jax
import numpy as np
import pytest
from random_adapters import random_adapter
from soak import engine_requests
from soak.engine_requests import answer_of as answer

import xinfer_jax as xj

pytestmark = [pytest.mark.full, pytest.mark.oldest]  # else test_serve_adapters.py

LONG = xj.GenerateOptions(40, xj.SamplingConfig(temperature=1.0), eos_token_ids=())
SHAPE = dict(rows=3, capacity=384, chunk=128, pages=24, max_adapters=3, max_rank=4)
PROMPT = [i % 50 + 3 for i in range(150)]


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return engine_requests.random_model("qwen2", None)


@pytest.fixture(scope="module")
def adapters(model) -> list[xj.Adapter]:
    return [random_adapter(model.config, i, rank) for i, rank in enumerate((4, 2, 3))]


@pytest.fixture(scope="module")
def own_engine(model):
    return xj.Engine(model, **SHAPE, warm_up=True)


@pytest.fixture
def engine(own_engine):
    for name in list(own_engine.adapters):
        own_engine.remove_adapter(name)
    yield own_engine
    stats = own_engine.stats
    assert (stats.pages_used, stats.pages_cached + stats.pages_free) == (0, own_engine.pages - 1)


def submit(engine, adapter=None, prompt=PROMPT, options=LONG, **how) -> xj.Request:
    return engine.submit(prompt, options, key=jax.random.key(len(prompt)), adapter=adapter, **how)


def test_rows_have_their_own_adapters_and_the_bits_that_they_have_alone(
    engine, model, adapters, monkeypatch
):  # fmt: skip
    names = [None, "a", "b", "c"]
    with compiling.events() as seen:
        alone = {None: answer(submit(engine))}
        for name, adapter in zip(names[1:], adapters, strict=True):
            engine.add_adapter(name, adapter)
            alone[name] = answer(submit(engine, name))
        for order in (names, ["c", None, "a", "b", "a"]):
            requests = [submit(engine, name) for name in order]
            assert [answer(request) for request in requests] == [alone[name] for name in order]
        with monkeypatch.context() as patched:
            patched.setattr(engine.core.scheduler, "time_slice", 1e-9)
            before = engine.stats.preemptions
            requests = [submit(engine, name, client=f"client of {name}") for name in names]
            assert [answer(request) for request in requests] == [alone[name] for name in names]
            assert engine.stats.preemptions - before > 5
        engine.remove_adapter("a")
        engine.add_adapter("d", adapters[1])  # in the place of another one
        assert answer(submit(engine, "d")) == alone["b"]
    assert seen == []
    assert len({str(tokens) for tokens, _ in alone.values()}) == 4
    assert submit(engine, "b").result().adapter == "b"
    for name, adapter in zip(names[1:], adapters, strict=True):
        adapted = xj.with_adapter(model.params, adapter)
        (tokens, logprobs) = alone[name]
        wanted = xj.score(adapted, model.config, np.array([PROMPT + tokens]))[0, -len(tokens) :]
        np.testing.assert_allclose(logprobs, wanted, atol=2e-4)


def test_pages_are_shared_with_the_same_adapter_only(engine, adapters):
    engine.add_adapter("a", adapters[0])
    engine.add_adapter("b", adapters[0])  # the same contents
    engine.add_adapter("c", adapters[1])
    hits = []
    for name in (None, "a", "c", "b", None, "c"):
        request = submit(engine, name, salt="pages")
        request.result()
        hits.append(request.answers[0].row.hits)
    assert hits == [0, 0, 0, 128, 128, 128]
    engine.update_adapter("a", adapters[2])
    for name, expected in (("a", 0), ("b", 128), ("c", 128), (None, 128)):
        request = submit(engine, name, salt="pages")
        request.result()
        assert request.answers[0].row.hits == expected


@pytest.mark.parametrize("mode", ["continue", "wait", "abort", "recompute"])
def test_an_adapter_is_replaced_as_weights_are(engine, model, adapters, mode):
    for name, adapter in zip("ab", adapters, strict=False):
        engine.add_adapter(name, adapter)
    alone = [answer(submit(engine, name)) for name in "ab"]
    engine.core._pacing.step_seconds = 0.1
    (first, other) = requests = [submit(engine, name, salt=mode) for name in "ab"]
    while min(len(request.answers[0].sampled) for request in requests) < 5:
        engine.core._pacing.step_seconds = 0.1
        engine.step()
    assert first.answers[0].finish_reason is None
    waiting = submit(engine, "a", salt="later")
    engine.update_adapter("a", adapters[2], version=7, mode=mode)
    assert answer(other) == alone[1]
    out = first.result()
    assert engine.adapters["a"].version == 7
    if mode != "abort":
        contents = {0: adapters[0], 7: adapters[2]}
        assert engine.replay(first, {engine.version: model.params}, contents) == out.logprobs[0]
        with pytest.raises(xj.InputError, match="needs its adapter of version 0"):
            engine.replay(first, {engine.version: model.params}, {7: adapters[2]})
    if mode == "wait":
        assert (out.tokens[0], out.logprobs[0]) == alone[0]
        assert out.adapter_versions == [[0] * 40]
    elif mode == "abort":
        assert out.finish_reason == ["aborted"]
        assert waiting.result().finish_reason == ["aborted"]
        return
    else:
        versions = out.adapter_versions[0]
        assert set(versions) == {0, 7} and versions == sorted(versions)
        assert out.logprobs[0] != alone[0][1]
        assert other.result().adapter_versions == [[0] * 40]
        assert other.result().token_versions == [[engine.version] * 40]
    assert answer(waiting) == answer(submit(engine, "a", salt="still later"))
    assert waiting.result().adapter_versions == [[7] * 40]


def test_a_removed_adapter_stays_until_its_requests_end(engine, adapters):
    for name, adapter in zip("abc", adapters, strict=True):
        engine.add_adapter(name, adapter)
    alone = answer(submit(engine, "a"))
    request = submit(engine, "a")
    engine.remove_adapter("a")
    with pytest.raises(xj.InputError, match="no adapter is called 'a': the engine has b, c"):
        submit(engine, "a")
    with pytest.raises(xj.InputError, match="holds 3 adapters .* requests of removed ones still run: a"):
        engine.add_adapter("a", adapters[1])
    assert answer(request) == alone
    engine.add_adapter("a", adapters[1])
    assert answer(submit(engine, "a")) == answer(submit(engine, "b"))


def test_adapters_come_within_a_mesh(engine, adapters):
    """The caller trains on a mesh whose axes are Explicit."""
    with jax.set_mesh(jax.make_mesh((1,), ("model",))):
        own = jax.tree.map(lambda x: jax.numpy.array(x) * 1, adapters[0])
        engine.add_adapter("a", own)
        engine.update_adapter("a", own)
        found = answer(submit(engine, "a"))
    engine.add_adapter("b", adapters[0])
    assert found == answer(submit(engine, "b"))


def test_new_weights_keep_the_adapters(engine, model, adapters):
    engine.add_adapter("a", adapters[0])
    before = answer(submit(engine, "a"))
    half = jax.tree.map(lambda x: np.asarray(x) / 2, model.params)
    engine.update(half)
    assert answer(submit(engine, "a")) != before
    engine.update(model.params)
    assert answer(submit(engine, "a")) == before


def test_prompt_logprobs_and_generate_take_adapters(engine, model, adapters):
    engine.add_adapter("a", adapters[0])
    request = submit(engine, "a", prompt_logprobs=1)
    request.result()
    found = [token.logprob for token in request.prompt_logprobs]
    wanted = xj.score(xj.with_adapter(model.params, adapters[0]), model.config, np.array([PROMPT]))[0]
    np.testing.assert_allclose(found, wanted[-len(found) :], atol=2e-4)
    short = xj.GenerateOptions(4, eos_token_ids=())
    (plain, adapted) = engine.generate([PROMPT, PROMPT], short, adapter=[None, "a"])
    assert plain.adapter is None and adapted.adapter == "a"
    assert plain.tokens != adapted.tokens


def test_bad_calls(engine, model, adapters, tmp_path):
    engine.add_adapter("a", adapters[0])
    large = random_adapter(model.config, 5, 5)
    nan = jax.tree.map(lambda x: x * np.nan, adapters[0])
    path = "layers.0.q"
    matrices = {path: adapters[0].matrices[path]}
    deleted = jax.tree.map(lambda x: jax.numpy.array(x), adapters[0])
    jax.tree.leaves(deleted)[0].delete()
    embed = xj.Adapter({"embed": xj.LowRank(np.zeros((2, 9)), np.zeros((9, 2)))}, (1.0,))
    for call, message in (
        (lambda: engine.add_adapter("a", adapters[1]), "'a' is there"),
        (lambda: engine.add_adapter("", adapters[1]), "short text"),
        (lambda: engine.add_adapter("b", large), "rank 5, and the engine max_rank 4"),
        (lambda: engine.add_adapter("b", nan), "NaN or inf"),
        (
            lambda: engine.add_adapter("b", xj.Adapter(matrices, (np.inf,))),
            f"NaN or inf in {path}, .* scale inf",
        ),
        (lambda: engine.add_adapter("b", xj.Adapter({path: (1, 2)}, (1.0,))), f"{path} has no LowRank"),
        (lambda: engine.add_adapter("b", deleted), "donated"),
        (lambda: engine.add_adapter("b", embed), "embed"),
        (lambda: engine.add_adapter("b", tmp_path), "holds no adapter_config.json"),
        (lambda: engine.add_adapter("b", 5), "load_adapter"),
        (lambda: engine.update_adapter("b", adapters[0]), "'b': the engine has a"),
        (lambda: engine.update_adapter("a", adapters[0], mode="x"), "mode must be"),
        (lambda: engine.remove_adapter("b"), "'b'"),
        (lambda: submit(engine, "b"), "'b'"),
        (lambda: engine.generate([PROMPT], adapter=["a", "a"]), "2 adapters for 1"),
        (lambda: engine.generate([PROMPT], adapter=5), "no adapter is called 5"),
        (lambda: xj.Engine(model, **SHAPE | dict(max_rank=0)), "max_rank"),
        (lambda: xj.Engine(model, **SHAPE, adapters=["a"]), "adapters of an engine must be a dict"),
        (lambda: xj.Engine(model, **SHAPE, adapters=dict(a=5)), "what load_adapter returns, got int"),
        (lambda: xj.Engine(model, rows=1, capacity=64).add_adapter("a", adapters[0]), "max_adapters"),
        (
            lambda: xj.Engine(
                xj.Model(**vars(model) | dict(params=xj.with_adapter(model.params, adapters[0]))), **SHAPE
            ),
            "has an adapter already",
        ),
    ):
        with pytest.raises(xj.InputError, match=message):
            call()
    assert [*engine.adapters] == ["a"]
