"""Grammars that stop a compiler end in one sentence. The masks of other processes are those of this one. Rows
whose masks are late wait alone.
"""

import asyncio
import hashlib
import json
import threading
import time

import grammar_cases
import jax
import numpy as np
import pytest
from soak import hostile_grammars

import xinfer_jax as xj
from xinfer_jax.api.fields import Fields
from xinfer_jax.api.grammar_fields import parse_grammar
from xinfer_jax.errors import GrammarError, NoTokenLeftError
from xinfer_jax.grammar import pool as pool_module, turns
from xinfer_jax.grammar.grammars import Grammar
from xinfer_jax.grammar.matcher import CompiledGrammar, LocalMasks
from xinfer_jax.grammar.pool import GrammarPool

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

LONG = xj.grammar.json_schema({"type": "integer", "multipleOf": 9699692})  # known to no other test


@pytest.fixture(scope="module")
def model():
    return grammar_cases.random_model()


@pytest.fixture(scope="module")
def pool(model):
    pool = GrammarPool(model.tokenizer, model.config.vocab_size)
    yield pool
    pool.close()
    assert pool._process.poll() is not None


def compile_in(pool, grammar, client="one"):
    return asyncio.run(pool.compile(client, grammar))


@pytest.mark.parametrize("name", hostile_grammars.named())
def test_a_hostile_grammar_ends_in_an_answer_or_a_sentence(pool, monkeypatch, name):
    monkeypatch.setattr(pool_module, "_CHECK_SECONDS", 0.3)
    field, value = hostile_grammars.named()[name]
    began = time.monotonic()
    try:
        found = compile_in(pool, parse_grammar(Fields({field: value}), None))
    except xj.InputError as error:
        assert "\n" not in str(error) and "items" not in str(error)  # the compiler's word
    else:
        assert found.first is not None
    assert time.monotonic() - began < 60  # 5 s where the machine has nothing else to do
    assert compile_in(pool, xj.grammar.json_object(), "other").first is not None


