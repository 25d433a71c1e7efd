"""Engines with `draft_tokens="auto"`, whose steps have different numbers of draft tokens."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
import tiny
from draft_cases import HEADS, draft_case, prompts
from quick import full_except

import xinfer_jax as xj
from xinfer_jax.cache.page_size import PAGE_SIZE
from xinfer_jax.cli.answer_flags import define_engine
from xinfer_jax.cli.flag_parser import FlagParser
from xinfer_jax.engine.draft_pacing import DraftChoice, DraftPacing
from xinfer_jax.engine.engine_options import EngineOptions
from xinfer_jax.engine.shape import check_options, engine_shape
from xinfer_jax.grammar.matcher import CompiledGrammar, Matcher

PLAIN = xj.GenerateOptions(max_tokens=90, eos_token_ids=())
KINDS = (*HEADS, "lookup")


# All take the same path through the engine, which the heads change in `test_drafting`.
each_kind = pytest.mark.parametrize("name", full_except((), KINDS, soak=HEADS))


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


def model_and_draft(name):
    if name == "lookup":
        return draft_case("mtp").model, "lookup"
    return draft_case(name)


def make_engine(name, **given):
    """Returns an engine that compiles nothing in the background."""
    model, draft = model_and_draft(name)
    settings = dict(rows=2, capacity=256, chunk=64, draft=draft, draft_tokens="auto")
    engine = xj.Engine(model, **settings | given)
    engine._warm_up.stop()
    return engine


def proposed(engine, ids, count, **how):
    """Returns the draft tokens after at least this number of sampled tokens, and these tokens."""
    request = engine.submit(ids, PLAIN, **how)
    while len(request.answers[0].tokens) < count:
        engine.core._pacing.step_seconds = 1.0  # so that a call takes one step
        engine.step()
    (row,) = engine.core.scheduler.running
    pages = {row.slot: row.pages}
    engine.core.device.read_unread(pages, 3, 1)
    draft_BT = engine.core.device.draft_tokens(pages, 3)
    found = draft_BT[row.slot].tolist(), list(request.answers[0].tokens)
    request.cancel()
    engine.step()
    return found


@each_kind
def test_a_head_reads_later_what_steps_without_drafts_sampled(name, widths):
    """It then drafts what it drafts in an engine in which it reads in each step."""
    (ids,) = prompts(1, model_and_draft(name)[0].config.vocab_size)
    with_drafts = make_engine(name, draft_tokens=3)
    drafts, tokens = proposed(with_drafts, ids, 75)
    with_drafts.close()
    widths[:] = [0]
    engine = make_engine(name)
    assert engine.shape.num_unread == (5 if name in ("gemma4", "lookup") else 64)
    assert proposed(engine, ids, len(tokens)) == (drafts, tokens)  # a head with a cache has read twice
    engine.close()


@pytest.mark.soak
def test_pages_of_answers_have_all_tokens_of_the_head(widths):
    """A head that did not read an answer reads it before other prompts share its pages."""
    widths[:] = [0]
    engine = make_engine("mtp")
    (ids,) = prompts(1, engine.model.config.vocab_size)
    size = 2 * PAGE_SIZE + 1
    options = dataclasses.replace(PLAIN, max_tokens=size - len(ids))
    out = engine.submit(ids, options, share_answers=True).result()
    turn = [*ids, *out.tokens[0], 1, 2]
    hits = engine.stats.hits
    shared = proposed(engine, turn, 3, share_answers=True)
    assert engine.stats.hits - hits == 2 * PAGE_SIZE
    assert shared == proposed(engine, turn, 3, salt="own pages")
    engine.close()


@each_kind
def test_widths_change_no_token(name, widths):
    """Rows are also preempted between steps with different numbers of draft tokens."""
    (model, _) = model_and_draft(name)
    ids = prompts(5, model.config.vocab_size)
    widths[:] = [0, 3, 0, 0, 0, 1]
    engine = make_engine(name)
    engine.core.scheduler.time_slice = 1e-9
    requests = [engine.submit(row, PLAIN, client=str(i)) for i, row in enumerate(ids)]
    outs = [request.result() for request in requests]
    plain = xj.generate(model.params, model.config, ids, PLAIN)
    assert [out.tokens[0] for out in outs] == plain.tokens
    stats = engine.stats
    assert stats.preemptions > 3
    assert 0 < stats.passes < sum(out.stats.passes[0] for out in outs)
    for found, name in ((stats.drafted_by_place, "drafted"), (stats.accepted, "accepted")):
        by_place = np.sum([getattr(out.stats, name)[0] for out in outs], 0).tolist()
        assert by_place == [*found, 0]  # no step had four draft tokens
    assert stats.drafted == sum(stats.drafted_by_place)
    for out in outs:
        tokens = 1 + out.stats.passes[0] + sum(out.stats.accepted[0])
        assert tokens == 90 and out.stats.acceptance[0] <= 1
    engine.close()


@pytest.mark.soak
@pytest.mark.parametrize("draft", ["lookup", "mtp"])
def test_masks_of_grammars_are_for_the_draft_tokens_of_the_step(widths, draft):
    model = xj.load_model(draft_head=True)
    widths[:] = [2, 0, 1]
    engine = xj.Engine(model, rows=2, capacity=128, chunk=64, draft=draft, draft_tokens="auto")
    engine._warm_up.stop()
    grammar = dataclasses.replace(xj.grammar.lark("start: /(abc|abd){12}/"), tokenizer=model.tokenizer)
    asked = xj.GenerateOptions(max_tokens=60, grammar=grammar)
    out = engine.submit([5, 6, 7], asked).result()
    assert re.fullmatch("(abc|abd){12}", model.tokenizer.decode(out.tokens[0], skip_special_tokens=True))
    assert out.tokens == xj.generate(model.params, model.config, [[5, 6, 7]], asked).tokens
    engine.close()


def test_masks_are_computed_again_for_other_draft_tokens():
    """A row waits for masks, and then the engine takes another number of draft tokens."""
    model = xj.load_model()
    grammar = dataclasses.replace(xj.grammar.lark("start: /(abc|abd){12}/"), tokenizer=model.tokenizer)
    compiled = CompiledGrammar(grammar, model.config.vocab_size, None, None)
    a, b, x = (model.tokenizer.encode(text)[-1] for text in "abx")
    found = []
    for started in ([()], [(), (a, b)], [(x,), (a, b)], [(a, b, x), (a, b)]):
        matcher = Matcher(compiled._local_masks(), model.config.vocab_size, (0,), None)
        for drafts in started:
            matcher.start(drafts)
        masks = np.zeros((3, -(-model.config.vocab_size // 32)), np.uint32)
        matcher.fill(masks)
        found.append(masks)
    assert found[0][0].any() and not found[0][1:].any()
    for masks in found[1:]:
        assert masks[1:].any(1).all()
        np.testing.assert_array_equal(masks, found[1])


@pytest.mark.soak
def test_rows_with_masks_have_pages_for_their_draft_tokens(monkeypatch):
    """The head writes after a prompt that fills its page."""
    model = xj.load_model(draft_head=True)
    grammar = dataclasses.replace(xj.grammar.lark("start: /(abc|abd){12}/"), tokenizer=model.tokenizer)
    asked = xj.GenerateOptions(max_tokens=60, grammar=grammar)
    engine = xj.Engine(model, rows=2, capacity=256, chunk=64, draft="mtp", draft_tokens=3)
    drafted = []
    draft_tokens = engine.core.device.draft_tokens

    def recorded(pages, width):
        rows = engine.core.scheduler.running
        drafted.extend(PAGE_SIZE * len(pages[row.slot]) - row.num_computed - width for row in rows)
        return draft_tokens(pages, width)

    monkeypatch.setattr(engine.core.device, "draft_tokens", recorded)
    ids = [[5 + i] * 64 for i in range(2)]
    together = engine.generate(ids, asked)
    alone = [engine.generate([row], asked)[0] for row in ids]
    assert drafted and min(drafted) >= 0
    assert [out.stats.accepted for out in together] == [out.stats.accepted for out in alone]
    engine.close()


@pytest.mark.soak
def test_all_widths_are_compiled_by_warm_up():
    engine = make_engine("mtp", warm_up=True)
    (ids,) = prompts(1, engine.model.config.vocab_size)
    programs = engine.stats.programs
    for _ in range(3):
        assert len(engine.submit(ids, PLAIN).result().tokens[0]) == 90
    assert engine.stats.programs == programs
    assert len(engine.core._draft_pacing._times[0, False]) > 1
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
