"""The text functions: `generate_text`, `stream_text`, `encode_prompt`; stop strings."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import tiny
from hypothesis import given, strategies as st
from tiny import ANSWER, ANSWER_IDS, QUESTION

import xinfer_jax as xj
from xinfer_jax.tokenization.answer_detokenizer import AnswerDetokenizer, find_stop, stop_prefix_start
from xinfer_jax.tokenization.detokenizer import IncrementalDetokenizer

pytestmark = pytest.mark.oldest


@pytest.fixture(scope="module")
def model(good) -> xj.Model:
    return xj.load_model(good)


def test_generate_text_and_stream_text(model):
    options = xj.GenerateOptions(max_tokens=16)
    stream = xj.stream_text(model, QUESTION, options)
    chunks = list(stream)
    out = stream.output
    assert "".join(chunks) == ANSWER == xj.generate_text(model, QUESTION, options) and len(chunks) > 5
    assert (out.tokens, out.finish_reason) == ([[*ANSWER_IDS, tiny.IM_END]], ["stop"])


def test_a_conversation_is_encoded_as_its_template_says(model):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    expected = (
        "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        + "<|im_start|>assistant\n"
    )
    assert xj.encode_prompt(model, messages) == tiny.tokenizer().encode(expected).ids
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    ids = xj.encode_prompt(model, messages, system="Be brief.")
    assert ids == tiny.tokenizer().encode(system + expected).ids
    assert xj.encode_prompt(model, "a <|im_end|>", raw=True) == tiny.tokenizer().encode("a <|im_end|>").ids


# Sampling makes three different answers. Prompts have 33 to 64 ids, also with a system message: few programs.
TALK = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
PROMPTS = [QUESTION, TALK, "And is this what you said?"]
SAMPLED = xj.GenerateOptions(max_tokens=16, sampling=xj.SamplingConfig(temperature=1000.0))


def one_by_one(model, options, **more) -> list[str]:
    """The answer of each prompt alone, with the key of its row."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(5), jnp.arange(3))
    each = [(model, prompt, options) for prompt in PROMPTS]
    texts = [xj.generate_text(*one, key=keys[i : i + 1], **more) for i, one in enumerate(each)]
    assert "".join(xj.stream_text(*each[0], key=keys[:1], **more)) == texts[0]
    return texts


def test_a_list_of_prompts_gives_a_list(model):
    texts = xj.generate_text(model, PROMPTS, SAMPLED, key=jax.random.key(5))
    assert isinstance(texts, list) and texts == one_by_one(model, SAMPLED) and len(set(texts)) == 3
    assert texts == xj.generate_text(model, tuple(PROMPTS), SAMPLED, key=jax.random.key(5))
    greedy = xj.GenerateOptions(max_tokens=16)
    assert xj.generate_text(model, TALK, greedy) == ANSWER  # a list of messages is one conversation
    assert xj.generate_text(model, [TALK], greedy) == [ANSWER]


def test_a_list_with_stop_strings(model):
    """Each text ends before its first stop string, as it does alone. A row without one continues."""
    whole = xj.generate_text(model, PROMPTS, SAMPLED, key=jax.random.key(5))
    stops = (whole[0][3:6], whole[1][5:6])
    options = dataclasses.replace(SAMPLED, stop_strings=stops)
    texts = xj.generate_text(model, PROMPTS, options, key=jax.random.key(5))
    assert texts == one_by_one(model, options)
    cut = [min([len(text), *(text.find(stop) for stop in stops if stop in text)]) for text in whole]
    assert [len(text) for text in texts] == cut and texts[:2] != whole[:2]


def test_the_stop_string_completed_first_counts(model):
    """The rule holds in a single prompt and in a list."""
    options = xj.GenerateOptions(max_tokens=16, stop_strings=("Yes,", "e"))
    assert xj.generate_text(model, QUESTION, options) == "Y"
    assert list(xj.stream_text(model, QUESTION, options)) == ["Y"]
    assert xj.generate_text(model, [QUESTION], options) == ["Y"]


@pytest.mark.full
def test_min_new_tokens_holds_against_stop_strings(model):
    """It also holds in a list with several numbers, and in an engine."""
    stops = dict(max_tokens=16, stop_strings=("e", "🚀"))
    settings = [xj.SamplingConfig(min_tokens=count) for count in (1, 2, 11, 12)]
    wanted = ["Y", "Yes, 你", "Yes, 你", ANSWER]  # the rocket is complete with the 12th token
    assert xj.generate_text(model, [QUESTION] * 4, xj.GenerateOptions(sampling=settings, **stops)) == wanted
    options = xj.GenerateOptions(sampling=settings[2], **stops)
    assert "".join(xj.stream_text(model, QUESTION, options)) == wanted[2]
    with xj.Engine(model, rows=1, capacity=64) as engine:
        request = engine.submit(QUESTION, options)
        assert "".join(request.text()) == wanted[2] and len(request.result().tokens[0]) == 12


def test_system_and_raw_apply_to_each_prompt(model):
    texts = xj.generate_text(model, PROMPTS, SAMPLED, key=jax.random.key(5), system="Be brief.")
    assert texts == one_by_one(model, SAMPLED, system="Be brief.")
    assert texts != xj.generate_text(model, PROMPTS, SAMPLED, key=jax.random.key(5))
    lines = [f"{letter * 40}\n" for letter in "xyz"]
    assert xj.generate_text(model, lines, xj.GenerateOptions(max_tokens=16), raw=True) == [ANSWER] * 3
    with pytest.raises(xj.InputError, match="prompt 1: raw takes a text"):
        xj.generate_text(model, PROMPTS, raw=True)


