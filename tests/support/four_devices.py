"""Tests of several engines behind one queue: `test_engines.py` runs them in a process with four devices."""

import dataclasses
import json
import random
import threading
from pathlib import Path

import compiling
import jax
import numpy as np
import pytest
import tiny
from random_adapters import random_adapter
from soak import engine_requests

import xinfer_jax as xj
from xinfer_jax.engine.answers import sums_by_place

SIZES = dict(rows=2, capacity=512, pages=20)  # of all engines: they have the same programs
SHAPE = SIZES | dict(warm_up=True)
HF = tiny.CONFIG | dict(eos_token_id=286, max_position_embeddings=512)


def ended(request: xj.types.Request) -> xj.types.Request:
    request.result()
    return request


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(5, 250), k=length)


def options(tokens: int) -> xj.GenerateOptions:
    return xj.GenerateOptions(max_tokens=tokens, eos_token_ids=())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("engines") / "m", HF)


@pytest.fixture(scope="module")
def model(checkpoint) -> xj.Model:
    """Returns the model on the first device: a single engine has the programs of the first of several."""
    loaded = xj.load_model(checkpoint)
    return dataclasses.replace(loaded, params=jax.device_put(loaded.params, jax.devices()[0]))


@pytest.fixture(scope="module")
def several(model):
    with xj.Engine(model, data_parallel=2, **SHAPE) as several:
        yield several


@pytest.fixture
def unstarted(several, model):
    """Engines that are not started."""
    own = xj.Engine(model, data_parallel=2, **SHAPE)
    yield own
    own.close()


def where(engine: xj.Engine) -> set:
    device = engine.core.device
    return {d for x in jax.tree.leaves((device.params, device.pools, device.rows)) for d in x.devices()}


def test_the_bits_of_one_engine_and_nothing_compiled(several, model):
    asked = engine_requests.draw(random.Random(3), model.config.vocab_size, 40, 300, SHAPE)
    for one in asked:
        one.more.pop("deadline", None)
    with xj.Engine(model, **SHAPE) as one:
        alone = [one.submit(a.ids, a.options, key=a.key, **a.more) for a in asked]
        expected = [engine_requests.outcome(request) for request in alone]
        wanted = one.generate([[5], [6, 7], [8]], options(3), key=jax.random.key(0))
    with compiling.events() as seen:
        requests = [several.submit(a.ids, a.options, key=a.key, **a.more) for a in asked]
        found = [engine_requests.outcome(request) for request in requests]
        outs = several.generate([[5], [6, 7], [8]], options(3), key=jax.random.key(0))
    assert seen == []
    assert all(map(engine_requests.same_outcome, found, expected))
    assert [out.logprobs for out in outs] == [out.logprobs for out in wanted]
    assert [where(engine) for engine in several.engines] == [{d} for d in jax.devices()[:2]]
    each = [engine.stats for engine in several.engines]
    assert all(one.requests > 10 for one in each)
    whole = several.stats
    for field in dataclasses.fields(whole):
        if not field.name.endswith("_seconds"):
            parts = [getattr(one, field.name) for one in each]
            total = sums_by_place(*parts) if isinstance(parts[0], list) else sum(parts)
            assert getattr(whole, field.name) == total, field.name
    assert whole.requests == len(asked) + 3 and len(whole.ttft_seconds) == 3
    assert whole.pages_used == 0 and whole.pages_cached + whole.pages_free == 2 * 19


def test_a_conversation_stays_on_its_engine(several):
    turns = {seed: prompt(seed, 140) for seed in (1, 2)}
    at = {}
    for turn in range(3):
        for seed, ids in turns.items():
            request = ended(several.submit(ids, options(70), share_answers=True))
            assert at.setdefault(seed, request.engine) is request.engine
            assert bool(turn) == (request.answers[0].row.hits > 64 * turn)
            turns[seed] = ids + request.answers[0].tokens + prompt(turn, 5)
    assert at[1] is not at[2]
    other = ended(several.submit(turns[1], options(1), salt="other"))
    assert other.answers[0].row.hits == 0


