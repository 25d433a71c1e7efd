"""New weights in a running engine: how answers go on, which version sampled which token, and replay."""

import compiling
import jax
import numpy as np
import pytest
from soak import engine_requests

import xinfer_jax as xj
from xinfer_jax.weights import device_quantization, params_like as params_like_module
from xinfer_jax.weights.params_like import params_like
from xinfer_jax.weights.resharding import with_repeated_kv_heads

pytestmark = [pytest.mark.full, pytest.mark.oldest]  # else test_page_tiers.py

LONG = xj.GenerateOptions(max_tokens=100, sampling=xj.SamplingConfig(temperature=1.0), eos_token_ids=())
SHAPE = dict(rows=3, capacity=384, chunk=128, pages=24)


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return engine_requests.random_model("qwen2", None)


@pytest.fixture(scope="module")
def versions(model) -> dict[int, xj.weights.params.Params]:
    """Parameters of versions 0, 1, 2."""
    return {i: jax.tree.map(lambda x, i=i: np.asarray(x) * (1 - i / 10), model.params) for i in range(3)}


@pytest.fixture(scope="module")
def own_engine(model):
    return xj.Engine(model, **SHAPE, warm_up=True)


@pytest.fixture
def engine(own_engine, versions):
    with compiling.events() as seen:
        own_engine.update(versions[0], version=0)
    assert seen == []
    own_engine.core._pacing.step_seconds = 0.0  # so that the first step decodes few tokens
    yield own_engine
    stats = own_engine.stats
    assert (stats.pages_used, stats.pages_cached + stats.pages_free) == (0, own_engine.pages - 1)


def submit(engine, prompt: list[int], options=LONG, **how) -> xj.types.Request:
    return engine.submit(prompt, options, key=jax.random.key(len(prompt)), **how)


def start(engine, prompt: list[int], tokens: int, options=LONG, **how) -> xj.types.Request:
    """A request that has sampled at least so many tokens."""
    request = submit(engine, prompt, options, **how)
    advance(engine, request, tokens)
    return request


def advance(engine, request, tokens: int) -> None:
    while len(request.answers[0].tokens) < tokens:
        engine.core._pacing.step_seconds = 0.1
        engine.step()


def check(engine, requests, versions) -> None:
    for request in requests:
        for answer in request.answers:
            assert engine.replay(answer, versions) == answer.logprobs


def test_continue_and_recompute(engine, versions):
    """Two updates of each kind, of rows that decode, prefill and wait. The prompts begin alike."""
    common = [*range(5, 105)]
    with compiling.events() as seen:
        requests = [start(engine, [*common, *range(60)], 5, prompt_logprobs=2)]
        engine.update(versions[1], mode="recompute")
        requests.append(start(engine, common, 9))
        requests += [submit(engine, [*common, *range(i)]) for i in (70, 130, 160)]
        engine.step()
        engine.update(versions[2], mode="continue")
        advance(engine, requests[0], 60)
        engine.update(versions[1], version=1, mode="recompute")
        outs = [request.result() for request in requests]
        check(engine, requests, versions)
    assert seen == []
    of_first, of_second = (out.token_versions[0] for out in outs[:2])
    assert of_first == sorted(of_first[:60]) + [1] * (len(of_first) - 60) and {*of_first} == {0, 1, 2}
    assert {*of_second} == {1, 2} and len(of_second) == 100
    assert engine.version == 1


