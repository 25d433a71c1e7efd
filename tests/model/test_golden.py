"""Logits and greedy ids against golden files of transformers (scripts/make_golden.py): runs everywhere,
without torch.
"""

import dataclasses
import json
from functools import cache

import jax
import numpy as np
import parity_cases as cases
import pytest
from paths import GOLDEN
from quick import full_except

import xinfer_jax as xj

pytestmark = [pytest.mark.newest, pytest.mark.optimized]

TOLERANCE = 1e-4  # on logits of order 1 to 10

# Of the quick set: the logits of the first case of each family whose parts no other one has, and greedy ids
# of one case.
AGAIN = (
    "gemma4_unified_text",
    "qwen3_5_moe_text",
    "mixtral",
    "qwen2_moe",
    "seed_oss",
    "olmo3",
    "lfm2_moe",
    "granitemoe",
    "granitemoeshared",
)
LOGITS = [name for family, name in cases.FIRST.items() if family not in AGAIN]
GREEDY = ["qwen2-gqa-tied-old"]

forward = jax.jit(xj.forward, static_argnames="config")


@cache
def load_case(name: str):
    """A case's golden arrays, config, params and prompts."""
    case = cases.CASES[name]
    with np.load(GOLDEN / f"{name}.npz") as file:
        golden = dict(file)
    about = json.loads(str(golden["about"]))
    assert about["config"] == json.loads(json.dumps(case.hf)), (
        f"{name} has changed in parity_cases.py: run scripts/make_golden.py"
    )
    params = cases.params_from(case.config, cases.random_tensors(case.config, about["seed"]))
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(len(case.lengths))]
    return golden, case.config, params, prompts


def test_every_golden_file_has_its_case():
    assert {path.stem for path in GOLDEN.glob("*.npz")} == set(cases.CASES)


@pytest.mark.parametrize("name", full_except(LOGITS, cases.CASES))
def test_logits_and_greedy_ids(name):
    """Prompts and transformers' answers in one padded batch: the logits of the prompts agree, and every token
    of the answers is our greedy token.
    """
    golden, config, params, prompts = load_case(name)
    assert prompts == cases.prompts(cases.CASES[name])
    answers = [golden[f"greedy_{i}"].tolist() if f"greedy_{i}" in golden else [] for i in range(len(prompts))]
    tokens_BT, num_tokens_B = cases.pad_prompts(
        [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    )
    logits_BTV = np.asarray(forward(params, config, tokens_BT, None, num_tokens_B)[0])
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        expected = golden[f"logits_{i}"]
        assert 1 < np.abs(expected).max() < 30
        np.testing.assert_allclose(logits_BTV[i, golden[f"at_{i}"]], expected, rtol=0, atol=TOLERANCE)
        assert logits_BTV[i, len(prompt) - 1 :][: len(answer)].argmax(-1).tolist() == answer


@pytest.mark.parametrize("name", full_except(GREEDY, cases.CACHED))
def test_greedy_ids_equal_golden(name):
    """Prefill and decode through the cache, prompts of different lengths in one batch."""
    golden, config, params, prompts = load_case(name)
    rows = cases.CASES[name].continued_prompts
    out = xj.generate(
        params, config, [prompts[i] for i in rows], xj.GenerateOptions(max_tokens=cases.NEW_TOKENS)
    )
    assert out.tokens == [golden[f"greedy_{i}"].tolist() for i in rows]
    assert out.finish_reason == ["length"] * len(rows)


@pytest.mark.full
def test_generate_one_prompt_until_eos():
    golden, config, params, prompts = load_case("smollm3-window-layer-types")
    expected = golden["greedy_2"].tolist()
    out = xj.generate(params, config, prompts[2:], xj.GenerateOptions(max_tokens=cases.NEW_TOKENS))
    assert out.tokens == [expected]
    eos = expected[-1]
    stop = expected.index(eos)
    out = xj.generate(
        params, config, prompts[2:], xj.GenerateOptions(max_tokens=cases.NEW_TOKENS, eos_token_ids=[eos])
    )
    assert out.tokens == [expected[: stop + 1]] and out.finish_reason == ["stop"]
    assert len(out.logprobs[0]) == stop + 1


@pytest.mark.parametrize(
    "name", [name for name, case in cases.CASES.items() if case.config.rope.rope_type == "dynamic"]
)
def test_dynamic_is_not_continued_across_its_maximum(name):
    _, config, params, prompts = load_case(name)
    with pytest.raises(xj.InputError, match="dynamic"):
        xj.generate(params, config, prompts, xj.GenerateOptions(max_tokens=cases.NEW_TOKENS))


# Written by version 0.1.0 before its files moved into packages: a tiny checkpoint in our own format, in int8
# and int4 (config.json has the settings of version 5 since), and what it and prefixes of it give; and
# gear.prefix. plain.prefix is of format 6.
FILES = GOLDEN / "files"
RESULTS = json.loads((FILES / "said.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", full_except(["int8"], ["int8", "int4", "plain"]))
def test_files_written_before_still_load(name):
    is_prefix = name == "plain"
    expected = RESULTS[name]
    model = xj.load_model(FILES / ("int8" if is_prefix else name))
    options = xj.GenerateOptions(max_tokens=len(expected["logprobs"][0]), eos_token_ids=())
    if is_prefix:
        prefix = xj.load_prefix(model.params, model.config, FILES / f"{name}.prefix")
        options = dataclasses.replace(options, prefix=prefix)
    out = xj.generate(model.params, model.config, expected["prompts"], options)
    assert out.tokens == expected["tokens"] and out.stats.reused_tokens == expected.get("reused", 0)
    np.testing.assert_allclose(out.logprobs, expected["logprobs"], atol=TOLERANCE)


@pytest.mark.full
def test_a_prefix_of_an_older_format_is_rejected():
    model = xj.load_model(FILES / "int8")
    with pytest.raises(xj.InputError, match="in another format: prefill again"):
        xj.load_prefix(model.params, model.config, FILES / "gear.prefix")
