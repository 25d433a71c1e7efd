"""The engine: nothing is compiled after warm-up, no page is lost, and every method of its callers."""

import asyncio
import dataclasses
import random

import compiling
import jax
import numpy as np
import pytest
import tiny
from soak import engine_requests

import xinfer_jax as xj
from xinfer_jax.engine import pacing

pytestmark = [pytest.mark.newest, pytest.mark.optimized]

SHAPE = dict(rows=3, capacity=512, chunk=128)
NO_END = dict(eos_token_ids=())


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return tiny.shallow_model()


@pytest.fixture(scope="module")
def engine(model):
    with xj.Engine(model, **SHAPE, pages=20, warm_up=True) as engine:
        yield engine


def generate_alone(model, ids, options, key=None):
    return xj.generate(model.params, model.config, [ids], options, key=key)


def test_nothing_is_compiled_after_warm_up_and_no_page_is_lost(engine, model):
    rng = random.Random(5)
    shape = dict(capacity=512, pages=engine.pages)
    asked = engine_requests.draw(rng, model.config.vocab_size, 300, 60, shape)
    short = [dataclasses.replace(a.options, max_tokens=min(a.options.max_tokens, 6)) for a in asked]
    key = jax.random.key(0)
    with compiling.events() as seen:
        requests = [engine.submit(a.ids, o, key=a.key, **a.more) for a, o in zip(asked, short, strict=True)]
        for request in requests:
            engine_requests.outcome(request)
        assert engine.generate([[5], [6, 7]], xj.GenerateOptions(max_tokens=2), key=key)
    assert seen == []
    stats = engine.stats
    assert stats.warming_up == stats.waiting_for_programs == 0 and stats.programs > 10
    assert stats.running == stats.waiting == stats.pages_used == 0
    assert stats.pages_cached + stats.pages_free == engine.pages - 1
    assert stats.requests >= 300 and stats.ttft_seconds[0] > 0


def test_generate_of_the_engine_equals_generate(engine, model):
    prompts = ["What is the capital of France?", [{"role": "user", "content": "Hello"}], list(range(40, 60))]
    ids = [p if isinstance(p[0], int) else xj.encode_prompt(model, p) for p in prompts]
    options = xj.GenerateOptions(max_tokens=12, sampling=xj.SamplingConfig(temperature=0.8))
    key = jax.random.key(4)
    outs = engine.generate(prompts, options, key=key)
    together = xj.generate(model.params, model.config, ids, options, key=key)
    assert [out.tokens[0] for out in outs] == together.tokens
    assert [out.finish_reason[0] for out in outs] == together.finish_reason
    keys = jax.random.split(key, 3)
    outs = engine.generate(prompts, [options] * 3, key=keys)
    assert [out.tokens[0] for out in outs] == xj.generate(
        model.params, model.config, ids, options, key=keys
    ).tokens


def test_text_is_streamed_up_to_a_stop_string(engine, model):
    asked = "What is the capital of France?", xj.GenerateOptions(max_tokens=20)
    text = xj.generate_text(model, *asked)
    assert "".join(engine.submit(*asked).text()) == text

    async def read() -> str:
        return "".join([piece async for piece in engine.submit(*asked).text_async()])

    assert asyncio.run(read()) == text
    stops = [text[-9:-5], text[9:13]]
    request = engine.submit(asked[0], xj.GenerateOptions(max_tokens=20, stop_strings=stops))
    assert "".join(request.text()) == text[: min(map(text.index, stops))]
    assert request.result().finish_reason == ["stop"]


def test_n_and_best_of(engine, model):
    ids = xj.encode_prompt(model, "Tell me about France.")
    key = jax.random.key(1)
    options = xj.GenerateOptions(max_tokens=9, sampling=xj.SamplingConfig(temperature=1.0), n=2, best_of=3)
    request = engine.submit(ids, options, key=key)
    assert request.result().tokens == generate_alone(model, ids, options, key).tokens
    assert len(request.answers) == 3 and list(request.answers[1]) == request.answers[1].tokens
    with pytest.raises(xj.InputError, match=r"request\.answers\[j\]"):
        iter(request)


def test_cancel_deadline_and_timeout(engine):
    long = xj.GenerateOptions(max_tokens=400, **NO_END)
    request = engine.submit([5] * 9, long)
    ids = iter(request)
    begun = [next(ids), next(ids)]
    request.cancel()
    out = request.result()
    assert out.finish_reason == ["abort"] and out.tokens[0][:2] == begun
    assert engine.submit([5] * 9, long, deadline=1e-3).result().finish_reason == ["length"]
    request = engine.submit([5] * 9, long)
    with pytest.raises(TimeoutError, match="after 0.01 seconds"):
        request.result(timeout=0.01)
    request.cancel()


