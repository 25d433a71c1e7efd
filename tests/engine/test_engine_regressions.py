"""Tests of faults that the engine once had, and that must not come back."""

import asyncio
import dataclasses
import signal
import time

import jax
import numpy as np
import pytest
import tiny
from compiling import events

import xinfer_jax as xj
from xinfer_jax.engine.scheduler import Scheduler

pytestmark = [pytest.mark.full, pytest.mark.oldest]

_BROKEN = 200  # a token whose embedding is NaN
HF = tiny.CONFIG | dict(eos_token_id=286)
SAMPLED = xj.SamplingConfig(temperature=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return xj.load_model(tiny.write(tmp_path_factory.mktemp("engine") / "m", HF))


@pytest.fixture(scope="module")
def shared(model):
    return xj.Engine(model, rows=2, capacity=256, chunk=64, pages=9)


@pytest.fixture
def engine(shared, model):
    """`shared` with a new scheduler and no requests."""
    shared.error = None
    shared._thread = None
    for kept in (shared._unfinished, shared._submitted, shared._cancelled, shared._calls):
        kept.clear()
    shared.core.answers.clear()
    shared.core._pacing.record_decode(0.0, 1)
    shared.core.scheduler = Scheduler(shared.rows, shared.pages, shared.capacity, shared.chunk)
    shared.core.device.params = model.params
    shared.model = model
    return shared


def test_draft_tokens_past_the_last_page_overwrite_no_key(model):
    # 20 + 236 = the capacity, a multiple of 64: the last pass writes positions 256 and on.
    options = xj.GenerateOptions(max_tokens=236, eos_token_ids=())
    with xj.Engine(model, rows=1, capacity=256, chunk=64, pages=9, draft="lookup") as guessing:
        for seed in range(2):
            ids = np.random.RandomState(seed).randint(5, 250, 20).tolist()
            mine = guessing.submit(ids, options).result()
            whole = xj.generate(model.params, model.config, [ids], options)
            # Another key at position 192 moves the last log-probabilities far beyond rounding.
            assert np.allclose(mine.logprobs[0][-4:], whole.logprobs[0][-4:], atol=1e-4)


def test_an_answer_may_fail_in_the_step_that_ends_another(tmp_path):
    weights = tiny.tensors(HF | dict(tie_word_embeddings=False))
    weights[tiny.EMBED][_BROKEN] = np.nan
    path = tiny.write(tmp_path / "m", HF | dict(tie_word_embeddings=False), weights=weights)
    broken = xj.Engine(xj.load_model(path), rows=2, capacity=128, chunk=64, pages=6)
    sampling = dataclasses.replace(SAMPLED, allowed_token_ids=[_BROKEN, *range(10, 24)])
    options = xj.GenerateOptions(max_tokens=12, sampling=sampling, n=2, eos_token_ids=())
    for seed in range(8):  # in some the first answer fails and the second does not
        try:
            broken.generate([[1, 2, 3]], options, key=jax.random.key(seed))
        except xj.InputError as error:
            assert "nan" in str(error)
    assert broken.generate([[1, 2, 3]], xj.GenerateOptions(max_tokens=2))


def test_a_closed_event_loop_does_not_stop_other_requests(engine):
    with engine:
        left, other = (
            engine.submit([i], xj.GenerateOptions(max_tokens=200, eos_token_ids=())) for i in (4, 5)
        )

        async def begin():
            pieces.append(left.text_async())
            async for _ in pieces[0]:
                return

        pieces = []
        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin())
        loop.close()
        assert other.result(60).finish_reason == ["length"]


def test_alternatives_end_where_a_stop_string_ends_the_answer(engine, model):
    options = xj.GenerateOptions(max_tokens=60, eos_token_ids=(), logprobs=2)
    text = model.tokenizer.decode(engine.submit([1, 2, 3], options).result().tokens[0])
    out = engine.submit([1, 2, 3], dataclasses.replace(options, stop_strings=[text[20:22]])).result()
    assert out.finish_reason == ["stop"]
    assert len(out.alternatives[0]) == len(out.logprobs[0])


