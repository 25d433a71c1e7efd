"""Tests of prompts and answers on different devices: `test_engines.py` runs them with two devices."""

import dataclasses
import itertools
import random
import socket
import threading
import time

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
import routed_engines
import tiny
from random_adapters import random_adapter
from soak import engine_requests

import xinfer_jax as xj
from xinfer_jax.serve.peer_front import PeerEngines
from xinfer_jax.serve.peer_worker import PeerWorker

SHAPE = dict(rows=3, capacity=512, pages=9, chunk=128, cache_dtype="int8", warm_up=True)
HF = tiny.CONFIG | dict(
    model_type="gemma3_text", head_dim=8, eos_token_id=286, max_position_embeddings=512, sliding_window=96,
    layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip


def engines_of(engine: xj.Engine, role: str) -> list[xj.Engine]:
    return [one for one in engine.engines if one.role == role]


def options(tokens: int, **more) -> xj.GenerateOptions:
    return xj.GenerateOptions(max_tokens=tokens, eos_token_ids=(), **more)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(5, 250), k=length)


def idle(engine: xj.Engine) -> bool:
    """Returns True if all pages are free or cached again. The end of a move may come after the end of its
    request.
    """
    end = time.monotonic() + 120
    while engine.stats.pages_used and time.monotonic() < end:
        time.sleep(0.01)
    counts = [one.counts() for one in engine.engines]
    full = SHAPE["pages"] - 1
    return all(c["pages_used"] == 0 and c["pages_cached"] + c["pages_free"] == full for c in counts)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> xj.Model:
    """Sliding windows, and a tokenizer. On the device that prefills: one engine has the same programs."""
    loaded = xj.load_model(tiny.write(tmp_path_factory.mktemp("disaggregated") / "m", HF))
    return dataclasses.replace(loaded, params=jax.device_put(loaded.params, jax.devices()[0]))


@pytest.fixture(scope="module")
def one(model):
    with xj.Engine(model, **SHAPE) as engine:
        yield engine


@pytest.fixture(scope="module")
def apart(model):
    devices = dict(prefill_devices=[0], decode_devices=[1, 1])
    with xj.Engine(model, **devices, time_slice=1e-3, **SHAPE) as engine:
        yield engine


def test_the_bits_of_one_engine_and_nothing_compiled(one, apart, monkeypatch):
    """There are so few pages, and such short time slices, that rows are preempted. Programs of the other side
    are not there.
    """
    assert isinstance(apart, xj.Engine)
    (first,) = engines_of(apart, "prefill")
    decoding = engines_of(apart, "decode")
    for other in decoding:
        for name in ("prefill", "prefill_with_logprobs", "sample_first", "new_rows"):
            monkeypatch.setattr(other.core.device, name, None)
    monkeypatch.setattr(first.core.device, "decode", None)
    asked = engine_requests.draw(random.Random(3), 288, 40, 200, SHAPE)
    more = [{name: x for name, x in a.more.items() if name != "deadline"} for a in asked]
    alone = [one.submit(a.ids, a.options, key=a.key, **m) for a, m in zip(asked, more, strict=True)]
    expected = [engine_requests.outcome(request) for request in alone]
    with compiling.events() as seen:
        requests = [apart.submit(a.ids, a.options, key=a.key, **a.more) for a in asked]
        for request, a in zip(requests, asked, strict=True):
            if a.cancel:
                request.cancel()
        found = [engine_requests.outcome(request) for request in requests]
    assert seen == []
    assert all(map(engine_requests.same_outcome, found, expected))
    assert idle(apart) and apart.stats.preemptions > 0
    assert all(other.stats.requests > 5 for other in decoding)
    places = [{d for x in jax.tree.leaves(e.core.device.pools) for d in x.devices()} for e in apart.engines]
    assert places == [{jax.devices()[i]} for i in (0, 1, 1)]


def test_grammars_stop_strings_and_several_answers(one, apart):
    """The state of grammar and detokenizer moves with the row. What ends with its first token does not."""
    asked = [
        (xj.GenerateOptions(max_tokens=30, grammar=xj.grammar.regex("[a-f]{3,9}x[0-9]+")), prompt(1, 70)),
        (options(20, n=3, sampling=xj.SamplingConfig(temperature=1.0)), prompt(2, 150)),
        (options(40, stop_strings=("e", "a")), prompt(3, 20)),
        (options(1), prompt(4, 90)),
    ]
    before = [apart.stats.requests, *(engine.stats.requests for engine in apart.engines)]
    outs = [apart.submit(ids, o, key=jax.random.key(5)).result() for o, ids in asked]
    expected = [one.submit(ids, o, key=jax.random.key(5)).result() for o, ids in asked]
    assert [(o.tokens, o.logprobs, o.finish_reason) for o in outs] == [
        (o.tokens, o.logprobs, o.finish_reason) for o in expected
    ]
    after = [apart.stats.requests, *(engine.stats.requests for engine in apart.engines)]
    ended = [new - old for new, old in zip(after, before, strict=True)]
    assert ended[:2] == [4, 6] and sum(ended[2:]) == 5  # six answers are prefilled, five are decoded
    assert idle(apart)