def test_the_least_loaded_engine_is_chosen_unless_another_has_the_prefix(unstarted):
    shared = prompt(7, 130)

    def went(ids):
        return unstarted.engines.index(unstarted.submit(ids, options(2)).engine)

    assert [went([5, 6]) for _ in range(4)] == [0, 1, 0, 1]
    assert [went([*shared, i]) for i in range(3)] == [0, 0, 1]  # 0 is busier by more than half its rows
    assert [went([*shared, i]) for i in range(2)] == [1, 0]  # now both have the prefix
    assert [engine.load for engine in unstarted.engines] == [5, 4]
    while unstarted.step():
        pass
    assert unstarted.stats.requests == 9 and unstarted.stats.hits > 0
    for i in range(30):  # the number of known prefixes is bounded
        went(prompt(100 + i, 300))
    assert all(len(known) <= SHAPE["pages"] for known in unstarted._router.given.values())
    without = xj.Engine(unstarted.model, data_parallel=2, **SHAPE, prefix_cache=False)
    assert [without.submit(shared, options(2)).engine.name for _ in range(2)] == [
        engine.name for engine in without.engines
    ]
    without.close()


def test_cancelled_requests_and_deadlines(several):
    requests = [several.submit([5, 6], options(400)) for _ in range(6)]
    late = several.submit([5, 6], options(400), deadline=1e-9)
    next(iter(requests[0]))
    for request in requests:
        request.cancel()
    assert {r.result().finish_reason[0] for r in requests} <= {"abort", "length"}
    assert late.result(60).finish_reason == ["length"]
    assert several.stats.pages_used == several.stats.running == 0


@pytest.mark.parametrize("mode", ["wait", "recompute"])
def test_update_of_running_engines(several, model, mode):
    """All switch or none, and any of them replays."""
    trees = {several.version: several.model.params, 100: jax.tree.map(lambda x: x * 1.5, model.params)}
    requests = [several.submit(prompt(30 + i, 70), options(300)) for i in range(6)]
    for request in requests[:2]:
        next(iter(request))
    with compiling.events() as seen:
        with pytest.raises(xj.InputError, match="unknown leaves: more"):
            several.update(model.params | dict(more=model.params["final_norm"]))
        several.update(trees[100], version=100, mode=mode)
        outs = [request.result(60) for request in requests]
        assert all(several.replay(r, trees) == out.logprobs[0] for r, out in zip(requests, outs, strict=True))
    assert seen == [] and {engine.version for engine in several.engines} == {100}
    mixed = [len({*out.token_versions[0]}) for out in outs]
    assert max(mixed) == (1 if mode == "wait" else 2) and outs[-1].token_versions[0][-1] == 100
    several.update(model.params, version=0)


def test_update_of_an_engine_on_a_mesh(model):
    """Key heads that it repeats are repeated anew."""
    mesh = jax.make_mesh((4,), ("model",))
    params, config = xj.params.reshard(model.params, model.config, mesh)
    engine = xj.Engine(dataclasses.replace(model, params=params, config=config), **SIZES)
    assert config.num_key_value_heads > model.config.num_key_value_heads
    others = jax.tree.map(lambda x: np.asarray(x) * 1.5, model.params)
    request = engine.submit(prompt(1, 90), options(60))
    while not request.answers[0].tokens:
        engine.step()
    with compiling.events() as seen:
        engine.update(others, mode="recompute")
        out = request.result()
        assert engine.replay(request, {0: model.params, 1: others}) == out.logprobs[0]
    assert seen == [] and {*out.token_versions[0]} == {0, 1}
    resharded = xj.params.reshard(others, model.config, mesh)[0]
    jax.tree.map(np.testing.assert_array_equal, engine.model.params, resharded)
    assert (
        engine.model.params["layers"][0]["k"]["weight"].sharding
        == params["layers"][0]["k"]["weight"].sharding
    )