@pytest.mark.parametrize("prompt", ["", [7], ["x", "y"], [TALK, TALK]])
def test_stream_text_rejects_prompts_before_iteration(model, prompt):
    """The error comes before the first chunk is requested."""
    with pytest.raises(xj.InputError):
        xj.stream_text(model, prompt)


@pytest.mark.parametrize(
    "prompt, named",
    [
        ([], "no prompts"),
        (None, "a prompt is a text, or messages"),
        (TALK[0], "a prompt is a text"),
        (iter(["x"]), "a prompt is a text"),
        ([1, 2, 3], "prompt 0: a prompt is a text"),
        (["x", None], "prompt 1: a prompt is a text"),
        (["x", ""], "prompt 1: the prompt is empty"),
        ([{"role": "user", "content": " \n"}], "the prompt is empty: no message"),
        ([{"role": "system", "content": ""}, {"role": "user", "content": ""}], "the prompt is empty"),
        (["x", []], "prompt 1: a prompt is a text"),
        (["x"] * 100 + ["\ud800"], "prompt 100: only valid Unicode text"),
        ([{"content": "x"}], "message 0 must have a role"),
        ([TALK[0], {"role": "user"}], "message 1 must have a text as its content, got None"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "must have a text as its content"),
        ([TALK[0] | {1: "x"}], "only texts as keys"),
    ],
)  # fmt: skip
def test_invalid_prompts_are_rejected(model, prompt, named):
    with pytest.raises(xj.InputError, match=named):
        xj.generate_text(model, prompt)


def test_matching_stop_strings_takes_linear_time(model):
    """64 strings whose prefix is the whole text. More strings, and longer ones, are rejected."""
    stops = tuple("a" * 255 + chr(98 + at) for at in range(64))
    text = "a" * 100_000
    assert find_stop(stops, text, 0) is None and stop_prefix_start(stops, text) == len(text) - 255
    pending = text[-255:]
    assert find_stop(stops, f"{pending}b", 255) == (0, 256) and find_stop(stops, f"{pending}ab", 255) == (
        1,
        257,
    )
    for wrong in (["a"] * 65, ["a" * 257]):
        with pytest.raises(xj.InputError, match="64 of at most 256"):
            xj.generate_text(model, "Hello", xj.GenerateOptions(max_tokens=1, stop_strings=wrong))


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_the_first_stop_string_is_found_across_chunks(stops, chunks):
    text = ""
    pending = ""
    for chunk in chunks:
        match = find_stop(stops, pending + chunk, len(pending))
        text += chunk
        pending += chunk
        places = [(text.find(stop), text.find(stop) + len(stop)) for stop in stops if stop in text]
        assert (match is None) == (not places)
        if match:
            before = len(text) - len(pending)
            assert (match[0] + before, match[1] + before) == min(places)
            return
        pending = pending[stop_prefix_start(tuple(stops), pending) :]
        assert len(pending) == max(
            n for stop in stops for n in range(len(stop) + 1) if text.endswith(stop[:n])
        )


def test_the_text_may_include_the_stop_string(model):
    ids = model.tokenizer.encode("The capital of France is Paris.")
    for include, wanted in ((False, "The capital of "), (True, "The capital of Fran")):
        detokenizer = AnswerDetokenizer(model.tokenizer, ("Fran", "is"), include)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == wanted


def test_incomplete_characters_are_decoded_a_bounded_number_of_times(model, monkeypatch):
    tokenizer = model.tokenizer
    decoded = [0]
    first_byte = tokenizer.backend.token_to_id("\u00e2")  # of a character of several bytes
    ids = [first_byte] * 500
    wanted = tokenizer.decode([first_byte] * 500)
    decode = type(tokenizer).decode

    def counted(self, ids, skip_special_tokens=True):
        decoded[0] += len(ids)
        return decode(self, ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(type(tokenizer), "decode", counted)
    decoder = IncrementalDetokenizer(tokenizer)
    assert "".join(map(decoder.push, ids)) + decoder.finish() == wanted
    assert decoded[0] < 150 * len(ids)
    special = IncrementalDetokenizer(tokenizer)
    assert not "".join(map(special.push, list(tokenizer.eos_token_ids[:1]) * 500)) + special.finish()
    assert decoded[0] < 300 * len(ids)


def test_an_end_id_has_no_text(model):
    """An id that is no special token has none either, in all functions of text. `tokens` has it."""
    tokenizer = model.tokenizer
    whole = xj.generate(model.params, model.config, [xj.encode_prompt(model, QUESTION)]).tokens[0]
    end = whole[3]
    want = tokenizer.decode(whole[: whole.index(end)])
    for options in (dict(stop_token_ids=[end]), dict(eos_token_ids=[end])):
        options = xj.GenerateOptions(max_tokens=20, **options)
        stream = xj.stream_text(model, QUESTION, options)
        assert "".join(stream) == xj.generate_text(model, QUESTION, options) == want
        never = dataclasses.replace(options, stop_strings=["never"])
        assert xj.generate_text(model, QUESTION, never) == want
        out = stream.output
        assert out.tokens[0][-1] == end and out.finish_reason == ["stop"]
        assert out.stop_reason == [end if options.stop_token_ids else None]
