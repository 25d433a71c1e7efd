"""One state per row: rows that join, that end by their own limits, in any number; what they look at."""

import dataclasses
from functools import partial

import compiling
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import xinfer_jax as xj
from xinfer_jax.generation import run
from xinfer_jax.generation.batches import first_state
from xinfer_jax.generation.doors import prompt_chunk
from xinfer_jax.generation.loop import ADVANCE, READ, admit
from xinfer_jax.generation.options import checked
from xinfer_jax.generation.state import choose_and_note
from xinfer_jax.sampling.choice import choose, process
from xinfer_jax.sampling.context import start
from xinfer_jax.sampling.settings import per_row

start_rows = jax.jit(choose_and_note, static_argnames="impl")
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15], [3, 1, 4, 1, 5]]
WARM = xj.SamplingConfig(temperature=0.9, top_k=30)


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return tiny.shallow()


def asked(**given) -> xj.GenerateOptions:
    return xj.GenerateOptions(**dict(max_new_tokens=9, eos_token_ids=(), sampling=WARM) | given)


def test_any_number_of_rows_and_any_settings_compile_nothing_new(model):
    """After one call with plain settings and one with any other, up to the next power of two."""
    everything = xj.SamplingConfig(0.9, min_p=0.1, logit_bias={3: 1.0})

    def call(rows, **given):
        options = asked(**given)
        xj.generate(model.params, model.config, PROMPTS[:rows], options, key=jax.random.key(rows))
        stream = xj.stream(model.params, model.config, PROMPTS[:rows], options, key=jax.random.key(rows))
        next(stream)
        stream.stop()

    call(4)
    call(4, sampling=everything)
    with compiling.events() as compiled:
        call(3, max_new_tokens=16)
        call(3, sampling=[xj.SamplingConfig(), WARM, xj.SamplingConfig(1.3, 5, 0.9, 1.2)])
        call(4, sampling=xj.SamplingConfig(), eos_token_ids=(1, 2, 3), stop_token_ids=(4, 5))
        call(3, sampling=[xj.SamplingConfig(typical_p=0.8), xj.SamplingConfig(no_repeat_ngram_size=2), WARM])
        call(4, sampling=xj.SamplingConfig(presence_penalty=1.0, frequency_penalty=0.5, min_new_tokens=3))
        call(3, sampling=xj.SamplingConfig(allowed_token_ids=(5, 6), forbidden_token_ids=(7,)))
    assert compiled == []


def test_long_prompts_are_read_in_chunks_that_the_cache_takes(model):
    chunks = {size: prompt_chunk(xj.init_cache(model.config, 2, size)) for size in (64, 4096)}
    assert chunks == {64: 64, 4096: 512}
    assert jax.jit(lambda: prompt_chunk(xj.init_cache(model.config, 2, 4096)))() == 512


def test_the_number_of_beam_prompts_compiles_nothing_new(model):
    search = partial(xj.beam_search, model.params, model.config, num_beams=2, max_new_tokens=4)
    four = search(PROMPTS[:4])
    with compiling.events() as compiled:
        three = search(PROMPTS[:3])
    assert compiled == [] and three.sequences == four.sequences[:3]


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_rows_that_hold_nothing_change_nothing(model, rows):
    keys = jax.random.split(jax.random.key(1), 5)
    settings = [WARM, xj.SamplingConfig(), xj.SamplingConfig(1.0, min_p=0.1), WARM, WARM][:rows]
    out = xj.generate(model.params, model.config, PROMPTS[:rows], asked(sampling=settings), key=keys[:rows])
    assert out.stats.rows == len(out.tokens) == rows
    for i in range(rows):
        alone = xj.generate(
            model.params, model.config, [PROMPTS[i]], asked(sampling=settings[i]), key=keys[i : i + 1]
        )
        assert out.tokens[i] == alone.tokens[0]