def test_weights_of_a_directory_and_of_a_stream(several, model, tmp_path):
    """The weights arrive in all engines, and on a mesh that repeats key heads."""
    others = jax.tree.map(lambda x: np.asarray(x) * 1.5, model.params)
    xj.save_model(others, model.config, tmp_path / "others")
    tensors = xj.params.params_to_tensors(others, model.config)
    mesh = jax.make_mesh((4,), ("model",))
    params, config = xj.params.reshard(model.params, model.config, mesh)
    on_mesh = xj.Engine(dataclasses.replace(model, params=params, config=config), **SIZES)
    resharded = xj.params.reshard(others, model.config, mesh)[0]
    for source in (lambda: tmp_path / "others", lambda: iter(tensors.items())):
        several.update(source(), version=7)
        assert {engine.version for engine in several.engines} == {7}
        for engine in several.engines:
            jax.tree.map(np.testing.assert_array_equal, engine.model.params, others)
            assert where(engine) == {*engine.model.params["final_norm"].devices()}
        on_mesh.update(source())
        jax.tree.map(np.testing.assert_array_equal, on_mesh.model.params, resharded)
        several.update(model.params, version=0)
        on_mesh.update(model.params)


def test_pauses_of_several_engines(several):
    for mode, reasons in (("keep", {"length"}), ("wait", {"length"}), ("abort", {"abort"})):
        requests = [several.submit(prompt(60 + i, 20), options(300)) for i in range(6)]
        next(iter(requests[0]))
        several.pause(mode)
        assert mode != "abort" or all(request.ended for request in requests)
        several.resume()
        assert {request.result(60).finish_reason[0] for request in requests} <= reasons | {"length"}


def test_adapters_of_all_engines_and_on_a_mesh(several, model):
    """Each engine holds all of them. Over a mesh they are divided as their matrices are."""
    adapters = [random_adapter(model.config, i, 2 + i) for i in range(3)]
    mesh = jax.make_mesh((2,), ("model",), (jax.sharding.AxisType.Auto,))
    divided = dataclasses.replace(
        model, params=jax.device_put(model.params, xj.params.shardings(model.config, mesh))
    )
    ids = [prompt(1, 90)] * 4
    wanted = None
    how = SIZES | dict(adapters=dict(a=adapters[0]), max_adapters=2, max_rank=3)
    engines = (xj.Engine(model, data_parallel=2, **how), xj.Engine(divided, **how))
    for engine in engines:
        engine.add_adapter("b", adapters[1])
        with pytest.raises(xj.InputError, match="rank 4, and the engine max_rank 3"):
            engine.add_adapter("c", adapters[2])
        outs = engine.generate(ids, options(20), adapter=[None, "a", "b", "a"])
        wanted = wanted or outs
        assert [out.tokens for out in outs] == [out.tokens for out in wanted]
        for out, other in zip(outs, wanted, strict=True):
            np.testing.assert_allclose(out.logprobs[0], other.logprobs[0], atol=1e-4)
        engine.update_adapter("b", adapters[0])
        (out,) = engine.generate(ids[:1], options(20), adapter="b")
        np.testing.assert_allclose(out.logprobs[0], outs[1].logprobs[0], atol=1e-6)
        assert out.adapter_versions == [[1] * 20]
    core = engine.core.device.adapters
    (a, b) = core._stacks["layers.0.down"]
    assert {a.addressable_shards[0].data.shape[2] * 2, b.shape[1]} == {a.shape[2], model.config.hidden_size}
    engines[0].close()


def test_an_engine_that_fails_leaves_the_others_running(unstarted, caplog):
    good, bad = unstarted.engines
    bad.core.device.decode = lambda *_: 1 / 0
    requests = [unstarted.submit([5, 6], options(5)) for _ in range(4)]
    with pytest.raises(ZeroDivisionError):
        while unstarted.step():
            pass
    for request in requests:
        if request.engine is bad:
            with pytest.raises(ZeroDivisionError):
                request.result(60)
        else:
            assert len(request.result(60).tokens[0]) == 5
    assert not unstarted.alive and good.error is None and bad.load == 0
    with pytest.raises(xj.InputError, match=r"engine 2 of 2 \(.*\) is closed: division by zero"):
        unstarted.submit([5])
    assert "engine 2 of 2 (" in (said := caplog.text)
    assert "has failed: ZeroDivisionError" in said


