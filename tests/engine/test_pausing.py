"""Engines that are paused, and that lend the memory of their pages."""

import compiling
import jax
import numpy as np
import parity_cases as cases
import pytest

import xinfer_jax as xj

pytestmark = pytest.mark.newest

LONG = xj.GenerateOptions(100, eos_token_ids=())


def prompt(seed: int, length: int) -> list[int]:
    return np.random.RandomState(seed).randint(5, 90, length).tolist()


@pytest.fixture(scope="module")
def engine() -> xj.Engine:
    """Of a hybrid: it has pages, recurrent states and snapshots."""
    config = cases.CASES["qwen3-5-tied"].config
    model = xj.Model(cases.params_from(config, cases.random_tensors(config, 3)), config)
    return xj.Engine(model, rows=3, capacity=256, pages=12, chunk=64, warm_up=True)


def outcome(request: xj.Request) -> tuple:
    out = request.result(60)
    return out.tokens, out.logprobs, out.finish_reason


def test_rows_go_on_with_their_bits_after_their_pages_were_released(engine):
    """A row that decodes, one whose prompt is half prefilled, and requests that come meanwhile."""
    sampled = xj.GenerateOptions(60, xj.SamplingConfig(temperature=1.0), eos_token_ids=())
    asked = [(prompt(0, 20), LONG), (prompt(1, 150), sampled), (prompt(2, 90), sampled), (prompt(3, 5), LONG)]
    keys = [jax.random.key(i) for i in range(4)]
    expected = [outcome(engine.submit(*a, key=key)) for a, key in zip(asked, keys, strict=True)]
    engine.update(engine.model.params)  # which empties the prefix cache
    requests = [engine.submit(*a, key=key) for a, key in zip(asked[:3], keys, strict=False)]
    while not (engine.stats.running and engine.stats.prefilling):
        engine._core._pacing.step_seconds = 1.0  # so that a step decodes one token
        engine.step()
    device = engine._core.device
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
        assert cancelled.result(60).finish_reason == ["cancelled"]
        engine.update(engine.model.params)
        engine.restore_cache()
        engine.resume()
        assert [outcome(request) for request in requests] == expected
    assert seen == []
    assert engine.stats.pages_used == 0
    assert engine.stats.pages_cached + engine.stats.pages_free == engine.pages - 1


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
    create = engine._core.device._create
    engine._core.device._create = lambda function: 1 / 0  # as where no memory is free
    with pytest.raises(ZeroDivisionError):
        engine.restore_cache()
    engine._core.device._create = create
    engine.restore_cache()
    engine.release_cache()
    waiting = engine.submit([5], LONG)
    with engine:
        engine.close()
    with pytest.raises(xj.InputError, match="closed before the request ended"):
        waiting.result()
    with pytest.raises(xj.InputError, match="is closed"):
        engine.restore_cache()
