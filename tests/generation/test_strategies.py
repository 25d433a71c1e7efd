"""Ways to decode: processors, alternatives, stopping, several answers, in batches, streams
and with quantized weights.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

PROMPTS = ([1, 2, 3, 4, 5], [7, 8, 9])


@pytest.fixture(scope="module")
def model():
    return xj.load_model()


def options(**given) -> xj.GenerateOptions:
    return xj.GenerateOptions(**dict(max_tokens=12, eos_token_ids=()) | given)


def run(model, prompts=PROMPTS, key=0, **given) -> xj.types.GenerateOutput:
    return xj.generate(model.params, model.config, prompts, options(**given), key=jax.random.key(key))


def streamed(model, prompts=PROMPTS, until=None, **given):
    """Returns the ids that a stream yields, told to stop after `until` steps, and its output."""
    steps = xj.stream(model.params, model.config, prompts, options(**given), key=jax.random.key(0))
    seen = []
    for ids in steps:
        seen.append(ids)
        if len(seen) == until:
            steps.stop()
    return seen, steps.output


SETTINGS = [
    xj.SamplingConfig(temperature=0.9, min_p=0.05, typical_p=0.9, xtc_probability=0.5),
    xj.SamplingConfig(presence_penalty=2.0, frequency_penalty=0.8, no_repeat_ngram_size=2),
    xj.SamplingConfig(temperature=1.0, logit_bias={11: 5.0, 12: -4.0}, forbidden_token_ids=(3, 4)),
    xj.SamplingConfig(temperature=0.8),
]


@pytest.mark.full
def test_a_processed_row_of_a_batch_is_the_row_alone_and_streamed(model):
    """No setting of another row reaches it."""
    keys = jax.random.split(jax.random.key(3), 4)
    prompts = [*PROMPTS, *PROMPTS]
    batch = xj.generate(model.params, model.config, prompts, options(sampling=SETTINGS), key=keys)
    for i, prompt in enumerate(prompts):
        call = model.params, model.config, [prompt], options(sampling=SETTINGS[i])
        assert xj.generate(*call, key=keys[i : i + 1]).tokens[0] == batch.tokens[i]
        assert [ids[0] for ids in xj.stream(*call, key=keys[i : i + 1])] == batch.tokens[i]


# --- log-probabilities --------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_list_the_most_probable_tokens(model, temperature):
    """Greedy and sampled, out of the same two programs."""
    settings = xj.SamplingConfig(temperature=temperature, top_k=20, repetition_penalty=1.2)
    out, plain = (run(model, sampling=settings, logprobs=n, logits=n > 0) for n in (3, 0))
    assert out.tokens == plain.tokens and plain.alternatives is None
    np.testing.assert_allclose(sum(out.logprobs, []), sum(plain.logprobs, []), atol=1e-5)
    for i, prompt in enumerate(PROMPTS):
        full = xj.forward(model.params, model.config, jnp.array([prompt + out.tokens[i]]))[0][
            0, len(prompt) - 1 : -1
        ]
        np.testing.assert_allclose(out.logits[i], full, atol=2e-3)
        logprobs = np.asarray(jax.nn.log_softmax(out.logits[i]))
        for t, token in enumerate(out.alternatives[i]):
            assert token.id == out.tokens[i][t] and token.logprob == out.logprobs[i][t]
            np.testing.assert_allclose(token.logprob, logprobs[t, token.id], atol=1e-5)
            assert [j for j, _ in token.top] == np.argsort(-logprobs[t], kind="stable")[:3].tolist()
            np.testing.assert_allclose([p for _, p in token.top], np.sort(logprobs[t])[::-1][:3], atol=1e-5)
            assert (
                token.processed_logprob <= 0 and token.processed_top[0][1] >= token.processed_logprob - 1e-6
            )
            if temperature == 0:
                assert token.processed_top[0][0] == token.id
    text = xj.alternatives_text(model, out)
    assert len(text) == 12 and len(text[0]) == 4 and 0 < text[0][0].probability <= 1


# --- stopping -----------------------------------------------------------------------------------------------


def test_stop_token_ids(model):
    whole = run(model).tokens[0]
    out = run(model, stop_token_ids=(whole[4],))
    first = whole.index(whole[4])
    assert (out.tokens[0], out.finish_reason[0], out.stop_reason[0]) == (whole[: first + 1], "stop", whole[4])
    assert out.text_ids(0) == whole[:first]


def test_stop_ends_a_stream(model):
    until = 3
    whole, _ = streamed(model)
    seen, out = streamed(model, until=until)
    assert seen == whole[:until]
    assert out.tokens == [[ids[i] for ids in seen] for i in range(2)] and out.finish_reason == ["abort"] * 2
    assert [len(row) for row in out.logprobs] == [until] * 2 and out.stats.generated_tokens == 2 * until


QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@pytest.mark.parametrize("stop", [" France", "tal of Fr", "T"])
def test_the_text_ends_before_a_stop_string(model, stop):
    given = dataclasses.replace(options(max_tokens=16), stop_strings=("nowhere", stop))
    pieces = xj.stream_text(model, QUESTION, given)
    text = "".join(pieces)
    out = pieces.output
    assert text == xj.generate_text(model, QUESTION, given) == ANSWER[: ANSWER.index(stop)]
    assert out.finish_reason == ["stop"] and stop in model.tokenizer.decode(out.tokens[0])


# --- several answers ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_answers_share_a_prompt_and_differ_by_key(model):
    settings = xj.SamplingConfig(temperature=1.5)
    keys = jax.random.split(jax.random.key(2), 2)
    out = xj.generate(model.params, model.config, PROMPTS, options(sampling=settings, n=3), key=keys)
    assert len(out.tokens) == 6 and len({tuple(row) for row in out.tokens}) == 6
    for row, (i, j) in enumerate((i, j) for i in range(2) for j in range(3)):
        key = jax.random.fold_in(keys[i], j) if j else keys[i]
        alone = xj.generate(
            model.params, model.config, [PROMPTS[i]], options(sampling=settings), key=key[None]
        )
        assert out.tokens[row] == alone.tokens[0]
    assert out.stats.prompt_tokens == sum(map(len, PROMPTS))
    recomputed = xj.generate(
        model.params, model.config, PROMPTS, options(sampling=settings, n=3, use_cache=False), key=keys
    )
    assert recomputed.tokens == out.tokens


@pytest.mark.full
def test_best_of_returns_the_most_probable_answers(model):
    settings = xj.SamplingConfig(temperature=1.5)
    every, best = (
        run(model, sampling=settings, logprobs=1, **more) for more in (dict(n=4), dict(n=2, best_of=4))
    )
    for i in range(2):
        ranked = sorted(range(4 * i, 4 * i + 4), key=lambda row: -np.mean(every.logprobs[row]))[:2]
        assert [best.tokens[2 * i + j] for j in range(2)] == [every.tokens[row] for row in ranked]
        assert [best.alternatives[2 * i + j] for j in range(2)] == [every.alternatives[row] for row in ranked]


# --- rejected options -------------------------------------------------------------------------------------


def test_options_that_text_and_streams_reject(model):
    for given, named in (
        (dict(stop_strings=("",)), "stop_strings must be a list of texts"),
        (dict(n=2), "n=2: the text functions"),
    ):
        with pytest.raises(xj.InputError, match=named):
            xj.generate_text(model, QUESTION, options(**given))
    with pytest.raises(xj.InputError, match="best_of=3 cannot be streamed"):
        xj.stream(model.params, model.config, PROMPTS, options(best_of=3), key=jax.random.key(0))
    cache = xj.init_cache(model.config)
    call = (model.params, model.config, jnp.zeros((1, model.config.vocab_size)), cache, jax.random.key(0))
    for name in ("no_repeat_ngram_size", "dry_multiplier"):
        with pytest.raises(xj.InputError, match="dry_multiplier need history_BS"):
            xj.decode_loop(*call, xj.SamplingConfig(**{name: 2}), np.zeros(0, np.int32), 4)
