"""Speculative decoding: the tokens are those of plain decoding, greedy or sampled, with any draft. Accepted
draft tokens are counted. Verifying them at all positions at the same time, as GPUs do, equals one position
after the other, as CPUs do.
"""

import contextlib
import dataclasses

import gpu_forms
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import build

import xinfer_jax as xj
from xinfer_jax.config.run_config import RunConfig
from xinfer_jax.generation.loop import Hidden
from xinfer_jax.generation.proposers import prompt_lookup
from xinfer_jax.generation.speculation import SpeculationState, verify
from xinfer_jax.generation.state import new_state
from xinfer_jax.sampling.batched_settings import settings_per_row
from xinfer_jax.sampling.context import init_context
from xinfer_jax.sampling.logprobs import empty_alternatives

pytestmark = pytest.mark.oldest

PROMPTS = ([1, 2, 3, 4, 5], [7, 8, 9, 7, 8, 9, 7], [30])
MIXED = (
    xj.SamplingConfig(),
    xj.SamplingConfig(temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3),
    xj.SamplingConfig(temperature=1.0, no_repeat_ngram_size=3, min_p=0.02),
)


@pytest.fixture(scope="module")
def model():
    return xj.Model(*build("qwen2"))


@pytest.fixture(scope="module")
def drafts(model):
    """Drafts: the model itself, a smaller one, an unrelated one, prompt look-up, and a function."""
    config = build("qwen2", num_hidden_layers=1)[1]
    small = xj.Model(model.params | {"layers": model.params["layers"][:1]}, config)
    random = dataclasses.replace(model, params=jax.tree.map(lambda x: x[::-1], model.params))
    return {"itself": model, "small": small, "random": random, "lookup": "lookup", "function": sevens}


def sevens(history_BS, length_B, count):
    return jnp.full((len(length_B), count), 7)


def run(model, prompts=PROMPTS, **given) -> xj.types.GenerateOutput:
    options = xj.GenerateOptions(**dict(max_tokens=24, eos_token_ids=()) | given)
    return xj.generate(model.params, model.config, prompts, options, key=jax.random.key(4))


@pytest.mark.full
@pytest.mark.parametrize("draft", ["lookup", "small", "function"])
def test_tokens_equal_plain_decoding(model, drafts, draft):
    eos = tuple(run(model).tokens[0][9:10])
    for settings in (MIXED,) if draft == "lookup" else (xj.SamplingConfig(),):
        given = dict(sampling=settings, eos_token_ids=eos, logprobs=2)
        plain = run(model, **given)
        speculated = run(model, draft=drafts[draft], **given)
        assert speculated.tokens == plain.tokens and speculated.finish_reason == plain.finish_reason
        np.testing.assert_allclose(sum(speculated.logprobs, []), sum(plain.logprobs, []), atol=1e-4)
        for a, b in zip(sum(speculated.alternatives, []), sum(plain.alternatives, []), strict=True):
            assert a.id == b.id
            np.testing.assert_allclose(a.processed_logprob, b.processed_logprob, atol=1e-3)
        for row, rate, passes in zip(
            speculated.logprobs, speculated.stats.acceptance, speculated.stats.passes, strict=True
        ):
            assert 0 <= rate <= 1 and passes <= len(row) - 1 <= passes * 4


@pytest.mark.full
def test_a_draft_that_is_always_accepted(model, drafts):
    """Draft tokens are sampled with the same noise. So those of the model itself are always accepted, if the
    settings do not depend on earlier tokens.
    """
    settings = [
        xj.SamplingConfig(),
        xj.SamplingConfig(temperature=1.0),
        xj.SamplingConfig(temperature=0.7, top_k=20, top_p=0.9),
    ]
    out = run(model, sampling=settings, draft=drafts["itself"], draft_tokens=4, max_tokens=21)
    assert out.stats.acceptance == [1.0] * 3 and out.stats.passes == [4] * 3
    wrong = run(model, sampling=settings, draft=drafts["random"], draft_tokens=4, max_tokens=21)
    assert max(wrong.stats.acceptance) < 0.2