def test_the_host_has_no_view_of_donated_rows(engine):
    """Output arrays are apart from the arrays that the next call donates, and host arrays are copied."""
    device = engine.core.device
    engine.submit([5, 6, 7], xj.GenerateOptions(max_tokens=30, **NO_END)).result()
    with engine._step_lock:
        out = device.decode({0: [1]}, 1, False, True, {0: 1})
        kept = {
            leaf.unsafe_buffer_pointer()
            for leaf in jax.tree.leaves(device.rows)
            if leaf.dtype != device.rows.key_B.dtype
        }
        assert not kept & {np.asarray(leaf).ctypes.data for leaf in jax.tree.leaves(out)}
        views = jax.tree.map(np.asarray, out)
        copies = jax.tree.map(np.copy, views)
        before = device.pools[0][0]
        device.decode({0: [1]}, 1, False, True, {0: 1})
        assert before.is_deleted(), "a view kept the pool from being donated"
        assert all(map(np.array_equal, jax.tree.leaves(views), jax.tree.leaves(copies)))


def test_rows_that_are_preempted_before_their_first_token(engine, monkeypatch):
    """First tokens of a step's prompts are sampled together, before any of these rows is swapped out."""
    core = engine.core
    asked = [
        ([5] * 9, xj.GenerateOptions(max_tokens=1)),
        *(([i] * 70, xj.GenerateOptions(max_tokens=6, **NO_END)) for i in (6, 7)),
    ]
    expected = [engine.submit(*one).result() for one in asked]
    schedule = core.scheduler.schedule
    preempted = []

    def preempt_or_schedule(now):
        for answer in core._firsts.values():
            if answer not in preempted:
                preempted.append(answer)
                return [core.scheduler._preempt(answer.row)]
        return schedule(now)

    monkeypatch.setattr(core.scheduler, "schedule", preempt_or_schedule)
    requests = [engine.submit(*one) for one in asked]
    outs = [request.result(60) for request in requests]
    assert [(o.tokens, o.logprobs) for o in outs] == [(o.tokens, o.logprobs) for o in expected]
    assert len(preempted) > 1 and preempted[0].request is requests[0]
    assert engine.stats.pages_used == 0


def test_time_slices_keep_the_bits(engine, monkeypatch):
    """Five clients on three slots, where a row is preempted in each step: with shared pages, a grammar, two
    answers, and a stream.
    """
    common = [*range(40, 180)]
    warm = xj.GenerateOptions(
        max_tokens=20, sampling=xj.SamplingConfig(temperature=1.0), logprobs=2, **NO_END
    )
    asked = [
        (common + [5], dataclasses.replace(warm, max_tokens=60)),
        (common + [6], warm),
        ("Hello", xj.GenerateOptions(max_tokens=20, grammar=xj.grammar.regex("[a-z ]{60}"))),
        ([7] * 9, dataclasses.replace(warm, n=2)),
        ([8] * 70, dataclasses.replace(warm, sampling=xj.SamplingConfig(repetition_penalty=1.3))),
    ]
    keys = [jax.random.key(i) for i in range(len(asked))]
    alone = [engine.submit(*one, key=key).result() for one, key in zip(asked, keys, strict=True)]
    assert engine.core.scheduler.time_slice == 0.5
    monkeypatch.setattr(engine.core.scheduler, "time_slice", 1e-9)
    monkeypatch.setattr(pacing, "_BUSY_SECONDS", 0.0)  # one step in each call, on a fast machine too
    before = engine.stats.preemptions
    clients = [
        engine.submit(*one, key=key, client=str(i))
        for i, (one, key) in enumerate(zip(asked, keys, strict=True))
    ]
    assert [*clients[0]] == alone[0].tokens[0]
    outs = [request.result(60) for request in clients]
    for name in ("tokens", "logprobs", "alternatives", "finish_reason"):
        assert [getattr(out, name) for out in outs] == [getattr(out, name) for out in alone]
    assert engine.stats.preemptions - before >= 5 and engine.stats.pages_used == 0


def test_greedy_rows_run_no_sampler(engine, monkeypatch):
    """They run none after rows that were sampled either, though a slot keeps the settings of its last row."""
    from xinfer_jax.engine.warm_up import WarmUp

    ran = set()
    run = WarmUp.__call__

    def recorded(self, program, *args):
        ran.add(program.__name__)
        return run(self, program, *args)

    drawn = xj.SamplingConfig(temperature=1.0, top_k=5, min_p=0.1, bad_words_ids=[[9], [8, 7]])
    key = jax.random.key(0)
    engine.generate(
        [[i, 6] for i in range(engine.rows)],
        xj.GenerateOptions(max_tokens=3, sampling=drawn, **NO_END),
        key=key,
    )
    monkeypatch.setattr(WarmUp, "__call__", recorded)
    engine.generate([[5, 6, 7]], xj.GenerateOptions(max_tokens=3, **NO_END))
    assert "_most_likely" in ran and not ran & {"_sample", "_alternatives"}
    engine.generate(
        [[5, 6, 7]],
        xj.GenerateOptions(max_tokens=3, sampling=xj.SamplingConfig(repetition_penalty=1.2), **NO_END),
    )
    assert "_sample" in ran, "a penalty is a sampling setting"


