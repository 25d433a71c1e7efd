"""Scores are log_softmax of the logits, alone or in a batch, in parts or whole, with gradients. The sampler
and transformers agree.
"""

import dataclasses
import json
import math
import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import parity_cases as cases
import pytest
import run_script
import tiny
from quick import full_except

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

forward = jax.jit(xj.forward, static_argnums=1)


@pytest.fixture(
    scope="module", params=full_except(["qwen2-gqa-tied-old"], ["qwen2-gqa-tied-old", "smollm3-window"])
)
def model(request):
    config = cases.CASES[request.param].config
    return cases.params_from(config, cases.random_tensors(config, 5)), config


@pytest.fixture(scope="module")
def qwen():
    config = cases.CASES["qwen2-gqa-tied-old"].config
    return cases.params_from(config, cases.random_tensors(config, 5)), config


@pytest.fixture(scope="module")
def bundled():
    return xj.load_model(dtype="float32")


def batch():
    return cases.pad_prompts(cases.prompts(cases.CASES["qwen2-gqa-tied-old"]))


def whole(params, config, tokens_BT, num_tokens_B=None):
    """The same by logits of all tokens at once; undefined at padding."""
    logits_BTV, _ = forward(params, config, tokens_BT, None, num_tokens_B)
    return jnp.take_along_axis(jax.nn.log_softmax(logits_BTV[:, :-1]), tokens_BT[:, 1:, None], -1)[..., 0]


def assert_equal_where_real(got_BT, want_BT, num_tokens_B, atol=1e-5):
    real_BT = np.arange(1, got_BT.shape[1] + 1) < np.asarray(num_tokens_B)[:, None]
    np.testing.assert_allclose(np.asarray(got_BT)[real_BT], np.asarray(want_BT)[real_BT], atol=atol)
    assert not np.any(np.asarray(got_BT)[~real_BT])


# --- identities ---------------------------------------------------------------------------------------------


def test_equals_log_softmax_of_the_logits(model):
    tokens_BT, num_tokens_B = batch()
    got_BT = xj.score(*model, tokens_BT, num_tokens_B).logprobs_BT
    assert got_BT.dtype == jnp.float32 and got_BT.shape == (len(tokens_BT), tokens_BT.shape[1] - 1)
    assert_equal_where_real(got_BT, whole(*model, tokens_BT, num_tokens_B), num_tokens_B)
    np.testing.assert_allclose(xj.score(*model, tokens_BT).logprobs_BT, whole(*model, tokens_BT), atol=1e-5)


def test_a_row_of_a_ragged_batch_is_the_row_alone(model):
    tokens_BT, num_tokens_B = batch()
    together_BT = xj.score(*model, tokens_BT, num_tokens_B).logprobs_BT
    for i, n in enumerate(num_tokens_B):
        np.testing.assert_allclose(
            xj.score(*model, tokens_BT[i : i + 1, :n]).logprobs_BT[0], together_BT[i, : n - 1], atol=1e-5
        )


