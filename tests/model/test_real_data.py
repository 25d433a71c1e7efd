"""A real trained model and a real tokenizer against recorded results of transformers and tokenizers (see
../shared/data/README.md).
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from paths import DATA, STORIES

import xinfer_jax as xj

QWEN = DATA / "qwen2.5-0.5b-instruct"

pytestmark = [
    pytest.mark.full,
    pytest.mark.oldest,
    pytest.mark.skipif(not DATA.is_dir(), reason=f"the real data is not there: {DATA}"),
]


def cases(file: Path, name: str = "text") -> list:
    """The cases of a golden file as pytest parameters; none where the data is missing."""
    if not file.is_file():
        return []
    listed = json.loads(file.read_text(encoding="utf-8"))["cases"]
    return [pytest.param(case, id=f"{i}-{ascii(case[name])[1:21]}") for i, case in enumerate(listed)]


@cache
def stories() -> xj.Model:
    return xj.load_model(STORIES, dtype="float32")


@cache
def qwen() -> xj.Tokenizer:
    return xj.Tokenizer.from_dir(QWEN)


# --- stories260K: a Llama -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(STORIES / "golden_greedy.json", "prompt"))
def test_stories_greedy_answers_equal_transformers(case):
    model = stories()
    ids = model.tokenizer.encode(case["prompt"])
    assert ids == case["prompt_ids"]
    options = xj.GenerateOptions(len(case["greedy_ids"]), eos_token_ids=())
    out = xj.generate(model.params, model.config, [ids], options)
    assert out.tokens[0] == case["greedy_ids"]
    np.testing.assert_allclose(out.logprobs[0], case["greedy_logprobs"], rtol=0, atol=1e-4)
    assert model.tokenizer.decode(out.tokens[0]) == case["greedy_text"]


def test_stories_in_one_ragged_batch():
    model = stories()
    golden = json.loads((STORIES / "golden_greedy.json").read_text())["cases"]
    options = xj.GenerateOptions(200, eos_token_ids=())
    out = xj.generate(model.params, model.config, [c["prompt_ids"] for c in golden], options)
    assert out.tokens == [c["greedy_ids"] for c in golden]
    np.testing.assert_allclose(out.logprobs, [c["greedy_logprobs"] for c in golden], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", cases(STORIES / "golden_greedy.json", "prompt"))
def test_stories_last_logits(case):
    model = stories()
    logits_BTV, _ = xj.forward(model.params, model.config, np.array([case["prompt_ids"]]))
    expected = dict(case["last_logits_top5"])
    assert np.argsort(-logits_BTV[0, -1])[:5].tolist() == list(expected)
    np.testing.assert_allclose(
        np.asarray(logits_BTV[0, -1])[list(expected)], list(expected.values()), rtol=0, atol=1e-4
    )


# --- Qwen2.5: tokenizer and chat template -------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(QWEN / "golden_tokenizer.json"))
def test_qwen_tokenizer_gives_the_golden_ids(case):
    assert qwen().encode(case["text"]) == case["ids"]
    assert qwen().decode(case["ids"], skip_special_tokens=False) == case["decode"]
    assert qwen().decode(case["ids"]) == case["decode_skip"]


@pytest.mark.parametrize("case", cases(QWEN / "golden_chat_template.json", "name"))
def test_qwen_chat_template(case):
    text = qwen().apply_chat_template(case["messages"], **case["kwargs"])
    assert text == case["text"]
    assert qwen().encode(text, add_special_tokens=False) == case["ids"]


def test_qwen_french_question_has_26_ids():
    system = "You are a helpful assistant."
    user = "What is the capital of France?"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    assert len(qwen().encode(qwen().apply_chat_template(messages), add_special_tokens=False)) == 26


def test_qwen_stops_at_both_of_its_eos_ids():
    assert set(qwen().eos_token_ids) == {151645, 151643}
