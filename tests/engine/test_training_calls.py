"""Tests the calls of a trainer: an engine pauses, lends the memory of its pages, and gives rollouts as
arrays.
"""

import asyncio
import pickle

import compiling
import jax
import numpy as np
import parity_cases as cases
import pytest
from small_models import QWEN

import xinfer_jax as xj
from xinfer_jax.layerwise import layerwise_executor
from xinfer_jax.layerwise.layer_programs import layer_groups

pytestmark = [pytest.mark.full, pytest.mark.oldest]

LONG = xj.GenerateOptions(max_tokens=100, eos_token_ids=())


def prompt(seed: int, length: int) -> list[int]:
    return np.random.RandomState(seed).randint(5, 90, length).tolist()


@pytest.fixture(scope="module")
def engine() -> xj.Engine:
    """Returns the engine of a hybrid: it has pages, recurrent states and snapshots."""
    config = cases.CASES["qwen3-5-tied"].config
    model = xj.Model(cases.params_from(config, cases.random_tensors(config, 3)), config)
    return xj.Engine(model, rows=3, capacity=256, pages=12, chunk=64, warm_up=True)


def outcome(request: xj.types.Request) -> tuple:
    out = request.result(60)
    return out.tokens, out.logprobs, out.finish_reason


def test_rows_go_on_with_their_bits_after_their_pages_were_released(engine):
    """A row that decodes, one whose prompt is half prefilled, and requests that come meanwhile."""
    sampled = xj.GenerateOptions(max_tokens=60, sampling=xj.SamplingConfig(temperature=1.0), eos_token_ids=())
    asked = [(prompt(0, 20), LONG), (prompt(1, 150), sampled), (prompt(2, 90), sampled), (prompt(3, 5), LONG)]
    keys = [jax.random.key(i) for i in range(4)]
    expected = [outcome(engine.submit(*a, key=key)) for a, key in zip(asked, keys, strict=True)]
    engine.update(engine.model.params)  # which empties the prefix cache
    requests = [engine.submit(*a, key=key) for a, key in zip(asked[:3], keys, strict=False)]
    while not (engine.stats.running and engine.stats.prefilling):
        engine.core._pacing.step_seconds = 1.0  # so that a step decodes one token
        engine.step()
    device = engine.core.device
    arrays = jax.tree.leaves((device.pools, device.states, device._snapshots))
    with compiling.events() as seen:
        engine.pause()
        before = len(requests[0].answers[0].tokens)
        requests.append(engine.submit(*asked[3], key=keys[3]))
        assert not engine.step() and len(requests[0].answers[0].tokens) == before > 0
        engine.release_cache()
        assert all(x.is_deleted() for x in arrays)
        assert engine.stats.pages_used == engine.stats.pages_cached == engine.stats.running == 0
        with pytest.raises(TimeoutError):
            requests[0].result(0.01)
        cancelled = engine.submit([5], LONG)
        cancelled.cancel()
        assert cancelled.result(60).finish_reason == ["abort"]
        engine.update(engine.model.params)
        engine.restore_cache()
        engine.resume()
        assert [outcome(request) for request in requests] == expected
    assert seen == []
    assert engine.stats.pages_used == 0
    assert engine.stats.pages_cached + engine.stats.pages_free == engine.pages - 1