@pytest.mark.full
def test_ids_that_are_no_tokens_in_a_trace():
    """Below 0 they are padding, as in labels. Above the vocabulary, and after both, scores are NaN."""
    config = dataclasses.replace(cases.CASES["qwen2-gqa-tied-old"].config, num_hidden_layers=1)
    params = cases.params_from(config, cases.random_tensors(config, 5))
    tokens_BT = jnp.asarray(batch()[0])[:, :12]
    tokens_BT = jnp.concatenate([tokens_BT] * 2)[:4].at[0, 7:].set(-100).at[1, 4].set(-1).at[2, 4].set(96)
    segment_ids_BT = jnp.zeros_like(tokens_BT).at[1:, 5:].set(1)
    reference = jax.tree.map(lambda x: 1.5 * x, params)
    ids = jnp.full((4, 11, 1), -1).at[1].set(5).at[2].set(96)
    teacher = ids, jnp.full((4, 11, 1), -jnp.inf).at[1:].set(-1.0)

    @jax.jit
    def scores(tokens_BT, teacher):
        more = xj.score(
            params, config, tokens_BT, entropy=True, reference=reference, teacher_topk=teacher
        )  # fmt: skip
        return more, xj.score(params, config, tokens_BT, segment_ids_BT=segment_ids_BT).logprobs_BT

    more, packed_BT = scores(tokens_BT, teacher)
    want, want_packed_BT = scores(jnp.clip(tokens_BT, 0, 95), teacher)
    at_T = np.arange(11)
    other_BT = np.stack([at_T < 0, at_T > 3, at_T > 3, at_T < 0])  # an id before the target is no token
    padding_BT = np.asarray(tokens_BT)[:, 1:] < 0
    for name in ("logprobs_BT", "entropy_BT", "kl_BT", "topk_kl_BT"):
        expected_BT = np.where(other_BT, np.nan, getattr(want, name))
        if name == "logprobs_BT":
            expected_BT[2, 3] = np.nan
        expected_BT = np.where(padding_BT, 0, expected_BT)
        np.testing.assert_allclose(getattr(more, name), expected_BT, atol=1e-6, err_msg=name)
    assert np.isnan(more.topk_kl_BT[2]).all() and not np.any(more.topk_kl_BT[0])
    expected_BT = np.where(padding_BT, 0, want_packed_BT)
    expected_BT[2, 3] = np.nan
    np.testing.assert_allclose(packed_BT, expected_BT, atol=1e-6)
    gradient = jax.grad(lambda params: (xj.score(params, config, tokens_BT[:1]).logprobs_BT * 2).sum())
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.jit(gradient)(params)))


@pytest.mark.full
def test_logits_in_parts_are_those_of_the_whole():
    """A vocabulary so large that the logits of 70 tokens exist a part at a time, which is no divisor of them.
    The gradient goes through the parts.
    """
    config = dataclasses.replace(
        cases.CASES["qwen2-gqa-tied-old"].config, vocab_size=2**19, num_hidden_layers=1
    )
    params = xj.init_params(config, jax.random.key(0), "float32")
    tokens_BT = np.random.RandomState(0).randint(0, config.vocab_size, (1, 71))
    got, gradient = jax.jit(jax.value_and_grad(lambda p: xj.score(p, config, tokens_BT).logprobs_BT.sum()))(
        params
    )
    want, expected = jax.jit(jax.value_and_grad(lambda p: whole(p, config, tokens_BT).sum()))(params)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    chex.assert_trees_all_close(gradient, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.full
def test_gradients_are_those_of_the_whole(model):
    params, config = model
    tokens_BT, num_tokens_B = batch()
    real_BT = np.arange(1, tokens_BT.shape[1]) < num_tokens_B[:, None]
    weight_BT = real_BT * np.random.RandomState(0).standard_normal(real_BT.shape).astype(np.float32)
    in_score, of_whole = (
        jax.jit(jax.grad(lambda p, f=f: (weight_BT * f(p, config, tokens_BT, num_tokens_B)).sum()))(params)
        for f in (lambda *given: xj.score(*given).logprobs_BT, whole)
    )
    chex.assert_trees_all_close(in_score, of_whole, atol=1e-4, rtol=1e-4)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(in_score))


# --- agreement with the sampler, in every weight format -----------------------------------------------------