def test_each_engine_on_a_mesh_has_devices_of_its_own(tmp_path):
    path = tiny.write(tmp_path, HF | dict(num_hidden_layers=1))
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    model = xj.load_model(path, mesh=mesh)
    ids = [prompt(30 + i, 70 + i) for i in range(6)]
    expected = xj.Engine(model, **SHAPE).generate(ids, options(12))
    with xj.Engine(model, data_parallel=2, **SHAPE) as several:
        groups = [where(engine) for engine in several.engines]
        with compiling.events() as seen:
            found = several.generate(ids, options(12))
        assert all(engine.stats.requests == 3 for engine in several.engines)
    assert seen == [] and groups == [{*jax.devices()[:2]}, {*jax.devices()[2:]}]
    assert [(out.tokens, out.logprobs) for out in found] == [(out.tokens, out.logprobs) for out in expected]
    with pytest.raises(xj.InputError, match=r"data_parallel=3 needs 6 devices, and there are 4: give 2"):
        xj.Engine(model, data_parallel=3, **SHAPE)


def lines(path: Path, count: int) -> Path:
    asked = [dict(prompt=prompt(i, 4 + i % 90), max_tokens=5 + i % 40, temperature=0.9) for i in range(count)]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in asked))
    return path


def test_a_file_has_the_same_lines_when_it_is_stopped_and_resumed(model, tmp_path, monkeypatch):
    asked = lines(tmp_path / "in", 60)
    stop = threading.Event()

    def run(name, number, **more):
        given = SIZES | dict(progress=False, in_order=True, seed=3, data_parallel=number)
        return xj.generate_file(model, asked, tmp_path / name, **given, **more)

    assert run("one", 1)["answered"] == 60
    written = xj.batch.resumable_output.ResumableOutput.add

    def add(*args):
        written(*args)
        stop.set()

    monkeypatch.setattr(xj.batch.resumable_output.ResumableOutput, "add", add)
    assert run("two", 2, stop=stop, grace=0.0)["stopped"]
    monkeypatch.undo()
    report = run("two", 2)
    assert 0 < report["finished_before"] < 60 and report["generated_tokens"] > 0
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    monkeypatch.setattr(xj.engine.engine_device.Device, "decode", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # no line is answered by it
        run("broken", 2)
    assert (tmp_path / "broken").read_bytes() == b""


def test_a_server_over_two_engines(model):
    pytest.importorskip("uvicorn", reason="the server needs starlette, uvicorn and prometheus-client")
    serving = pytest.importorskip("serving")
    how = dict(engine=xj.EngineOptions(**SHAPE, data_parallel=2), admin_keys=(b"admin",))
    with serving.run_server(model, **how) as server:
        first, second = server.engine.engines
        for path in ("/pause?mode=keep", "/resume"):
            assert server.call("POST", path, authorization="Bearer admin")[0] == 200
            assert {engine.pausing.phase for engine in (first, second)} == {
                "paused" if "pause" in path else "running"
            }
        asked = dict(max_tokens=20, ignore_eos=True, return_token_ids=True)
        answers = [
            server.ask("completion", prompt=[5, 6, i], **asked)["choices"][0]["token_ids"] for i in range(4)
        ]
        for i, ids in enumerate(answers):
            assert {tuple(e.submit([5, 6, i], options(20)).result().tokens[0]) for e in (first, second)} == {
                tuple(ids)
            }
        many = server.ask("completion", prompt=[[5, i] for i in range(8)], **asked)
        assert len(many["choices"]) == 8
        assert len(server.events("completion", prompt=[5, 6], max_tokens=5, ignore_eos=True)) >= 1
        assert server.idle() and min(first.stats.requests, second.stats.requests) > 6
        text = server.call("GET", "/metrics")[1]
        whole = server.engine.stats
        assert f'generation_tokens_total{{model_name="tiny"}} {float(whole.generated_tokens)}' in text
        assert whole.generated_tokens == first.stats.generated_tokens + second.stats.generated_tokens
        assert server.call("GET", "/health")[0] == 200
        second.core.device.decode = lambda *_: 1 / 0
        for i in range(2):
            status = server.call("POST", "/v1/completions", dict(prompt=[9, i], max_tokens=5))[0]
            assert status in (200, 500, 503)
        status, said, _ = server.call("GET", "/health")
        assert status == 503 and said["status"].startswith("engine 2 of 2 (")
        assert said["status"].endswith(") has failed")
        assert server.call("POST", "/v1/completions", dict(prompt="a"))[0] == 503