def test_one_answer_each_or_several_for_any_number_of_prompts(model):
    keys = jax.random.split(jax.random.key(1), 3)
    several = xj.generate(model.params, model.config, PROMPTS[:3], asked(n=3), key=keys)
    assert len(several.tokens) == 9
    for row in range(9):
        key = jax.random.fold_in(keys[row // 3], row % 3)
        alone = xj.generate(model.params, model.config, [PROMPTS[row // 3]], asked(), key=key[None])
        assert several.tokens[row] == alone.tokens[0]


FULL = dict(sampling=xj.SamplingConfig(0.9, min_p=0.02), logprobs=2)


@pytest.mark.parametrize("given", [{}, FULL], ids=["plain", "full"])
def test_a_row_joins_others_that_go_on(model, given):
    """The second row ends; another prompt is read into its place and its numbers are admitted; the first row
    notices nothing.
    """
    params = model.params
    config = model.config
    keys = jax.random.split(jax.random.key(3), 3)
    alone = [
        xj.generate(
            params, config, [PROMPTS[i]], asked(max_new_tokens=new, capacity=64, **given), key=keys[i : i + 1]
        )
        for i, new in enumerate((14, 3, 8))
    ]

    def begin(prompts, limits, keys, cache, rows):
        """Rows of these limits, read into these places of the cache, with their first tokens."""
        options = asked(max_new_tokens=14, capacity=64, **given)
        state = first_state(checked(params, config, prompts, options, keys), np.arange(len(prompts)))
        tokens_BT = np.zeros((2, 16), np.int32)
        num_tokens_B = np.zeros(2, np.int32)
        for row, prompt in zip(rows, prompts, strict=True):
            tokens_BT[row, : len(prompt)] = prompt
            num_tokens_B[row] = len(prompt)
        logits_BV, cache = READ.keeping(params, config, tokens_BT, num_tokens_B, cache, None, 512)
        state = dataclasses.replace(state, limit_B=np.array(limits, np.int32))
        return start_rows(np.asarray(logits_BV)[rows], state, None), cache

    cache = xj.init_cache(config, 2, 64)
    state, cache = begin(PROMPTS[:2], (14, 3), keys[:2], cache, [0, 1])
    state, cache = ADVANCE.keeping(params, config, state, cache, 4, None)
    assert state.length_B.tolist() == [5, 3] and state.active_B.tolist() == [True, False]
    assert state.tokens_BT[1, :3].tolist() == alone[1].tokens[0]
    cache = xj.truncate(cache, np.array([2**20, 0]))
    joined, cache = begin(PROMPTS[2:3], (8,), keys[2:], cache, [1])
    state = jax.jit(admit)(state, np.array([1]), joined)
    state, cache = ADVANCE.keeping(params, config, state, cache, 100, None)
    assert state.length_B.tolist() == [14, 8]
    assert state.tokens_BT[0, :14].tolist() == alone[0].tokens[0]
    assert state.tokens_BT[1, :8].tolist() == alone[2].tokens[0]


def test_only_rows_of_the_same_kind_join(model):
    def state(**given):
        call = checked(model.params, model.config, PROMPTS[:1], asked(**given), jax.random.key(0))
        return first_state(call, np.zeros(1, np.int32))

    others = (
        dict(sampling=xj.SamplingConfig(min_p=0.1)), dict(max_new_tokens=100), dict(eos_token_ids=range(9)),
        dict(logprobs=1),
    )  # fmt: skip
    for given in others:
        with pytest.raises(xj.InputError, match="rows that join must have settings of the same structure"):
            admit(state(), np.array([0]), state(**given))


V = 70  # no multiple of 32


def test_only_allowed_tokens_are_chosen():
    """Bit v % 32 of word v // 32, whatever else a row asks for; greedy rows and those that draw."""
    rows = per_row([xj.SamplingConfig(min_p=0.01), xj.SamplingConfig(temperature=5.0)], 2, V)
    context = start(rows, np.zeros(2, np.int32), np.full((2, 1), -1, np.int32), np.zeros((2, V), bool))
    assert context.allowed_bits.shape == (2, 3) and (context.allowed_bits == 2**32 - 1).all()
    logits_BV = jax.random.normal(jax.random.key(0), (2, V))
    np.testing.assert_array_equal(process(logits_BV, rows, context), logits_BV)
    context.allowed_bits[:] = 0
    context.allowed_bits[0, 2] = 1 << 5 | 1
    context.allowed_bits[1, 0] = 1 << 31
    kept = np.isfinite(process(logits_BV, rows, context))
    assert [np.flatnonzero(row).tolist() for row in kept] == [[64, 69], [31]]
    token_B, *_ = choose(logits_BV, jax.random.split(jax.random.key(1), 2), rows, context)
    assert token_B[0] in (64, 69) and token_B[1] == 31


def test_what_processors_look_at_advances_and_is_reordered():
    rows = per_row(xj.SamplingConfig(min_new_tokens=2), 2, V)
    seen_BV = np.zeros((2, V), bool)
    history_BS = np.zeros((2, 6), np.int32)
    context = start(rows, np.array([1, 2]), np.full((2, 1), -1), seen_BV, history_BS)
    context = context.advance(jnp.array([4, 5]), jnp.array([True, False]))
    context = context.advance(jnp.array([4, 6]), jnp.array([True, True])).reorder(jnp.array([1, 0]))
    assert context.chosen_B.tolist() == [1, 2] and context.position_B.tolist() == [3, 3]
    assert [np.flatnonzero(row).tolist() for row in context.seen_BV] == [[6], [4]]
    assert context.count_BV[0, 6] == 1 and context.count_BV[1, 4] == 2 and context.count_BV.sum() == 3
    assert context.history_BS.tolist() == [[0, 0, 6, 0, 0, 0], [0, 4, 4, 0, 0, 0]]


def test_a_stream_has_its_output_once_it_has_ended(model):
    stream = xj.stream(model.params, model.config, PROMPTS[:2], asked(), key=jax.random.key(0))
    next(stream)
    with pytest.raises(xj.InputError, match="has not ended"):
        stream.output  # noqa: B018
    assert len(list(stream)) == 8 and next(stream, None) is None
    assert [len(row) for row in stream.output.tokens] == [9, 9]
    stream.stop()  # too late to change anything
    assert stream.output.finish_reason == ["length", "length"]
    unread = xj.stream(model.params, model.config, PROMPTS[:2], asked(), key=jax.random.key(0))
    unread.stop()
    assert unread.output.tokens == [[], []] and unread.output.finish_reason == ["stop", "stop"]


def test_a_stream_that_broke_off_says_so(model, monkeypatch):
    stream = xj.stream(model.params, model.config, PROMPTS[:2], asked(), key=jax.random.key(0))
    next(stream)
    monkeypatch.setattr(run.Run, "advance", lambda *_: (_ for _ in ()).throw(xj.InputError("broken")))
    for ask in (lambda: list(stream), lambda: next(stream), lambda: stream.output, stream.stop):
        with pytest.raises(xj.InputError, match="broken"):
            ask()