def test_pages_of_answers_go_back_where_asked(apart):
    ids = prompt(7, 100)
    for shared in (False, True):
        first = apart.submit(ids, options(100), share_answers=shared)
        turn = ids + first.result().tokens[0] + [5, 6]
        assert idle(apart)
        time.sleep(0.1)
        second = apart.submit(turn, options(2), share_answers=True)
        second.result()
        assert second.answers[0].row.hits == (192 if shared else 64)


def test_rows_that_wait_for_pages_are_cancelled_and_late(apart):
    """The decoding side is full: rows wait with their pages on the other side, in slots that are freed."""
    requests = [apart.submit(prompt(i, 60), options(400)) for i in range(9)]
    late = apart.submit(prompt(20, 60), options(400), deadline=0.3)
    next(iter(requests[0]))
    assert late.result(300).finish_reason == ["length"]
    for request in requests:
        request.cancel()
    assert {r.result(300).finish_reason[0] for r in requests} <= {"abort", "length"}
    assert idle(apart) and not any(engine.load for engine in apart.engines)


@pytest.mark.parametrize("name, dtype", [("qwen3-5-tied", "int8"), ("deepseek-v3-yarn-groups", "float32")])
def test_recurrent_states_and_latents_move_with_their_pages(name, dtype):
    """There are so few pages that rows are preempted. The second time a prefix is reused."""
    config = cases.CASES[name].config
    params = cases.params_from(config, cases.random_tensors(config, 3))
    model = xj.Model(jax.device_put(params, jax.devices()[0]), config)
    shape = SHAPE | dict(rows=2, pages=6, chunk=64, warm_up=False, cache_dtype=dtype)
    common, first, second, other = ([i % 90 for i in prompt(n, n)] for n in (64, 9, 10, 60))
    asked = [common + first, other, common + second]
    with xj.Engine(model, **shape) as engine:
        expected = [engine_requests.outcome(engine.submit(ids, options(140))) for ids in asked]
    with xj.Engine(model, prefill_devices=[0], decode_devices=[1], **shape) as engine:
        for _ in range(2):
            requests = [engine.submit(ids, options(140)) for ids in asked]
            found = [engine_requests.outcome(request) for request in requests]
            assert all(map(engine_requests.same_outcome, found, expected))
        assert engine.stats.hits >= 128 and engine.stats.preemptions > 0


def test_routes_move_with_their_pages():
    model = routed_engines.build(routed_engines.NAMES[0])
    ids = routed_engines.prompt(30, 70)
    with xj.Engine(model, prefill_devices=[0], decode_devices=[1], **routed_engines.SHAPE) as engine:
        requests = [engine.submit(ids, options(tokens), return_routed_experts=True) for tokens in (1, 40, 90)]
        late = engine.submit(ids, options(40), return_routed_experts=True, deadline=1e-9)
        for request in requests:
            request.result()
            routed_engines.check(model, ids, *request.answers)
        assert (late.result().routed_experts[0] == -1).all()


def test_updates_of_both_sides_while_answers_are_decoded(apart, model):
    """Both switch between the same steps, so that no version follows a later one. "wait" mixes none."""
    start = apart.version
    trees = [jax.tree.map(lambda x, i=i: x * (1 + i / 2), model.params) for i in range(2)]
    requests = apart.submit_many([prompt(40 + i, 70 + 40 * i) for i in range(8)], options(60))
    with compiling.events() as seen:
        for mode in ("continue", "wait", "continue", "abort"):
            count = apart.stats.generated_tokens
            apart.wait(lambda count=count: apart.stats.generated_tokens > count + 40 or not apart.load, 60)
            apart.update(jax.device_get(trees[apart.version % 2]), mode=mode)
            requests += apart.submit_many([prompt(50 + i, 70) for i in range(4)], options(60))
        outs = [request.result(300) for request in requests]
    assert seen == [] and idle(apart)
    mixed = [set(out.token_versions[0]) for out in outs]
    assert all(versions == sorted(versions) for out in outs for versions in out.token_versions)
    assert not any({*range(start, start + 2)} & one and {start + 2, start + 3} & one for one in mixed)
    assert any(len(one) > 1 for one in mixed)
    assert {start, start + 4} <= set().union(*mixed) and apart.version == start + 4
    assert {out.finish_reason[0] for out in outs} == {"length", "abort"}
    versions = {start + i: trees[(start + i + 1) % 2] for i in range(1, 5)} | {start: model.params}
    for request in requests[:10]:
        if request.answers[0].logprobs:
            assert apart.replay(request, versions) == request.answers[0].logprobs
    shared = apart.submit(prompt(40, 70), options(3), share_answers=True)
    shared.result(300)
    with pytest.raises(xj.InputError, match="submit without it to replay"):
        apart.replay(shared, versions)
    apart.update(model.params)


