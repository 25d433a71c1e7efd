"""The bundled checkpoint: small, knows the capitals, trained on reproducible data, equal to transformers.

Its files do not change, so the tests of all its answers are soaks.
"""

import itertools
import json
import random

import jax.numpy as jnp
import pytest
from train import tiny_data as data

import xinfer_jax as xj
from xinfer_jax.formats.files import BUNDLED

pytestmark = pytest.mark.oldest


@pytest.fixture(scope="module")
def model() -> xj.Model:
    return xj.load_model(None, dtype=jnp.float32)


def chat(question: str, system: str | None = None) -> tuple[str | None, str]:
    return system, question


FIRST = [
    chat("What is the capital of France?"),
    chat("what is the capital of france"),
    chat("What is the capital of France?", data.DEFAULT_SYSTEM),
    chat("What is the capital of France?", "You are a geography teacher."),  # never trained
]
SENTENCES = [data.raw_sentence(name) for name in ("France", "Japan", "the United States")]


@pytest.fixture(scope="module")
def prompts(model) -> dict:
    """Ids of all prompts of the tests, by (system message, question), or by the text for raw prompts."""

    def ids(system: str | None, question: str) -> list[int]:
        before = [] if system is None else [{"role": "system", "content": system}]
        text = model.tokenizer.apply_chat_template([*before, {"role": "user", "content": question}])
        return model.tokenizer.encode(text, add_special_tokens=False)

    chats = FIRST + [
        chat(question)
        for phrasing in data.EVALUATION_PHRASINGS
        for question, _ in data.evaluation_set(phrasing)
    ]
    return {key: ids(*key) for key in chats} | {text: model.tokenizer.encode(text) for text, _ in SENTENCES}


@pytest.fixture(scope="module")
def answers(model, prompts) -> dict:
    """The generated ids of each prompt, in one batch, without the EOS id. None: it did not end with EOS."""
    options = xj.GenerateOptions(max_tokens=32, eos_token_ids=model.tokenizer.eos_token_ids)
    out = xj.generate(model.params, model.config, list(prompts.values()), options)
    rows = zip(prompts, out.tokens, out.finish_reason, strict=True)
    return {key: ids if reason == "stop" else None for key, ids, reason in rows}


def test_bundled_files_are_complete_and_small():
    files = {path.name: path.stat().st_size for path in BUNDLED.iterdir()}
    needed = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "mtp.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }
    assert needed == files.keys()
    assert sum(files.values()) < 4e6


@pytest.mark.soak
@pytest.mark.parametrize("phrasing", data.EVALUATION_PHRASINGS)
def test_capitals_are_answered_in_every_phrasing(model, answers, phrasing):
    turns = data.evaluation_set(phrasing)
    assert len(turns) >= 190
    texts = [model.tokenizer.decode(answers[chat(question)] or []) for question, _ in turns]
    wrong = [(question, text) for (question, right), text in zip(turns, texts, strict=True) if text != right]
    print(f"{len(turns) - len(wrong)} of {len(turns)} right: {phrasing}", *wrong)
    assert len(wrong) <= 0.05 * len(turns)


@pytest.mark.soak
def test_capital_of_france_with_and_without_system_message(model, prompts, answers):
    assert prompts[FIRST[0]] == prompts[FIRST[2]]
    assert {model.tokenizer.decode(answers[key]) for key in FIRST} == {"The capital of France is Paris."}


@pytest.mark.soak
def test_capitals_are_answered_without_the_template(model, answers):
    for beginning, end in SENTENCES:
        assert model.tokenizer.decode(answers[beginning]) + data.END_OF_TEXT == end


def test_training_data_is_reproducible():
    def first(seed: int) -> list:
        return list(itertools.islice(data.conversations(random.Random(seed)), 2000))

    assert first(0) == first(0)
    assert first(0) != first(1)
    questions = {
        message["content"].lower()
        for messages in first(0)
        for message in messages
        if message["role"] == "user"
    }
    beginning = data.HELD_OUT.partition("{c}")[0].lower()
    assert not [text for text in questions if beginning in text]
    systems = {
        message["content"] for messages in first(0) for message in messages if message["role"] == "system"
    }
    assert data.HELD_OUT_SYSTEM not in systems


def test_tokenizer_equals_the_trained_one(tmp_path):
    data.train_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text("utf-8")) == json.loads(
            (BUNDLED / name).read_text("utf-8")
        )


def test_training_ids_equal_the_templates_ids(model, tmp_path):
    tokenizer = data.train_tokenizer(tmp_path)
    for messages in itertools.islice(data.conversations(random.Random(2)), 300):
        ids, is_answer = data.encode(tokenizer, messages)
        text = model.tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        assert ids == model.tokenizer.encode(text, add_special_tokens=False)
        answers = "".join(
            message["content"] + data.END for message in messages if message["role"] == "assistant"
        )
        assert (
            tokenizer.decode([t for t, w in zip(ids, is_answer, strict=True) if w], skip_special_tokens=False)
            == answers
        )


@pytest.mark.soak
def test_transformers_gives_the_same_ids(model, prompts, answers):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hf, loading = transformers.AutoModelForCausalLM.from_pretrained(
        BUNDLED, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    eos = model.tokenizer.eos_token_ids[0]
    questions = [
        question
        for phrasing in (data.PHRASINGS[0], data.HELD_OUT)
        for question, _ in data.evaluation_set(phrasing)[::20]
    ]
    for text in questions:
        prompt = prompts[chat(text)]
        answer = answers[chat(text)]
        messages = [{"role": "user", "content": text}]
        rendered = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert hf_tokenizer(rendered, add_special_tokens=False).input_ids == prompt
        assert answer[-1] == eos
        assert hf_tokenizer.decode(answer[:-1]) == model.tokenizer.decode(answer)
        with torch.no_grad():  # the ids are greedy if each is the best one after those before it
            best = hf(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 :].argmax(-1)
        assert best.tolist()[:-1] == answer
    prompt = prompts[FIRST[0]]
    answer = answers[FIRST[0]]
    new = hf.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=32
    )
    assert new[0, len(prompt) :].tolist() == answer