def test_raw_uint32_keys_one_per_prompt(engine, model):
    keys = np.array([[0, 1], [0, 2]], np.uint32)
    options = xj.GenerateOptions(max_tokens=4, sampling=SAMPLED)
    whole = xj.generate(model.params, model.config, [[1, 2], [3]], options, key=keys)
    assert [out.tokens[0] for out in engine.generate([[1, 2], [3]], options, key=keys)] == whole.tokens
    for number in (2, 5):
        with pytest.raises(xj.InputError, match=f"{number}.*for 3"):
            engine.generate([[1]] * 3, options, key=jax.random.split(jax.random.key(0), number))
    with pytest.raises(xj.InputError, match="key"):
        engine.submit([1], xj.GenerateOptions(max_tokens=2), key=[1])
    with pytest.raises(xj.InputError, match="list"):
        engine.generate("hello", xj.GenerateOptions(max_tokens=1))


def test_keys_settings_and_weights_of_other_kinds_compile_nothing(engine, model):
    """Several keys, a committed one, a setting that is a jax array, committed weights."""
    keys = jax.random.split(jax.random.key(0), 7)
    committed = jax.device_put((jax.random.key(0), model.params), jax.devices()[0])
    options = xj.GenerateOptions(max_tokens=2, sampling=SAMPLED)
    as_array = xj.GenerateOptions(
        max_tokens=2, sampling=xj.SamplingConfig(temperature=jax.numpy.float32(0.7))
    )
    engine.update(committed[1])
    with events() as seen:
        engine.generate([[1]] * 7, options, key=keys)
        engine.submit([1], options, key=committed[0]).result()
        engine.submit([1], as_array, key=np.array([0, 1], np.uint32)).result()
        engine.submit([1] * 100, xj.GenerateOptions(max_tokens=2)).result()
    assert not seen


def test_weights_are_not_the_callers_arrays(engine, model):
    mine = jax.tree.map(np.array, model.params)
    engine.update(mine)
    first = engine.submit([1, 2, 3], xj.GenerateOptions(max_tokens=4)).result().logprobs
    for leaf in jax.tree.leaves(mine):
        leaf *= 2
    assert engine.submit([1, 2, 3], xj.GenerateOptions(max_tokens=4)).result().logprobs == first
    engine.update(model.params)


@pytest.mark.filterwarnings("error")
def test_best_of_cancelled_answers(engine):
    request = engine.submit(
        [1], xj.GenerateOptions(max_tokens=9, sampling=SAMPLED, best_of=3), key=np.array([0, 1], np.uint32)
    )
    request.cancel()
    assert request.result().finish_reason == ["abort"]


def test_ttft_ends_when_the_host_has_the_token(engine, monkeypatch):
    """It does not end when the program is dispatched."""
    seen = []
    get = jax.device_get
    request = engine.submit([1], xj.GenerateOptions(max_tokens=1))
    monkeypatch.setattr(jax, "device_get", lambda x: (seen.append(dict(request.times)), get(x))[1])
    request.result()
    assert "first" not in seen[0]


def test_requests_of_one_token_do_not_delay_others(engine):
    """Cancels are handled between two chunks, whatever waits."""
    options = xj.GenerateOptions(max_tokens=1, eos_token_ids=())
    flood = engine.submit_many([[i] * 100 for i in range(5, 45)], options, client="a", prompt_logprobs=1)
    engine.step()
    small = engine.submit([7], options, client="b")
    for _ in range(4):
        engine.step()
    assert small.ended and not flood[-1].ended
    for request in flood:
        request.cancel()
    engine.step()
    assert all(request.ended for request in flood)
    assert {request.answers[0].finish_reason for request in flood[10:]} == {"abort"}


def test_a_step_is_short_although_no_caller_streams(engine):
    long = [
        engine.submit([i], xj.GenerateOptions(max_tokens=200, eos_token_ids=()), live=False) for i in (5, 6)
    ]
    while not all(request.answers[0].tokens for request in long):
        engine.step()
    engine.core._pacing.record_decode(0.1, 1)  # of a decode step
    given = [len(request.answers[0].tokens) for request in long]
    engine.step()
    assert [len(request.answers[0].tokens) for request in long] == [count + 10 for count in given]


