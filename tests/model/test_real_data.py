"""A real trained model and a real tokenizer against recorded results of transformers and tokenizers (see
../shared/data/README.md).
"""

import json
from functools import cache
from pathlib import Path

import jax
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
    """The cases of a golden file as pytest parameters. None where the data is missing."""
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


def test_stories_in_one_ragged_batch():
    model = stories()
    golden = json.loads((STORIES / "golden_greedy.json").read_text())["cases"]
    prompts = [model.tokenizer.encode(case["prompt"]) for case in golden]
    assert prompts == [case["prompt_ids"] for case in golden]
    out = xj.generate(
        model.params, model.config, prompts, xj.GenerateOptions(max_tokens=200, eos_token_ids=())
    )
    assert out.tokens == [case["greedy_ids"] for case in golden]
    assert [*map(model.tokenizer.decode, out.tokens)] == [case["greedy_text"] for case in golden]
    np.testing.assert_allclose(out.logprobs, [case["greedy_logprobs"] for case in golden], rtol=0, atol=1e-4)


def test_stories_last_logits():
    model = stories()
    golden = json.loads((STORIES / "golden_greedy.json").read_text())["cases"]
    prompts = [case["prompt_ids"] for case in golden]
    num_tokens_B = np.array([*map(len, prompts)])
    tokens_BT = np.array([ids + [0] * (max(num_tokens_B) - len(ids)) for ids in prompts])
    forward = jax.jit(xj.forward, static_argnums=1)
    logits_BTV = np.asarray(forward(model.params, model.config, tokens_BT, None, num_tokens_B)[0])
    for case, logits_TV, n in zip(golden, logits_BTV, num_tokens_B, strict=True):
        expected = dict(case["last_logits_top5"])
        assert np.argsort(-logits_TV[n - 1])[:5].tolist() == list(expected)
        np.testing.assert_allclose(logits_TV[n - 1, list(expected)], list(expected.values()), atol=1e-4)


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


def test_qwen_stops_at_both_of_its_eos_ids():
    assert set(qwen().eos_token_ids) == {151645, 151643}