@pytest.mark.full
def test_generate_returns_the_same_log_probabilities(bundled):
    """EOS entry included. Temperature and top-p change what is drawn, not what is reported."""
    params = bundled.params
    config = bundled.config
    tok = bundled.tokenizer
    questions = ("What is the capital of France?", "What is the capital of Spain?", "Hello")
    prompts = [tok.encode(tok.apply_chat_template([{"role": "user", "content": text}])) for text in questions]
    sampling = xj.SamplingConfig(temperature=1.3, top_p=0.95)
    options = xj.GenerateOptions(max_tokens=40, sampling=sampling, eos_token_ids=tok.eos_token_ids[:1])
    out = xj.generate(params, config, prompts, options, key=jax.random.key(2))
    assert "stop" in out.finish_reason
    completions = out.tokens
    scores = xj.score_completions(params, config, prompts, completions)
    for ours, theirs in zip(scores, out.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for again in (xj.score_completions(params, config, prompts, completions, rows=n) for n in (1, 2)):
        chex.assert_trees_all_close(again, scores, atol=1e-5)
    tokens_BT = np.array([prompts[0] + completions[0]])
    np.testing.assert_allclose(
        xj.score(params, config, tokens_BT).logprobs_BT[0, len(prompts[0]) - 1 :], out.logprobs[0], atol=1e-5
    )


@pytest.mark.full
@pytest.mark.parametrize("weights, bound", [("int8", 2e-3), ("int4", 2e-3), ("bfloat16", 0.08)])
def test_scores_of_quantized_and_16_bit_weights(weights, bound):
    narrow = dict(quantize=weights) if weights.startswith("int") else dict(dtype=weights)
    model = tiny.shallow_model(**narrow)
    params = model.params
    config = model.config
    tok = model.tokenizer
    prompt = tok.encode("What is the capital of France?")
    out = xj.generate(params, config, [prompt], xj.GenerateOptions(max_tokens=8, eos_token_ids=()))
    tokens_BT = np.array([prompt + out.tokens[0]])
    got_BT = xj.score(params, config, tokens_BT).logprobs_BT
    np.testing.assert_allclose(got_BT, whole(params, config, tokens_BT), atol=bound)
    np.testing.assert_allclose(got_BT[0, len(prompt) - 1 :], out.logprobs[0], atol=bound)
    total = lambda inputs_BTD: xj.score(params, config, tokens_BT, inputs_BTD=inputs_BTD).logprobs_BT.sum()  # noqa: E731
    gradient = jax.grad(total)(xj.embed_tokens(params, config, tokens_BT))
    chex.assert_tree_all_finite(gradient)
    assert jnp.any(gradient != 0)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3-head-dim-tied", "smollm3-window"])
def test_scores_equal_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    case = cases.CASES[name]
    prompts = cases.prompts(cases.CASES[name])
    tensors = cases.random_tensors(case.config, 1234)
    theirs = cases.hf_model(case.hf, tensors)
    scores = xj.score(cases.params_from(case.config, tensors), case.config, *cases.pad_prompts(prompts))
    for row, prompt in zip(np.asarray(scores.logprobs_BT), prompts, strict=True):
        log_softmax_TV = torch.log_softmax(torch.tensor(cases.hf_logits(theirs, prompt)), -1).numpy()
        np.testing.assert_allclose(
            row[: len(prompt) - 1], log_softmax_TV[np.arange(len(prompt) - 1), prompt[1:]], atol=1e-4
        )


# --- refusals -----------------------------------------------------------------------------------------------

GOOD = np.ones((2, 4), np.int32)


@pytest.mark.parametrize(
    "tokens, more, named",
    [
        ([[1, 2], [3]], {}, "must be an array of ids, as np.array makes of a list"),
        (GOOD[0], {}, r"shape \[rows, 2 or more\], got int32 of \(4,\)"),
        (GOOD[:, :1], {}, "2 or more"),
        (GOOD.astype(np.float32), {}, "integers"),
        (96 * GOOD, {}, "token id 96 is outside 0 … 95"),
        (-GOOD, {}, "token id -1"),
        (GOOD, dict(num_tokens_B=np.array([4])), r"num_tokens must have the shape \[2\]"),
        (GOOD, dict(num_tokens_B=np.array([4, 5])), "num_tokens 5 is outside 0 … 4"),
        (GOOD, dict(inputs_BTD=np.zeros((2, 3, 48))), r"inputs must have the shape \(2, 4, 48\)"),
        (GOOD, dict(impl="cuda"), "cuda"),
    ],
)
def test_bad_arguments_of_score_raise(qwen, tokens, more, named):
    with pytest.raises(xj.InputError, match=named):
        xj.score(*qwen, tokens, **more)


@pytest.mark.parametrize(
    "prompts, completions, more, named",
    [
        ([[1]], [[2], [3]], {}, "1 prompts for 2 completions"),
        ([[1]], [[]], {}, "completion 0 must be a non-empty list"),
        ([[1]], [[96]], {}, "completion 0 holds token id 96"),
        ([[]], [[1]], {}, "prompt 0"),
        ([[1] * 1000], [[1] * 25], {}, "1025 tokens exceed the model's context limit 1024"),
        ([[1]], [[1]], dict(rows=0), "rows must be at least 1, got 0"),
    ],
)
def test_bad_arguments_of_score_completions_raise(qwen, prompts, completions, more, named):
    with pytest.raises(xj.InputError, match=named):
        xj.score_completions(*qwen, prompts, completions, **more)


# --- xinfer-jax perplexity ----------------------------------------------------------------------------------


perplexity = partial(run_script.command, "perplexity")


@pytest.mark.full
@pytest.mark.parametrize("window, stride, length", [(32, 12, 101), (64, 32, 20)])
def test_command_scores_every_token_once(bundled, tmp_path, window, stride, length):
    """Token by token: the last of a context that starts where the first window to hold the token does."""
    ids = bundled.tokenizer.encode("What is the capital of France? It is Paris.\n" * 40)[:length]
    text = tmp_path / "text.txt"
    text.write_text(bundled.tokenizer.decode(ids), encoding="utf-8")
    assert bundled.tokenizer.encode(text.read_text(encoding="utf-8")) == ids
    done = perplexity(f"--text={text}", f"--window={window}", f"--stride={stride}")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    tokens_BT = np.zeros((length - 1, window), np.int32)
    last_B = []
    for i in range(1, length):
        begin = stride * max(0, math.ceil((i + 1 - window) / stride))
        assert i - begin >= min(i, window - stride)
        tokens_BT[i - 1, : i + 1 - begin] = ids[begin : i + 1]
        last_B.append(i - begin)
    logprobs_BTV = jax.nn.log_softmax(forward(bundled.params, bundled.config, tokens_BT)[0])
    logprobs = np.asarray(
        logprobs_BTV[np.arange(length - 1), np.array(last_B) - 1, np.array(ids[1:])], np.float64
    )
    assert report["tokens"] == length and report["scored_tokens"] == length - 1
    np.testing.assert_allclose(report["nats_per_token"], -logprobs.mean(), rtol=1e-5)
    np.testing.assert_allclose(report["perplexity"], np.exp(-logprobs.mean()), rtol=1e-5)
    scored_bytes = len(bundled.tokenizer.decode(ids[1:]).encode())
    np.testing.assert_allclose(report["bits_per_byte"], -logprobs.sum() / np.log(2) / scored_bytes, rtol=1e-5)


SHORT = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
)  # fmt: skip