@pytest.mark.full
@pytest.mark.parametrize("draft", ["lookup"])
def test_a_row_of_a_batch_is_the_row_alone_streamed_and_shared(model, drafts, draft):
    keys = jax.random.split(jax.random.key(1), 2)
    given = dict(
        max_tokens=16, eos_token_ids=(), draft=drafts[draft], sampling=xj.SamplingConfig(temperature=0.9)
    )
    options = xj.GenerateOptions(**given)
    batch = xj.generate(model.params, model.config, PROMPTS[:2], options, key=keys)
    for i in range(2):
        steps = xj.stream(model.params, model.config, PROMPTS[i : i + 1], options, key=keys[i : i + 1])
        assert [ids[0] for ids in steps] == batch.tokens[i]
    several, plain = (run(model, PROMPTS[:2], **given | dict(draft=d, n=2)) for d in (drafts[draft], None))
    assert several.tokens == plain.tokens


def test_prompt_lookup_continues_the_last_repetition():
    history = np.zeros((4, 16), np.int32)
    rows = ([5, 6, 7, 8, 5, 6], [1, 2, 1, 3, 1], [4, 4, 4], [9])
    for row, ids in zip(history, rows, strict=True):
        row[: len(ids)] = ids
    drafts_BT = np.asarray(prompt_lookup(jnp.array(history), jnp.array([len(row) for row in rows]), 3))
    assert drafts_BT[0].tolist() == [7, 8, 5]
    assert drafts_BT[1].tolist() == [3, 1, 3]  # of two places the later; it runs into the end and repeats
    assert drafts_BT[2].tolist() == [4, 4, 4]


def test_a_draft_with_another_vocabulary_raises(model):
    draft = dataclasses.replace(model, config=dataclasses.replace(model.config, vocab_size=7))
    with pytest.raises(xj.InputError, match="the draft's vocabulary of 7 is not the model's"):
        run(model, draft=draft)


# --- verification -------------------------------------------------------------------------------------------

B, T, V, S = 8, 4, 300, 32
EOS = 4
SIZE = 12  # columns of the output
NOTED = 2  # tokens that were sampled before the first of them
ALLOWED = [3, EOS, 20, 150, 299]
PLAIN = [
    xj.SamplingConfig(), xj.SamplingConfig(temperature=0.8, top_k=20, top_p=0.8),
    xj.SamplingConfig(temperature=1.0), xj.SamplingConfig(temperature=0.9, top_k=0, top_p=0.9),
    xj.SamplingConfig(repetition_penalty=3.0), xj.SamplingConfig(temperature=1.0, top_k=30,
    repetition_penalty=3.0), xj.SamplingConfig(temperature=0.7, top_k=66, top_p=0.9),
    xj.SamplingConfig(temperature=1.0, top_k=64),
]  # fmt: skip
ALL = [
    xj.SamplingConfig(presence_penalty=4.0), xj.SamplingConfig(temperature=1.0, top_k=20,
    frequency_penalty=3.0), xj.SamplingConfig(no_repeat_ngram_size=2), xj.SamplingConfig(temperature=1.0,
    bad_words_ids=[[3], [20, 150], [7]]), xj.SamplingConfig(min_tokens=5), xj.SamplingConfig(temperature=1.0,
    top_k=20, min_p=0.02, logit_bias={3: 9.0}), xj.SamplingConfig(temperature=1.0, allowed_token_ids=ALLOWED,
    xtc_probability=0.5, xtc_threshold=0.02), xj.SamplingConfig(temperature=1.0, top_k=40, typical_p=0.7,
    dry_multiplier=3.0, dry_allowed_length=0),
]  # fmt: skip
COMMON = [
    xj.SamplingConfig(
        temperature=0.8, top_k=20, top_p=0.8, repetition_penalty=1.5, min_p=0.02, logit_bias={3: 2.0}
    )
] * B  # from candidates