def test_keys_of_both_sides_are_computed_anew(apart, model):
    """The keys belong to rows that prefill, move, wait for pages and decode. The engine that has the row then
    computes them.
    """
    start = apart.version
    versions = {start: model.params}
    versions |= {start + i: jax.tree.map(lambda x, i=i: x * (1 + i / 9), model.params) for i in range(1, 8)}
    requests = apart.submit_many([prompt(60 + i, 60 + 20 * i) for i in range(9)], options(90))
    for version in range(start + 1, start + 8):
        count = apart.stats.generated_tokens
        apart.wait(lambda count=count: apart.stats.generated_tokens > count + 5 or not apart.load, 60)
        apart.update(versions[version], mode="recompute")
    for request in requests:
        assert len(request.result(300).logprobs[0]) == 90
        assert apart.replay(request, versions) == request.answers[0].logprobs
    switches = [switch for request in requests for switch in request.answers[0].switches[1:]]
    assert all(switch.recomputed or not switch.computed for switch in switches)  # else it had no keys
    assert {1} < {switch.sampled for switch in switches}
    assert idle(apart)
    apart.update(model.params)


def test_adapters_and_callers_functions_on_both_sides(model):
    """Adapters are added, replaced and removed on both or none. Pages of answers are those of the adapter.
    States of processors move with the rows. Vectors are added where prompts and answers are.
    """
    first, second, large = (random_adapter(model.config, i, rank) for i, rank in enumerate((2, 3, 4)))

    def less_of_the_last(state, logits_BV, context):
        last_B1 = state["last"][:, None]
        return logits_BV - 3 * state["by"][:, None] * (jnp.arange(logits_BV.shape[1]) == last_B1)

    less = xj.LogitsProcessor(
        lambda by_B, context: dict(by=by_B, last=jnp.zeros_like(context.position_B)),
        less_of_the_last,
        lambda state, token_B, context: state | dict(last=token_B),
    )
    steps = np.linspace(-1, 1, model.config.hidden_size)
    how = dict(processors=dict(less=(less, 1.0)), taps=dict(up={0: steps}), adapters=dict(a=first))
    how |= SHAPE | dict(max_adapters=2, max_rank=3)
    each = [
        options(40, sampling=xj.SamplingConfig(temperature=1.0), **more)
        for more in (dict(processors=dict(less=2.0)), dict(taps=dict(up=3.0)), {}, {})
    ]
    prompts = [prompt(90 + i, 100) for i in range(4)]
    asked = dict(key=jax.random.key(3), adapter=[None, None, "a", None])
    with xj.Engine(model, **how) as alone:
        wanted = [out.logprobs for out in alone.generate(prompts, each, **asked)]
    ids = prompt(90, 150)
    with xj.Engine(model, **how, prefill_devices=[0], decode_devices=[1]) as engine:
        with compiling.events() as seen:
            assert [out.logprobs for out in engine.generate(prompts, each, **asked)] == wanted
            with pytest.raises(xj.InputError, match="rank 4"):
                engine.add_adapter("b", large)
            engine.add_adapter("b", second)
            requests = engine.submit_many([ids] * 8, options(200), adapter="a", share_answers=True)
            engine.wait(lambda: engine.stats.generated_tokens > 220, 60)
            engine.update_adapter("a", second)
            versions = [request.result(300).adapter_versions[0] for request in requests]
            assert all(each == sorted(each) for each in versions) and {*sum(versions, [])} == {0, 1}
            history = [*ids, *requests[0].result().tokens[0], 5]
            turn = engine.submit(history, options(4), adapter="a", share_answers=True)
            other = engine.submit(ids, options(40), adapter="b")
            reused = turn.result(300).stats.reused_tokens
            assert reused <= 128  # pages of the first answer are of other contents
            last = engine.submit(ids, options(40), adapter="a").result(300)
            assert last.logprobs == other.result(300).logprobs
        assert seen == []
        engine.remove_adapter("b")
        with pytest.raises(xj.InputError, match="no adapter is called 'b'"):
            engine.submit(ids, adapter="b")
        assert idle(engine)


