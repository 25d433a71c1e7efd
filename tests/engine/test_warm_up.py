"""An engine compiles in the background: requests meanwhile have the same bits, and wait only for their own
programs.
"""

import threading
import time

import compiling
import jax
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.layerwise import precompile

pytestmark = pytest.mark.oldest

SHAPE = dict(rows=3, capacity=256, chunk=64, pages=12)
NO_END = dict(eos_token_ids=())
DRAWN = xj.SamplingConfig(temperature=0.9, top_k=30)
REQUESTS = [
    ([5, 6, 7], xj.GenerateOptions(max_tokens=9, **NO_END), {}),
    ([5, 6, 8], xj.GenerateOptions(max_tokens=9, sampling=DRAWN, **NO_END), {}),
    (list(range(90)), xj.GenerateOptions(max_tokens=5, **NO_END), {}),
    ([9, 6, 7], xj.GenerateOptions(max_tokens=5, logprobs=3, **NO_END), {}),
    ([9, 6, 7], xj.GenerateOptions(max_tokens=5, sampling=DRAWN, logprobs=3, n=2, **NO_END), {}),
    (list(range(70)), xj.GenerateOptions(max_tokens=2, **NO_END), dict(prompt_logprobs=2)),
    (
        [4, 3],
        xj.GenerateOptions(max_tokens=9, sampling=xj.SamplingConfig(frequency_penalty=1.0), **NO_END),
        {},
    ),
]


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return tiny.shallow_model()


def submit_all(engine):
    return [engine.submit(ids, options, key=jax.random.key(3), **more) for ids, options, more in REQUESTS]


def outcome(request):
    out = request.result()
    return out.tokens, out.logprobs, out.alternatives, request.prompt_logprobs


def wait_until_warm(engine) -> None:
    end = time.monotonic() + 120
    while engine.stats.warming_up and time.monotonic() < end:
        time.sleep(0.05)
    assert not engine.stats.warming_up


@pytest.mark.full
def test_requests_during_warm_up_have_the_bits_of_later_ones(model):
    jax.clear_caches()
    with xj.Engine(model, **SHAPE) as engine:
        assert engine.stats.warming_up == 1 and "in the background" in engine.about
        together = [outcome(request) for request in submit_all(engine)]
        wait_until_warm(engine)
        assert engine.stats.programs > 10
        alone = []
        for ids, options, more in REQUESTS:
            alone.append(outcome(engine.submit(ids, options, key=jax.random.key(3), **more)))
        with compiling.events() as seen:
            again = [outcome(request) for request in submit_all(engine)]
    assert together == alone == again
    assert seen == []
    (out,) = xj.Engine(model, **SHAPE).generate([[5, 6, 8]], REQUESTS[1][1], key=jax.random.key(3))
    assert out.tokens == alone[1][0], "without a thread the caller waits"


def hold(monkeypatch, name: str) -> threading.Event:
    """Programs of this name are compiled once the event is set."""
    compile_it = precompile._compile
    released = threading.Event()

    def held(lowered):
        if f"@jit_{name} " in lowered.as_text()[:200]:
            assert released.wait(300)
        compile_it(lowered)

    monkeypatch.setattr(precompile, "_compile", held)
    return released


@pytest.mark.full
def test_a_request_waits_for_its_own_program_only(model, monkeypatch):
    released = hold(monkeypatch, "_sample")
    with xj.Engine(model, **SHAPE) as engine:
        drawn = engine.submit(
            [5, 6, 8], xj.GenerateOptions(max_tokens=4, sampling=DRAWN, **NO_END), key=jax.random.key(0)
        )
        greedy = engine.submit([5, 6, 8], xj.GenerateOptions(max_tokens=4, **NO_END))
        assert len(greedy.result().tokens[0]) == 4 and not drawn.ended
        long = engine.submit(
            list(range(70)), xj.GenerateOptions(max_tokens=2, **NO_END)
        )  # needs another stage
        assert len(long.result().tokens[0]) == 2 and not drawn.ended
        stats = engine.stats
        assert stats.waiting == stats.waiting_for_programs == 1 and stats.running == 0
        before = engine.last_step_time
        end = time.monotonic() + 120
        while engine.last_step_time == before:
            assert time.monotonic() < end, "the engine is stuck"
            time.sleep(0.01)
        cancelled = engine.submit(
            [5, 6], xj.GenerateOptions(max_tokens=4, sampling=DRAWN, **NO_END), key=jax.random.key(0)
        )
        cancelled.cancel()
        assert cancelled.result().finish_reason == ["abort"]
        released.set()
        assert len(drawn.result().tokens[0]) == 4
        wait_until_warm(engine)
        assert engine.stats.waiting_for_programs == engine.stats.pages_used == 0


@pytest.mark.full
def test_a_program_that_fails_in_the_background_compiles_when_it_is_needed(model, monkeypatch, caplog):
    compile_it = precompile._compile

    def broken(lowered):
        if "@jit__sample " in lowered.as_text()[:200]:
            raise MemoryError("no room")
        compile_it(lowered)

    monkeypatch.setattr(precompile, "_compile", broken)
    with xj.Engine(model, **SHAPE) as engine:
        out = engine.submit(
            [5, 6, 8], xj.GenerateOptions(max_tokens=4, sampling=DRAWN, **NO_END), key=jax.random.key(0)
        ).result()
        later = engine.submit([5, 6, 8], xj.GenerateOptions(max_tokens=4, logprobs=2, **NO_END)).result()
        wait_until_warm(engine)
    assert len(out.tokens[0]) == len(later.tokens[0]) == 4
    assert "not compiled in the background: MemoryError: no room" in caplog.text
