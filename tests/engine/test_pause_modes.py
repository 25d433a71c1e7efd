"""Tests the fate of unfinished answers when an engine is paused."""

import pytest
import tiny

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

LONG = xj.GenerateOptions(max_tokens=30, eos_token_ids=())


@pytest.fixture(scope="module")
def own_engine():
    engine = xj.Engine(tiny.shallow_model(), rows=1, capacity=128, chunk=64, pages=8)
    engine.generate([[5]], LONG)  # its programs are compiled
    return engine


@pytest.fixture
def engine(own_engine):
    yield own_engine
    if own_engine.pausing.phase != "running":
        own_engine.resume()


def start(engine) -> list[xj.types.Request]:
    """An answer that has begun, and one that waits for its slot. The caller takes the steps."""
    requests = [engine.submit([i, 6], LONG) for i in (5, 7)]
    for _ in range(5):
        engine.core._pacing.step_seconds = 1.0  # so that a step decodes one token
        engine.step()
    assert 0 < len(requests[0].answers[0].tokens) < 30 and not requests[1].answers[0].tokens
    return requests


def test_keep(engine):
    alone = [engine.submit([i, 6], LONG).result().tokens for i in (5, 7)]
    requests = start(engine)
    engine.pause()
    count = len(requests[0].answers[0].tokens)
    assert not engine.step() and len(requests[0].answers[0].tokens) == count
    engine.resume()
    assert [request.result().tokens for request in requests] == alone


def test_wait(engine):
    requests = start(engine)
    engine.pause("wait")
    assert [request.ended for request in requests] == [True, False]
    later = engine.submit([8], LONG)
    assert not engine.step() and not requests[1].answers[0].tokens
    engine.resume()
    assert [len(request.result().tokens[0]) for request in (*requests, later)] == [30] * 3


def test_abort(engine):
    requests = start(engine)
    engine.pause("abort")
    outs = [request.result() for request in requests]
    assert [out.finish_reason for out in outs] == [["abort"]] * 2
    assert 0 < len(outs[0].tokens[0]) < 30 and outs[1].tokens == [[]]
    later = engine.submit([8], LONG)
    engine.pausing.abort()
    assert later.result().finish_reason == ["abort"]
    engine.resume()
    assert len(engine.submit([8], LONG).result().tokens[0]) == 30


def test_wrong_calls(engine):
    with pytest.raises(xj.InputError, match="mode must be one of keep, wait, abort, got 'later'"):
        engine.pause("later")
    engine.pause()
    for mode in ("keep", "wait", "abort"):
        with pytest.raises(xj.InputError, match="this one is paused"):
            engine.pause(mode)