def test_host_arrays_are_not_changed(engine, monkeypatch):
    """A jitted function on a CPU may read the memory of a NumPy array, also after the call."""
    from xinfer_jax.engine.warm_up import WarmUp

    given = []

    def recorded(self, program, *args):
        given.extend((x, x.copy()) for x in jax.tree.leaves(args) if isinstance(x, np.ndarray))
        return program(*args)

    monkeypatch.setattr(WarmUp, "__call__", recorded)
    options = xj.GenerateOptions(max_tokens=200, **NO_END)
    for request in [engine.submit([i, 6], options) for i in range(5)]:
        request.result()
    assert len(given) >= 6 and all(np.array_equal(now, then) for now, then in given)


@pytest.mark.full
def test_a_row_with_nan_fails_alone():
    small = engine_requests.random_model("qwen2", None)
    embed = np.array(small.params["embed"]["weight"])
    embed[500] = np.nan
    params = small.params | dict(embed=dict(weight=jax.numpy.asarray(embed)))
    untied = params | dict(lm_head=small.params["embed"])
    config = dataclasses.replace(small.config, tie_word_embeddings=False)
    engine = xj.Engine(
        dataclasses.replace(small, params=untied, config=config), rows=2, capacity=256, chunk=64
    )
    good = list(range(70))
    bad = [*range(66), 500, 5, 6, 7]
    options = xj.GenerateOptions(max_tokens=20, **NO_END)
    expected = engine.submit(good, options).result()
    broken = engine.submit(bad, options)
    well = engine.submit(good, options)
    assert well.result().logprobs == expected.logprobs
    with pytest.raises(xj.InputError, match="the log-probability of token"):
        broken.result()
    assert engine.submit(good, options).result().logprobs == expected.logprobs
    engine.close()
    with pytest.raises(xj.InputError, match="the engine is closed"):
        engine.submit(good, options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(options=dict(capacity=64)), "capacity=64 is not for a request: give it to Engine"),
        (dict(options=dict(draft="lookup")), "draft='lookup' is not for a request"),
        (dict(options=dict(use_cache=False)), "an engine has pages"),
        (dict(options=dict(keep_prefix=True)), "an engine shares pages itself"),
        (dict(options=dict(logits=True)), "use generate, or logprobs"),
        (dict(options=dict(taps={0: xj.Tap()})), "the tap of layer 0 is not of Tap.steer"),
        (dict(options=dict(processors=dict(a=1))), "no processor is called .a.: the engine has none"),
        (dict(options=dict(logprobs=21)), "logprobs: an engine takes 20 at most, got 21"),
        (dict(options=dict(stop_token_ids=[*range(25)])), "stop_token_ids: an engine takes 16 at most"),
        (dict(options=dict(max_tokens=600)), "exceeds the 512 that a row of this engine can hold"),
        (dict(options=dict(stop_strings=[""])), "stop_strings must be a list of texts"),
        (dict(options=dict(sampling=1.0)), "sampling must be a SamplingConfig, or a list of them, got 1.0"),
        (dict(deadline=0), "deadline must be a number of seconds above 0, got 0"),
        (dict(salt=5), "salt must be a string, got 5"),
        (dict(prompt_logprobs=21), "prompt_logprobs"),
        (dict(priority="high"), "priority"),
        (dict(prompt=[]), "non-empty list"),
        (dict(prompt=[10**6]), "outside the vocabulary"),
    ],
)  # fmt: skip
def test_invalid_requests_are_rejected(engine, given, message):
    prompt = given.pop("prompt", [5])
    options = xj.GenerateOptions(**given.pop("options", {}))
    before = engine.stats
    with pytest.raises(xj.InputError, match=message):
        engine.submit(prompt, options, **given)
    assert engine.stats.waiting == before.waiting == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(rows=0), "rows"), (dict(chunk=100), "a multiple of 64, got 100"), (dict(pages=1), "pages"),
        (dict(capacity=10**6), "capacity"), (dict(draft="small"), "'lookup', 'mtp', a head"),
        (dict(cache_dtype="gear"), "use 'int8' or 'int4'"), (dict(pages=10**9), "fewer pages"),
        (dict(impl="bogus"), "impl"),
        (dict(time_slice=-1), "time_slice must be a number from 0 to .*, got -1"),
    ],
)  # fmt: skip
def test_invalid_engine_arguments_are_rejected(model, given, message):
    with pytest.raises(xj.InputError, match=message):
        xj.Engine(model, **given)
