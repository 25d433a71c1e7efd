"""Engines with `draft_tokens="auto"`, whose steps have different numbers of draft tokens."""

import itertools
import re

import mtp_cases
import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.cli.answer_flags import define_engine
from xinfer_jax.cli.flag_parser import FlagParser
from xinfer_jax.engine.draft_pacing import DraftChoice, DraftPacing
from xinfer_jax.engine.engine_options import EngineOptions
from xinfer_jax.engine.shape import check_options, engine_shape

SHAPE = dict(rows=3, capacity=256, chunk=64, draft_tokens="auto")
PLAIN = xj.GenerateOptions(max_tokens=90, eos_token_ids=())


@pytest.fixture
def widths(monkeypatch):
    """Lets engines take these widths in turn, in calls of at most 20 steps. Returns the list."""
    found = []

    def choose(self, rows, masked, is_ready):
        if len(self._widths) == 1:
            return DraftChoice(self._widths[0])
        turns = self.__dict__.setdefault("turns", itertools.cycle(list(found)))
        return DraftChoice(next(turns), 20)

    monkeypatch.setattr(DraftPacing, "choose", choose)
    return found


def prompts_of(model):
    draws = np.random.RandomState(3)
    return [draws.randint(1, model.config.vocab_size, n).tolist() for n in (5, 70, 9)]


def proposed(engine, ids, count):
    """The draft tokens after at least this number of sampled tokens, and these tokens."""
    request = engine.submit(ids, PLAIN)
    while len(request.answers[0].tokens) < count:
        engine.core._pacing.step_seconds = 1.0  # so that a call takes one step
        engine.step()
    (row,) = engine.core.scheduler.running
    pages = {row.slot: row.pages}
    engine.core.device.read_unread(pages, 3, 1)
    draft_BT = engine.core.device.draft_tokens(pages, 3)
    found = draft_BT[row.slot].tolist(), request.answers[0].tokens
    request.cancel()
    engine.step()
    return found


def test_steps_without_drafts_are_read_later(widths):
    """The head drafts the same after steps without draft tokens, in which it did not read."""
    model = mtp_cases.build("qwen3")
    ids = prompts_of(model)[1]
    one_by_one = xj.Engine(model, draft="mtp", **SHAPE | dict(draft_tokens=3))
    drafts, tokens = proposed(one_by_one, ids, 80)
    widths[:] = [0]
    engine = xj.Engine(model, draft="mtp", **SHAPE)
    assert engine.shape.num_unread == 64
    assert proposed(engine, ids, len(tokens)) == (drafts, tokens)  # the head has read twice
    widths[:] = [3, 0]
    engine.core._draft_pacing.turns = itertools.cycle(widths)
    prompts = prompts_of(model)
    results = [engine.submit(prompt, PLAIN) for prompt in prompts]
    found = [request.result() for request in results]
    assert [out.tokens[0] for out in found] == [
        xj.generate(model.params, model.config, [prompt], PLAIN).tokens[0] for prompt in prompts
    ]
    stats = engine.stats
    for name in ("drafted", "accepted"):
        by_place = np.sum([getattr(out.stats, name)[0] for out in found], 0).tolist()
        assert by_place[3] == 0 and len(by_place) == 4
    passes = sum(out.stats.passes[0] for out in found)
    assert 0 < stats.passes < passes and stats.drafted == 3 * stats.passes
    assert stats.drafted_by_place[:3] == [stats.passes] * 3


@pytest.mark.full
def test_preempted_rows_and_the_end_of_pages(widths):
    """Rows are swapped out between steps of different widths, and tokens stay."""
    model = mtp_cases.build("qwen3_5")
    prompts = prompts_of(model) + [[7] * 70, [8] * 3]
    widths[:] = [0, 2, 0, 0, 4, 1]
    engine = xj.Engine(model, draft="mtp", **SHAPE | dict(rows=2))
    engine.core.scheduler.time_slice = 1e-9
    requests = [engine.submit(ids, PLAIN, client=str(i)) for i, ids in enumerate(prompts)]
    found = [request.result().tokens[0] for request in requests]
    want = [xj.generate(model.params, model.config, [ids], PLAIN).tokens[0] for ids in prompts]
    assert found == want and engine.stats.preemptions > 3


@pytest.mark.full
@pytest.mark.parametrize("draft", ["lookup", "mtp"])
def test_grammars_of_the_host(widths, draft):
    """Masks are computed for the draft tokens of the step that follows."""
    model = xj.load_model(draft_head=True) if draft == "mtp" else tiny.shallow_model()
    widths[:] = [2, 0, 1]
    engine = xj.Engine(model, draft=draft, **SHAPE)
    grammar = xj.grammar.lark("start: /(abc|abd){12}/")
    asked = xj.GenerateOptions(max_tokens=60, grammar=grammar)
    out = engine.submit([5, 6, 7], asked).result()
    assert re.fullmatch("(abc|abd){12}", model.tokenizer.decode(out.tokens[0], skip_special_tokens=True))
    assert out.tokens == xj.generate(model.params, model.config, [[5, 6, 7]], asked).tokens


def test_auto_measures_and_gives_the_same_tokens():
    model = tiny.shallow_model()
    ids = xj.encode_prompt(model, "Count: 1 2 3 4 5 1 2 3 4 5 1 2 3")
    engine = xj.Engine(model, draft="lookup", **SHAPE | dict(rows=1))
    for _ in range(3):
        out = engine.submit(ids, PLAIN).result()
    assert out.tokens == xj.generate(model.params, model.config, [ids], PLAIN).tokens
    assert sum(out.stats.drafted[0]) * out.stats.acceptance[0] == pytest.approx(sum(out.stats.accepted[0]))
    engine.close()


def test_options():
    model = tiny.shallow_model()
    checked = check_options(model, EngineOptions(draft="lookup", draft_tokens="auto", capacity=64))
    shape = engine_shape(model, checked)
    assert (shape.draft_widths, shape.num_draft_tokens) == ((0, 1, 2, 3, 4), 4)
    plain = engine_shape(model, check_options(model, EngineOptions(draft_tokens="auto", capacity=64)))
    assert (plain.draft_widths, plain.num_draft_tokens) == ((0,), 0)
    with pytest.raises(xj.InputError, match="draft_tokens"):
        check_options(model, EngineOptions(draft="lookup", draft_tokens="some"))


def test_a_flag_has_it():
    for text, value in (("5", 5), ("auto", "auto")):
        parser = FlagParser("engine", "about", "", "")
        define_engine(parser)
        parser.parse(["engine", f"--draft_tokens={text}"])
        assert parser.values.draft_tokens == value
    with pytest.raises(xj.InputError, match="give a whole number from 1 to 16 or auto"):
        parser.parse(["engine", "--draft_tokens=some"])