def test_sample_gives_log_probabilities_as_arrays(engine):
    """It also gives the log-probabilities of the distribution that was sampled from, next to rows that do not
    ask for them.
    """
    settings = xj.SamplingConfig(temperature=0.7, top_k=8)
    options = xj.GenerateOptions(max_tokens=12, sampling=settings, eos_token_ids=(7,))
    both = xj.GenerateOptions(max_tokens=12, sampling=settings, eos_token_ids=(), logprobs=20)
    ids = prompt(5, 9)

    async def several() -> list[xj.types.SampleOutput]:
        engine.submit(ids, LONG)
        calls = [engine.sample(np.array(ids), options, seed=seed) for seed in (1, 2)]
        calls += [engine.sample(ids, both, seed=3), engine.sample(ids, options)]
        return await asyncio.gather(*calls)

    async def again(seed: int) -> xj.types.SampleOutput:
        return await engine.sample(ids, options, seed=seed)

    engine.__enter__()
    outs = asyncio.run(several())
    same = asyncio.run(again(outs[3].seed))
    request = engine.submit(ids, options, key=jax.random.key(1))
    assert (
        request.result().logprobs == [outs[0].logprobs_T.tolist()]
        and not request.answers[0].processed_logprobs
    )
    for bad, message in (
        ((dict(ids="text")), "ids must be a list of token ids, got 'text'"),
        (dict(ids=ids, options=xj.GenerateOptions(n=2)), "gives one answer, got n=2"),
        (dict(ids=ids, key=jax.random.key(0)), "takes no key: give a seed"),
        (dict(ids=ids, seed=-1), "seed must be a whole number from 0"),
    ):
        with pytest.raises(xj.InputError, match=message):
            asyncio.run(engine.sample(**bad))
    assert asyncio.run(cancelled(engine, ids)) == 0
    assert outs[3].seed != outs[0].seed and same.tokens_T.tolist() == outs[3].tokens_T.tolist()
    assert (same.processed_logprobs_T == outs[3].processed_logprobs_T).all() and outs[0].alternatives is None
    assert [a.processed_logprob for a in outs[2].alternatives] == pytest.approx(
        outs[2].processed_logprobs_T.tolist()
    )
    for i, out in enumerate(outs):
        assert out.finish_reason == ("stop" if i != 2 and out.tokens_T[-1] == 7 else "length")
    versions = {engine.version: engine.model.params}
    assert engine.replay(outs[0], versions) == outs[0].answer.logprobs
    with pytest.raises(xj.InputError, match="what sample returned in this process, got SampleOutput"):
        engine.replay(pickle.loads(pickle.dumps(outs[0])), versions)
    out = outs[2]
    assert out.versions_T.tolist() == [engine.version] * len(out.tokens_T)
    for token, raw, processed in zip(out.alternatives, out.logprobs_T, out.processed_logprobs_T, strict=True):
        kept = {id: logprob / 0.7 for id, logprob in token.top[:8]}
        total = np.log(np.exp(list(kept.values())).sum())
        assert dict(token.top)[token.id] == pytest.approx(raw, abs=1e-5)
        assert kept[token.id] - total == pytest.approx(processed, abs=1e-5)


async def cancelled(engine: xj.Engine, ids: list[int]) -> int:
    """Unfinished requests after a task was cancelled."""
    task = asyncio.create_task(engine.sample(ids, LONG))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    while engine.load:
        await asyncio.sleep(0.01)
    return engine.load


def test_the_order_is_checked_and_a_paused_engine_is_closed(engine):
    for call in (engine.resume, engine.release_cache, engine.restore_cache):
        with pytest.raises(xj.InputError, match="this one is running: the order is pause, release_cache"):
            call()
    engine.pause()
    for call in (engine.pause, engine.restore_cache):
        with pytest.raises(xj.InputError, match="this one is paused"):
            call()
    engine.release_cache()
    for call in (engine.pause, engine.resume, engine.release_cache):
        with pytest.raises(xj.InputError, match="this one is without pages"):
            call()
    create = engine.core.device._create
    engine.core.device._create = lambda function: 1 / 0  # as where no memory is free
    with pytest.raises(ZeroDivisionError):
        engine.restore_cache()
    engine.core.device._create = create
    engine.restore_cache()
    engine.release_cache()
    waiting = engine.submit([5], LONG)
    engine.close()
    with pytest.raises(xj.InputError, match="closed before the request ended"):
        waiting.result()
    for call in (
        engine.restore_cache, engine.pause, lambda: engine.replay(waiting, {}),
        lambda: engine.update(engine.model.params),
    ):  # fmt: skip
        with pytest.raises(xj.InputError, match="is closed"):
            call()


def test_large_logits_are_of_the_last_layers_alone(monkeypatch):
    """If logits are large, groups of layers before the last one have a program without logits."""
    config = xj.ModelConfig.from_hf(QWEN | dict(num_hidden_layers=6))
    params = xj.init_params(config, jax.random.key(0), "float32")
    assert len(layer_groups(config, 5)) == 2
    options = xj.GenerateOptions(max_tokens=4, eos_token_ids=())
    outs = []
    for limit in (2**24, 0):
        monkeypatch.setattr(layerwise_executor, "_LARGE_LOGITS", limit)
        outs.append(xj.generate(params, config, [[5, 6, 7]], options))
    assert outs[0].tokens == outs[1].tokens
    np.testing.assert_allclose(outs[0].logprobs, outs[1].logprobs, atol=1e-5)