def test_masks_are_those_of_this_process(model, pool):
    """They are equal also with draft tokens, and if a process was lost in between."""
    grammar = xj.grammar.json_schema(
        dict(type="array", items=dict(enum=["a", "bc", 12])), tokenizer=model.tokenizer
    )
    (V, ends) = model.config.vocab_size, model.config.eos_token_ids
    local = CompiledGrammar(grammar, V).matcher([5], ends)
    pooled = compile_in(pool, grammar).compile(V).matcher([5], ends)
    draw = np.random.default_rng(0)
    for i in range(12):
        drafts = draw.integers(0, 256, 3).tolist()
        masks = np.zeros((2, 4, V // 32), np.uint32)
        for matcher, mask in zip((local, pooled), masks, strict=True):
            matcher.fill(mask, drafts)
        np.testing.assert_array_equal(*masks)
        allowed = np.flatnonzero(np.unpackbits(masks[0, 0].view(np.uint8), bitorder="little"))
        token = int(draw.choice(allowed))
        if token in ends:
            break
        for matcher in (local, pooled):
            matcher.append([token])
        if i % 4 == 3:
            with pool._lock:
                slot = pool._turns._clients["one"].slot
            pool._end(slot, b"K")
    assert i > 3
    pooled.fill(mask[:1])
    forbidden = np.flatnonzero(~np.unpackbits(mask[0].view(np.uint8), bitorder="little") & 1)
    with pytest.raises(NoTokenLeftError, match="leave no token"):
        pooled.append([int(forbidden[0])])


def test_a_grammar_that_is_known_to_fail_has_an_error_of_its_own(pool, monkeypatch):
    """One that is raised again would keep the frames of all requests that asked for it."""
    monkeypatch.setattr(pool_module, "_CHECK_SECONDS", 0.3)
    errors = []
    for _ in range(3):
        with pytest.raises(GrammarError, match="takes more than") as found:
            compile_in(pool, xj.grammar.json_schema({"type": "integer", "multipleOf": 9699694}))
        errors.append(found.value)
    assert len({*map(id, errors)}) == 3


def test_a_cancelled_job_ends_and_a_slot_is_the_clients_own(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "_CHECK_SECONDS", 60.0)

    async def cancel():
        task = asyncio.ensure_future(pool.compile("leaves", LONG))
        await asyncio.sleep(0.05)
        other = await pool.compile("other", xj.grammar.json_object())
        assert other.first is not None and not task.done()
        task.cancel()
        began = time.monotonic()
        await pool.compile("leaves", xj.grammar.json_object())
        return time.monotonic() - began

    assert asyncio.run(cancel()) < pool_module._CHECK_SECONDS


def test_masks_have_a_budget(model, pool, monkeypatch):
    monkeypatch.setattr(pool_module, "_BUDGET", -1.0)
    matcher = compile_in(pool, xj.grammar.json_object()).compile(model.config.vocab_size).matcher([5], [270])
    with pytest.raises(NoTokenLeftError, match="the masks of the json grammar take more than"):
        matcher.fill(np.zeros((1, model.config.vocab_size // 32), np.uint32))


class _LateMasks(LocalMasks):
    """Masks that come when an event is set."""

    event = threading.Event()

    def wait(self, seconds):
        return self.event.is_set() or self.event.wait(min(seconds, 0.001))


class _LateGrammar(Grammar):
    def compile(self, vocab_size):
        found = CompiledGrammar(self, vocab_size)
        new = found._new_masks
        found._new_masks = lambda: _LateMasks(new()._masks._matcher, vocab_size)
        return found


@pytest.mark.parametrize(
    "shape",
    [{}, pytest.param(dict(draft="lookup", draft_tokens=2), marks=pytest.mark.soak)],
)
def test_rows_with_late_masks_wait_alone(model, shape):
    """They lose neither settings nor limits, and others go on. With draft tokens a step is one program."""
    schema = dict(type="array", items=dict(type="integer", minimum=0, maximum=9), minItems=9, maxItems=9)
    source = xj.grammar.json_schema(schema).source
    grammar = _LateGrammar("json", source, model.tokenizer)
    hot = xj.SamplingConfig(temperature=1.5, repetition_penalty=1.1)
    given = xj.GenerateOptions(max_tokens=24, sampling=hot, grammar=grammar)
    free = xj.GenerateOptions(max_tokens=60, sampling=hot, eos_token_ids=())
    key = jax.random.key(7)
    event = _LateMasks.event
    event.set()
    with xj.Engine(model, rows=4, capacity=grammar_cases.CAPACITY, pages=9, chunk=64, **shape) as engine:
        want = engine.submit([5, 9], given, key=key).result()
        request = engine.submit([5, 9], given, key=key)
        tokens = iter(request)
        next(tokens)
        event.clear()
        other = engine.submit([7], free, key=key).result(60)
        waited = len(request.answers[0].tokens)
        event.set()
        found = request.result(60)
    assert found.tokens == want.tokens and found.logprobs == want.logprobs
    assert len(other.tokens[0]) == 60 and waited < len(want.tokens[0])
    assert len(json.loads(model.tokenizer.decode(found.tokens[0]))) == 9


def test_a_grammar_that_is_not_quick_goes_on_in_a_slow_process(pool, monkeypatch):
    monkeypatch.setitem(turns._QUICK_SECONDS, turns.CHECK, 1e-3)
    grammar = xj.grammar.json_schema(dict(enum=[f"choice {i}" for i in range(4000)]))
    assert compile_in(pool, grammar, "heavy").first is not None
    assert pool._turns._clients["heavy"].slow == {turns.CHECK: turns._SLOW_JOBS, turns.MASKS: 0}
    assert any(slot.done for slot in pool._turns.slots if slot.pace == turns.SLOW)


def test_a_mask_that_takes_too_long_ends_its_answer_alone(model, pool, monkeypatch):
    grammar = parse_grammar(Fields(dict([hostile_grammars.named()["ambiguous"]])), None)
    found = compile_in(pool, grammar)
    masks = found.compile(model.config.vocab_size).matcher([5], [270])._masks
    for name in ("_MASK_SECONDS", "_CHECK_SECONDS"):
        monkeypatch.setattr(pool_module, name, 1e-3)
    masks.start(model.tokenizer.encode("a" * 300), [])
    with pytest.raises(NoTokenLeftError, match="takes more than"):
        masks.result()
    assert hashlib.sha256(f"{grammar.kind} {grammar.source}".encode()).hexdigest() not in pool._failed
    assert compile_in(pool, grammar, "other").first is not None
