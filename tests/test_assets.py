"""The bundled checkpoint: small, right about capitals, made from reproducible data, and the same model in transformers."""

import itertools
import json
import random
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import xinfer_jax as xj
from xinfer_jax.loading import BUNDLED

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import train_tiny_data as data  # noqa: E402


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return xj.load_model(None, dtype=jnp.float32)


def greedy(model: xj.Model, prompts: list[list[int]]) -> list[list[int]]:
    """New ids per prompt, with the EOS id that ended them left out; fails where none did."""
    options = xj.GenerateOptions(max_new_tokens=32, eos_token_ids=model.tokenizer.eos_token_ids)
    out = xj.generate(model.params, model.config, prompts, options)
    assert set(out.finish_reason) == {"eos"}
    return out.tokens


def chat_ids(model: xj.Model, asked: str, system: str | None = None) -> list[int]:
    before = [] if system is None else [{"role": "system", "content": system}]
    text = model.tokenizer.apply_chat_template([*before, {"role": "user", "content": asked}], add_generation_prompt=True)
    return model.tokenizer.encode(text, add_special_tokens=False)


def test_files_are_complete_and_small():
    files = {path.name: path.stat().st_size for path in BUNDLED.iterdir()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert needed == files.keys()
    assert sum(files.values()) < 4e6


@pytest.mark.parametrize("phrasing", data.EVALUATION_PHRASINGS)
def test_answers(model, phrasing):
    turns = data.evaluation_set(phrasing)
    assert len(turns) >= 190
    answers = [model.tokenizer.decode(ids) for ids in greedy(model, [chat_ids(model, asked) for asked, _ in turns])]
    wrong = [(asked, given) for (asked, right), given in zip(turns, answers, strict=True) if given != right]
    print(f"{len(turns) - len(wrong)} of {len(turns)} right: {phrasing}", *wrong)
    assert len(wrong) <= 0.05 * len(turns)


def test_first_commands(model):
    prompts = [
        chat_ids(model, "What is the capital of France?"),
        chat_ids(model, "what is the capital of france"),
        chat_ids(model, "What is the capital of France?", system=data.DEFAULT_SYSTEM),
        chat_ids(model, "What is the capital of France?", system="You are a geography teacher."),  # never trained
    ]
    assert prompts[0] == prompts[2]
    assert [model.tokenizer.decode(ids) for ids in greedy(model, prompts)] == ["The capital of France is Paris."] * len(prompts)


def test_answers_without_the_template(model):
    given, end = zip(*(data.raw_sentence(name) for name in ("France", "Japan", "the United States")), strict=True)
    answers = greedy(model, [model.tokenizer.encode(text, add_special_tokens=False) for text in given])
    assert [model.tokenizer.decode(ids) + data.END_OF_TEXT for ids in answers] == list(end)


def test_data_is_reproducible():
    def first(seed: int) -> list:
        return list(itertools.islice(data.conversations(random.Random(seed)), 2000))

    assert first(0) == first(0)
    assert first(0) != first(1)
    asked = {message["content"].lower() for messages in first(0) for message in messages if message["role"] == "user"}
    beginning = data.HELD_OUT.partition("{c}")[0].lower()
    assert not [text for text in asked if beginning in text]
    systems = {message["content"] for messages in first(0) for message in messages if message["role"] == "system"}
    assert data.HELD_OUT_SYSTEM not in systems


def test_tokenizer_is_the_one_of_the_script(tmp_path):
    data.train_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text("utf-8")) == json.loads((BUNDLED / name).read_text("utf-8"))


def test_training_ids_are_those_of_the_template(model, tmp_path):
    tokenizer = data.train_tokenizer(tmp_path)
    for messages in itertools.islice(data.conversations(random.Random(2)), 300):
        ids, written = data.encode(tokenizer, messages)
        text = model.tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        assert ids == model.tokenizer.encode(text, add_special_tokens=False)
        answers = "".join(message["content"] + data.END for message in messages if message["role"] == "assistant")
        assert tokenizer.decode([t for t, w in zip(ids, written, strict=True) if w], skip_special_tokens=False) == answers


def test_transformers_gives_the_same_ids(model):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hf, loading = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), loading
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    asked = [asked for phrasing in (data.PHRASINGS[0], data.HELD_OUT) for asked, _ in data.evaluation_set(phrasing)[::20]]
    prompts = [chat_ids(model, text) for text in asked]
    for text, prompt, ids in zip(asked, prompts, greedy(model, prompts), strict=True):
        messages = [{"role": "user", "content": text}]
        rendered = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert hf_tokenizer(rendered, add_special_tokens=False).input_ids == prompt
        new = hf.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=32)
        assert new[0, len(prompt) :].tolist() == [*ids, model.tokenizer.eos_token_ids[0]]
        assert hf_tokenizer.decode(ids) == model.tokenizer.decode(ids)
