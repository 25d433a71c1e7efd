"""One state per row: rows join, and end by their own limits, in any number; the context of the processors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import build

import xinfer_jax as xj
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.generation import batch_generator
from xinfer_jax.generation.batch_arrays import initial_state
from xinfer_jax.generation.functional import prefill_chunk_size
from xinfer_jax.generation.loop import DECODE, PREFILL
from xinfer_jax.generation.state import sample_and_append
from xinfer_jax.generation.strategies import Plain
from xinfer_jax.generation.validation import validate_call
from xinfer_jax.model.decoder import Inputs
from xinfer_jax.model.extras import NO_EXTRAS
from xinfer_jax.sampling.batched_settings import settings_per_row
from xinfer_jax.sampling.context import init_context
from xinfer_jax.sampling.sampler import process_logits, sample_tokens

pytestmark = [pytest.mark.full, pytest.mark.oldest]

start_rows = jax.jit(sample_and_append, static_argnames="run_config")
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [14, 15], [3, 1, 4, 1, 5]]
WARM = xj.SamplingConfig(temperature=0.9, top_k=30)


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return xj.Model(*build("qwen2", num_hidden_layers=1))


def options_of(**given) -> xj.GenerateOptions:
    return xj.GenerateOptions(**dict(max_tokens=9, eos_token_ids=(), sampling=WARM) | given)


def test_prefill_chunks_fit_the_cache(model):
    chunks = {size: prefill_chunk_size(xj.init_cache(model.config, 2, size)) for size in (64, 4096)}
    assert chunks == {64: 64, 4096: 512}
    assert jax.jit(lambda: prefill_chunk_size(xj.init_cache(model.config, 2, 4096)))() == 512


def test_a_row_joins_others_that_continue(model):
    """The second row ends. Another prompt is prefilled into its row, and its state is admitted. The first row
    does not change.
    """
    params = model.params
    config = model.config
    given = dict(capacity=64, sampling=xj.SamplingConfig(temperature=0.9, min_p=0.02), logprobs=2)
    keys = jax.random.split(jax.random.key(3), 3)
    alone = []
    for i, new in enumerate((14, 3, 8)):
        options = options_of(max_tokens=new, **given)
        alone.append(xj.generate(params, config, [PROMPTS[i]], options, key=keys[i : i + 1]))

    def begin(prompts, limits, keys, cache, rows):
        """Rows with these limits and their first tokens, prefilled into these rows of the cache."""
        options = options_of(max_tokens=14, **given)
        state = initial_state(validate_call(params, config, prompts, options, keys), np.arange(len(prompts)))
        tokens_BT = np.zeros((2, 16), np.int32)
        num_tokens_B = np.zeros(2, np.int32)
        for row, prompt in zip(rows, prompts, strict=True):
            tokens_BT[row, : len(prompt)] = prompt
            num_tokens_B[row] = len(prompt)
        inputs = Inputs(tokens_BT, num_tokens_B)
        out = PREFILL.keeping(params, config, inputs, NO_EXTRAS, cache, 512, RunConfig())
        state = dataclasses.replace(state, limit_B=np.array(limits, np.int32))
        return start_rows(np.asarray(out.hidden)[rows], state, RunConfig()), out.cache

    cache = xj.init_cache(config, 2, 64)
    state, cache = begin(PROMPTS[:2], (14, 3), keys[:2], cache, [0, 1])
    state, cache = DECODE(Plain(config), (params, NO_EXTRAS), (state, cache), 4, RunConfig())
    assert state.length_B.tolist() == [5, 3] and state.active_B.tolist() == [True, False]
    assert state.tokens_BT[1, :3].tolist() == alone[1].tokens[0]
    cache = cache.truncate(np.array([2**20, 0]))
    joined, cache = begin(PROMPTS[2:3], (8,), keys[2:], cache, [1])
    state = jax.tree.map(lambda old, new: old.at[1].set(new[0]), state, joined)
    state, cache = DECODE(Plain(config), (params, NO_EXTRAS), (state, cache), 100, RunConfig())
    assert state.length_B.tolist() == [14, 8]
    assert state.tokens_BT[0, :14].tolist() == alone[0].tokens[0]
    assert state.tokens_BT[1, :8].tolist() == alone[2].tokens[0]


V = 70  # no multiple of 32


def test_only_allowed_tokens_are_sampled():
    """Bit v % 32 of word v // 32, with any other settings; greedy and sampled rows."""
    rows = settings_per_row([xj.SamplingConfig(min_p=0.01), xj.SamplingConfig(temperature=5.0)], 2, V)
    context = init_context(rows, np.zeros(2, np.int32), np.full((2, 1), -1, np.int32), np.zeros((2, V), bool))
    assert context.allowed_bits.shape == (2, 1, 3) and (context.allowed_bits == 2**32 - 1).all()
    logits_BV = jax.random.normal(jax.random.key(0), (2, V))
    np.testing.assert_array_equal(process_logits(logits_BV, rows, context), logits_BV)
    context.allowed_bits[:] = 0
    context.allowed_bits[0, 0, 2] = 1 << 5 | 1
    context.allowed_bits[1, 0, 0] = 1 << 31
    kept = np.isfinite(process_logits(logits_BV, rows, context))
    assert [np.flatnonzero(row).tolist() for row in kept] == [[64, 69], [31]]
    token_B, *_ = sample_tokens(logits_BV, jax.random.split(jax.random.key(1), 2), rows, context)
    assert token_B[0] in (64, 69) and token_B[1] == 31