def test_short_batches_are_one_part():
    """They are one part if all logits and their gradient take no more than the gradient of the vocabulary's
    matrix: a loop would carry that, and each of its parts would compute the logits again.
    """

    def sizes(tokens, dtype="float32", **changes):
        config = xj.ModelConfig.from_hf(SHORT | changes)
        init = lambda key: xj.init_params(config, key, dtype)  # noqa: E731
        given = jax.eval_shape(init, jax.random.key(0)), jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        text = str(jax.make_jaxpr(lambda p, t: xj.score(p, config, t).logprobs_BT)(*given))
        return {int(size) for size in re.findall(r"f32\[1,(\d+),151936\]", text)}

    assert sizes(257) == {256}  # 148 MiB
    assert sizes(401) == {400} and sizes(500) == {167}  # 232 MiB, and 290 MiB in 3 parts
    assert sizes(401, "bfloat16") == {200}  # the gradient is half as large
    assert sizes(201, hidden_size=256) == {200} and sizes(257, hidden_size=256) == {128}


# --- the result is `Scores`, whatever was asked for ---------------------------------------------------------


@pytest.mark.parametrize(
    "used",
    [
        lambda scores: -scores,
        lambda scores: scores * 2,
        lambda scores: 1 - scores,
        lambda scores: np.ones(2) - scores,
        lambda scores: jnp.ones(2) * scores,
        lambda scores: scores[0],
        lambda scores: len(scores),
        lambda scores: [*scores],
        lambda scores: np.asarray(scores, np.float64),
        lambda scores: jnp.mean(scores),
        lambda scores: scores.sum(),
        lambda scores: scores.shape,
    ],
)
def test_scores_are_no_array(used):
    scores = xj.types.Scores(np.zeros((1, 3), np.float32))
    with pytest.raises((xj.InputError, AttributeError), match=r"score returns Scores, .* use \.logprobs_BT"):
        used(scores)
    assert not hasattr(scores, "logprobs") and repr(scores).startswith("Scores(logprobs_BT=float32[1, 3]")