def test_replay(engine, versions):
    request = start(engine, [7] * 20, 20, xj.GenerateOptions(max_tokens=60, eos_token_ids=(), n=2))
    other = start(
        engine, [8, 9], 3, xj.GenerateOptions(max_tokens=300, sampling=LONG.sampling, eos_token_ids=())
    )
    running = len(other.answers[0].tokens)
    first = request.result()
    assert len(other.answers[0].tokens) > running
    with pytest.raises(xj.InputError, match="needs an answer that has ended"):
        engine.replay(other, versions)
    with pytest.raises(xj.InputError, match="needs a request, one of its answers, or .* got GenerateOutput"):
        engine.replay(first, versions)
    check(engine, [request], versions)
    assert engine.replay(request.answers[1], {0: versions[1]}) != first.logprobs[1]
    assert len(engine.replay(request.answers[1], {0: versions[1]})) == 60
    with pytest.raises(xj.InputError, match="parameters of version 0: give them too"):
        engine.replay(request.answers[0], {1: versions[1]})
    other.result()
    check(engine, [other], versions)


def test_wait(engine, versions):
    requests = [start(engine, [i] * 9, 3) for i in (4, 5)]
    requests += [submit(engine, [i] * 9) for i in (6, 7, 8)]
    engine.update(versions[1], mode="wait")
    assert [request.ended for request in requests] == [True, True, False, False, False]
    kinds = [{*request.result().token_versions[0]} for request in requests]
    assert kinds == [{0}, {0}, {1}, {1}, {1}]
    check(engine, requests, versions)


def test_paused_engines_switch_too(engine, versions):
    """The pages are in host memory: rows continue with them, or compute them again."""
    requests = [start(engine, [4] * 90, 3)]
    with compiling.events() as seen:
        for version, mode in ((1, "continue"), (2, "recompute")):
            advance(engine, requests[0], 20 * version)
            requests.append(submit(engine, [5] * 9 * version))
            engine.pause()
            engine.release_cache()
            with pytest.raises(xj.InputError, match="wait' is for an engine that runs"):
                engine.update(versions[0], mode="wait")
            engine.update(versions[version], mode=mode)
            engine.restore_cache()
            engine.resume()
        outs = [request.result() for request in requests]
        check(engine, requests, versions)
    assert seen == [] and {*outs[0].token_versions[0]} == {0, 1, 2}


def test_containers_and_dtypes(engine, model, versions):
    tree = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), versions[1])
    rounded = jax.tree.map(lambda x: x.astype(np.float32), tree)
    ids = [[3, 4, 5]]
    expected = xj.generate(rounded, model.config, ids, xj.GenerateOptions(max_tokens=20)).logprobs
    tree["layers"] = [dict(layer) for layer in tree["layers"]]
    with compiling.events() as seen:
        engine.update(tree)
        found = engine.generate(ids, xj.GenerateOptions(max_tokens=20))[0].logprobs
    assert seen == []
    np.testing.assert_allclose(found, expected, atol=1e-5)
    tree["layers"] = {str(i): layer for i, layer in enumerate(tree["layers"])}
    engine.update(tree)
    assert engine.generate(ids, xj.GenerateOptions(max_tokens=20))[0].logprobs == found
    own = engine.model.params
    with pytest.raises(xj.InputError, match=r"embed.weight is bfloat16, not float32: leave out cast"):
        engine.update(tree, cast=False)
    del tree["layers"]["0"]["q"]
    with pytest.raises(xj.InputError, match=r"parameters lack layers.0.q.bias: give"):
        engine.update(tree)
    with pytest.raises(xj.InputError, match="lack layers.0.attn_norm: give all of the model's, unstacked"):
        engine.update(xj.params.stack_layers(versions[1], model.config))
    with pytest.raises(xj.InputError, match="final_norm must be an array, got 1.0"):
        engine.update(versions[1] | dict(final_norm=1.0))
    with pytest.raises(xj.InputError, match="unknown leaves: bias"):
        engine.update(versions[1] | dict(bias=tree["final_norm"]))
    with pytest.raises(xj.InputError, match=r"final_norm has the shape \[3\], not \[64\]"):
        engine.update(versions[1] | dict(final_norm=np.ones(3, np.float32)))
    with pytest.raises(xj.InputError, match="mode must be one of continue, wait"):
        engine.update(versions[1], mode="restart")
    assert engine.model.params is own