def test_context_appends_tokens_and_is_reordered():
    rows = settings_per_row(xj.SamplingConfig(min_tokens=2), 2, V)
    seen_BV = np.zeros((2, V), bool)
    history_BS = np.zeros((2, 6), np.int32)
    context = init_context(rows, np.array([1, 2]), np.full((2, 1), -1), seen_BV, history_BS)
    context = context.append_token(jnp.array([4, 5]), jnp.array([True, False]))
    context = context.append_token(jnp.array([4, 6]), jnp.array([True, True])).reorder(jnp.array([1, 0]))
    assert context.num_generated_B.tolist() == [1, 2] and context.position_B.tolist() == [3, 3]
    assert [np.flatnonzero(row).tolist() for row in context.seen_BV] == [[6], [4]]
    assert context.count_BV[0, 6] == 1 and context.count_BV[1, 4] == 2 and context.count_BV.sum() == 3
    assert context.history_BS.tolist() == [[0, 0, 6, 0, 0, 0], [0, 4, 4, 0, 0, 0]]


def test_a_stream_has_output_after_it_has_ended(model):
    stream = xj.stream(model.params, model.config, PROMPTS[:2], options_of(), key=jax.random.key(0))
    next(stream)
    with pytest.raises(xj.InputError, match="has not ended"):
        stream.output  # noqa: B018
    assert len(list(stream)) == 8 and next(stream, None) is None
    assert [len(row) for row in stream.output.tokens] == [9, 9]
    stream.stop()  # too late to change anything
    assert stream.output.finish_reason == ["length", "length"]
    unread = xj.stream(model.params, model.config, PROMPTS[:2], options_of(), key=jax.random.key(0))
    unread.stop()
    assert unread.output.tokens == [[], []] and unread.output.finish_reason == ["abort", "abort"]


def test_a_stream_raises_its_error_again(model, monkeypatch):
    stream = xj.stream(model.params, model.config, PROMPTS[:2], options_of(), key=jax.random.key(0))
    next(stream)
    monkeypatch.setattr(
        batch_generator.BatchGenerator, "decode", lambda *_: (_ for _ in ()).throw(xj.InputError("broken"))
    )
    for ask in (lambda: list(stream), lambda: next(stream), lambda: stream.output, stream.stop):
        with pytest.raises(xj.InputError, match="broken"):
            ask()