def test_both_sides_lend_the_memory_of_their_pages(one, apart):
    """Rows prefill, move, wait for pages and decode meanwhile. Some come back to pages of another side."""
    asked = [(prompt(40 + i, 40 + 30 * i), options(90)) for i in range(7)]
    alone = [one.submit(*a, processed_logprobs=True) for a in asked]
    expected = [engine_requests.outcome(request) for request in alone]
    how = dict(processed_logprobs=True)
    requests = [apart.submit(*a, share_answers=i % 2 > 0, **how) for i, a in enumerate(asked)]
    assert len(list(itertools.islice(requests[0], 3))) == 3
    with compiling.events() as seen:
        apart.pause()
        apart.release_cache()
        pools = [x for engine in apart.engines for x in jax.tree.leaves(engine.core.device.pools)]
        assert all(x.is_deleted() for x in pools)
        requests.append(apart.submit(*asked[0]))
        time.sleep(0.3)  # rows arrive meanwhile
        assert not requests[-1].ended
        apart.restore_cache()
        apart.resume()
        found = [engine_requests.outcome(request) for request in requests]
    assert seen == []
    assert all(map(engine_requests.same_outcome, found, [*expected, expected[0]]))
    for request, other in zip(requests, alone, strict=False):
        assert request.answers[0].processed_logprobs == other.answers[0].processed_logprobs != []
    assert idle(apart)


def test_pages_of_old_weights_are_not_given_back(apart, model):
    ids = prompt(30, 100)
    old = apart.submit(ids, options(200), share_answers=True)
    next(iter(old))
    apart.update(jax.tree.map(lambda x: x * 1.5, model.params))
    turn = ids + old.result().tokens[0]
    apart.submit(ids, options(1)).result()
    assert idle(apart)
    time.sleep(0.1)
    new = apart.submit(turn, options(2), share_answers=True)
    new.result()
    apart.update(model.params)
    assert new.answers[0].row.hits == 64


def test_a_request_with_answers_on_both_sides_fails_at_once(apart):
    request = apart.submit(
        prompt(31, 60), options(400, n=6, sampling=xj.SamplingConfig(temperature=1.0)), key=jax.random.key(1)
    )
    assert len(list(itertools.islice(request.answers[0], 2))) == 2  # it is decoded
    (first,) = (answer for e in apart.engines for answer in e.core.answers.values() if not answer.number)

    def fail(*args):
        raise xj.InputError("numbers that are not finite")

    first.append = fail
    with pytest.raises(xj.InputError, match="not finite"):
        request.result(300)
    assert max(len(answer.tokens) for answer in request.answers) < 400
    assert idle(apart) and not any(engine.load for engine in apart.engines)