def rows_before(settings: list, logprobs: bool, wanted: bool, V: int = V):
    """Rows that have sampled some tokens. Row 2 has ended, row 3 may sample two more tokens."""
    rng = np.random.RandomState(3)
    sampling = settings_per_row(settings, B, V)
    history = rng.randint(0, V, (B, S)).astype(np.int32)
    eos = np.tile(np.int32([EOS, -1]), (B, 1))
    seen = rng.random_sample((B, V)) < 0.2
    context = init_context(sampling, np.arange(10, 10 + B, dtype=np.int32), eos, seen, history)
    context = dataclasses.replace(context, num_generated_B=np.full(B, NOTED, np.int32))
    if context.count_BV is not None:
        context = dataclasses.replace(context, count_BV=rng.randint(0, 2, (B, V)).astype(np.int32))
    limit = np.where(np.arange(B) == 3, NOTED + 2, 20).astype(np.int32)
    state = new_state(jax.random.split(jax.random.key(5), B), sampling, limit, context, SIZE)
    state = dataclasses.replace(state, finished_B=np.arange(B) == 2, output_start_B=context.num_generated_B)
    if logprobs:
        recorded = empty_alternatives(B, SIZE, 3, V, False)
        recorded = dataclasses.replace(recorded, wanted_B=(np.arange(B) % 2 == 1) & wanted)
        state = dataclasses.replace(state, alternatives=recorded)
    return state


def program(on_gpu: bool, model=None, impl=None):
    """`verify`, jitted anew: a jitted function keeps its trace. model: it gets hidden states, not logits."""

    @jax.jit
    def jitted(outputs, state, draft):
        counts = SpeculationState.of_rows(B, draft.shape[1])
        states = outputs if model is None else Hidden(*model, outputs)
        return verify(states, state, draft, counts, RunConfig(impl))

    def run(outputs, state, draft):
        with gpu_forms.selected() if on_gpu else contextlib.nullcontext():
            return jitted(outputs, state, draft)

    return run


def accepted_drafts(run, logits, state) -> np.ndarray:
    """Draft tokens that are right up to another position of some rows, some outside the vocabulary."""
    draft = np.zeros((B, T - 1), np.int32)
    for i in range(T - 1):
        after, _ = run(logits, state, draft)
        columns = np.minimum(np.asarray(after.length_B) - NOTED, i + 1) - 1
        draft[:, i] = np.asarray(after.tokens_BT)[np.arange(B), columns]
    draft[4, 2] = -1
    draft[5, 1] = V
    draft[6, 0] = 5
    return draft


@pytest.mark.full
@pytest.mark.parametrize(
    "settings, logprobs, wanted",
    [
        (PLAIN, True, True),
        pytest.param(ALL, True, True, marks=pytest.mark.soak),
        (ALL, True, False),
        pytest.param(COMMON, False, False, marks=pytest.mark.soak),
    ],
)
def test_positions_at_once_equal_one_after_the_other(settings, logprobs, wanted):
    logits = np.random.RandomState(1).standard_normal((B, T, V)).astype(np.float32) * 3
    logits[7, 1, EOS] = 60  # row 7 ends at its second token
    logits = jnp.asarray(logits)
    state = rows_before(settings, logprobs, wanted)
    in_turn = program(on_gpu=False)
    draft = accepted_drafts(in_turn, logits, state)
    want = in_turn(logits, state, draft)
    got = program(on_gpu=True)(logits, state, draft)
    assert (np.asarray(want[0].length_B) - NOTED).tolist() == [T, T, 0, 2, 3, 2, 1, 2]
    assert_equal(got, want)


@pytest.mark.full
def test_hidden_states_give_the_tokens_of_their_logits():
    """Greedy rows by the kernel that fuses head and argmax, other rows by the sampler."""
    params, config = build("qwen2")
    hidden = jax.random.normal(jax.random.key(0), (B, 3, config.hidden_size))
    logits = jax.jit(xj.unembed, static_argnums=1)(params, config, hidden)
    from_hidden = program(True, (params, config), "interpret")
    in_turn = program(False)
    draft = np.asarray(jnp.argmax(logits[:, :2], -1)).astype(np.int32)
    draft[5, 1] += 1
    for sampling in (xj.SamplingConfig(), xj.SamplingConfig(temperature=1.0, top_k=20)):
        state = rows_before([sampling] * B, False, False, config.vocab_size)
        assert_equal(from_hidden(hidden, state, draft), in_turn(logits, state, draft))


def assert_equal(got, want):
    got, want = (jax.tree.map(key_data, found) for found in (got, want))
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        if one.dtype == np.float32:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=str(path))
        else:
            np.testing.assert_array_equal(one, other, str(path))


def key_data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