def test_options_are_checked_once_for_many_prompts(engine, monkeypatch):
    seen = []
    validate = xj.SamplingConfig.validate
    monkeypatch.setattr(xj.SamplingConfig, "validate", lambda self: (seen.append(1), validate(self))[1])
    sampling = xj.SamplingConfig(logit_bias={5: 1.0}, allowed_token_ids=list(range(250)) * 40)
    requests = engine.submit_many(
        [[i] for i in range(5, 37)], xj.GenerateOptions(max_tokens=1, sampling=sampling)
    )
    assert len(seen) <= 2
    biases = {id(np.asarray(request.call.sampling_B.logit_bias).base) for request in requests}
    assert len({id(request.call.sampling_B) for request in requests}) == 1 and len(biases) == 1
    assert engine.submit_many([[1], [2]], xj.GenerateOptions(max_tokens=1), keys=[jax.random.key(0)] * 2)
    with pytest.raises(xj.InputError, match="1 keys for 2"):
        engine.submit_many([[1], [2]], xj.GenerateOptions(max_tokens=1), keys=[jax.random.key(0)])


def test_an_interrupt_lets_the_step_end(engine, model, monkeypatch):
    options = xj.GenerateOptions(max_tokens=100, eos_token_ids=())
    window = engine.core.device.decode
    turns = []

    def interrupted(*args):
        turns.append(signal.raise_signal(signal.SIGINT))
        return window(*args)

    monkeypatch.setattr(engine.core.device, "decode", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2]], options)
        assert len(turns) == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    assert engine.alive and engine.generate([[1, 2]], options)[0].finish_reason == ["length"]
    assert engine.stats.pages_used == 0


def test_an_error_without_a_message_is_named(engine, monkeypatch):
    def broken(*args):
        raise MemoryError

    monkeypatch.setattr(engine.core.device, "decode", broken)
    with pytest.raises(MemoryError):
        engine.generate([[1, 2]], xj.GenerateOptions(max_tokens=5))
    with pytest.raises(xj.InputError, match="MemoryError"):
        engine.submit([1])


def test_a_request_keeps_no_old_weights(engine, model):
    request = engine.submit([1, 2], xj.GenerateOptions(max_tokens=2))
    request.result()
    old = sum(x.nbytes for x in jax.tree.leaves(request.call.params))
    assert old == model.params["final_norm"].nbytes


def test_the_end_time_is_set_before_a_request_has_ended(engine):
    request = engine.submit([1, 2], xj.GenerateOptions(max_tokens=1))
    take = engine.core._notify
    seen = []

    def told(requests):
        seen.append([r.ended for r in requests if r.answered])
        take(requests)

    engine.core._notify = told
    try:
        request.result()
    finally:
        engine.core._notify = take
    assert [False] in seen and request.ended and request.times["ended"] >= request.times["first"]


def test_times_count_from_arrival(engine):
    request = engine.submit([1, 2], xj.GenerateOptions(max_tokens=1), received=time.monotonic() - 5)
    assert request.result().stats.ttft_seconds > 5
    late = engine.submit([1, 2], xj.GenerateOptions(max_tokens=1), received=time.monotonic() - 5, deadline=2)
    assert late.result().finish_reason == ["length"]


def test_a_stop_string_may_be_the_text_of_a_special_token(engine, model):
    """This holds if special tokens have text."""
    special = next(i for i, t in model.tokenizer.backend.get_added_tokens_decoder().items() if t.special)
    spelled = model.tokenizer.decode([special], skip_special_tokens=False)
    sampling = xj.SamplingConfig(allowed_token_ids=[special])
    options = xj.GenerateOptions(max_tokens=5, sampling=sampling, eos_token_ids=(), stop_strings=[spelled])
    for skips, reason in ((True, "length"), (False, "stop")):
        assert engine.submit([1], options, skip_special_tokens=skips).result().finish_reason == [reason]