def test_prefill_and_decode_processes_behind_a_front_process(one, model):
    """Here they are threads: `scripts/soak_peers.py` has processes, and kills them. Of two prefill processes
    one is lost, and its prompts go to the other. Rows of a lost decode process fail, others do not.
    """
    lines = []
    secret = b"x" * 32
    adapters = dict(adapters=dict(a=random_adapter(model.config, 0, 2)))
    listening = socket.create_server(("127.0.0.1", 0))
    front = PeerEngines(model, listening, secret, lines.append)
    address = listening.getsockname()[:2]
    stop = threading.Event()
    workers = []

    def connect(role: str, device: int) -> PeerWorker:
        own = dataclasses.replace(model, params=jax.device_put(model.params, jax.devices()[device]))
        engine = xj.Engine(own, role=role, **SHAPE, **adapters).__enter__()
        workers.append(PeerWorker(engine, address, secret, lines.append))
        threading.Thread(target=workers[-1].run, args=(stop,), daemon=True).start()
        return workers[-1]

    with pytest.raises(xj.InputError, match="no prefill process is connected"):
        front.submit([5])
    connect("prefill", 0)
    decoding = connect("decode", 1)
    front.wait_for_both(stop.is_set)
    asked = engine_requests.draw(random.Random(4), 288, 12, 150, SHAPE)
    asked = [a for a in asked if not a.cancel and "deadline" not in a.more]
    expected = [engine_requests.outcome(one.submit(a.ids, a.options, key=a.key, **a.more)) for a in asked]

    def found() -> list[tuple]:
        requests = [front.submit(a.ids, a.options, key=a.key, **a.more) for a in asked]
        return [engine_requests.outcome(request) for request in requests]

    assert all(map(engine_requests.same_outcome, found(), expected))
    grammar = xj.GenerateOptions(max_tokens=30, grammar=xj.grammar.regex("[a-f]{3,9}x[0-9]+"))
    assert (
        front.submit([5, 6, 7], grammar).result(300).tokens == one.submit([5, 6, 7], grammar).result().tokens
    )
    with xj.Engine(model, **SHAPE, **adapters) as alone:
        (wanted,) = alone.generate([prompt(3, 90)], options(20), adapter="a")
    out = front.submit(prompt(3, 90), options(20), adapter="a").result(300)
    assert (out.adapter, out.logprobs) == ("a", wanted.logprobs)
    with pytest.raises(xj.InputError, match="no adapter is called 'b': the engine has a"):
        front.submit([5], adapter="b")
    with pytest.raises(xj.InputError, match="engines in other processes keep their adapters"):
        front.add_adapter("b", adapters["adapters"]["a"])
    silent = [socket.create_connection(address) for _ in range(70)]  # they lock nobody out
    second = connect("prefill", 0)
    while len(front.engines) < 3:
        time.sleep(0.01)
    long = [front.submit(prompt(i, 60), options(200)) for i in range(8)]
    assert len(list(itertools.islice(long[0], 3))) == 3
    second._channel._connection.shutdown(socket.SHUT_RDWR)
    assert all(len(request.result(300).tokens[0]) == 200 for request in long)
    assert sum("is gone" in line for line in lines) == 1
    for worker in workers[:2]:
        assert idle(worker._engine)
        end = time.monotonic() + 120  # its messages are handled on another thread
        held = worker._endpoint._answers, worker._work
        while any(held) and time.monotonic() < end:
            time.sleep(0.01)
        assert not any(held)
    assert not (front._dispatcher._jobs or front._dispatcher._current or front.load)
    for worker in workers[:2]:
        worker._transfer._server = None  # pages go through the host
    assert all(map(engine_requests.same_outcome, found(), expected))
    decoding._receive(10**6, ["array", 0, np.zeros(3, np.uint8)])  # of a row that has ended
    shape = decoding._engine.shape
    decoding._engine.shape = dataclasses.replace(shape, capacity=64)
    with pytest.raises(xj.InputError, match="exceeds the 64 that a row"):
        front.submit(prompt(9, 60), options(400)).result(300)
    decoding._engine.shape = shape
    request = front.submit(prompt(9, 60), options(400))
    assert len(list(itertools.islice(request, 3))) == 3
    decoding._channel._connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(xj.InputError, match="the decode process .* is gone"):
        request.result(300)
    assert front.missing == "no decode process is connected" and not front.alive
    with pytest.raises(xj.InputError, match="engines in other processes keep their pages"):
        front.pause()
    front.close()
    for connection in silent:
        connection.close()
    stop.set()
    for worker in workers:
        worker._engine.close()


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_side_that_fails_ends_the_requests_that_need_it(apart, model, side, caplog):
    """The last tests: engines do not come back."""
    engine = apart
    if side == "prefill":
        engine = xj.Engine(model, prefill_devices=[0], decode_devices=[1], **SHAPE).__enter__()
    bad = engines_of(engine, side)[0]
    call = getattr(bad.core.device, side)
    go = threading.Event()
    setattr(bad.core.device, side, lambda *args: 1 / 0 if go.is_set() else call(*args))
    requests = [engine.submit(prompt(i, 60), options(300, n=1 + i % 2)) for i in range(12)]
    assert len(list(itertools.islice(requests[0].answers[0], 5))) == 5  # its pages have arrived
    go.set()
    ended = []
    for request in requests:
        try:
            ended.append(request.result(300))
        except ZeroDivisionError:
            ended.append(None)
    assert None in ended and any(ended)
    assert all(len(tokens) == 300 for out in ended if out for tokens in out.tokens)
    good = [other for other in engine.engines if other is not bad]
    end = time.monotonic() + 120
    while any(other.stats.pages_used for other in good) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(other.load or other.stats.pages_used for other in good)
    with pytest.raises(xj.InputError, match=f"the {side} engine on .* is closed: division by zero"):
        engine.submit([5])
    engine.close()
    assert f"the {side} engine on" in caplog.text