def test_donated_parameters(engine, model, versions):
    mine = jax.tree.map(jax.numpy.array, versions[1])
    engine.update(mine, copy=True)
    jax.tree.map(lambda x: x.delete(), mine)
    expected = start(engine, [4] * 9, 3).result().logprobs
    mine = jax.tree.map(jax.numpy.array, versions[1])
    engine.update(mine)
    request = start(engine, [4] * 9, 3)
    jax.tree.map(lambda x: x.delete(), mine)
    for _ in range(2):
        with pytest.raises(xj.InputError, match="were donated to another program"):
            request.result()
        request = submit(engine, [5])
    with pytest.raises(xj.InputError, match="embed.weight was donated"):
        engine.update(mine)
    engine.update(versions[1])
    assert start(engine, [4] * 9, 3).result().logprobs == expected


def test_an_int8_engine_quantizes(model, versions):
    """The engine quantizes new weights as it does when it loads a model."""
    quantized = [engine_requests.random_model("qwen2", "int8") for _ in range(2)]
    engine = xj.Engine(quantized[0], **SHAPE)
    own = engine.model.params
    request = start(engine, [4] * 9, 3)
    engine.update(versions[0])
    jax.tree.map(np.testing.assert_array_equal, engine.model.params, quantized[1].params)
    advance(engine, request, 20)
    engine.update(versions[1], mode="recompute")
    assert {*request.result().token_versions[0]} == {0, 1, 2}
    check(engine, [request], dict(enumerate((own, *versions.values()))))
    engine.update(own)
    assert engine.version == 3


def test_quantizing_on_an_accelerator(model, monkeypatch):
    """Programs quantize a part at a time, and are compiled once."""
    monkeypatch.setattr(params_like_module, "is_on_host", lambda x: False)
    for method in ("int8", "int4"):
        like = engine_requests.random_model("qwen2", method).params
        found = params_like(model.params, model.config, like)
        jax.tree.map(np.testing.assert_array_equal, found, like)
        programs = device_quantization._ON_DEVICE._cache_size()
        params_like(model.params, model.config, like)
        assert device_quantization._ON_DEVICE._cache_size() == programs > 0
    large = dict(weight=model.params["embed"]["weight"] * np.inf)
    with pytest.raises(xj.InputError, match="holds NaN, inf or numbers too large"):
        params_like(dict(model.params, embed=large), model.config, like)
    for bits, group in ((4, 64), (8, 64), (8, 2048)):
        shape = jax.ShapeDtypeStruct((2048, 2048), np.float32)
        program = device_quantization._ON_DEVICE.lower(shape, bits, group).compile()
        assert program.memory_analysis().temp_size_in_bytes < 2**20 * 5  # of 16 MiB in float32


def test_parameters_like_others(model):
    """Groups of int4, key heads that a mesh repeats, and a format that floats do not have."""
    int4 = engine_requests.random_model("qwen2", "int4").params
    jax.tree.map(np.testing.assert_array_equal, params_like(model.params, model.config, int4), int4)
    again = dict(int4, layers=list(int4["layers"]))
    jax.tree.map(np.testing.assert_array_equal, params_like(again, model.config, int4), int4)
    ternary = xj.init_params(model.config, jax.random.key(0), "float32", "ternary")
    with pytest.raises(xj.InputError, match="has a format of its checkpoint"):
        params_like(model.params, model.config, ternary)
    repeated = with_repeated_kv_heads(model.config, 4)
    wide = xj.init_params(repeated, jax.random.key(0), "float32")
    found = params_like(model.params, repeated, wide)["layers"][0]["k"]["weight"]
    own = np.asarray(model.params["layers"][0]["k"]["weight"])
    np.testing.assert_array_equal(found.reshape(2, 2, 16, 64)[:, 1].reshape(32, 64), own)
    assert found.shape == wide["layers"][0]["k"]["weight"].shape == (64, 64)
